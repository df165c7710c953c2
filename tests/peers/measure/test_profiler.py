"""Probing a link, on virtual time: what is measured is what the link does, in the direction in which the prober sends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import count, cycle, permutations, repeat
from typing import Any, cast

import pytest
import torch

from meshcee.config import Timeouts
from meshcee.figures.profile import LinkProfile
from peers.cli.status import rate
from peers.device.compute import Compute, Pace
from peers.device.profile import measure_device
from peers.measure.measuring import PROBE_SHARE
from peers.measure.probe import LIGHT_S, MOST_MEASURED_BYTES_PER_S, Probed, Turns, probe_link
from peers.measure.sounding import SHARE, sound
from peers.node.early import JoinOptions
from peers.node.in_process import InProcess
from peers.transport.base import Frame, StreamClosed, Transport
from peers.transport.memory import Impairment, MemoryNetwork
from peers.wire import messages
from tests.rig.virtual_time import virtual_time


@virtual_time
async def test_each_direction_has_its_own_bandwidth_and_half_the_round_trip() -> None:
    network = MemoryNetwork()
    clock = asyncio.get_running_loop().time
    async with network.transport("a") as a, network.transport("b") as b:
        network.impair("a", "b", Impairment(latency_s=0.03, bandwidth_bytes_per_s=2e5))
        network.impair("b", "a", Impairment(latency_s=0.05, bandwidth_bytes_per_s=2e7))
        for transport in (a, b):
            transport.serve("probe", Turns(transport.peer_id).serve)
        up, _ = await probe_link(a, "b", (), 7.0, clock)
        down, _ = await probe_link(b, "a", (), 8.0, clock)
    assert up.latency_s == pytest.approx(0.04, rel=0.02)
    assert down.latency_s == pytest.approx(0.04, rel=0.02)
    assert up.bandwidth_bytes_per_s == pytest.approx(2e5, rel=0.05)
    assert down.bandwidth_bytes_per_s == pytest.approx(2e7, rel=0.05)
    assert (up.measured_at, down.measured_at) == (7.0, 8.0)


@virtual_time
async def test_jitter_shows_in_the_range() -> None:
    network = MemoryNetwork(seed=1)
    async with network.transport("a") as a, network.transport("b") as b:
        network.impair("a", "b", Impairment(latency_s=0.02, jitter_s=0.05, bandwidth_bytes_per_s=1e6))
        b.serve("probe", Turns("b").serve)
        link, _ = await probe_link(a, "b", (), 0.0, asyncio.get_running_loop().time)
    assert link.latency_range_s is not None
    assert link.bandwidth_range_bytes_per_s is not None
    low_s, high_s = link.latency_range_s
    assert 0.01 <= low_s < link.latency_s < high_s <= 0.036
    assert link.bandwidth_range_bytes_per_s[0] < link.bandwidth_range_bytes_per_s[1]


@pytest.mark.parametrize("ahead_s", [0.0, 0.02, 0.2, 0.5])
@virtual_time
async def test_two_that_probe_each_other_measure_what_each_would_measure_alone(ahead_s: float) -> None:
    """The answers of each would wait behind the payloads of the other: a tenth of the bandwidth was found, now and then."""
    network = MemoryNetwork()
    clock = asyncio.get_running_loop().time
    speeds = {("a", "b"): 1e6, ("b", "a"): 2e7}
    async with network.transport("a") as a, network.transport("b") as b:
        for (source, target), speed in speeds.items():
            network.impair(source, target, Impairment(latency_s=0.03, bandwidth_bytes_per_s=speed))
        ends: dict[Transport, Turns] = {end: Turns(end.peer_id) for end in (a, b)}
        for end, turns in ends.items():
            end.serve("probe", turns.serve)

        async def probe(source: Transport, target: str, after_s: float) -> LinkProfile:
            await asyncio.sleep(after_s)
            with ends[source].own(target) as answered:
                return (await probe_link(source, target, (), clock(), clock, answered=answered)).link

        for first, second in ((a, b), (b, a)):
            both = probe(first, second.peer_id, 0.0), probe(second, first.peer_id, ahead_s)
            for end, link in zip((first, second), await asyncio.gather(*both), strict=True):
                other = second if end is first else first
                assert link.bandwidth_bytes_per_s == pytest.approx(speeds[end.peer_id, other.peer_id], rel=0.05)
                assert link.latency_s == pytest.approx(0.03, rel=0.1)


@virtual_time
async def test_a_prober_that_reads_nothing_or_asks_twice_is_let_go() -> None:
    network = MemoryNetwork()
    async with network.transport("a") as a, network.transport("b") as b:
        b.serve("probe", Turns("b", 5.0).serve)
        began_s = asyncio.get_running_loop().time()
        first, second = await a.open("b", "probe"), await a.open("b", "probe")
        await second.send(Frame(messages.PING))
        assert (await second.recv()).kind == messages.PONG
        for stream, longest_s in ((first, 1.0), (second, 6.0)):
            async with asyncio.timeout(10.0):
                with pytest.raises(StreamClosed):
                    await stream.recv()
            assert asyncio.get_running_loop().time() < began_s + longest_s


async def probed(wire: Callable[[int], float]) -> tuple[LinkProfile, int]:
    """Of a link whose exchange with so many bytes of payload takes that long."""
    now_s, sent = 0.0, list[int]()

    class Timed:
        max_payload_bytes = 0

        async def send(self, frame: Frame) -> None:
            nonlocal now_s
            sent.append(frame.payload_bytes)
            now_s += wire(frame.payload_bytes)

        async def recv(self) -> Frame:
            return Frame(messages.PONG, {"bytes": sent[-1]})

        async def aclose(self) -> None: ...

    class Net:
        async def open(self, *where: object) -> Timed:
            return Timed()

    link, sent_bytes = await probe_link(cast(Transport, Net()), "b", (), 0.0, lambda: now_s)
    assert sent_bytes == sum(sent)
    return link, sent_bytes


async def test_a_link_within_a_busy_machine_is_not_measured_faster_than_anything_is() -> None:
    """Empty round trips wait behind other work, most of them; payloads of 4 MiB take 2 ms."""
    empty = count()

    def busy(size: int) -> float:
        return 1e-4 + size / 2e9 if size or next(empty) % 3 == 1 else 2.1e-3

    link, _ = await probed(busy)
    assert 2e9 <= link.bandwidth_bytes_per_s <= 4.1e9
    link, _ = await probed(lambda size: 1e-4)
    assert link.bandwidth_bytes_per_s == pytest.approx(MOST_MEASURED_BYTES_PER_S)


@pytest.mark.parametrize(
    ("bytes_per_s", "shown"),
    [(1e6, "8 Mbit/s"), (1.25e9, "10.0 Gbit/s"), (12.4e9, "99.2 Gbit/s"), (370e9, "over 100 Gbit/s")],
)
def test_a_bandwidth_is_shown_as_far_as_it_can_be_measured(bytes_per_s: float, shown: str) -> None:
    assert rate(bytes_per_s) == shown


async def test_a_connection_that_had_idled_counts_once_it_has_got_going() -> None:
    """TCP begins slowly again after a rest: two payloads took 80 ms each on a link that carries them in 20."""
    loaded = count(1)
    link, _ = await probed(lambda size: 0.02 + (0.08 if size and next(loaded) <= 2 else size / 3.2e6))
    assert link.bandwidth_bytes_per_s == pytest.approx(3.2e6)
    assert link.bandwidth_range_bytes_per_s == pytest.approx((3.2e6, 3.2e6))


async def test_measuring_a_device_leaves_the_generator_that_training_draws_from() -> None:
    """Else a peer that starts in the process of others, in the middle of a step, changes their dropout."""
    before = torch.get_rng_state()
    async with Compute() as compute:
        assert (await measure_device(compute)).speed_flops_per_s > 0
    assert torch.equal(torch.get_rng_state(), before)


async def test_an_emulated_device_may_tell_another_speed_than_it_has() -> None:
    async with Compute(pace=Pace(800.0, claimed_flops_per_s=1000.0)) as compute:
        assert (await measure_device(compute)).speed_flops_per_s == 1000.0
        assert compute.pace is not None
        assert compute.pace.seconds(800.0) == 1.0


@pytest.mark.slow
@virtual_time
async def test_idle_links_are_measured_soon_and_then_sparingly(monkeypatch: pytest.MonkeyPatch) -> None:
    probe_s, idle_s = 1.5, 3600.0
    probed: list[tuple[str, str]] = []
    speeds = dict[tuple[str, str], Iterator[float]]()

    async def probe(transport: Transport, target: str, *rest: Any, **more: Any) -> Probed:
        probed.append((transport.peer_id, target))
        await asyncio.sleep(probe_s)
        return Probed(LinkProfile(0.01, next(speeds.get((transport.peer_id, target), repeat(1e7))), now()), 1 << 20)

    def now() -> float:
        return asyncio.get_running_loop().time()

    monkeypatch.setattr("peers.measure.measuring.probe_link", probe)
    async with InProcess(JoinOptions(), timeouts=Timeouts(), clock=now, monotonic=now) as here:
        peers = {(await here.start(name)).peer_id for name in "abc"}
        await asyncio.sleep(30)
        assert set(probed) == set(permutations(peers, 2))
        first = len(probed)
        await asyncio.sleep(idle_s)
        for link in permutations(peers, 2):
            assert 3 + (idle_s - 480) // (480 + 60) <= probed[first:].count(link) <= 3 + idle_s / 480
        first, changes = len(probed), next(permutations(peers, 2))
        speeds[changes] = cycle([2e7, 1e7])
        await asyncio.sleep(idle_s)
    for link in permutations(peers, 2):
        assert (probed[first:].count(link) >= 20) == (link == changes)
    assert sum(source == changes[0] for source, _ in probed[first:]) <= PROBE_SHARE * idle_s / probe_s + 1


@pytest.mark.cases(1)
@pytest.mark.parametrize("bandwidth", [2e5, 8e5, 1e7])
@virtual_time
async def test_links_that_are_asked_about_are_measured_with_a_small_share_of_their_time(
    monkeypatch: pytest.MonkeyPatch, bandwidth: float
) -> None:
    sent, found, watched_s = 0, list[float](), 120.0

    async def probe(*args: Any, target_s: float, **more: Any) -> Probed:
        nonlocal sent
        probed = await probe_link(*args, target_s=target_s, **more)
        if target_s == LIGHT_S:
            sent += probed.sent_bytes
            found.append(probed.link.bandwidth_bytes_per_s)
        return probed

    def now() -> float:
        return asyncio.get_running_loop().time()

    monkeypatch.setattr("peers.measure.measuring.probe_link", probe)
    network = MemoryNetwork(impairment=Impairment(latency_s=0.01, bandwidth_bytes_per_s=bandwidth))
    async with InProcess(JoinOptions(), network, timeouts=Timeouts(), clock=now, monotonic=now) as here:
        a, b = [await here.start(name) for name in "ab"]
        await asyncio.sleep(30)  # they have measured each other
        begun_s = now()
        while now() < begun_s + watched_s:
            await sound(b, [(a.peer_id, b.peer_id)])
            await asyncio.sleep(0.5)
    assert len(found) >= watched_s / 20, "it is still looked at"
    assert found == pytest.approx([bandwidth] * len(found), rel=0.2)
    assert sent / bandwidth <= 1.1 * SHARE * watched_s


@pytest.mark.slow
@virtual_time
async def test_a_link_that_cannot_be_measured_holds_up_neither_the_others_nor_who_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[tuple[str, str, bool]] = []
    hangs: set[str] = set()

    async def probe(transport: Transport, target: str, *rest: Any, target_s: float, **more: Any) -> Probed:
        tried.append((transport.peer_id, target, target_s == LIGHT_S))
        await asyncio.sleep(60.0 if target in hangs else 0.1)
        return Probed(LinkProfile(0.01, 1e7, now()), 1 << 10)

    def now() -> float:
        return asyncio.get_running_loop().time()

    monkeypatch.setattr("peers.measure.measuring.probe_link", probe)
    async with InProcess(JoinOptions(), timeouts=Timeouts(), clock=now, monotonic=now) as here:
        a, b = [await here.start(name) for name in "ab"]
        await asyncio.sleep(30)
        for name in "cd":
            hangs.add((await here.start(name)).peer_id)
        tried.clear()
        await asyncio.sleep(800)
        assert tried.count((a.peer_id, b.peer_id, False)) >= 3
        assert {target for source, target, _ in tried if source == a.peer_id} == {b.peer_id, *hangs}
        assert sum(source == a.peer_id and target in hangs for source, target, _ in tried) <= 10 * len(hangs)
        tried.clear()
        for _ in range(30):
            await sound(b, [(a.peer_id, b.peer_id)])
            await asyncio.sleep(2)
        assert tried.count((a.peer_id, b.peer_id, True)) >= 2
