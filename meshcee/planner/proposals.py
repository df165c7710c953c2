"""Proposals: what estimates think of, before anything is simulated.

The idea: everything that is looked at by estimate alone: which micro-batch sizes, which rows of groups. Rows begin along walks
through the regions. A beam for each micro-batch size improves them, then annealing for the best sizes. The search simulates the
best.

Several pipelines side by side are made from rows that were judged for one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshcee.figures import MOST_MICROS, Cluster
from meshcee.figures.workload import Workload
from meshcee.planner.chain import Chain, ChainStage, Layout
from meshcee.planner.cut import DeviceClass, classes_of
from meshcee.planner.rows import Beam, Row, Rows, best_of
from meshcee.planner.rules import Runs

__all__ = ["Effort", "Proposals", "side_by_side"]

TEAMS = 200  # sets of devices that are combined


def side_by_side(
    judged: Sequence[tuple[float, Chain]], rows: Rows, micro_batch: int, codec: str, most: int | None, keep: int
) -> list[tuple[float, Layout]]:
    """Layouts of two pipelines or more with estimates of a step, best first.

    judged  rows with estimates, best first; the best of each set of devices is used
    most    pipelines
    """
    total = rows.workload.global_batch // micro_batch
    limit = min(most or total, total)
    if limit < 2:
        return []
    teams: dict[tuple[int, ...], tuple[float, Row]] = {}
    for estimate, chain in judged:
        teams.setdefault(rows.counts(chain.peers), (total / estimate, tuple(s.peers for s in chain.stages)))
    sizes = np.array([len(c.peers) for c in rows.classes])
    # a set that leaves room for another one; the best of them, and among equals the smaller
    apart = [(rate, counts, row) for counts, (rate, row) in teams.items() if np.any(sizes - counts > 0)]
    apart = sorted(apart, key=lambda x: (-x[0] / sum(x[1]), x[1]))[:TEAMS]
    if not apart:
        return []
    counts_of, rates = np.array([c for _, c, _ in apart]), np.array([r for r, _, _ in apart])
    found: dict[tuple[int, ...], float] = {}
    for first in range(len(apart)):
        chosen, left = [first], sizes - counts_of[first]
        while len(chosen) < limit:
            fitting = np.flatnonzero((counts_of <= left).all(axis=1))
            if not len(fitting):
                break
            best = int(fitting[rates[fitting].argmax()])
            chosen.append(best)
            left = left - counts_of[best]
            found[tuple(sorted(chosen))] = total / float(rates[chosen].sum())
    layouts = []
    for teams_of, _ in sorted(found.items(), key=lambda x: (x[1], x[0]))[: 2 * keep]:
        layout = _placed([apart[t][2] for t in teams_of], [apart[t][0] for t in teams_of], rows, micro_batch, codec)
        if layout is not None:
            layouts.append(layout)
    return sorted(layouts, key=lambda x: x[0])[:keep]


def _placed(
    team_rows: Sequence[Row], rates: Sequence[float], rows: Rows, micro_batch: int, codec: str
) -> tuple[float, Layout] | None:
    """The rows on devices of their own, with their micro-batches and best cuts."""
    total = rows.workload.global_batch // micro_batch
    taken = [1] * len(rates)
    for _ in range(total - len(rates)):
        taken[min(range(len(rates)), key=lambda i: ((taken[i] + 1) / rates[i], i))] += 1
    free = {k: list(c.peers) for k, c in enumerate(rows.classes)}
    chains, slowest = [], 0.0
    for row, num_micro in zip(team_rows, taken):
        placed = tuple(tuple(free[k].pop(0) for k in group) for group in rows.shape(row))
        found = rows.best(placed, micro_batch, codec, num_micro)
        if found is None:
            return None
        slowest = max(slowest, found[0])
        chains.append(found[1])
    return slowest + _reduction_s(chains, rows), tuple(chains)


def _reduction_s(chains: Sequence[Chain], rows: Rows) -> float:
    """Of all gradients between the first devices of the pipelines, once a step."""
    heads = [chain.peers[0] for chain in chains]
    paths = [path for a, b in zip(heads, heads[1:] + heads[:1]) if (path := rows.cluster.path(a, b)) is not None]
    share = 2 * (len(heads) - 1) / len(heads)
    size = share * sum(rows.workload.gradient_bytes)
    return max((size / path.bandwidth_bytes_per_s + path.latency_s for path in paths), default=0.0)


LARGEST_GROUP = 16
GROUPS = (1, 2, 4, 8, LARGEST_GROUP)  # sizes of the groups that rows begin with
WIDE_SIZES = 2
FEW = 5  # devices, up to which a closer look costs little
LARGE = 8  # classes of devices, above which the cluster is large
STRONGEST, FARTHEST = 6, 9  # regions that walks begin in, and regions of a walk
BEAM = 4
BROAD = 3  # times as wide are the beams over rows of few devices ...
BROAD_CELLS = 24_000_000  # ... where so many cells may be worked: with less, they leave too little for the rest
MOST_SIZES = 8  # micro-batch sizes looked at
HOPEFUL = 1.15  # pipelines side by side that take this many times as long as the best one are not simulated
LEAST = 2  # candidates of each micro-batch size, and how many at most
CANDIDATES = 12
SEVERAL = 4  # layouts of several pipelines, of each micro-batch size
BEST = 2  # micro-batch sizes that are looked at closely ...
ANNEALED = 0.7  # ... for this share of the work by annealing, else by the neighbours of the best


@dataclass(frozen=True)
class Effort:
    """How much is tried."""

    rows: int = 36_000_000  # cells of the dynamic programs over rows, all sizes together
    events: int = 600_000  # of the simulator in the local search; fewer for more than 18 devices

    def times(self, factor: float, *, rows: float = 1) -> Effort:
        """The same, with this many times the simulated events, and the cells of rows."""
        return replace(self, events=max(1, round(self.events * factor)), rows=round(self.rows * rows))


class Proposals:
    """Candidates by estimate, for one question."""

    def __init__(self, cluster: Cluster, workload: Workload, codecs: Sequence[str], effort: Effort, runs: Runs) -> None:
        self.cluster, self.workload, self.codecs = cluster, workload, tuple(codecs)
        self.effort, self.runs = effort, runs
        self.classes = classes_of(cluster)
        self.large = len(self.classes) > LARGE
        self.rows = Rows(cluster, workload, self.classes, runs)
        self.parallel: list[Layout] = []  # the best of several pipelines, however far behind one pipeline

    def layouts(self, rescored: int) -> list[Layout]:
        """About so many candidates, all micro-batch sizes and codecs together, the best of each first."""
        begin = self.beginnings()
        narrow = self.sizes()
        middle = narrow[len(narrow) // 2] if narrow else 0
        few = len(self.cluster.devices) <= FEW
        broad = few and self.effort.rows >= BROAD_CELLS
        beams: list[Beam] = []
        for codec in self.codecs:
            for micro_batch in sorted([*narrow, *self.wide_sizes(narrow)], key=lambda m: m != middle):
                beam = Beam(self.rows, micro_batch, codec, BEAM * (BROAD if broad else 1))
                beams.append(beam)
                for row in begin:
                    beam.judge(row)
        work = (
            self.effort.rows // len(self.codecs) // (3 if self.large else 1)
        )  # there a cell costs more than its arithmetic
        for beam in beams:
            beam.run(work // 3 // max(1, len(beams)))
        for beam in best_of(beams, BEST):
            part = work * 2 // 3 // BEST
            annealed = 0 if few else int(ANNEALED * part)
            beam.run(part - annealed)
            beam.anneal(annealed)
        ranked: list[tuple[float, Layout]] = []
        beside: list[tuple[float, Layout]] = []
        found: list[Layout] = []
        for beam in beams:
            judged = beam.ranked()
            mine: list[tuple[float, Layout]] = [(estimate, (chain,)) for estimate, chain in judged[:CANDIDATES]]
            found += [layout for _, layout in mine[:LEAST]]
            ranked += mine
            beside += side_by_side(judged, self.rows, beam.micro_batch, beam.codec, self.runs.pipelines, SEVERAL)
        ranked.sort(key=lambda x: x[0])
        best_s = ranked[0][0] if ranked else math.inf
        self.parallel = [layout for _, layout in sorted(beside, key=lambda x: x[0])[:SEVERAL]]
        found += [layout for estimate, layout in beside if estimate < HOPEFUL * best_s]
        return list(dict.fromkeys([*(layout for _, layout in ranked[:rescored]), *found]))

    def beginnings(self) -> list[Row]:
        """Rows to go on from: each class alone, regions as groups, and walks from strong regions to the nearest others.

        The classes along a walk are divided into groups of one size. Unlike devices in one group may compute what none can alone.
        """
        regions: dict[str, list[DeviceClass]] = {}
        for of in sorted(self.classes, key=lambda c: -self._rate(c)):
            regions.setdefault(of.region, []).append(of)
        orders = [sorted(self.classes, key=lambda c: -self._rate(c))]
        for strong in sorted(regions, key=lambda r: -sum(map(self._rate, regions[r])))[:STRONGEST]:
            walk = self._walk(strong, {r: classes[0].peers[0] for r, classes in regions.items()})
            for end in range(len(walk), 0, -1):
                orders += [[c for r in order for c in regions[r]] for order in (walk[:end], walk[end - 1 :: -1])]
        members = list(self.cluster.regions.values())
        rows: list[Row] = [
            tuple(g for c in order for g in _groups(c.peers, size)) for order in orders for size in GROUPS
        ]
        rows.append((tuple(p for peers in members for p in peers)[:LARGEST_GROUP],))
        rows.append(tuple(tuple(peers[:LARGEST_GROUP]) for peers in members))
        rows += [((c.peers[0],),) for c in self.classes]
        return list(dict.fromkeys(row[: self.workload.num_blocks] for row in rows))

    def _walk(self, first: str, places: dict[str, str]) -> list[str]:
        """From region to region, always to the nearest one that is left; `places` has a device of each."""
        size, walk, left = max(self.workload.boundary_bytes, default=0), [first], set(places) - {first}
        while left and len(walk) < FARTHEST:
            away = {r: self._seconds(places[walk[-1]], places[r], size) for r in places if r in left}
            walk.append(min(away, key=away.__getitem__))
            if math.isinf(away[walk[-1]]):
                return walk[:-1]
            left.remove(walk[-1])
        return walk

    def sizes(self) -> list[int]:
        """Micro-batch sizes that some class can compute, alone or shared: divisors of the batch, of which a step has MOST_MICROS at
        most."""
        batch = self.workload.global_batch
        if self.workload.micro_batch is not None:
            return [self.workload.micro_batch]
        top = max(self.workload.times[c.kind].largest * min(len(c.peers), LARGEST_GROUP) for c in self.classes)
        fitting = [m for m in range(-(-batch // MOST_MICROS), min(batch, top) + 1) if batch % m == 0]
        if len(fitting) <= MOST_SIZES:
            return fitting
        spread = {round(k * (len(fitting) - 1) / (MOST_SIZES - 1)) for k in range(MOST_SIZES)}
        return [fitting[k] for k in sorted(spread)]

    def wide_sizes(self, narrow: Sequence[int]) -> list[int]:
        """The next sizes up, which only unlike devices together can compute."""
        if self.workload.micro_batch is not None or self.large:
            return []
        batch = self.workload.global_batch
        top = sum(self.workload.times[c.kind].largest * len(c.peers) for c in self.classes)
        least = max(max(narrow, default=0) + 1, -(-batch // MOST_MICROS))
        above = [m for m in range(least, min(batch, top) + 1) if batch % m == 0]
        return above[:WIDE_SIZES]

    def singles(self) -> list[Layout]:
        """Every class alone, with every micro-batch size."""
        found: list[Layout] = []
        for of in self.classes:
            for m in self.sizes():
                for recompute in (False, True):
                    stage = ChainStage(0, self.workload.num_blocks, of.peers[:1], recompute)
                    found.append((Chain(m, self.workload.global_batch // m, (stage,), ()),))
        return found

    def _rate(self, of: DeviceClass) -> float:
        """Samples per second of all its devices together, if each could hold everything."""
        return len(of.peers) / max(self.seconds_alone(of.peers[0]), 1e-12)

    def seconds_alone(self, peer: str) -> float:
        """Of one sample through all blocks, if the device could hold everything."""
        times = self.workload.times[self.cluster.devices[peer].kind]
        return times.stage(0, self.workload.num_blocks, times.sizes[0]).total_s / times.sizes[0]

    def _seconds(self, a: str, b: str, size: float) -> float:
        go, come = self.cluster.path(a, b), self.cluster.path(b, a)
        return math.inf if go is None or come is None else go.seconds(size) + come.seconds(size)


def _groups(peers: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """Of this size, or all in one where there are fewer; what is left over has no group."""
    size = min(size, len(peers))
    return [tuple(peers[i : i + size]) for i in range(0, len(peers) - len(peers) % size, size)]
