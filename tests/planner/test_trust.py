"""Figures that a peer got wrong, or made up: set aside, said so, and never the ground of a plan."""

from dataclasses import replace

import pytest

from meshcee.errors import PlanError
from meshcee.figures.profile import LinkProfile
from meshcee.planner.live import plan_job, situation
from meshcee.planner.trust import believed_links, believed_speeds
from tests.planner.test_live import JOB, QUICK, block_times, measured
from tests.planner.test_regions import DEVICES, FAR, LINKS, NEAR, PEERS


@pytest.mark.parametrize("bandwidth", [1e15, 1.0])
@pytest.mark.parametrize("latency_s", [0.01, 1e6])
def test_a_link_that_no_wire_has_is_set_aside(bandwidth: float, latency_s: float) -> None:
    notes: list[str] = []
    links = believed_links(PEERS, {**LINKS, ("a", "b"): LinkProfile(latency_s, bandwidth)}, notes)
    assert ("a", "b") not in links
    assert len(notes) == 1
    assert "what a says of its link to b is set aside" in notes[0]


def test_a_claim_that_the_other_end_and_the_others_do_not_bear_out_is_cut() -> None:
    notes: list[str] = []
    thin = dict.fromkeys(LINKS, LinkProfile(0.02, 1e6))
    links = believed_links(PEERS, {**thin, ("a", "b"): LinkProfile(0.02, 9e9)}, notes)
    assert links["a", "b"].bandwidth_bytes_per_s == 1e6
    assert "nobody else measured more" in notes[0]


def test_a_slow_last_mile_may_be_lopsided() -> None:
    """Twenty times as fast down as up, and a fast pair in a slow mesh, are no contradictions."""
    notes: list[str] = []
    links = {**dict.fromkeys(LINKS, LinkProfile(0.02, 1e6)), ("a", "b"): LinkProfile(0.0201, 2e7)}
    links |= dict.fromkeys([("c", "d"), ("d", "c")], NEAR)
    assert believed_links(PEERS, links, notes) == links
    assert not notes


def test_both_ends_measure_the_same_round_trip() -> None:
    notes: list[str] = []
    links = believed_links(PEERS, {**LINKS, ("a", "c"): replace(FAR, latency_s=0.0001)}, notes)
    assert links["a", "c"].latency_s == FAR.latency_s
    assert "the longer counts" in notes[0]


@pytest.mark.parametrize("changes", [{"speed_flops_per_s": 1e30}, {"memory_bytes": 1 << 60}])
def test_a_device_that_claims_what_none_has_is_left_out(changes: dict[str, int]) -> None:
    devices = {**DEVICES, "e": replace(DEVICES["e"], **changes)}
    plan, notes = plan_job(measured(devices), JOB, None, QUICK)
    assert "e" not in plan.peers
    assert any(note.startswith("e is left out") for note in notes)
    with pytest.raises(PlanError, match="which no device has"):
        plan_job(measured({"e": devices["e"]}), JOB, None, QUICK)


def test_a_profile_that_is_too_good_to_be_true_is_set_aside() -> None:
    honest = {p: block_times(d.speed_flops_per_s / 4) for p, d in DEVICES.items()}
    cluster, workload = situation(measured(times=honest), JOB)
    assert not cluster.notes
    for speed, says in ((1e20, "no device computes"), (1e13, "as its claimed speed bears out")):
        times = {**honest, "a": block_times(speed)}
        cluster, known = situation(measured(times=times), JOB)
        assert known.times["a"].stage(0, 8, 1).f_s == pytest.approx(workload.times["a"].stage(0, 8, 1).f_s)
        assert any("the profile of a is set aside" in note and says in note for note in cluster.notes)


@pytest.mark.parametrize(
    ("kinds", "worth"),
    [({}, {"a": 0.8, "b": 0.2}), ({"b": "cuda"}, {"a": 0.4, "b": 0.0125})],
    ids=["disturbed", "a GPU"],
)
def test_a_profile_is_held_against_those_of_its_kind_and_never_against_a_slow_one_alone(
    kinds: dict[str, str], worth: dict[str, float]
) -> None:
    """A GPU's claim is a large product, of which small blocks show a hundredth; a busy CPU shows a quarter of its usual share."""
    devices = {p: replace(DEVICES[p], kind=kinds.get(p, "cpu")) for p in worth}
    times = {p: block_times(share * devices[p].speed_flops_per_s) for p, share in worth.items()}
    notes: list[str] = []
    found, counted = believed_speeds(devices, times, JOB.alike, [c.flops for c in JOB.blocks], notes)
    assert counted == times
    assert all(found[p].speed_flops_per_s == pytest.approx(worth[p] * devices[p].speed_flops_per_s) for p in worth)
    assert not [note for note in notes if "set aside" in note]


def test_figures_with_a_spread_are_corrected_with_it() -> None:
    notes: list[str] = []
    slow = LinkProfile(0.2, 1e6, 0.0, (0.19, 0.21), (0.9e6, 1.1e6))
    quick = LinkProfile(0.001, 9e9, 0.0, (0.0009, 0.002), (8e9, 10e9))
    links = believed_links(PEERS, {**dict.fromkeys(LINKS, slow), ("a", "b"): quick}, notes)
    assert (links["a", "b"].latency_s, links["a", "b"].latency_range_s) == (0.2, (0.19, 0.21))
    assert (links["a", "b"].bandwidth_bytes_per_s, links["a", "b"].bandwidth_range_bytes_per_s) == (1e6, None)
    assert len(notes) == 2
