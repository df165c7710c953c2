"""The planner against trying everything on small clusters, and its dynamic program against HiGHS."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from meshcee.errors import PlanError
from meshcee.figures.profile import Cluster
from meshcee.figures.workload import Workload
from meshcee.plan import Plan
from meshcee.planner.cut import Join, StageTable, cut, estimate_s
from meshcee.planner.search import plans
from tests.planner.oracle import exhaustive, exhaustive_wide, random_case, random_wide_case

CASES = 20
Case = tuple[Cluster, Workload]


def gap(case: Case, enumerate_all: Callable[[Cluster, Workload], tuple[float, Plan | None]]) -> float:
    """How much slower the plan is than the best of the enumeration; negative when it found a better one."""
    where, work = case
    best, _ = enumerate_all(where, work)
    try:
        plan = plans(where, work).best
    except PlanError:
        assert math.isinf(best)
        return 0.0
    assert plan.predicted is not None
    return plan.predicted.step_s / best - 1 if math.isfinite(best) else -1.0


def judge(gaps: list[float]) -> None:
    assert sum(g > 0.01 for g in gaps) <= max(1, 0.05 * len(gaps)), gaps
    assert max(gaps) <= 0.05, gaps


@pytest.mark.parametrize("seeds", [(25,), pytest.param(range(CASES), marks=pytest.mark.slow)])
def test_the_plan_is_within_one_percent_of_exhaustive_enumeration(seeds: Sequence[int]) -> None:
    judge([gap(random_case(seed, devices=4), exhaustive) for seed in seeds])


@pytest.mark.parametrize("seeds", [(3, 4, 8, 37), pytest.param(range(CASES), marks=pytest.mark.slow)])
def test_so_it_is_with_unequal_shares_and_two_pipelines(seeds: Sequence[int]) -> None:
    judge([gap(random_wide_case(seed), exhaustive_wide) for seed in seeds])


@pytest.mark.parametrize("seed", range(6))
def test_highs_confirms_the_cut_of_a_row(seed: int) -> None:
    """For one period T: least residence over all cuts, as a mixed-integer program and by the dynamic program."""
    rng = np.random.default_rng(seed)
    where, work = random_case(100 + seed, devices=4)
    # memory by Little's law is beyond a linear program, so there is plenty of it here
    devices = [replace(d, memory_bytes=10**14) for d in where.devices.values()][:3]
    tables = [StageTable(work, [(d, 2)], 1.0, num_micro=8) for d in devices]
    trips = rng.uniform(0.001, 0.05, len(devices) - 1)
    flat = np.ones(work.num_blocks + 1)
    joins = [Join(t * flat, 0.0 * flat) for t in trips]
    low = 1 / sum(1 / t.busy_alone for t in tables)
    for period in low * np.array([1.05, 1.3, 2.0]):
        found = cut([[t] for t in tables], joins, np.array([period]), 8)
        value = _highs(tables, float(trips.sum()), float(period), work.num_blocks)
        if found is None:
            assert value is None
            continue
        _, bounds, _ = found
        residence = sum(t.forward_backward[a, b] for t, (a, b) in zip(tables, itertools.pairwise(bounds))) + trips.sum()
        assert value == pytest.approx(residence)


def _highs(tables: list[StageTable], trips: float, period: float, blocks: int) -> float | None:
    """min sum of f + b over x[j, a, b] in {0, 1}: each group one run of blocks, the runs in a row, each within T."""
    runs = [(a, b) for a in range(blocks) for b in range(a + 1, blocks + 1)]
    count = len(tables)
    cost = np.array([min(t.forward_backward[a, b], 1e6) for t in tables for a, b in runs])
    upper = np.array([float(t.busy[a, b] <= period) for t in tables for a, b in runs])
    rows, sides = [], []
    for j in range(count):
        row = np.zeros(count * len(runs))
        row[j * len(runs) : (j + 1) * len(runs)] = 1
        rows.append(row)
        sides.append(1.0)
        ends = np.zeros(count * len(runs))
        for r, (a, b) in enumerate(runs):
            ends[j * len(runs) + r] = b
            if j + 1 < count:
                ends[(j + 1) * len(runs) + r] -= a
        rows.append(ends)
        sides.append(0.0 if j + 1 < count else float(blocks))
    start = np.zeros(count * len(runs))
    start[: len(runs)] = [a for a, _ in runs]
    rows.append(start)
    sides.append(0.0)
    found = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), sides, sides),
        bounds=Bounds(0, upper),
        integrality=np.ones_like(cost),
    )
    return None if found.x is None else float(found.fun) + trips


def test_an_estimate_is_no_less_than_the_work_and_counts_what_is_done_once() -> None:
    where, work = random_case(100)
    device = next(iter(where.devices.values()))
    table, grouped = (StageTable(work, [(device, 2)], 1.0, num_micro=8, ring=ring) for ring in ((0.0, 0.0), (0.0, 0.5)))
    alone = estimate_s([(table, 0, 4), (table, 4, 8)], [(0.0, 0.0)], 8)
    assert alone >= 8 * table.busy[4, 8]
    assert estimate_s([(table, 0, 4), (table, 4, 8)], [(30.0, 0.0)], 8) > 30
    # half a second at the head of the pipeline delays every step
    assert estimate_s([(grouped, 0, 4), (table, 4, 8)], [(0.0, 0.0)], 8) > alone + 0.2
    assert estimate_s([(table, 0, 8)], [], 8, held_s=9.0) >= 72
