"""The emulated network on a clock of its own: bandwidth, latency, queues, loss and the trace, to the second."""

from collections.abc import Sequence

import pytest

from benchmarks.lab.network import Change, Host, Link, Network, pair_of_hosts
from benchmarks.lab.queues import Queues
from meshcee.errors import UsageError
from meshcee.figures.scenario import load_scenario, packaged

KB = 1000


def play(queues: Queues, packets: Sequence[tuple[float, int, int, bytes]]) -> list[tuple[float, int, bytes]]:
    """Put each packet at its time; all arrivals with the time at which they happened."""
    waiting, found = sorted(packets, key=lambda p: p[0]), []
    while True:
        due = queues.next_due()
        if waiting and (due is None or waiting[0][0] <= due):
            queues.put(*waiting.pop(0))
            continue
        if due is None:
            return found
        found += [(due, place, packet) for place, packet in queues.arrived(due)]


def test_a_packet_takes_its_bytes_and_then_the_latency() -> None:
    queues = Queues(pair_of_hosts(100 * KB, 0.5))
    found = play(queues, [(1.0, 0, 1, b"a" * KB), (1.0, 0, 1, b"b" * KB), (1.0, 1, 0, b"c" * KB)])
    times = {packet[:1]: (time, place) for time, place, packet in found}
    assert times == {b"a": (pytest.approx(1.26), 1), b"b": (pytest.approx(1.27), 1), b"c": (pytest.approx(1.26), 0)}


def test_all_that_crosses_between_two_regions_shares_the_line_and_ports_are_shared_too() -> None:
    hosts = (Host("a1", "a", 50 * KB), Host("a2", "a"), Host("b1", "b"), Host("b2", "b"))
    links = [Link(x, y, 0.1, 10 * KB if x != y else None) for x in "ab" for y in "ab"]
    queues = Queues(Network(hosts, tuple(links)))
    found = play(queues, [(0.0, 0, 2, b"x" * KB), (0.0, 1, 3, b"y" * KB)])
    # y is at the line at once, x only when it has left its sender's port, after 0.02 s; it waits for y.
    assert [(round(t, 6), place) for t, place, _ in found] == [(0.2, 3), (0.3, 2)]
    inside = play(queues, [(1.0, 0, 1, b"p" * KB), (1.0, 0, 1, b"q" * KB)])
    assert [round(t - 1, 6) for t, _, _ in inside] == [0.12, 0.14]


def test_a_full_queue_drops_and_nothing_else_is_lost() -> None:
    queues = Queues(pair_of_hosts(100 * KB, 0.1))  # its queue holds MIN_QUEUE_BYTES
    found = play(queues, [(0.0, 0, 1, bytes([i]) * KB) for i in range(100)])
    stats = queues.stats()["a>b"]
    assert stats == {"bytes": 49 * KB, "packets": 49, "dropped": 51, "lost": 0}
    assert [packet[0] for _, _, packet in found] == list(range(49))
    assert len(play(queues, [(9.0, 0, 1, b"z")])) == 1


def test_loss_is_drawn_from_the_seed() -> None:
    def survivors(seed: int) -> list[bytes]:
        queues = Queues(pair_of_hosts(1e9, 0.0, loss=0.2), seed=seed)
        return [packet for _, _, packet in play(queues, [(i / 100, 0, 1, bytes([i])) for i in range(200)])]

    assert survivors(1) == survivors(1) != survivors(2)
    assert 140 <= len(survivors(1)) <= 180


def test_a_trace_changes_the_link_when_it_has_been_started_and_order_is_kept() -> None:
    plain = pair_of_hosts(10 * KB, 2.0)
    changes = (Change(1.0, Link("a", "b", 0.0, 5 * KB)), Change(3.0, Link("a", "b", 0.5, 20 * KB)))
    queues = Queues(Network(plain.hosts, plain.links, changes))
    assert [t for t, _, _ in play(queues, [(0.0, 0, 1, b"a" * KB)])] == [pytest.approx(1.1)]
    queues.start_trace(10.0)
    found = play(queues, [(at, 0, 1, b"." * KB) for at in (10.5, 11.5, 12.5, 13.5)])
    # The second would arrive at 11.7 without latency, but the first is still under way until 11.6.
    assert [round(t, 6) for t, _, _ in found] == [11.6, 11.7, 12.7, 14.05]
    found = play(queues, [(20.0, 0, 1, b"." * KB), (20.0, 0, 1, b"!" * KB)])
    assert [round(t, 6) for t, _, _ in found] == [20.55, 20.6]
    queues.reset()
    found = play(queues, [(at, 0, 1, b"." * KB) for at in (30.0, 40.0)])
    assert [round(t, 6) for t, _, _ in found] == [31.1, 41.1]
    late = Queues(Network(plain.hosts, plain.links, (Change(0.2, Link("a", "b", 0.0, 10 * KB)),)))
    late.start_trace(0.0)
    found = play(late, [(0.1, 0, 1, b"1" * KB), (0.3, 0, 1, b"2" * KB)])
    assert [(packet[:1], round(t, 6)) for t, _, packet in found] == [(b"1", 1.2), (b"2", 1.2)]


def test_the_network_of_a_testbed_is_the_one_that_the_planner_sees() -> None:
    scenario = load_scenario(packaged("testbeds.json"), "cee-fluctuating", packaged("gpu_profiles.json"))
    network = Network.of(scenario, loss={("cloud", "edge"): 0.01})
    links = {(link.source, link.target): link for link in network.links}
    for a in network.hosts:
        for b in network.hosts:
            path = scenario.cluster.path(a.name, b.name)
            assert path is not None
            assert links[a.region, b.region].latency_s == path.latency_s
            least = (a.port_bytes_per_s, links[a.region, b.region].bandwidth_bytes_per_s, b.port_bytes_per_s)
            assert min(x for x in least if x is not None) == path.bandwidth_bytes_per_s
    assert links["cloud", "edge"].loss == 0.01
    assert links["edge", "cloud"].loss == 0.0
    assert len(network.changes) == 2 * len(scenario.trace)
    assert Network.from_json(network.to_json()) == network
    with pytest.raises(UsageError, match="regions are cloud, edge, end"):
        Network.of(scenario, loss={("cloud", "moon"): 0.5})
    with pytest.raises(UsageError, match="no link from"):
        Network(network.hosts, network.links[1:])
