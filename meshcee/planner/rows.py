"""Rows of groups: for a given row the best cut of the blocks, and the rows one change away.

The idea: a row is judged by the best that it can be, which one dynamic program says in a fraction of a millisecond. So
many rows can be looked at before the simulator is asked for the first time; unlike devices in one group and regions
visited twice are rows like any other.

Between two groups lies a join, priced by its own table. `beam` searches over rows: each round is replaced by the best of its
neighbours.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations

import numpy as np

from meshcee.figures import Cluster
from meshcee.figures.workload import Workload
from meshcee.planner.chain import Chain, ChainStage, Codecs, shares
from meshcee.planner.cut import DeviceClass, Floats, Join, StageTable, Suffix, cut, ladder, ring_of
from meshcee.planner.rules import Runs

__all__ = ["Beam", "GroupJoin", "Row", "RowMoves", "Rows", "best_of", "join_groups", "overlaps"]


@dataclass(frozen=True)
class GroupJoin:
    """A boundary for every place where it could be cut, the same for all devices of these classes.

    held_s   line between regions or two devices -> seconds at the largest boundary
    ports_s  (0 for the first group or 1 for the second, member, 0 for out or 1 for in) -> the same of its port
    """

    join: Join
    held_s: dict[tuple[str, str], float]
    ports_s: dict[tuple[int, int, int], float]


def overlaps(a: Sequence[int], b: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Who has samples for whom: (member of a, member of b, samples), members taking samples in listed order."""
    i = j = 0
    left_a, left_b = a[0], b[0]
    while True:
        both = min(left_a, left_b)
        yield i, j, both
        left_a, left_b = left_a - both, left_b - both
        if not left_a:
            i += 1
            if i == len(a):
                return
            left_a = a[i]
        if not left_b:
            j += 1
            if j == len(b):
                return
            left_b = b[j]


def join_groups(
    cluster: Cluster,
    workload: Workload,
    a: Sequence[tuple[str, int]],
    b: Sequence[tuple[str, int]],
    codec: str,
) -> GroupJoin | None:
    """Between members (peer, samples) of two groups; None when a pair that must exchange samples is not joined."""
    out, back = workload.cuts
    most_out, most_back = out.item(out.argmax()), back.item(back.argmax())
    share, each_s = workload.wire_bytes(1.0, codec), workload.codec_s(0.0, codec)
    coding = workload.codec_s(1.0, codec) - each_s
    delays: tuple[set[tuple[float, float]], ...] = (
        set(),
        set(),
    )  # there and back: latency, seconds per byte of a sample
    held: dict[tuple[str, str], float] = {}
    ports: dict[tuple[int, int, int], float] = {}
    for i, j, samples in overlaps([n for _, n in a], [n for _, n in b]):
        go, come = cluster.path(a[i][0], b[j][0]), cluster.path(b[j][0], a[i][0])
        if go is None or come is None:
            return None
        ends = ((0, i), (1, j))
        for way, (path, size) in enumerate(((go, samples * most_out), (come, samples * most_back))):
            delays[way].add((path.latency_s, samples * (share / path.bandwidth_bytes_per_s + coding)))
            for line in path.lines:
                seconds = size * share / cluster.bandwidth(line)
                if not _is_port(line):
                    held[line] = held.get(line, 0.0) + seconds
                else:
                    into = int(line[0][0] == "@")
                    port = (*ends[way ^ into], into)
                    ports[port] = ports.get(port, 0.0) + seconds
    there, again = (
        np.maximum.reduce([each_s + latency_s + slope * size for latency_s, slope in sorted(found)])
        for found, size in zip(delays, (out, back))
    )
    most = max(held.values(), default=0.0)
    return GroupJoin(Join(there + again, out * (most / max(most_out, 1e-12))), held, ports)


def _is_port(line: tuple[str, str]) -> bool:
    return (line[0][0] == "@") != (line[1][0] == "@")


Row = tuple[tuple[str, ...], ...]
PERIODS = 8
WORK_OF_A_ROW = 2000  # cells: tables and boundaries are mostly known
SPAN = 2.2  # the slowest period looked at, over the least possible
FINE = math.log(1.04)  # between two periods that are looked at closely


class Rows:
    """Judges rows; tables and boundaries are computed once for devices that are alike."""

    def __init__(
        self, cluster: Cluster, workload: Workload, classes: Sequence[DeviceClass], runs: Runs | None = None
    ) -> None:
        self.cluster, self.workload, self.classes = cluster, workload, classes
        self.runs = runs or Runs()
        self._class_of = {p: i for i, c in enumerate(classes) for p in c.peers}
        self._groups: dict[tuple[str, ...], tuple[int, ...]] = {}
        self.alone: dict[object, tuple[Floats, ...]] = {}  # tables of single devices
        self._tables: dict[object, tuple[list[StageTable], tuple[int, ...]] | None] = {}
        self._joins: dict[object, GroupJoin | None] = {}
        self._cuts: dict[object, tuple[float, Chain] | None] = {}
        self._ends: dict[object, Suffix] = {}  # of rows
        self._slow: dict[object, float] = {}  # rows that take longer than this
        self._periods: dict[tuple[int, int, int], Floats] = {}
        self.work = 0  # array cells touched: what a search costs, on any machine

    def shape(self, row: Row) -> tuple[tuple[int, ...], ...]:
        """The same for rows that differ only in which of several like devices they use."""
        return tuple([self._group(group) for group in row])

    def _group(self, group: tuple[str, ...]) -> tuple[int, ...]:
        known = self._groups.get(group)
        if known is None:
            known = self._groups[group] = tuple(self._class_of[p] for p in group)
        return known

    def counts(self, peers: Sequence[str]) -> tuple[int, ...]:
        """How many devices of each class."""
        found = [0] * len(self.classes)
        for peer in peers:
            found[self._class_of[peer]] += 1
        return tuple(found)

    def best(
        self, row: Row, micro_batch: int, codec: str, num_micro: int | None = None, limit_s: float = math.inf
    ) -> tuple[float, Chain] | None:
        """(estimate of a step, the row with its best cut), or None when it does not fit.

        num_micro   of a step; None: the whole batch, a single pipeline
        limit_s     None as well when it takes longer
        """
        num_micro = num_micro or self.workload.global_batch // micro_batch
        key = (self.shape(row), micro_batch, codec, num_micro)
        if self._slow.get(key, 0.0) >= limit_s:
            return None
        if key not in self._cuts:
            found = self._cut(row, micro_batch, codec, num_micro, limit_s)
            if found is None and limit_s < math.inf:
                self._slow[key] = limit_s
                return None
            self._cuts[key] = found
        found = self._cuts[key]
        if found is None or tuple(s.peers for s in found[1].stages) == row:
            return found
        estimate, chain = found  # the same cut for other devices of the same classes
        stages = tuple(ChainStage(s.first, s.end, g, s.recompute) for s, g in zip(chain.stages, row))
        return estimate, Chain(chain.micro_batch, chain.num_micro, stages, chain.codecs)

    def _cut(
        self, row: Row, micro_batch: int, codec: str, num_micro: int, limit_s: float
    ) -> tuple[float, Chain] | None:
        known = self._parts(row, micro_batch, codec, num_micro, limit_s / num_micro)
        if known is None:
            return None
        tables, joins, low, held_s = known
        grid, periods = self._grid(low, limit_s / num_micro)
        shape = self.shape(row)
        names = [(shape[j:], micro_batch, codec, num_micro, grid) for j in range(len(row))]
        fresh = sum(name not in self._ends for name in names)
        self.work += len(periods) * self.workload.num_blocks**2 * fresh
        best = cut(tables, joins, periods, num_micro, held_s, self._ends, names)
        if best is None or best[0] > limit_s:
            return None
        estimate, bounds, again = best
        stages = tuple(ChainStage(bounds[j], bounds[j + 1], g, again[j]) for j, g in enumerate(row))
        return estimate, Chain(micro_batch, num_micro, stages, (Codecs(codec, codec),) * (len(row) - 1))

    def _grid(self, low: float, high: float) -> tuple[tuple[int, int, int], Floats]:
        """The periods to look at: the same for rows that need about the same, so that what is known of one helps all."""
        first = math.ceil(math.log(low) / FINE - 1e-9)
        if math.isinf(high):
            first -= first % 3
            grid = (first, first, 0)
        else:
            last = max(first, math.ceil(math.log(high) / FINE))
            step = -(-(last - first + 1) // PERIODS)
            grid = (last - (last - first) // step * step, last, step)
        if grid not in self._periods:
            base = math.exp(FINE * grid[0])
            if grid[2]:
                self._periods[grid] = np.exp(FINE * np.arange(grid[0], grid[1] + 1, grid[2]))
            else:
                self._periods[grid] = ladder(base, SPAN * base, PERIODS)
        return grid, self._periods[grid]

    def _parts(
        self, row: Row, micro_batch: int, codec: str, num_micro: int, most_s: float
    ) -> tuple[list[list[StageTable]], list[Join], float, float] | None:
        """Tables, boundaries, a period that no cut can beat, and seconds that the busiest line is held.

        most_s  None where that period is longer
        """
        if not row or len(row) > min(self.workload.num_blocks, self.runs.stages or len(row)):
            return None
        if not all(self.runs.may_share(group) for group in row):
            return None
        self.work += WORK_OF_A_ROW
        tables: list[list[StageTable]] = []
        taken: list[tuple[int, ...]] = []
        for group in row:
            known = self._table(group, micro_batch, codec, num_micro)
            if known is None:
                return None
            tables.append(known[0])
            taken.append(known[1])
        least_s = 1 / sum(1 / t[0].busy_alone for t in tables)
        if least_s > most_s:
            return None
        joins = []
        held: dict[object, float] = {}
        for j, ((a, na), (b, nb)) in enumerate(pairwise(zip(row, taken))):
            found = self._join(a, na, b, nb, codec)
            if found is None:
                return None
            joins.append(found.join)
            for line, seconds in found.held_s.items():
                held[line] = held.get(line, 0.0) + seconds
            for (side, member, way), seconds in found.ports_s.items():
                port = (j + side, member, way)
                held[port] = held.get(port, 0.0) + seconds
        held_s = max(held.values(), default=0.0)
        low = max(least_s, held_s)
        return None if low > most_s else (tables, joins, low, held_s)

    def _table(
        self, group: tuple[str, ...], micro_batch: int, codec: str, num_micro: int
    ) -> tuple[list[StageTable], tuple[int, ...]] | None:
        devices = [self.cluster.devices[p] for p in group]
        key = (self._group(group), micro_batch, codec, num_micro)
        if key not in self._tables:
            self._tables[key] = None
            taken = shares(self.cluster, self.workload, ChainStage(0, self.workload.num_blocks, group), micro_batch)
            ring = ring_of(self.cluster, self.workload, group)
            if taken is not None and ring is not None:
                members, share = list(zip(devices, taken)), self.workload.wire_bytes(1.0, codec)
                tables = []
                for recompute in (False, True):
                    table = StageTable(
                        self.workload, members, share, recompute=recompute,
                        ring=ring, num_micro=num_micro, known=self.alone,
                    )  # fmt: skip
                    tables.append(table)
                    if not table.tight:
                        break
                self._tables[key] = (tables, taken)
        return self._tables[key]

    def _join(
        self, a: tuple[str, ...], na: tuple[int, ...], b: tuple[str, ...], nb: tuple[int, ...], codec: str
    ) -> GroupJoin | None:
        key = (self._group(a), na, self._group(b), nb, codec)
        if key not in self._joins:
            self._joins[key] = join_groups(self.cluster, self.workload, list(zip(a, na)), list(zip(b, nb)), codec)
        return self._joins[key]

    def neighbours(self, row: Row) -> Iterator[Row]:
        """All rows one change away."""
        groups, count = list(row), len(row)
        for i, j in combinations(range(count), 2):
            other = groups.copy()
            other[i], other[j] = other[j], other[i]
            yield tuple(other)
            rest = [g for k, g in enumerate(groups) if k not in (i, j)]
            both = groups[i] + groups[j]
            yield (*rest[:i], both, *rest[i:])
            if j - 1 != i:
                yield (*rest[: j - 1], both, *rest[j - 1 :])
            if len(groups[i]) > 1 or len(groups[j]) > 1:
                yield from self._exchanged(groups, i, j)
        for i, j in permutations(range(count), 2):
            rest = groups[:i] + groups[i + 1 :]
            if abs(i - j) > 1:
                yield (*rest[:j], groups[i], *rest[j:])
            if len(groups[i]) > 1:  # one member goes over to the other group
                for k, peer in enumerate(groups[i]):
                    other = groups.copy()
                    other[i], other[j] = without(groups[i], k), (*groups[j], peer)
                    yield tuple(other)
        used = {p for g in groups for p in g}
        free = [left[0] for c in self.classes if (left := [p for p in c.peers if p not in used])]
        for i, group in enumerate(groups):
            if count > 1:
                yield (*groups[:i], *groups[i + 1 :])
            for k in range(len(group)):
                if len(group) > 1:
                    yield (*groups[:i], without(group, k), *groups[i + 1 :])
            for at in range(1, len(group)):
                yield (*groups[:i], group[:at], group[at:], *groups[i + 1 :])
            for peer in free:
                yield (*groups[:i], (*group, peer), *groups[i + 1 :])
                yield (*groups[:i], (peer,), *groups[i:])
                for k in range(len(group)):
                    if self._class_of[group[k]] != self._class_of[peer]:
                        yield (*groups[:i], (*group[:k], peer, *group[k + 1 :]), *groups[i + 1 :])
        for peer in free:
            yield (*groups, (peer,))

    def _exchanged(self, groups: Sequence[tuple[str, ...]], i: int, j: int) -> Iterator[Row]:
        """Two groups with a member of each in the other's place."""
        for k, a in enumerate(groups[i]):
            for m, b in enumerate(groups[j]):
                if self._class_of[a] != self._class_of[b]:
                    other = list(groups)
                    other[i] = (*groups[i][:k], b, *groups[i][k + 1 :])
                    other[j] = (*groups[j][:m], a, *groups[j][m + 1 :])
                    yield tuple(other)


def without(group: tuple[str, ...], k: int) -> tuple[str, ...]:
    """A group after its k-th member has gone."""
    return group[:k] + group[k + 1 :]


Groups = list[tuple[str, ...]]  # a row that is being changed


class RowMoves:
    """Draws one change of a row at a time."""

    def __init__(self, rows: Rows, rng: random.Random) -> None:
        self.rows, self.random = rows, rng
        self._free: list[str] = []  # of each class the first device that is not used
        kinds: list[tuple[int, Callable[[Groups], Groups | None]]] = [
            (3, self._swap),
            (3, self._insert),
            (3, self._drop),
            (2, self._replace),
            (2, self._relocate),
            *([(3, self._regroup)] if rows.runs.group != 1 else []),
        ]
        self._weights, self._kinds = [w for w, _ in kinds], [f for _, f in kinds]
        self.weight = sum(self._weights)

    def propose(self, row: Row, used: Collection[str]) -> Row | None:
        """A row one change away, or None when the drawn change has no meaning here. `used`: devices of this row and others."""
        self._free = [left[0] for c in self.rows.classes if (left := [p for p in c.peers if p not in used])]
        move = self.random.choices(self._kinds, self._weights)[0]
        other = move(list(row))
        return None if other is None else tuple(other)

    def _swap(self, row: Groups) -> Groups | None:
        if len(row) < 2:
            return None
        i, j = self.random.sample(range(len(row)), 2)
        if self._same(row[i], row[j]):
            return None
        row[i], row[j] = row[j], row[i]
        return row

    def _relocate(self, row: Groups) -> Groups | None:
        if len(row) < 3:
            return None
        group = row.pop(self.random.randrange(len(row)))
        row.insert(self.random.randrange(len(row) + 1), group)
        return row

    def _drop(self, row: Groups) -> Groups | None:
        j = self.random.randrange(len(row))
        if len(row[j]) > 1 and self.random.random() < 0.5:
            row[j] = without(row[j], self.random.randrange(len(row[j])))
        elif len(row) > 1:
            del row[j]
        return row

    def _unused(self) -> str | None:
        return self.random.choice(self._free) if self._free else None

    def _insert(self, row: Groups) -> Groups | None:
        if (peer := self._unused()) is None:
            return None
        row.insert(self.random.randrange(len(row) + 1), (peer,))
        return row

    def _replace(self, row: Groups) -> Groups | None:
        peer = self._unused()
        j = self.random.randrange(len(row))
        if peer is None or self._same(row[j], (peer,)):
            return None
        gone = self.random.randrange(len(row[j]))
        row[j] = (*row[j][:gone], peer, *row[j][gone + 1 :])
        return row

    def _regroup(self, row: Groups) -> Groups | None:
        """Two groups become one, one becomes two, members trade places or go over, or an unused device joins."""
        j = self.random.randrange(len(row))
        kind = self.random.randrange(5)
        if kind == 0 and len(row[j]) > 1:
            at = self.random.randrange(1, len(row[j]))
            row[j : j + 1] = [row[j][:at], row[j][at:]]
        elif kind == 1 and j + 1 < len(row):
            row[j : j + 2] = [row[j] + row[j + 1]]
        elif kind in (2, 3) and len(row) > 1 and any(len(group) > 1 for group in row):
            i, j = self.random.sample(range(len(row)), 2)
            k, m = self.random.randrange(len(row[i])), self.random.randrange(len(row[j]))
            if kind == 2:
                mine, theirs = row[i][k], row[j][m]
                row[i] = (*row[i][:k], theirs, *row[i][k + 1 :])
                row[j] = (*row[j][:m], mine, *row[j][m + 1 :])
            else:
                row[i], row[j] = without(row[i], k), (*row[j], row[i][k])
                row = [group for group in row if group]
        elif (peer := self._unused()) is not None:
            row[j] = (*row[j], peer)
        else:
            return None
        return row

    def _same(self, a: tuple[str, ...], b: tuple[str, ...]) -> bool:
        return self.rows.shape((a,)) == self.rows.shape((b,))


HOPELESS = 1.1  # a row that takes this many times as long as the best one is of no use
HEAT = 0.03  # at the beginning: by how much slower a row may be that is gone on from, in the mean
Shape = tuple[tuple[int, ...], ...]


class Beam:
    """Rows of one micro-batch size and codec, as far as they were looked at."""

    def __init__(self, rows: Rows, micro_batch: int, codec: str, width: int) -> None:
        self.rows, self.micro_batch, self.codec, self.width = rows, micro_batch, codec, width
        self.best_s = math.inf
        self._judged: dict[Shape, tuple[float, Chain, Row]] = {}
        self._seen: set[Shape] = set()
        self._expanded: set[Shape] = set()
        self._sets: set[tuple[int, ...]] = set()  # how many devices of each class rows had
        self._random = random.Random(0)
        self._waiting: list[Row] = []  # neighbours that are still to be judged

    def judge(self, row: Row) -> None:
        """Estimate a row, unless it was seen or can be of no use."""
        if (shape := self._shape(row)) in self._seen:
            return
        self._seen.add(shape)
        counts = self.rows.counts([p for group in row for p in group])
        # the first row of each set of devices is always cut: it may stand beside another one
        limit_s = HOPELESS * self.best_s if counts in self._sets else math.inf
        found = self.rows.best(row, self.micro_batch, self.codec, limit_s=limit_s)
        if found is not None:
            self._keep(shape, *found, row)

    def _keep(self, shape: Shape, estimate_s: float, chain: Chain, row: Row) -> None:
        self._judged[shape] = (estimate_s, chain, row)
        self.best_s = min(self.best_s, estimate_s)
        self._sets.add(self.rows.counts([p for group in row for p in group]))

    def _shape(self, row: Row) -> Shape:
        """In which order a group lists its members changes little, and would fill the beam with one row."""
        return tuple(tuple(sorted(g)) for g in self.rows.shape(row))

    def run(self, work: int) -> None:
        """Go on to the neighbours of the best rows for so many cells of the dynamic programs over rows."""
        end = self.rows.work + work
        while self.rows.work < end:
            if self._waiting:
                self.judge(self._waiting.pop())
                continue
            beam = sorted(self._judged.items(), key=lambda x: (x[1][0], x[0]))[: self.width]
            fresh = [(shape, row) for shape, (_, _, row) in beam if shape not in self._expanded]
            if not fresh:
                return
            for shape, row in fresh:
                self._expanded.add(shape)
                self._waiting += self.rows.neighbours(row)
            self._random.shuffle(self._waiting)

    def anneal(self, work: int) -> None:
        """Go on from the best row by single changes, at first also to worse rows, for so many cells of the dynamic programs."""
        if not self._judged:
            return
        moves, begun = RowMoves(self.rows, self._random), self.rows.work
        now_s, _, now = min(self._judged.values(), key=lambda x: x[0])
        while (spent := self.rows.work - begun) < work:
            self.rows.work += WORK_OF_A_ROW
            row = moves.propose(now, {peer for group in now for peer in group})
            limit_s = now_s * (1 - HEAT * (1 - spent / work) * math.log(1 - self._random.random()))
            found = None if row is None else self.rows.best(row, self.micro_batch, self.codec, limit_s=limit_s)
            if row is not None and found is not None and found[0] <= limit_s:
                now_s, now = found[0], row
                self._keep(self._shape(row), *found, row)
            elif now_s > HOPELESS * self.best_s:
                now_s, _, now = min(self._judged.values(), key=lambda x: x[0])

    def ranked(self) -> list[tuple[float, Chain]]:
        """Everything that was judged, best first."""
        return sorted(((e, c) for e, c, _ in self._judged.values()), key=lambda x: x[0])


def best_of(beams: Sequence[Beam], count: int) -> list[Beam]:
    """The beams with the best rows so far."""
    return sorted((b for b in beams if math.isfinite(b.best_s)), key=lambda b: b.best_s)[:count]
