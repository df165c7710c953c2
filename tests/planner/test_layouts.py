"""Several pipelines side by side, recomputation, and what a caller may rule out."""

import math
from dataclasses import replace

import pytest

from meshcee.errors import PlanError
from meshcee.figures.measured import MOST_MICROS
from meshcee.figures.profile import Cluster, Device, LinkProfile
from meshcee.figures.workload import Workload
from meshcee.plan import Plan
from meshcee.planner.chain import ChainStage, layout_of, most_live
from meshcee.planner.cut import StageTable
from meshcee.planner.proposals import Proposals
from meshcee.planner.rules import Runs, needs, shortages
from meshcee.planner.search import Effort, plans
from meshcee.simulator import bound_s, build, period_s
from tests.planner.oracle import random_case, random_wide_case
from tests.rig.small import cluster, pipeline, workload
from tests.rig.small import plan as plan_of

QUICK = Effort(events=60_000, rows=3_000_000)
ONE = Runs(pipelines=1)
PLAIN = Runs(pipelines=1, group=1)


def far_apart(count: int, *, memory: float = 4.0) -> tuple[Cluster, Workload]:
    """Like devices in regions of their own behind thin lines; `memory` is in models with four micro-batches of one."""
    _, work = random_case(2)
    kind = sorted(work.times)[0]
    # gradients are few, as with adapters; a boundary tensor takes longer than a block
    work = replace(work, gradient_bytes=(2**16,) * work.num_blocks, boundary_bytes=(2**22,) * 7 + (0,))
    whole = work.stage_bytes(0, work.num_blocks, 1, 4)
    places = [f"r{i}" for i in range(count)]
    devices = [Device(f"d{i}", kind, place, int(memory * whole), 1e9) for i, place in enumerate(places)]
    line = LinkProfile(0.02, 4e6)
    between = {(a, b): line for a in places for b in places if a != b}
    return Cluster(devices, inside_latency_s=dict.fromkeys(places, 1e-4), between=between), work


def step(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_s


@pytest.mark.parametrize("count", [2, 3])
def test_pipelines_side_by_side_where_links_are_thin_and_gradients_few(count: int) -> None:
    where, work = far_apart(count)
    # a group that shares every micro-batch does as well where devices are alike; it is left out here
    plan = plans(where, work, effort=QUICK, runs=Runs(group=1)).best
    assert len(plan.pipelines) == count
    assert sum(p.num_micro for p in plan.pipelines) * plan.micro_batch == work.global_batch
    assert step(plan) == pytest.approx(period_s(plan, where, work))
    one = plans(where, work, effort=QUICK, runs=PLAIN).best
    assert len(one.pipelines) == 1
    assert step(plan) < step(one) * 1.5 / count


def test_replicas_are_found_where_one_pipeline_leaves_devices_over() -> None:
    where, work = far_apart(4, memory=0.6)  # two devices hold the model, one does not
    near = {("r0", "r1"), ("r2", "r3")}
    between = {
        (a[1:], b[1:]): LinkProfile(0.0005, 4e8) if {(a[1:], b[1:]), (b[1:], a[1:])} & near else LinkProfile(0.2, 1e6)
        for a, b in where.graph.edges
        if a[0] == b[0] == "@"
    }
    pairs = Cluster(where.devices.values(), inside_latency_s=where.inside_latency_s, between=between)
    plan = plans(pairs, work, effort=QUICK).best
    assert {frozenset(p for s in line.stages for p in s.peers) for line in plan.pipelines} == {
        frozenset({"d0", "d1"}),
        frozenset({"d2", "d3"}),
    }
    assert shortages(plan, pairs, work) == []


def test_a_plan_of_two_pipelines_is_a_start_and_is_never_made_worse() -> None:
    where, work = far_apart(2)
    plan = plans(where, work, effort=QUICK).best
    again = plans(where, work, start=plan, effort=Effort(events=0, rows=0)).best
    assert step(again) <= step(plan) * (1 + 1e-9)
    assert len(plans(where, work, start=plan, effort=QUICK, runs=ONE).best.pipelines) == 1


@pytest.mark.parametrize("seed", range(8))
def test_what_is_ruled_out_is_not_proposed(seed: int) -> None:
    where, work = random_wide_case(seed)
    try:
        choice = plans(where, work, effort=QUICK, runs=PLAIN)
    except PlanError as error:
        if "are missing" not in str(error) and "cannot be spread" not in str(error):
            raise
        return
    for plan in (choice.best, *choice.runners_up):
        assert PLAIN.permits(layout_of(plan))
        assert len(plan.pipelines) == 1
        assert all(len(s.members) == 1 for s in plan.pipelines[0].stages)
    free = plans(where, work, effort=QUICK, start=choice.best).best
    assert step(free) <= step(choice.best) * (1 + 1e-9)


def test_recomputation_where_memory_is_tight() -> None:
    """The activations of one micro-batch fit beside the state, those of two do not: each F would wait for a W."""
    _, work = random_case(2)
    work = replace(work, activation_bytes=(2**28,) * work.num_blocks, micro_batch=1)
    half = work.num_blocks // 2
    room = work.stage_bytes(half, work.num_blocks, 1, 4, recompute=True)
    assert work.stage_bytes(half, work.num_blocks, 1, 2) > room
    assert work.stage_bytes(0, work.num_blocks, 1, 1) > room
    kind = sorted(work.times)[0]
    pair = Cluster([Device(n, kind, "r", room, 1e9) for n in "ab"], inside_latency_s={"r": 0.05}, between={})
    plan = plans(pair, work, effort=QUICK).best
    assert any(s.recompute for s in plan.pipelines[0].stages)
    assert shortages(plan, pair, work) == []
    assert all(needed <= room for needed in needs(plan, pair, work).values())
    # the same stages with all activations kept: one micro-batch at a time
    kept = tuple(replace(s, recompute=False, window=1, live_cap=1) for s in plan.pipelines[0].stages)
    plain = replace(plan, pipelines=(replace(plan.pipelines[0], stages=kept),))
    assert shortages(plain, pair, work) == []
    assert step(plan) < 0.95 * period_s(plain, pair, work)


def test_recomputation_costs_another_f_in_b() -> None:
    _, work = random_case(2)
    times = next(iter(work.times.values()))
    plain, again = times.stage(1, 4, 2), times.stage(1, 4, 2, recompute=True)
    assert again.b_s == pytest.approx(plain.b_s + plain.f_s)
    assert (again.f_s, again.w_s) == (plain.f_s, plain.w_s)
    # what came in of every live micro-batch, and the activations of the one that runs again
    inputs = 2 * work.boundary_bytes[0]
    assert work.stage_bytes(1, 4, 2, 5, recompute=True) == (
        work.state_sum_bytes(1, 4) + 5 * inputs + work.live_bytes(1, 4, 2)
    )


@pytest.mark.parametrize("seed", range(6))
def test_no_period_is_below_what_the_busiest_device_or_line_needs(seed: int) -> None:
    where, work = random_wide_case(seed)
    plan = plans(where, work, effort=QUICK).best
    bound = bound_s(build(plan, where, work))
    assert math.isfinite(bound)
    assert bound <= period_s(plan, where, work) * 1.02


def test_no_size_is_looked_at_that_makes_too_many_micro_batches() -> None:
    where = cluster({"r": ["a", "b"]})
    looked = Proposals(where, workload(batch=1 << 18, largest=64), ("none",), QUICK, Runs())
    assert looked.sizes() == [4, 8, 16, 32, 64, 128], "two share the largest"
    assert all((1 << 18) // m <= MOST_MICROS for m in looked.wide_sizes([]))
    with pytest.raises(PlanError, match="a batch of 16777216 samples makes more than 65536 micro-batches"):
        plans(where, workload(batch=1 << 24, largest=64), effort=QUICK)


def test_a_plan_of_other_blocks_needs_no_memory_that_anybody_could_count() -> None:
    where, work = cluster({"r": ["a"]}), workload(blocks=2)
    larger = plan_of(pipeline((0, 3, "a"), micros=1))
    with pytest.raises(PlanError, match="the plan has 3 blocks and the job 2; plan it again"):
        shortages(larger, where, work)
    assert plans(where, work, start=larger, effort=QUICK).best.num_blocks == 2


def test_the_workspace_of_one_block_at_a_time_takes_its_place_in_memory() -> None:
    known = ((1, (0, 5, 70, 1)), (8, (0, 40, 70, 8)))
    work = replace(workload(4, activation=10, state=100), workspace=known)
    assert work.stage_bytes(0, 2, 1, 3) == 2 * 100 + 3 * 2 * 10 + 5
    assert work.stage_bytes(0, 2, 4, 1) == 2 * 100 + 4 * 2 * 10 + 20  # on the line between the two
    assert work.stage_bytes(0, 4, 8, 1) == 4 * 100 + 8 * 4 * 10 + 70
    device = Device("a", "k", "r", 1000)
    table = StageTable(work, [(device, 1)], 1.0)
    cluster = Cluster([device], inside_latency_s={"r": 0.0}, between={})
    for first, end in ((0, 1), (0, 3), (2, 4)):
        live = most_live(cluster, work, ChainStage(first, end, ("a",)), (1,))
        assert table.live[first, end] == live == (1000 - work.stage_bytes(first, end, 1, 0)) // (10 * (end - first))
