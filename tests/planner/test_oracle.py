"""The planner against trying everything on small clusters, and its dynamic program against HiGHS."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from meshcee.errors import PlanError
from meshcee.planner.classes import StageTable
from meshcee.planner.job import plan_cluster
from meshcee.planner.partition import Join, cut, estimate_s
from tests.planner.oracle import exhaustive, random_case

CASES = 20


def gap(seed: int) -> float:
    """How much slower the plan is than the best of the enumeration; negative when it found a better one."""
    where, work = random_case(seed, devices=4)
    best, _ = exhaustive(where, work)
    try:
        plan = plan_cluster(where, work)
    except PlanError:
        assert math.isinf(best)
        return 0.0
    assert plan.predicted is not None
    return plan.predicted.step_s / best - 1 if math.isfinite(best) else -1.0


@pytest.mark.parametrize("count", [5, pytest.param(CASES, marks=pytest.mark.slow)])
def test_the_plan_is_within_one_percent_of_exhaustive_enumeration(count: int) -> None:
    gaps = [gap(seed) for seed in range(count)]
    assert sum(g <= 0.01 for g in gaps) >= 0.95 * count, gaps
    assert max(gaps) <= 0.05, gaps


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


def test_an_estimate_is_no_less_than_the_work() -> None:
    assert estimate_s(residence=1.0, period=0.5, num_micro=10) >= 5.0
    assert estimate_s(residence=30.0, period=0.5, num_micro=10) > 30
