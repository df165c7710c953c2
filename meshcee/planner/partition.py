"""Which devices, in which order, with which blocks: dynamic programming over sets of device classes.

The idea: for a period T, a suffix of the pipeline is judged by one number, its residence R (how long a micro-batch stays
in it), and a smaller R is better for everything in front: it shortens fill and drain, and by Little's law it needs fewer
micro-batches in memory. So the least R per (classes used, class in front, first block) is all that must be kept. It is
found for all candidate periods at once. Devices of a class stand next to one another here; the search that follows may
part them. The step takes about R + (M - 1) T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshcee.planner.chain import ChainStage
from meshcee.planner.classes import DeviceClass, StageTable

__all__ = ["Candidate", "Join", "cut", "solve"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Join:
    """The boundary between two classes, per cut: seconds there and back, and seconds that a line is held."""

    round_trip_s: Floats
    occupied_s: Floats


@dataclass(frozen=True)
class Candidate:
    """A row of stages and what the dynamic program thinks of it."""

    estimate_s: float
    period_s: float  # the T that it was found for
    stages: tuple[ChainStage, ...]


@dataclass
class _Run:
    """Suffixes that start with `used` devices of class `at`: the least residence, and how it came about."""

    residence: Floats  # (periods, blocks + 1)
    end: Ints
    table: Ints  # which table the first stage uses
    before: Ints  # devices of the class that the rest of the run uses
    next_class: Ints  # when the rest of the run is empty: class that follows, or -1
    next_used: Ints


def solve(
    classes: Sequence[DeviceClass],
    tables: Sequence[Sequence[StageTable]],
    joins: Sequence[Sequence[Join | None]],
    periods: Floats,
    num_micro: int,
    keep: int,
    most: int,
) -> list[Candidate]:
    """The `keep` best candidates over all periods and sets of classes, best first.

    tables  per class; joins[a][b]: from class a to class b (a == b: between neighbours of a run), None: not joined
    most    devices of one class that a run may use
    """
    count = len(classes)
    cuts = tables[0][0].busy.shape[0] if any(tables) else 0
    grid = periods[:, None]
    costs = [[_cost(t, periods) for t in row] for row in tables]
    empty = np.full((len(periods), cuts), np.inf)
    empty[:, -1] = 0.0
    runs: dict[tuple[int, int], list[_Run]] = {}
    best: dict[tuple[int, int], tuple[Floats, Ints]] = {}  # (set, class) -> least residence over run lengths
    for chosen in range(1, 1 << count):
        for at in range(count):
            if not chosen >> at & 1 or not tables[at]:
                continue
            rest = chosen & ~(1 << at)
            follow, which, used = _follow(at, rest, count, joins, best, grid, empty)
            if follow is None:
                continue
            inside = joins[at][at]
            found: list[_Run] = []
            for length in range(1, min(len(classes[at].peers), most) + 1):
                found.append(_extend(length, costs[at], tables[at], found, follow, which, used, inside, grid))
            runs[chosen, at] = found
            stack = np.stack([r.residence for r in found])
            lengths = stack.argmin(axis=0)
            best[chosen, at] = (np.take_along_axis(stack, lengths[None], 0)[0], lengths + 1)
    return _candidates(classes, tables, runs, best, periods, num_micro, keep)


def _candidates(
    classes: Sequence[DeviceClass],
    tables: Sequence[Sequence[StageTable]],
    runs: dict[tuple[int, int], list[_Run]],
    best: dict[tuple[int, int], tuple[Floats, Ints]],
    periods: Floats,
    num_micro: int,
    keep: int,
) -> list[Candidate]:
    """Of every period the sets of classes with the least residence, priced by the period that they really have."""
    keys = list(best)
    seen: set[tuple[ChainStage, ...]] = set()
    candidates: list[Candidate] = []
    residences = np.stack([best[key][0][:, 0] for key in keys]) if keys else np.empty((0, len(periods)))
    for t in range(len(periods)):
        order = np.argsort(residences[:, t], kind="stable")[: max(2, keep // 2)]
        for k in order.tolist():
            residence = float(residences[k, t])
            if not np.isfinite(residence):
                break
            chosen, at = keys[k]
            stages, period = _trace(classes, tables, runs, chosen, at, t, int(best[chosen, at][1][t, 0]))
            if stages not in seen:
                seen.add(stages)
                candidates.append(Candidate(estimate_s(residence, period, num_micro), period, stages))
    candidates.sort(key=lambda c: c.estimate_s)
    return candidates[:keep]


def estimate_s(residence: float, period: float, num_micro: int) -> float:
    """What a step takes: no less than its work, nor than F and B, two thirds of it, through fill and drain.

    Weight gradients fill part of the wait between steps, never all of it: half way to the step without such filling.
    """
    least = max(num_micro * period, residence + (num_micro - 1) * period * 2 / 3)
    return (least + residence + (num_micro - 1) * period) / 2


def _cost(table: StageTable, periods: Floats) -> tuple[Floats, Floats]:
    """f + b where the stage keeps up with the period, and the longest residence that its memory allows."""
    grid = periods[:, None, None]
    return np.where(table.busy[None] <= grid, table.forward_backward[None], np.inf), table.live[None] * grid


def _follow(
    at: int,
    rest: int,
    count: int,
    joins: Sequence[Sequence[Join | None]],
    best: dict[tuple[int, int], tuple[Floats, Ints]],
    grid: Floats,
    empty: Floats,
) -> tuple[Floats | None, Ints, Ints]:
    """The least residence of what comes after a run of class `at`, boundary included."""
    shape = empty.shape
    none: Ints = np.full(shape, -1, dtype=np.int64)
    if not rest:
        return empty, none, none
    least, which, used = np.full(shape, np.inf), none.copy(), none.copy()
    for after in range(count):
        join = joins[at][after]
        if not rest >> after & 1 or join is None or (rest, after) not in best:
            continue
        residence, lengths = best[rest, after]
        total = np.where(join.occupied_s[None] <= grid, residence + join.round_trip_s[None], np.inf)
        better = total < least
        least = np.where(better, total, least)
        which, used = np.where(better, after, which), np.where(better, lengths, used)
    return (least if np.isfinite(least).any() else None), which, used


def _extend(
    length: int,
    costs: Sequence[tuple[Floats, Floats]],
    tables: Sequence[StageTable],
    found: Sequence[_Run],
    follow: Floats,
    which: Ints,
    used: Ints,
    inside: Join | None,
    grid: Floats,
) -> _Run:
    """Runs of exactly `length` devices: one more stage in front of a shorter run."""
    shape = follow.shape
    least = np.full(shape, np.inf)
    end, table_of, before = (np.full(shape, -1, dtype=np.int64) for _ in range(3))
    for k, ((cost, longest), table) in enumerate(zip(costs, tables)):
        left = length - table.count
        if left < 0 or (left and inside is None):
            continue
        if left == 0:
            tail = follow
        else:
            assert inside is not None
            tail = np.where(
                inside.occupied_s[None] <= grid, found[left - 1].residence + inside.round_trip_s[None], np.inf
            )
        residence = cost + tail[:, None, :]
        residence[residence > longest] = np.inf
        choice = residence.argmin(axis=2)
        value = np.take_along_axis(residence, choice[:, :, None], 2)[:, :, 0]
        better = value < least
        least = np.where(better, value, least)
        end, table_of = np.where(better, choice, end), np.where(better, k, table_of)
        before = np.where(better, left, before)
    return _Run(least, end, table_of, before, which, used)


def _trace(
    classes: Sequence[DeviceClass],
    tables: Sequence[Sequence[StageTable]],
    runs: dict[tuple[int, int], list[_Run]],
    chosen: int,
    at: int,
    t: int,
    length: int,
) -> tuple[tuple[ChainStage, ...], float]:
    stages, block, taken, period = [], 0, 0, 0.0
    while True:
        run = runs[chosen, at][length - 1]
        table = tables[at][int(run.table[t, block])]
        end = int(run.end[t, block])
        period = max(period, float(table.busy[block, end]))
        peers = classes[at].peers[taken : taken + table.count]
        stages.append(ChainStage(block, end, peers, table.recompute))
        taken += table.count
        left = int(run.before[t, block])
        block = end
        if left:
            length = left
            continue
        follower = int(run.next_class[t, block])
        if follower < 0:
            return tuple(stages), period
        chosen, length, at, taken = chosen & ~(1 << at), int(run.next_used[t, block]), follower, 0


def cut(
    tables: Sequence[Sequence[StageTable]], joins: Sequence[Join], periods: Floats, num_micro: int
) -> tuple[float, list[int], list[bool]] | None:
    """For a given row of groups, the best places to cut: (estimate, bounds, which stages recompute).

    tables  per group: without, and perhaps with recomputation. Every group gets a block.
    """
    grid = periods[:, None]
    residence: Floats = np.full((len(periods), tables[0][0].busy.shape[0]), np.inf)
    residence[:, -1] = 0.0
    choices: list[tuple[Ints, Ints]] = []
    for j in range(len(tables) - 1, -1, -1):
        if j < len(joins):
            join = joins[j]
            residence = np.where(join.occupied_s[None] <= grid, residence + join.round_trip_s[None], np.inf)
        ends, values = [], []
        for table in tables[j]:
            cost, longest = _cost(table, periods)
            whole = cost + residence[:, None, :]
            whole[whole > longest] = np.inf
            choice = whole.argmin(axis=2)
            ends.append(choice)
            values.append(np.take_along_axis(whole, choice[:, :, None], 2)[:, :, 0])
        again = values[1] < values[0] if len(values) > 1 else np.zeros_like(values[0], dtype=bool)
        residence = np.where(again, values[-1], values[0])
        choices.append((np.where(again, ends[-1], ends[0]), again.astype(np.int64)))
    choices.reverse()
    best: tuple[float, list[int], list[bool]] | None = None
    for t in np.flatnonzero(np.isfinite(residence[:, 0])).tolist():
        bounds, recomputed, period = [0], [], 0.0
        for (choice, again), row in zip(choices, tables):
            first = bounds[-1]
            recomputed.append(bool(again[t, first]))
            bounds.append(int(choice[t, first]))
            period = max(period, float(row[int(again[t, first])].busy[first, bounds[-1]]))
        held = max((float(join.occupied_s[at]) for join, at in zip(joins, bounds[1:])), default=0.0)
        estimate = estimate_s(float(residence[t, 0]), max(period, held), num_micro)
        if best is None or estimate < best[0]:
            best = (estimate, bounds, recomputed)
    return best
