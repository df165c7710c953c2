"""The search: candidates from the dynamic program, judged by the simulator, then improved by small moves.

The idea: the dynamic program looks at everything and knows little (no shared lines, no tails of a step); the simulator
knows all and looks at few. The best candidates of the one start a local search under the other, whose moves also reach
what the first cannot express: regions visited twice, unlike devices in one group. Effort is counted in simulated events,
never in seconds, so that the same question has the same answer on any machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshcee.errors import PlanError
from meshcee.planner.chain import Chain, ChainStage, Codecs, to_plan
from meshcee.planner.classes import DeviceClass, StageTable, classes_of, ring_of
from meshcee.planner.joins import join
from meshcee.planner.moves import SLACKS, Moves
from meshcee.planner.partition import Candidate, Join, solve
from meshcee.planner.rows import Row, Rows
from meshcee.profile import Cluster
from meshcee.simulator import build, period_s, quick_period_s
from meshcee.workload import Workload

__all__ = ["Effort", "Search"]

LARGEST_GROUP = 16
NEAR_REGIONS = 3
WIDE_SIZES = 2
SHAKEN, SHAKEN_FROM = 2, 60
MANY = 7  # classes in one program, from which on one look must do
MOST_SIZES = 8  # micro-batch sizes looked at
FAR_BEHIND = 1.08  # a start that is this many times as slow as the best is not worth improving


@dataclass(frozen=True)
class Effort:
    """How much is tried. `events` bounds the simulator's work in the local search."""

    periods: int = 7
    candidates: int = 12  # of each micro-batch size and set of classes
    beam: int = 4
    rows: int = 30_000_000  # cells of the dynamic programs over rows, all sizes together
    rescored: int = 24  # in the simulator
    starts: int = 3
    finalists: int = 6  # simulated whole
    events: int = 700_000  # for nine devices; more for fewer, fewer for more
    classes: int = 8  # in one dynamic program; beyond, the cluster is large
    seeds: int = 6  # regions around which a large cluster is looked at
    large_classes: int = 5
    max_stages: int | None = None
    micros: int = 40  # simulated of a step; the rest is extrapolated

    def times(self, factor: float) -> Effort:
        """The same, with this many times the simulated events."""
        return replace(self, events=max(1, round(self.events * factor)))


class Search:
    """One question: a cluster, a workload, codecs that may be used."""

    def __init__(
        self,
        cluster: Cluster,
        workload: Workload,
        codecs: Sequence[str],
        effort: Effort,
        allowed: Callable[[Chain], bool] | None = None,
    ) -> None:
        """allowed: whether whoever runs the plan can run such a chain; None: any."""
        self.cluster, self.workload, self.effort = cluster, workload, effort
        self.codecs = tuple(codecs)
        self.allowed = allowed
        self.classes = classes_of(cluster)
        self.large = len(self.classes) > effort.classes
        self.rows = Rows(cluster, workload, self.classes)
        self.events = 0
        self._known: dict[Chain, float] = {}

    def run(self, starts: Sequence[Chain] = ()) -> list[tuple[float, Chain]]:
        """The best chains found with their periods, best first; empty when nothing fits."""
        alone = [((c.peers[0],),) for c in self.classes]
        chains = [*starts, *self.singles()]
        small = 9 / len(self.cluster.devices)  # a simulation costs so much less there
        narrow = self.sizes()
        sizes = [*narrow, *self.wide_sizes(narrow)]
        members = [p for peers in self.cluster.regions.values() for p in peers]
        together: list[Row] = [(tuple(members[:LARGEST_GROUP]),)]
        together.append(tuple(tuple(peers[:LARGEST_GROUP]) for peers in self.cluster.regions.values()))
        for micro_batch in sizes:
            proposals: list[tuple[float, Chain]] = []
            for codec in self.codecs:
                if micro_batch in narrow:
                    proposals += (first := self.propose(micro_batch, codec))
                    rows = [tuple(s.peers for s in c.stages) for _, c in first]
                else:  # only groups of unlike devices can compute it
                    rows = together
                width, work = self.effort.beam, self.effort.rows // len(narrow) // len(self.codecs)
                proposals += self.rows.improve([*rows, *alone], micro_batch, codec, width, work)[
                    : self.effort.candidates
                ]
            proposals.sort(key=lambda p: p[0])
            unlike = list(dict.fromkeys(c for _, c in proposals))
            chains += unlike[: max(3, int(self.effort.rescored * min(4.0, max(1.0, small**2))) // len(narrow))]
        events = self.effort.events * min(2.0, max(0.4, small))
        ranked = self.rank(chains)
        self.events = 0
        begun = self.tuned(ranked)
        for chain in begun:
            self.improve(chain, int(events / 2) // len(begun))
        # windows alone are worth two percent, and no formula knows which: the best rows, their windows shaken
        shaken: dict[object, Chain] = {}
        for period, chain in self.rank(list(self._known))[:SHAKEN_FROM]:
            if math.isfinite(period) and len(chain.stages) > 1 and len(shaken) < SHAKEN:
                shaken.setdefault((chain.micro_batch, self.rows.shape(tuple(s.peers for s in chain.stages))), chain)
        for chain in shaken.values():
            self.improve(chain, int(events / 2) // len(shaken), windows_only=True)
        ranked = [(p, c) for p, c in self.rank(list(self._known)) if math.isfinite(p)]
        finalists = dict.fromkeys(c for _, c in ranked[: self.effort.finalists])
        finalists |= dict.fromkeys([c for _, c in ranked if len(c.peers) == 1][:1])
        return sorted(((self.whole(c), c) for c in finalists), key=lambda x: x[0])

    def whole(self, chain: Chain) -> float:
        """The period, simulated whole."""
        plan = to_plan(chain, self.cluster, self.workload)
        return math.inf if plan is None else period_s(plan, self.cluster, self.workload)

    def tuned(self, ranked: Sequence[tuple[float, Chain]]) -> list[Chain]:
        """Where to start from: the best of each micro-batch size that is not far behind, with its best windows."""
        starts: dict[int, Chain] = {}
        for period, chain in ranked:
            if math.isfinite(period) and period < FAR_BEHIND * ranked[0][0] and len(starts) < self.effort.starts:
                starts.setdefault(chain.micro_batch, chain)
        found = []
        for chain in starts.values():
            if len(chain.stages) > 1:
                chain = self.rank([chain, *(replace(chain, slack=s) for s in SLACKS)])[0][1]
            found.append(chain)
        return found

    def best_single(self) -> tuple[str, float] | None:
        """The fastest device that trains alone, and its seconds per step."""
        alone = [(p, c) for c, p in self._known.items() if len(c.peers) == 1 and math.isfinite(p)]
        if not alone:
            return None
        _, chain = min(alone, key=lambda x: x[0])
        return chain.peers[0], self.whole(chain)

    def best_with(self, peers: Sequence[str]) -> tuple[float, Chain] | None:
        """The fastest chain looked at that uses one of these devices and another one besides."""
        wanted = set(peers)
        with_it = [(p, c) for c, p in self._known.items() if math.isfinite(p) and wanted.intersection(c.peers)]
        return min(with_it, key=lambda x: x[0], default=None)

    def rank(self, chains: Sequence[Chain]) -> list[tuple[float, Chain]]:
        priced = [(self.price(c), i, c) for i, c in enumerate(dict.fromkeys(chains))]
        return [(p, c) for p, _, c in sorted(priced, key=lambda x: x[:2])]

    def price(self, chain: Chain) -> float:
        """The period of consecutive steps, extrapolated; infinite when the chain does not fit."""
        if chain not in self._known:
            self.events += 200
            allowed = len(chain.stages) <= (self.effort.max_stages or len(chain.stages))
            allowed = allowed and (self.allowed is None or self.allowed(chain))
            plan = to_plan(chain, self.cluster, self.workload) if allowed else None
            if plan is None:
                self._known[chain] = math.inf
            else:
                try:
                    instance = build(plan, self.cluster, self.workload)
                except PlanError:  # a link is missing that only the reduction of a group would use
                    self._known[chain] = math.inf
                    return math.inf
                self.events += 10 * min(chain.num_micro, self.effort.micros) * len(instance.nodes)
                self._known[chain] = quick_period_s(instance, self.effort.micros)
        return self._known[chain]

    def improve(self, chain: Chain, events: int, *, windows_only: bool = False) -> Chain:
        """Annealing by small moves, from a seed."""
        moves = Moves(self.rows, self.codecs, random.Random(0))
        best = now = chain
        best_s = now_s = self.price(chain)
        end = self.events + events
        begun = self.events
        while self.events < end:
            self.events += 100
            other = moves.shake(now) if windows_only else moves.propose(now)
            if other is None:
                continue
            other_s = self.price(other)
            heat = 0.01 * (1 - (self.events - begun) / events)
            if other_s < now_s or moves.random.random() < math.exp(-(other_s / now_s - 1) / max(heat, 1e-9)):
                now, now_s = other, other_s
                if now_s < best_s:
                    best, best_s = now, now_s
            elif now_s > 1.02 * best_s:
                now, now_s = best, best_s
        return best

    # -- candidates ------------------------------------------------------------------------------------------------

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

    def singles(self) -> list[Chain]:
        """Every class alone, with every micro-batch size."""
        found = []
        for of in self.classes:
            for m in self.sizes():
                for recompute in (False, True):
                    stage = ChainStage(0, self.workload.num_blocks, of.peers[:1], recompute)
                    found.append(Chain(m, self.workload.global_batch // m, (stage,), ()))
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
        times = self.workload.times[of.kind]
        return (
            len(of.peers)
            * times.sizes[0]
            / max(times.stage(0, self.workload.num_blocks, times.sizes[0]).total_s, 1e-12)
        )

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
            for size in range(1, min(len(of.peers), micro_batch, LARGEST_GROUP) + 1):
                if self.large and size & (size - 1):
                    continue
                samples = micro_batch // size
                if micro_batch % size or not times.sizes[0] <= samples <= times.largest:
                    continue
                ring, num_micro = ring_of(self.cluster, of.peers[:size]), self.workload.global_batch // micro_batch
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
            most = min(work.num_blocks, effort.max_stages or work.num_blocks, 24 if self.large else 48)
            grid = low * np.geomspace(1.0, max(high / low, 1.001), effort.periods)
            first = solve(classes, rows, joins, grid, num_micro, effort.candidates, most)
            found += first
            if first and len(classes) < MANY:  # look closer around the best period
                step = max(high / low, 1.001) ** (1 / (effort.periods - 1))
                near = first[0].period_s * np.geomspace(1 / step, step, effort.periods)
                found += solve(classes, rows, joins, near, num_micro, effort.candidates, most)
        codecs = Codecs(codec, codec)
        return [(c.estimate_s, Chain(micro_batch, num_micro, c.stages, (codecs,) * (len(c.stages) - 1))) for c in found]


def _period_range(classes: Sequence[DeviceClass], rows: Sequence[Sequence[StageTable]]) -> tuple[float, float]:
    """From all devices working without a gap, to the fastest group alone."""
    rates = [len(c.peers) / min(t.count * t.busy_alone for t in row) for c, row in zip(classes, rows)]
    return 1 / sum(rates), min(t.busy_alone for row in rows for t in row) * 1.0001
