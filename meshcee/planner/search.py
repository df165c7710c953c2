"""The search: candidates from the dynamic program, judged by the simulator, then improved by small moves.

The idea: the dynamic program looks at everything and knows little (no shared lines, no tails of a step); the simulator
knows all and looks at few. The best candidates of the one start a local search under the other, whose moves also reach
what the first cannot express: regions visited twice, unlike devices in one group. What its busiest device or line forbids
is not simulated. Effort is counted in simulated events, never in seconds, so that the same question has the same answer on
any machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from meshcee.errors import PlanError
from meshcee.plan import Pipeline, Plan
from meshcee.planner.chain import Layout, peers_of, to_plan
from meshcee.planner.moves import SLACKS, Moves, all_shifted
from meshcee.planner.proposals import Effort, Proposals
from meshcee.planner.runs import Runs
from meshcee.planner.steady import NEARLY
from meshcee.profile import Cluster
from meshcee.simulator import bound_s, build, period_s, quick_period_s
from meshcee.workload import Workload

__all__ = ["Effort", "Search"]

SHAKEN, SHAKEN_FROM = 2, 60
TUNED = 8  # rows whose windows are tuned before the best of them are improved
FAR_BEHIND = 1.08  # a start that is this many times as slow as the best is not worth improving
CELLS = 200  # of the dynamic program over rows that take as long as one simulated event


class Search:
    """One question: a cluster, a workload, codecs that may be used, and what a plan may contain."""

    def __init__(self, cluster: Cluster, workload: Workload, codecs: Sequence[str], effort: Effort, runs: Runs) -> None:
        self.cluster, self.workload, self.effort, self.runs = cluster, workload, effort, runs
        self.codecs = tuple(codecs)
        self.proposals = Proposals(cluster, workload, codecs, effort, runs)
        self.classes, self.rows = self.proposals.classes, self.proposals.rows
        self.events = 0
        self._known: dict[Layout, float] = {}
        self._periods: dict[tuple[Pipeline, ...], float] = {}
        self._bounds: dict[Layout, float] = {}  # of layouts that were not simulated

    def run(self, starts: Sequence[Layout] = ()) -> list[tuple[float, Layout]]:
        """The best layouts found with their periods, best first; empty when nothing fits."""
        small = 9 / len(self.cluster.devices)  # a simulation costs so much less there
        events = self.effort.events * min(2.0, max(0.4, small))
        rescored = int(self.effort.rescored * min(6.0, max(1.0, small**2)))
        ranked = self.rank([*starts, *self.proposals.singles(), *self.proposals.layouts(rescored)])
        self.events = 0
        begun = self.tuned(ranked, small)
        for layout in begun:
            self.improve(layout, int(events / 2) // len(begun))
        # windows alone are worth two percent, and no formula knows which: the best rows, their windows shaken
        shaken: dict[object, Layout] = {}
        for _, layout in self.rank(list(self._known))[:SHAKEN_FROM]:
            if len(peers_of(layout)) > 1 and len(shaken) < SHAKEN:
                shaken.setdefault(self._form(layout), layout)
        for layout in shaken.values():
            self.improve(layout, int(events / 2) // len(shaken), windows_only=True)
        ranked = self.rank(list(self._known))
        finalists: dict[tuple[Pipeline, ...], Layout] = {}
        for _, layout in ranked:
            plan = to_plan(layout, self.cluster, self.workload)
            if plan is not None and len(finalists) < self.effort.finalists * min(3, max(1, round(small**2))):
                finalists.setdefault(plan.pipelines, layout)
        near: dict[object, Layout] = {}  # rows whose best is nearly the best of all: the last choice is between these
        for period, layout in ranked:
            if period <= NEARLY * ranked[0][0] and len(near) < self.effort.finalists:
                near.setdefault(self._form(layout), layout)
        chosen = dict.fromkeys([*finalists.values(), *near.values()])
        chosen |= dict.fromkeys([layout for _, layout in ranked if len(peers_of(layout)) == 1][:1])
        return sorted(((self.whole(layout), layout) for layout in chosen), key=lambda x: x[0])

    def whole(self, layout: Layout) -> float:
        """The period, simulated whole."""
        plan = to_plan(layout, self.cluster, self.workload)
        return math.inf if plan is None else period_s(plan, self.cluster, self.workload)

    def _form(self, layout: Layout) -> object:
        """What layouts share that differ in cuts and windows only."""
        return tuple((c.micro_batch, self.rows.shape(tuple(s.peers for s in c.stages))) for c in layout)

    def tuned(self, ranked: Sequence[tuple[float, Layout]], small: float) -> list[Layout]:
        """Where to start from: the best rows that are not far behind, of several micro-batch sizes, with their best windows.

        small   where simulations cost little, more rows are looked at, and with every boundary moved
        """
        forms: dict[object, Layout] = {}
        near = FAR_BEHIND if small <= 1 else 1 + 3 * (FAR_BEHIND - 1)
        for period, layout in ranked:
            if period < near * ranked[0][0] and len(forms) < TUNED * min(2.0, max(1.0, small)):
                forms.setdefault(self._form(layout), layout)
        others = [tuple(replace(c, slack=s) for c in layout) for layout in forms.values() for s in SLACKS[1::2]]
        if small > 1.5:
            others += [other for layout in forms.values() for other in all_shifted(layout)]
        starts: dict[object, Layout] = {}
        kinds: dict[tuple[int, int], int] = {}
        for _, layout in self.rank([*forms.values(), *others]):
            form, kind = self._form(layout), (layout[0].micro_batch, len(layout))
            if form not in starts and kinds.get(kind, 0) < 2 and len(starts) < self.effort.starts:
                starts[form] = layout
                kinds[kind] = kinds.get(kind, 0) + 1
        return list(starts.values())

    def best_single(self) -> tuple[str, float] | None:
        """The fastest device that trains alone, and its seconds per step."""
        alone = [(p, x) for x, p in self._known.items() if len(peers_of(x)) == 1]
        if not alone:
            return None
        _, layout = min(alone, key=lambda x: x[0])
        return peers_of(layout)[0], self.whole(layout)

    def best_with(self, peers: Sequence[str]) -> tuple[float, Layout] | None:
        """The fastest layout looked at that uses one of these devices, and others besides."""
        wanted = set(peers)
        with_it = [(p, x) for x, p in self._known.items() if wanted.intersection(peers_of(x))]
        if not with_it:  # none was simulated, as they could not have been faster
            bounded = [(b, x) for x, b in self._bounds.items() if wanted.intersection(peers_of(x))]
            with_it = [(self.price(x), x) for _, x in sorted(bounded, key=lambda x: x[0])[:1]]
        return min(with_it, key=lambda x: x[0], default=None)

    def rank(self, layouts: Sequence[Layout]) -> list[tuple[float, Layout]]:
        """Those that fit and are not far behind, best first."""
        priced, best = [], math.inf
        for i, layout in enumerate(dict.fromkeys(map(self.runs.coded, layouts))):
            period = self.price(layout, FAR_BEHIND * best)
            best = min(best, period)
            priced.append((period, i, layout))
        return [(p, x) for p, _, x in sorted(priced, key=lambda x: x[:2]) if x in self._known]

    def price(self, layout: Layout, limit: float = math.inf) -> float:
        """The period of consecutive steps, extrapolated; infinite when the layout does not fit or is not allowed.

        limit   where the busiest device or line forbids a period below it, nothing is simulated and that bound returned
        """
        layout = self.runs.coded(layout)
        if (known := self._known.get(layout)) is not None:
            return known
        if (bound := self._bounds.get(layout, -math.inf)) >= min(limit, 1e300):
            return bound
        if (bound := self._least(layout)) >= limit:
            self._bounds[layout] = bound
            return bound
        self.events += 200
        plan = to_plan(layout, self.cluster, self.workload) if self.runs.permits(layout) else None
        period = math.inf if plan is None else self._simulated(plan, layout, limit)
        if layout not in self._known:
            self._bounds[layout] = period
        return period

    def _least(self, layout: Layout) -> float:
        """Seconds of a step on the busiest device, as far as that is seen without a plan; groups share equally at best."""
        least = 0.0
        for chain in layout:
            for stage in chain.stages:
                kinds = {self.cluster.devices[p].kind for p in stage.peers}
                times = self.workload.times[kinds.pop()]
                samples = -(-chain.micro_batch // len(stage.peers))
                if not kinds and times.sizes[0] <= samples <= times.largest:
                    seconds = times.stage(stage.first, stage.end, samples, stage.recompute).total_s
                    least = max(least, chain.num_micro * seconds)
        return least

    def _simulated(self, plan: Plan, layout: Layout, limit: float) -> float:
        """As `price`, for what fits; other windows in name only have been simulated before."""
        period = self._periods.get(plan.pipelines)
        if period is None:
            try:
                instance = build(plan, self.cluster, self.workload)
            except PlanError:  # a link is missing that only the reduction of a group would use
                return math.inf
            if (bound := bound_s(instance)) >= limit:
                return bound
            period, events = quick_period_s(instance, self.effort.micros, limit)
            self.events += events
            if period >= limit:
                return period
            self._periods[plan.pipelines] = period
        self._known[layout] = period
        return period

    def improve(self, layout: Layout, events: int, *, windows_only: bool = False) -> Layout:
        """Annealing by small moves, from a seed."""
        moves = Moves(self.rows, self.codecs, random.Random(0))
        best = now = layout
        best_s = now_s = self.price(layout)
        begun, cut = self.events, self.rows.work
        while (spent := self.events - begun + (self.rows.work - cut) // CELLS) < events:
            self.events += 60
            other = moves.shake(now) if windows_only else moves.propose(now)
            if other is None:
                continue
            heat = 0.01 * (1 - spent / events)
            limit = now_s * (1 - heat * math.log(1 - moves.random.random()))
            other_s = self.price(other, limit)
            if other_s < limit:
                now, now_s = other, other_s
                if now_s < best_s:
                    best, best_s = now, now_s
            elif now_s > 1.02 * best_s:
                now, now_s = best, best_s
        return best
