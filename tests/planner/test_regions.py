"""Regions from measured links."""

import pytest

from meshcee.figures.profile import DeviceProfile, LinkProfile
from meshcee.planner.regions import cluster_of, find_regions

NEAR, FAR = LinkProfile(0.0005, 1e9), LinkProfile(0.04, 2e7)
PEERS = ["a", "b", "c", "d", "e"]
HOME = {"a": 0, "b": 0, "c": 1, "d": 1, "e": 1}
LINKS = {(p, q): NEAR if HOME[p] == HOME[q] else FAR for p in PEERS for q in PEERS if p != q}
DEVICES = {p: DeviceProfile("cpu", "test", 10**9, 1e9 * (1 + i)) for i, p in enumerate(PEERS)}


def test_regions_are_cut_at_the_largest_gap() -> None:
    assert find_regions(PEERS, LINKS, 1e6) == [["a", "b"], ["c", "d", "e"]]
    assert find_regions(PEERS, dict.fromkeys(LINKS, NEAR), 1e6) == [PEERS]


def test_a_gap_below_three_is_no_border() -> None:
    links = {k: LinkProfile(0.01 if v is NEAR else 0.02, 1e8) for k, v in LINKS.items()}
    assert find_regions(PEERS, links, 1e6) == [PEERS]


def lan(loopback: float, wire: float, far: LinkProfile | None = None) -> dict[tuple[str, str], LinkProfile]:
    """Two peers on one machine, two more in the same building, and e elsewhere, or in the building as well."""
    links = {}
    for p in PEERS:
        for q in PEERS:
            if p != q:
                near = LinkProfile(0.0001, loopback) if {p, q} == {"a", "b"} else LinkProfile(0.0004, wire)
                links[p, q] = far if far is not None and "e" in (p, q) else near
    return links


@pytest.mark.parametrize("tensor_bytes", [1e3, 1e5, 1e6, 3e7])
def test_what_a_lan_joins_is_one_region_whatever_the_ratio(tensor_bytes: float) -> None:
    """A machine that talks to itself at 2 GB/s and to others at 1 Gbit/s, or measured one of its links while it was busy."""
    assert find_regions(PEERS, lan(2e9, 1.17e8), tensor_bytes) == [PEERS]
    away = lan(2e9, 1.17e8, LinkProfile(0.02, 1.2e7))
    assert find_regions(PEERS, away, tensor_bytes) == [PEERS[:4], ["e"]]
    busy = LinkProfile(0.008, 2e7, 0.0, (0.0005, 0.02), (5e6, 2e8))
    assert find_regions(PEERS, {**lan(2e9, 2e9), ("a", "c"): busy, ("c", "a"): busy}, tensor_bytes) == [PEERS]


def test_a_thin_line_is_between_regions_however_short() -> None:
    thin = lan(2e9, 1.17e8, LinkProfile(0.0005, 6e5))
    assert find_regions(PEERS, thin, 1e6) == [PEERS[:4], ["e"]]
    assert find_regions(PEERS, thin, 1e3) == [PEERS]  # 2 ms for what crosses it


def test_peers_that_nobody_measured_are_alone() -> None:
    known = {k: v for k, v in LINKS.items() if "e" not in k}
    assert find_regions(PEERS, known, 1e6) == [["a", "b"], ["c", "d"], ["e"]]


def test_a_hint_names_a_region_and_measurement_overrules_it() -> None:
    cluster = cluster_of(DEVICES, LINKS, 1e6, {"a": "home", "c": "office", "d": "office", "e": "home"})
    assert cluster.devices["a"].region == cluster.devices["b"].region == "home"
    assert cluster.devices["e"].region == "office"
    assert cluster.notes == ["e said it is in home, but its links say office"]


def test_links_that_nobody_measured_are_guessed_and_said_so() -> None:
    known = {k: v for k, v in LINKS.items() if k not in (("a", "d"), ("d", "a"))}
    cluster = cluster_of(DEVICES, known, 1e6)
    path = cluster.path("a", "d")
    assert path is not None
    assert path.latency_s == FAR.latency_s
    assert "2 ordered pairs were not measured" in cluster.notes[-1]


def test_an_odd_pair_keeps_its_own_line() -> None:
    cluster = cluster_of(DEVICES, {**LINKS, ("a", "c"): LinkProfile(0.5, 1e6)}, 1e6)
    odd, even = cluster.path("a", "c"), cluster.path("a", "d")
    assert odd is not None
    assert even is not None
    assert odd.bandwidth_bytes_per_s == 1e6
    assert even.bandwidth_bytes_per_s == FAR.bandwidth_bytes_per_s


def site(thin: float, faster: float) -> dict[tuple[str, str], LinkProfile]:
    """c and d on a LAN so thin that each is a region, far from a and b; d measured more bandwidth than c did."""
    found = {}
    for p, q in LINKS:
        near = {p, q} <= {"a", "b"} or {p, q} <= {"c", "d"}
        bandwidth = 1e9 if {p, q} <= {"a", "b"} else faster if "d" in (p, q) else thin
        if "e" not in (p, q):
            found[p, q] = LinkProfile(0.0005 if near else 0.04, bandwidth)
    return found


def test_what_leaves_one_lan_shares_a_line_however_thin_the_lan() -> None:
    devices = {p: DEVICES[p] for p in "abcd"}
    cluster = cluster_of(devices, site(1e6, 1.5e6), 1e6)
    assert list(cluster.regions.values()) == [["a", "b"], ["c"], ["d"]]
    line = cluster.shared_line("c", "a")
    assert line is not None
    assert line == cluster.shared_line("d", "b")
    assert cluster.bandwidth(line) == 1.5e6, "the best that was measured of it"
    assert cluster.shared_line("a", "b") is cluster.shared_line("c", "nobody") is None
    assert cluster.shared_line("c", "d") != line
    for source, bandwidth in (("c", 1e6), ("d", 1.5e6)):
        path = cluster.path(source, "a")
        assert path is not None
        assert line in path.lines
        assert path.bandwidth_bytes_per_s == bandwidth
