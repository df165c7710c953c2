"""Plans for a live mesh: from measured devices, links and blocks, within what its members can run."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from meshcee.errors import PlanError, ProtocolError
from meshcee.fields import plain
from meshcee.figures.measured import JobCosts as Costs
from meshcee.figures.measured import Measured
from meshcee.figures.profile import BlockCost, DeviceProfile, LinkProfile
from meshcee.figures.timing import BlockTimes
from meshcee.plan import Member, Pipeline, Plan, Stage
from meshcee.planner.chain import Chain, ChainStage, to_plan
from meshcee.planner.live import (
    NO_FAR_ROOM,
    NO_ROOM,
    STEPS_SHARE,
    choose,
    has_room_for_copies,
    plan_job,
    question_of,
    situation,
)
from meshcee.planner.rules import needs, shortages
from meshcee.planner.search import Effort
from meshcee.planner.steady import NEARLY
from meshcee.show.words import explain
from meshcee.simulator import period_s
from tests.planner.test_regions import DEVICES, FAR, HOME, LINKS, NEAR, PEERS

BLOCKS = 8
COSTS = [BlockCost(f"h.{i}", 1e7, 10**6, 10**6, 10**5, 10**5, 10**5) for i in range(BLOCKS)]
JOB = Costs(COSTS, 16, alike=(0,) * BLOCKS)
QUICK = Effort(events=60_000, rows=3_000_000)


def measured(
    devices: Mapping[str, DeviceProfile] = DEVICES,
    links: Mapping[tuple[str, str], LinkProfile] = LINKS,
    times: Mapping[str, BlockTimes] | None = None,
) -> Measured:
    return Measured(devices, links, times or {}, {})


def plan(mesh: Measured, job: Costs = JOB, stages: int | None = None) -> Plan:
    return plan_job(mesh, job, stages, QUICK)[0]


def block_times(speed: float, sizes: tuple[int, ...] = (1, 16), **changes: Any) -> BlockTimes:
    """Of a device that computes so many FLOP/s on these blocks."""
    rows = tuple(((n * 1e7 / speed,) * 3,) for n in sizes)
    return replace(BlockTimes((0,), sizes, (rows, rows, rows), (1e-4,)), **changes)


def test_a_live_mesh_is_planned() -> None:
    found = plan(measured())
    assert found.num_blocks == BLOCKS
    assert found.global_batch == 16
    assert {*found.peers, *(x.peer for x in found.left_out)} == set(PEERS)
    assert all(x.why for x in found.left_out)
    assert found.pipelines[0].stages[0].codec_out == "none"
    assert all(len(s.members) == 1 for s in found.pipelines[0].stages)
    assert found.predicted is not None


def test_a_jobs_codec_is_planned_and_priced() -> None:
    thin = measured(links={k: v if v is NEAR else LinkProfile(0.04, 2e6) for k, v in LINKS.items()})
    plans = {codec: plan(thin, replace(JOB, codec=codec), 5) for codec in ("none", "int8", "int4")}
    for codec, found in plans.items():
        stages = found.pipelines[0].stages
        assert {s.codec_out for s in stages[:-1]} == {s.codec_back for s in stages[1:]} == {codec}
        assert (stages[0].codec_back, stages[-1].codec_out) == ("none", "none")
    steps = {codec: found.predicted.step_s for codec, found in plans.items() if found.predicted is not None}
    assert steps["int8"] < steps["none"]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("choice", "expected"), [("auto", "bf16-lossless"), ("lossless", "lossless")])
def test_between_regions_only_boundaries_are_coded_and_priced_so(choice: str, expected: str) -> None:
    job = replace(JOB, codec=choice)
    found = plan(measured(), job, 5)
    stages = found.pipelines[0].stages
    for a, b in pairwise(stages):
        across = HOME[a.peers[0]] != HOME[b.peers[0]]
        assert (a.codec_out, b.codec_back) == ((expected, expected) if across else ("none", "none"))
    assert expected in {s.codec_out for s in stages}
    cluster, workload = situation(measured(), job)
    assert found.predicted is not None
    assert found.predicted.step_s == period_s(found, cluster, workload)
    near = measured(links=dict.fromkeys(LINKS, NEAR))
    assert plan(near, job, 5) == plan(near, JOB, 5)


def test_what_auto_codes_is_priced_as_it_will_run_while_plans_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The LAN of c and d has 8 MB/s, so it matters that what stays inside of it is exact."""
    monkeypatch.setattr("meshcee.planner.rules.THIN_BYTES_PER_S", 0.0)
    devices = {p: DeviceProfile("cpu", "test", 10**9, 1e9) for p in "abcd"}
    thin = {k: LinkProfile(v.latency_s, 8e6) if {*k} & {"c", "d"} else v for k, v in LINKS.items() if "e" not in k}
    found, _, _ = choose(measured(devices, thin), replace(JOB, codec="auto", micro_batch=1), None, QUICK)
    steps = [x.predicted.step_s for x in (found.best, *found.runners_up) if x.predicted is not None]
    assert steps[1:] == sorted(steps[1:])
    assert steps[0] <= NEARLY * steps[1]
    assert steps[0] < 1.1 * 3 * 16 * BLOCKS * 1e7 / 4e9


def test_a_line_that_a_plan_crosses_three_times_carries_it_three_times() -> None:
    """c and d are on one thin LAN, so each is a region; what leaves it shares a line all the same."""
    devices = {p: DEVICES[p] for p in "abcd"}
    links = {k: replace(v, bandwidth_bytes_per_s=4e6) if {*k} & {"c", "d"} else v for k, v in LINKS.items()}
    cluster, workload = situation(measured(devices, {k: v for k, v in links.items() if "e" not in k}), JOB)
    assert len(cluster.regions) == 3

    def stages(row: str) -> Plan:
        cuts = [Stage(2 * i, 2 * i + 2, (Member(p, 1),), window=16, live_cap=16) for i, p in enumerate(row)]
        return Plan(1, (Pipeline(16, tuple(cuts)),))

    message_s = 1e5 / (STEPS_SHARE * 4e6)
    straight, zigzag = (period_s(stages(row), cluster, workload) for row in ("cdab", "cadb"))
    assert zigzag > 3 * 16 * message_s
    assert straight < zigzag / 1.2


def test_a_link_that_is_too_slow_is_not_crossed() -> None:
    thin = {k: v if v is NEAR else LinkProfile(0.04, 1e5) for k, v in LINKS.items()}
    assert {HOME[p] for p in plan(measured(links=thin)).peers} == {1}


@pytest.mark.parametrize("stages", [1, 2, 4, 5])
def test_exactly_so_many_stages(stages: int) -> None:
    found = plan(measured(), replace(JOB, micro_batch=4), stages)
    assert found.micro_batch == 4
    assert len(found.pipelines[0].stages) == stages
    assert len(found.left_out) == 5 - stages
    assert all(x.why for x in found.left_out)


def test_so_many_stages_of_many_alike_devices() -> None:
    """Beyond a handful, devices that are alike are one kind, and orders are sampled."""
    many = {f"p{i:02}": DeviceProfile("cpu", "test", 10**9, 1e9) for i in range(12)}
    links = {(p, q): NEAR for p in many for q in many if p != q}
    assert len(plan(measured(many, links), stages=7).pipelines[0].stages) == 7


@pytest.mark.parametrize(("stages", "says"), [(6, "were asked for on 5 devices"), (9, "were asked for on 5 devices")])
def test_too_many_stages_are_refused_in_a_sentence(stages: int, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        plan(measured(), stages=stages)
    short = replace(JOB, blocks=COSTS[:2], alike=(0, 0))
    with pytest.raises(PlanError, match="the model has 2 blocks"):
        plan(measured(), short, 3)


def test_stages_that_do_not_fit_are_refused_with_the_missing_bytes() -> None:
    small = {p: replace(d, memory_bytes=2 * 10**7) for p, d in DEVICES.items()}
    assert len(plan(measured(small)).pipelines[0].stages) > 1
    with pytest.raises(PlanError, match="no plan of exactly 1 stages fits"):
        plan(measured(small), stages=1)


@pytest.mark.slow
def test_plans_leave_room_for_copies_of_the_state_where_that_costs_little() -> None:
    """The state of all blocks takes 32 MB; with three copies of a stage and two of another one beside it 152."""

    def planned(kind: str, memory_bytes: int, link: LinkProfile) -> tuple[Plan, list[str], bool]:
        devices = {p: replace(d, kind=kind, memory_bytes=memory_bytes) for p, d in DEVICES.items()}
        found, notes = plan_job(measured(devices, dict.fromkeys(LINKS, link)), JOB, None, QUICK)
        return found, notes, has_room_for_copies(found, devices, JOB)

    fair, poor = LinkProfile(0.02, 1e7), LinkProfile(1.0, 1e5)
    _, notes, room = planned("cpu", 60 * 10**6, fair)
    assert (room, NO_ROOM in notes) == (True, False), "a tenth slower than the best without copies"
    tight, notes, room = planned("cpu", 40 * 10**6, fair)
    assert (len(tight.peers), room, NO_ROOM in notes) == (3, False, True), "a fourth device would cost a third"
    _, notes, room = planned("cpu", 25 * 10**6, fair)
    assert (room, NO_ROOM in notes) == (False, True), "all devices together have no room"
    alone, notes, _ = planned("cpu", 60 * 10**6, poor)
    assert (len(alone.peers), NO_ROOM in notes) == (1, False), "who is alone copies to nobody"
    _, notes, room = planned("cuda", 60 * 10**6, fair)
    assert (room, NO_ROOM in notes) == (True, False), "copies of what a GPU holds lie elsewhere"


@pytest.mark.parametrize(("memory_bytes", "room"), [(60 * 10**6, True), (40 * 10**6, False)])
def test_an_idle_gpu_hides_neither_the_plan_with_room_for_copies_nor_that_none_has(
    memory_bytes: int, room: bool
) -> None:
    """It holds no block. As the mesh was not of processors alone, no plan counted the copies that its members keep."""
    devices = {p: replace(d, memory_bytes=memory_bytes) for p, d in DEVICES.items()}
    fair = dict.fromkeys(LINKS, LinkProfile(0.02, 1e7))
    devices["gpu"] = DeviceProfile("cuda", "test", 10**3, 1e9)
    fair |= {pair: FAR for p in DEVICES for pair in ((p, "gpu"), ("gpu", p))}
    found, notes = plan_job(measured(devices, fair), JOB, None, QUICK)
    assert (has_room_for_copies(found, devices, JOB), NO_ROOM in notes) == (room, not room)
    assert {*found.peers, *(left.peer for left in found.left_out)} == devices.keys()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("memory_bytes", "missing"), [(100 * 10**6, []), (40 * 10**6, [NO_FAR_ROOM]), (20 * 10**6, [NO_ROOM])]
)
def test_copies_in_another_region_are_left_out_before_those_nearby(memory_bytes: int, missing: list[str]) -> None:
    """The state of all blocks takes 32 MB; with copies 152, with far ones too 248; on five devices in two regions."""
    devices = {p: replace(d, memory_bytes=memory_bytes) for p, d in DEVICES.items()}
    found, notes = plan_job(measured(devices), JOB, 5, QUICK)
    assert [note for note in notes if note in (NO_ROOM, NO_FAR_ROOM)] == missing
    rooms = [has_room_for_copies(found, devices, JOB, tiers) for tiers in (1, 2)]
    assert rooms == [NO_ROOM not in missing, not missing]


def test_one_device_is_a_mesh() -> None:
    assert plan(measured({"a": DEVICES["a"]}, {})).peers == ("a",)


def test_no_device_and_too_little_memory_are_refused() -> None:
    with pytest.raises(PlanError, match="no peer of the mesh has a free device"):
        plan(measured({}, {}))
    poor = {p: DeviceProfile("cpu", "test", 10**5, 1e9) for p in PEERS}
    with pytest.raises(PlanError, match="are missing"):
        plan(measured(poor))


def test_links_that_nobody_has_measured_are_filled_in_and_said_so() -> None:
    known = {k: v for k, v in LINKS.items() if "a" not in k}
    found, notes = plan_job(measured(links=known), JOB, 5, QUICK)
    assert "a" in found.peers
    assert any("100 Mbit/s" in note for note in notes)
    near = {k: NEAR for k in LINKS if "a" not in k}
    stages = plan(measured(links=near), replace(JOB, codec="auto"), 5).pipelines[0].stages
    assert {s.codec_out for s in stages} == {"none"}, "a guess rounds nothing"


# -- what blocks showed ------------------------------------------------------------------------------------------------


def test_measured_blocks_count_and_not_the_claimed_speed() -> None:
    """e claims most, and its blocks are slowest: the note says so and the plan gives it least."""
    times = {p: block_times(1e9) for p in PEERS} | {"e": block_times(1e8)}
    claims = dict.fromkeys(PEERS, DEVICES["a"]) | {"e": replace(DEVICES["e"], speed_flops_per_s=1e15)}
    mesh = measured(claims, dict.fromkeys(LINKS, NEAR), times)
    found, notes = plan_job(mesh, JOB, 5, QUICK)
    held = {s.peers[0]: s.end - s.first for s in found.pipelines[0].stages}
    assert held["e"] == 1
    assert any(note.startswith("e claims") for note in notes)


def test_a_device_that_was_not_profiled_is_judged_by_what_claims_were_worth_elsewhere() -> None:
    times = {p: block_times(d.speed_flops_per_s / 4) for p, d in DEVICES.items() if p != "c"}
    cluster, workload = situation(measured(times=times), JOB)
    of_c = workload.times["c"].stage(0, BLOCKS, 1).f_s
    assert of_c == pytest.approx(BLOCKS * 1e7 / (DEVICES["c"].speed_flops_per_s / 4))
    assert any(note.startswith("c has not profiled") for note in cluster.notes)


def test_identical_blocks_take_the_time_of_their_first() -> None:
    rows = (((1.0, 1.0, 1.0), (3.0, 3.0, 3.0)),)
    times = BlockTimes((0, 2), (4,), (rows, rows, rows), (0.1, 0.2), (0.5, 0.25, 0.0))
    stage = times.kind_times((0, 0, 2, 0)).stage(1, 4, 4)
    assert (stage.f_s, stage.b_s, stage.w_s) == (5.5, 5.25, 5.0)  # a call's own cost comes once
    assert stage.optimizer_s == pytest.approx(0.4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sizes": [4, 2]},
        {"seconds": [[[[1.0, 1.0, math.nan]]]] * 3},
        {"seconds": [[[[1.0, 1.0, 1e9]]]] * 3},
        {"seconds": [[[[0.0, 0.0, 0.0]]]] * 3},
        {"seconds": [[[[2.0, 1.0, 3.0]]]] * 3},
        {"seconds": [[[[-1.0, 1.0, 3.0]]]] * 3},
        {"seconds": [[[[1.0, 1.0, 1.0]]]] * 2},
        {"seconds": "fast"},
        {"apply_s": [math.inf]},
        {"call_s": [0.0, 0.0]},
        {"blocks": [-1]},
        {"blocks": [True]},
    ],
)
def test_absurd_profiles_are_refused(wrong: dict[str, Any]) -> None:
    good = plain(block_times(1e9, (2,)))
    assert BlockTimes.from_json(good) == block_times(1e9, (2,))
    with pytest.raises(ProtocolError):
        BlockTimes.from_json({**good, **wrong})


# -- what members can run ----------------------------------------------------------------------------------------------


def test_tight_memory_makes_stages_recompute_but_never_the_last() -> None:
    heavy = [replace(c, activation_bytes=4 * 10**7, boundary_bytes=10**5) for c in COSTS]
    room = {p: replace(d, memory_bytes=250 * 10**6) for p, d in DEVICES.items()}
    mesh, job = measured(room, dict.fromkeys(LINKS, NEAR)), replace(JOB, blocks=heavy)
    choice, cluster, workload = choose(mesh, job, 4, QUICK)
    stages = choice.best.pipelines[0].stages
    assert any(s.recompute for s in stages)
    assert not stages[-1].recompute
    assert not shortages(choice.best, cluster, workload)
    assert choice.best.predicted is not None
    assert choice.best.predicted.step_s == pytest.approx(period_s(choice.best, cluster, workload))


def test_a_stage_too_small_for_a_wide_window_gets_a_narrow_one() -> None:
    heavy = replace(JOB, blocks=[replace(c, activation_bytes=4 * 10**7) for c in COSTS], micro_batch=1)
    room = {p: replace(d, memory_bytes=115 * 10**6 if p == "a" else 10**11) for p, d in DEVICES.items()}
    choice, cluster, workload = choose(measured(room), heavy, 5, QUICK)
    stages = {stage.peers[0]: stage for stage in choice.best.pipelines[0].stages}
    # A block's state, copies of it and of another one, far ones too, and two micro-batches of 40 MB.
    assert stages["a"].window <= stages["a"].live_cap == 2
    assert max(stage.window for stage in stages.values()) > 2
    assert not shortages(choice.best, cluster, workload)


def test_pipelines_side_by_side_have_room_for_their_sum() -> None:
    """Each holds twice its gradients while they are summed, as `needs` counts it; windows were as wide as if none were."""
    heavy = replace(JOB, blocks=[replace(c, activation_bytes=10**6) for c in COSTS], micro_batch=1)
    room = {p: replace(DEVICES[p], memory_bytes=size) for p, size in (("a", 80 * 10**6), ("b", 170 * 10**6))}
    cluster, workload = situation(measured(room, {k: v for k, v in LINKS.items() if {*k} == {"a", "b"}}), heavy)
    chains = [Chain(1, 8, (ChainStage(0, BLOCKS, (p,)),), ()) for p in room]
    found = to_plan(tuple(chains), cluster, workload)
    assert found is not None
    assert [p.stages[0].live_cap < 8 for p in found.pipelines] == [True, False]
    assert shortages(found, cluster, workload) == []


def test_a_job_that_recomputes_does_so_everywhere_but_in_the_last_stage() -> None:
    stages = plan(measured(), replace(JOB, recompute=True), 3).pipelines[0].stages
    assert [s.recompute for s in stages] == [True, True, False]


def test_a_tied_parameter_costs_its_gradient_in_every_micro_batch() -> None:
    """The embedding that is also the head: its gradient would cross the slow link 4 times a step."""
    far = dict.fromkeys(LINKS, FAR)
    job = replace(JOB, micro_batch=4, tied=((0, BLOCKS - 1, 10**8),))
    loose, tight = (plan(measured(links=far), j, 2).predicted for j in (replace(job, tied=()), job))
    assert loose is not None
    assert tight is not None
    assert tight.step_s > loose.step_s + 3 * 10**8 / FAR.bandwidth_bytes_per_s
    assert len(plan(measured(links=far), job).peers) == 1


# -- groups ------------------------------------------------------------------------------------------------------------

LOPSIDED = [replace(c, flops=8e7 if i == 3 else 1e6) for i, c in enumerate(COSTS)]
SHARED = replace(JOB, blocks=LOPSIDED, alike=(), micro_batch=8, groups=True)


def groups_of(found: Plan) -> list[dict[str, int]]:
    return [{m.peer: m.samples for m in s.members} for s in found.pipelines[0].stages if len(s.members) > 1]


def test_groups_are_proposed_on_request_and_when_they_pay() -> None:
    """One block is most of the work: no cut shares it, samples do, in proportion to speed."""
    near = measured(links=dict.fromkeys(LINKS, NEAR))
    alone, shared = plan(near, replace(SHARED, groups=False)), plan(near, SHARED)
    assert groups_of(alone) == []
    (group,) = groups_of(shared)
    slowest_first = [group[p] for p in sorted(group, key=lambda p: DEVICES[p].speed_flops_per_s)]
    assert slowest_first == sorted(slowest_first)
    assert slowest_first[0] < slowest_first[-1]
    assert alone.predicted is not None
    assert shared.predicted is not None
    assert shared.predicted.step_s < 0.8 * alone.predicted.step_s


def test_members_have_room_for_the_sum() -> None:
    """Twice the gradients on top: what members hold of one another while they sum. What they send is explained."""
    near = measured(links=dict.fromkeys(LINKS, NEAR))
    choice, cluster, workload = choose(near, SHARED, effort=QUICK)
    (stage,) = [s for s in choice.best.pipelines[0].stages if len(s.members) > 1]
    live = min(stage.live_cap, 16 // 8)
    for member in stage.members:
        state = workload.stage_bytes(stage.first, stage.end, member.samples, live, stage.recompute)
        needed = needs(choice.best, cluster, workload)[member.peer]
        assert needed == state + 2 * 10**6 * (stage.end - stage.first)
    count = len(stage.members)
    sent = 2 * (count - 1) / count * (stage.end - stage.first)
    assert f"once a step each sends {sent:.3g} MB of gradients to the others" in explain(choice.best, cluster, workload)


def test_gradients_that_take_longer_than_the_work_are_not_summed() -> None:
    large = replace(SHARED, blocks=[replace(c, trainable_bytes=10**9, parameter_bytes=10**9) for c in LOPSIDED])
    room = {p: replace(d, memory_bytes=10**12) for p, d in DEVICES.items()}
    assert groups_of(plan(measured(room, dict.fromkeys(LINKS, NEAR)), large)) == []


def test_a_group_is_of_one_region_and_of_one_kind_of_device() -> None:
    across = plan(measured(), SHARED)
    assert [{HOME[p] for p in group} for group in groups_of(across)] == [{1}]
    mixed = {p: replace(d, kind="cuda" if p in "ae" else "cpu") for p, d in DEVICES.items()}
    found = groups_of(plan(measured(mixed, dict.fromkeys(LINKS, NEAR)), SHARED))
    assert found
    assert all(len({mixed[p].kind for p in group}) == 1 for group in found)


def test_the_first_stage_lies_where_the_owner_can_feed_it() -> None:
    """Two alike devices; the owner reaches one of them over a poor line."""
    devices = {peer: replace(DEVICES[PEERS[0]]) for peer in PEERS[:2]}
    links = {(a, b): NEAR for a in devices for b in devices if a != b}
    job = replace(JOB, feeds=((10**6, (0,)), (8, (BLOCKS - 1,))))
    good, poor = LinkProfile(0.001, 1e9), LinkProfile(0.001, 1e6)
    usual = plan(measured(devices, links), JOB, 2).predicted
    assert usual is not None
    for near, far in (PEERS[:2], PEERS[1::-1]):
        mesh = measured(devices, links)
        found = plan(replace(mesh, feeds={near: good, far: poor}), job, 2)
        assert found.peers == (near, far)
        assert found.predicted is not None
        assert found.predicted.step_s == pytest.approx(max(usual.step_s, 16e6 / 1e9), rel=0.05)
        both = plan(replace(mesh, feeds={near: poor, far: poor}), job, 2)
        assert both.predicted is not None
        assert both.predicted.step_s == pytest.approx(16.0, rel=0.001)


def on_gpus(*peers: str, memory_bytes: int = 10**9) -> dict[str, DeviceProfile]:
    """DEVICES, some of them GPUs that are ten times as fast."""
    return DEVICES | {
        p: replace(DEVICES[p], kind="cuda", memory_bytes=memory_bytes, speed_flops_per_s=1e11) for p in peers
    }


def test_a_model_that_draws_is_planned_on_devices_of_one_kind() -> None:
    """A CPU's random numbers are not a GPU's; who draws none may have both."""
    crowded = [replace(cost, flops=1e9) for cost in COSTS]
    job = replace(JOB, blocks=crowded)
    gpus = on_gpus("c", "d")
    found = plan(measured(gpus), replace(job, draws=True))
    assert {gpus[p].kind for p in found.peers} == {"cuda"}
    assert {x.peer for x in found.left_out if "random numbers" in x.why} == {"a", "b", "e"}


def test_where_the_faster_kind_cannot_hold_a_model_that_draws_the_other_one_does() -> None:
    found = plan(measured(on_gpus("c", memory_bytes=2 * 10**6)), replace(JOB, draws=True))
    assert "c" not in found.peers
    with pytest.raises(PlanError):
        plan(measured({p: replace(d, memory_bytes=10) for p, d in on_gpus("c").items()}), replace(JOB, draws=True))


def test_a_running_plan_that_draws_is_held_against_plans_of_its_own_kind() -> None:
    cpus = {p: device for p, device in DEVICES.items() if p != "c"}
    on_cpus = plan(measured(cpus), replace(JOB, draws=True))
    question = question_of(on_cpus, measured(on_gpus("c")), replace(JOB, draws=True))
    assert "c" not in question.cluster.devices
    assert "c" in question_of(on_cpus, measured(on_gpus("c")), JOB).cluster.devices
