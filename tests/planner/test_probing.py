"""Regions first, then representatives: few probes, and the plan's cluster is what it would be with all of them."""

import random
from itertools import permutations

from meshcee.figures.measured import FEW
from meshcee.figures.profile import DeviceProfile, LinkProfile
from meshcee.planner.regions import cluster_of, find_regions, whom_to_probe

REGIONS = {"lisbon": (0.0, 0.0), "oslo": (20.0, 5.0), "delhi": (70.0, -10.0), "lima": (-60.0, 40.0)}  # ms on a map


def mesh(count: int) -> dict[str, str]:
    """Peer -> region; names say nothing of regions."""
    chance = random.Random(count)
    return {
        f"p{chance.randrange(10**9):09}": name for i in range(count) for name in [sorted(REGIONS)[i % len(REGIONS)]]
    }


def truth(home: dict[str, str]) -> dict[tuple[str, str], LinkProfile]:
    chance = random.Random(1)
    found = {}
    for a, b in permutations(home, 2):
        (x, y), (u, v) = REGIONS[home[a]], REGIONS[home[b]]
        far_s = ((x - u) ** 2 + (y - v) ** 2) ** 0.5 / 1e3
        jitter = chance.uniform(1.0, 1.1)
        found[a, b] = LinkProfile(0.0004 * jitter, 1e9) if home[a] == home[b] else LinkProfile(far_s * jitter, 2e7)
    return found


def measured(home: dict[str, str]) -> tuple[dict[tuple[str, str], LinkProfile], int]:
    """What is known when nobody wants to measure anything any more, and in how many turns."""
    known: dict[tuple[str, str], LinkProfile] = {}
    real = truth(home)
    for turn in range(20):
        wanted = {(me, p) for me in home for p in whom_to_probe(me, list(home), known)} - known.keys()
        if not wanted:
            return known, turn
        known |= {pair: real[pair] for pair in wanted}
    raise AssertionError("there is always something more to measure")


def test_few_peers_measure_everybody() -> None:
    home = mesh(FEW)
    known, turns = measured(home)
    assert len(known) == FEW * (FEW - 1)
    assert turns == 1


def test_many_peers_find_their_regions_with_few_probes() -> None:
    home = mesh(200)
    known, turns = measured(home)
    assert turns <= 3
    assert len(known) < 0.17 * 200 * 199
    found = {frozenset(group) for group in find_regions(sorted(home), known, 1e6)}
    assert found == {frozenset(p for p in home if home[p] == name) for name in REGIONS}


def test_regions_are_joined_both_ways_and_unmeasured_pairs_have_their_figures() -> None:
    home = mesh(120)
    known, _ = measured(home)
    for a, b in permutations(REGIONS, 2):
        assert any(home[p] == a and home[q] == b for p, q in known)
    devices = {p: DeviceProfile("cpu", "x", 10**9, 1e9) for p in sorted(home)}
    cluster = cluster_of(devices, known, 1e6, dict(home))
    real = truth(home)
    for pair in list(permutations(sorted(home), 2))[::97]:
        path = cluster.path(*pair)
        assert path is not None
        assert 0.8 < path.seconds(1e6) / (real[pair].latency_s + 1e6 / real[pair].bandwidth_bytes_per_s) < 1.25
    assert all(cluster.devices[p].region == home[p] for p in home)


def test_a_newcomer_measures_the_landmarks_before_anything_else() -> None:
    home = mesh(60)
    known, _ = measured(home)
    first = whom_to_probe("a-newcomer", [*home, "a-newcomer"], known)
    assert len(first) <= 6
    assert set(first) <= set(sorted(home)[:6])


def test_a_landmark_that_cannot_be_measured_keeps_nobody_from_its_region() -> None:
    home = mesh(60)
    known, _ = measured(home)
    dead, me = sorted(home)[0], sorted(home)[30]
    known = {pair: link for pair, link in known.items() if pair != (me, dead)}
    assert dead in whom_to_probe(me, list(home), known)
    assert len(whom_to_probe(me, list(home), known)) <= 6
    wanted = whom_to_probe(me, list(home), known, {dead})
    assert dead in wanted, "now and then"
    assert sum(home[p] == home[me] for p in wanted) >= 14
    assert len(wanted) < 30
