"""Proposals: what the dynamic programs think of, before anything is simulated.

The idea: everything that is looked at by estimate alone: which micro-batch sizes, which sets of device classes, which
rows of groups. The search simulates the best of it.

Several pipelines side by side are made from rows that were judged for one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshcee.figures import Cluster, Workload
from meshcee.planner.chain import Chain, ChainStage, Codecs, Layout
from meshcee.planner.cut import Candidate, DeviceClass, Join, StageTable, classes_of, ladder, ring_of, solve
from meshcee.planner.rows import Beam, Row, Rows, best_of, join
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
NEAR_REGIONS = 3
WIDE_SIZES = 2
MANY = 7  # classes in one program, from which on one look must do
FEW = 5  # classes in one program, or devices, up to which a closer look costs little
BROAD = 3  # times as wide are the beams over rows of few devices ...
BROAD_CELLS = 8_000_000  # ... where so many cells may be worked: with less, they leave too little for the rest
MOST_SIZES = 8  # micro-batch sizes looked at
HOPEFUL = 1.15  # pipelines side by side that take this many times as long as the best one are not simulated
LEAST = 2  # candidates of each micro-batch size
BEST = 2  # micro-batch sizes that are looked at closely


@dataclass(frozen=True)
class Effort:
    """How much is tried. `events` bounds the simulator's work in the local search."""

    periods: int = 5
    candidates: int = 12  # of each micro-batch size and set of classes
    beam: int = 4
    rows: int = 12_000_000  # cells of the dynamic programs over rows, all sizes together
    rescored: int = 24  # in the simulator
    several: int = 4  # layouts of several pipelines, of each micro-batch size
    starts: int = 4
    finalists: int = 6  # simulated whole
    events: int = 150_000  # for nine devices; more for fewer, fewer for more
    classes: int = 8  # in one dynamic program; beyond, the cluster is large
    seeds: int = 6  # regions around which a large cluster is looked at
    large_classes: int = 5
    micros: int = 24  # simulated of a step; the rest is extrapolated

    def times(self, factor: float) -> Effort:
        """The same, with this many times the simulated events."""
        return replace(self, events=max(1, round(self.events * factor)))


class Proposals:
    """Candidates by estimate, for one question."""

    def __init__(self, cluster: Cluster, workload: Workload, codecs: Sequence[str], effort: Effort, runs: Runs) -> None:
        self.cluster, self.workload, self.codecs = cluster, workload, tuple(codecs)
        self.effort, self.runs = effort, runs
        self.classes = classes_of(cluster)
        self.large = len(self.classes) > effort.classes
        self.rows = Rows(cluster, workload, self.classes, runs)

    def layouts(self, rescored: int) -> list[Layout]:
        """About so many candidates, all micro-batch sizes and codecs together, the best of each first."""
        alone = [((c.peers[0],),) for c in self.classes]
        regions = list(self.cluster.regions.values())
        members = [p for peers in regions for p in peers]
        together: list[Row] = [(tuple(members[:LARGEST_GROUP]),), tuple(tuple(r[:LARGEST_GROUP]) for r in regions)]
        narrow = self.sizes()
        middle = narrow[len(narrow) // 2] if narrow else 0
        broad = len(self.cluster.devices) <= FEW and self.effort.rows >= BROAD_CELLS
        width = self.effort.beam * (BROAD if broad else 1)
        beams: list[Beam] = []
        proposals: dict[Beam, list[tuple[float, Chain]]] = {}
        for codec in self.codecs:
            first: list[tuple[float, Chain]] = []
            for micro_batch in sorted([*narrow, *self.wide_sizes(narrow)], key=lambda m: m != middle):
                beam = Beam(self.rows, micro_batch, codec, width)
                beams.append(beam)
                proposals[beam] = []
                rows = together  # groups of unlike devices may compute what none of them can alone
                if micro_batch in narrow:
                    if micro_batch == middle or len(self.classes) < MANY or self.large:
                        proposals[beam] = first = self.propose(micro_batch, codec)
                    rows = [tuple(s.peers for s in chain.stages) for _, chain in first]
                for row in [*rows, *alone]:
                    beam.judge(row)
        work = self.effort.rows // len(self.codecs)
        for beam in beams:
            beam.run(work // 3 // max(1, len(beams)))
        for beam in best_of(beams, BEST):
            beam.run(work * 2 // 3 // BEST)
        ranked: list[tuple[float, Layout]] = []
        beside: list[tuple[float, Layout]] = []
        found: list[Layout] = []
        most = self.runs.pipelines
        for beam in beams:
            judged = beam.ranked()
            mine: list[tuple[float, Layout]] = [(estimate, (chain,)) for estimate, chain in (*proposals[beam], *judged)]
            mine.sort(key=lambda x: x[0])
            found += list(dict.fromkeys(layout for _, layout in mine))[:LEAST]
            ranked += mine[: self.effort.candidates]
            beside += side_by_side(judged, self.rows, beam.micro_batch, beam.codec, most, self.effort.several)
        ranked.sort(key=lambda x: x[0])
        best_s = ranked[0][0] if ranked else math.inf
        found += [layout for estimate, layout in beside if estimate < HOPEFUL * best_s]
        return list(dict.fromkeys([*(layout for _, layout in ranked[:rescored]), *found]))

    def sizes(self) -> list[int]:
        """Micro-batch sizes that some class can compute, alone or shared; divisors of the batch."""
        batch = self.workload.global_batch
        if self.workload.micro_batch is not None:
            return [self.workload.micro_batch]
        top = max(self.workload.times[c.kind].largest * min(len(c.peers), LARGEST_GROUP) for c in self.classes)
        fitting = [m for m in range(1, min(batch, top) + 1) if batch % m == 0]
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
        above = [m for m in range(max(narrow, default=0) + 1, min(batch, top) + 1) if batch % m == 0]
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

    def choices(self) -> list[list[DeviceClass]]:
        """Sets of classes that one dynamic program can look at: all, or those around each of the strongest regions."""
        if not self.large:
            return [self.classes]
        speed: dict[str, float] = {}
        for of in self.classes:
            speed[of.region] = speed.get(of.region, 0.0) + self._rate(of)
        places = {c.region: c.peers[0] for c in reversed(self.classes)}
        size = max(self.workload.boundary_bytes, default=0)
        found: list[list[DeviceClass]] = []
        for seed in sorted(speed, key=lambda r: -speed[r])[: self.effort.seeds]:
            far = {r: 0.0 if r == seed else self._seconds(places[seed], p, size) for r, p in places.items()}
            near = sorted((r for r in far if math.isfinite(far[r])), key=lambda r: (far[r], r == seed))[
                : NEAR_REGIONS + 1
            ]
            fitting = [c for c in self.classes if c.region in near]
            fitting.sort(key=lambda c: (c.region != seed, -self._rate(c)))
            found.append(fitting[: self.effort.large_classes])
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

    def tables(self, classes: Sequence[DeviceClass], micro_batch: int, share: float) -> list[list[StageTable]]:
        found = []
        for of in classes:
            times, row = self.workload.times[of.kind], []
            device = self.cluster.devices[of.peers[0]]
            largest = min(len(of.peers), micro_batch, self.runs.group or LARGEST_GROUP)
            for size in range(1, largest + 1):
                if self.large and size & (size - 1):
                    continue
                samples = micro_batch // size
                if micro_batch % size or not times.sizes[0] <= samples <= times.largest:
                    continue
                num_micro = self.workload.global_batch // micro_batch
                ring = ring_of(self.cluster, self.workload, of.peers[:size])
                if ring is None:
                    continue
                for recompute in (False, True):
                    table = StageTable(
                        self.workload,
                        [(device, samples)],
                        share,
                        count=size,
                        recompute=recompute,
                        ring=ring,
                        num_micro=num_micro,
                        known=self.rows.alone,
                    )
                    row.append(table)
                    if not table.tight:
                        break
            found.append(row)
        return found

    def joins(self, classes: Sequence[DeviceClass], micro_batch: int, codec: str) -> list[list[Join | None]]:
        rows: list[list[Join | None]] = []
        for a in classes:
            row: list[Join | None] = []
            for b in classes:
                ends = (a.peers[0], b.peers[-1])
                row.append(None if ends[0] == ends[1] else join(self.cluster, self.workload, *ends, micro_batch, codec))
            rows.append(row)
        return rows

    def propose(self, micro_batch: int, codec: str) -> list[tuple[float, Chain]]:
        """Candidates of one micro-batch size."""
        work, effort = self.workload, self.effort
        num_micro = work.global_batch // micro_batch
        share = work.wire_bytes(1.0, codec)
        found: list[Candidate] = []
        for classes in self.choices():
            rows = self.tables(classes, micro_batch, share)
            kept = [(c, t) for c, t in zip(classes, rows) if t]
            if not kept:
                continue
            classes, rows = [c for c, _ in kept], [t for _, t in kept]
            joins = self.joins(classes, micro_batch, codec)
            low, high = _period_range(classes, rows)
            most = min(work.num_blocks, self.runs.stages or work.num_blocks, 24 if self.large else 48)
            grid = ladder(low, high, effort.periods + 1)
            first = solve(classes, rows, joins, grid, num_micro, effort.candidates, most)
            found += first
            if first and len(classes) < FEW:  # look closer around the best period; beams do so anyway
                step = max(high / low, 1.001) ** (1 / (effort.periods - 1))
                near = first[0].period_s * np.geomspace(1 / step, step, effort.periods)
                found += solve(classes, rows, joins, near, num_micro, effort.candidates, most)
        codecs = Codecs(codec, codec)
        return [(c.estimate_s, Chain(micro_batch, num_micro, c.stages, (codecs,) * (len(c.stages) - 1))) for c in found]


def _period_range(classes: Sequence[DeviceClass], rows: Sequence[Sequence[StageTable]]) -> tuple[float, float]:
    """From all devices working without a gap, to the fastest group alone."""
    rates = [len(c.peers) / min(t.count * t.busy_alone for t in row) for c, row in zip(classes, rows)]
    return 1 / sum(rates), min(t.busy_alone for row in rows for t in row) * 1.0001
