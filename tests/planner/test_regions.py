"""Regions from measured links, and plans for a live mesh."""

import pytest

from meshcee.errors import PlanError, UsageError
from meshcee.planner.job import plan_job
from meshcee.planner.regions import cluster_of, find_regions
from meshcee.planner.search import Effort
from meshcee.profile import BlockCost, DeviceProfile, LinkProfile

NEAR, FAR = LinkProfile(0.0005, 1e9), LinkProfile(0.04, 2e7)
PEERS = ["a", "b", "c", "d", "e"]
HOME = {"a": 0, "b": 0, "c": 1, "d": 1, "e": 1}
LINKS = {(p, q): NEAR if HOME[p] == HOME[q] else FAR for p in PEERS for q in PEERS if p != q}
DEVICES = {p: DeviceProfile("cpu", "test", 10**9, 1e9 * (1 + i)) for i, p in enumerate(PEERS)}
COSTS = [BlockCost(f"h.{i}", 1e7, 10**6, 10**6, 10**5, 10**5, 10**5) for i in range(8)]
QUICK = Effort(events=60_000, rows=3_000_000)


def test_regions_are_cut_at_the_largest_gap() -> None:
    assert find_regions(PEERS, LINKS, 1e6) == [["a", "b"], ["c", "d", "e"]]
    assert find_regions(PEERS, dict.fromkeys(LINKS, NEAR), 1e6) == [PEERS]


def test_a_gap_below_three_is_no_border() -> None:
    slower = LinkProfile(0.001, 5e8)
    links = {k: NEAR if v is NEAR else slower for k, v in LINKS.items()}
    assert find_regions(PEERS, links, 1e6) == [PEERS]


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


def test_a_live_mesh_is_planned() -> None:
    plan = plan_job(DEVICES, LINKS, COSTS, 16, effort=QUICK)
    assert plan.num_blocks == 8
    assert plan.global_batch == 16
    assert {*plan.peers, *(x.peer for x in plan.left_out)} == set(PEERS)
    assert plan.pipelines[0].stages[0].codec_out == "none"


def test_a_link_that_is_too_slow_is_not_crossed() -> None:
    thin = {k: v if v is NEAR else LinkProfile(0.04, 1e5) for k, v in LINKS.items()}
    plan = plan_job(DEVICES, thin, COSTS, 16, effort=QUICK)
    assert {HOME[p] for p in plan.peers} == {1}


def test_the_jobs_micro_batch_and_stage_limit_hold() -> None:
    plan = plan_job(DEVICES, LINKS, COSTS, 16, 4, max_stages=2, effort=QUICK)
    assert plan.micro_batch == 4
    assert len(plan.pipelines[0].stages) <= 2


def test_one_device_is_a_mesh() -> None:
    plan = plan_job({"a": DEVICES["a"]}, {}, COSTS, 6, effort=QUICK)
    assert plan.peers == ("a",)


def test_no_device_and_too_little_memory_are_refused() -> None:
    with pytest.raises(UsageError, match="no peer lends a device"):
        plan_job({}, {}, COSTS, 16)
    poor = {p: DeviceProfile("cpu", "test", 10**5, 1e9) for p in PEERS}
    with pytest.raises(PlanError, match="bytes are missing"):
        plan_job(poor, LINKS, COSTS, 16, effort=QUICK)


def test_peers_without_a_link_are_left_out_with_that_reason() -> None:
    known = {k: v for k, v in LINKS.items() if "a" not in k and "b" not in k}
    plan = plan_job(DEVICES, known, COSTS, 16, effort=QUICK)
    why = {x.peer: x.why for x in plan.left_out}
    assert "no link joins it" in why["a"]
