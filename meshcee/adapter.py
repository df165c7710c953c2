"""When the network changes under a running plan: stay, or go over to another one.

The idea: the work function of metrical task systems (Borodin, Linial and Saks, 1992). For every cached candidate p it
keeps the least time in which all steps so far could have been run by whoever ends in p, moves included. The run goes over
to another candidate only when that one's history pays for the move, so there is no detector and no threshold, and a link
that flaps makes the run stay. A change never touches the batch or its gradient, only who computes what, and when.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from meshcee.migration import moves, moving_s
from meshcee.plan import Plan
from meshcee.profile import Cluster
from meshcee.simulator import period_s
from meshcee.workload import Workload

__all__ = ["Adapter", "Decision", "Level", "WorkFunction", "level_of"]

SETTLING_STEPS = 4  # what a change costs besides moving: drain, offer, fill


class Level(IntEnum):
    """How deep a change goes, cheapest first."""

    ABSORB = 0
    REWINDOW = 1  # windows and live caps
    REALLOCATE = 2  # micro-batch, sample shares, codecs, recomputation
    SHIFT = 3  # boundary blocks change hands
    REGROUP = 4  # other groups, another order, a peer more or fewer


def level_of(old: Plan, new: Plan) -> Level:
    """The deepest difference between two plans."""

    def peers(plan: Plan) -> object:
        return [[s.peers for s in p.stages] for p in plan.pipelines]

    def blocks(plan: Plan) -> object:
        return [[(s.first, s.end) for s in p.stages] for p in plan.pipelines]

    def work(plan: Plan) -> object:
        """Everything but the windows."""
        stages = [[replace(s, window=1, live_cap=1) for s in p.stages] for p in plan.pipelines]
        return plan.micro_batch, [p.num_micro for p in plan.pipelines], stages

    if peers(old) != peers(new):
        return Level.REGROUP
    if blocks(old) != blocks(new):
        return Level.SHIFT
    if work(old) != work(new):
        return Level.REALLOCATE
    return Level.ABSORB if old.pipelines == new.pipelines else Level.REWINDOW


class WorkFunction:
    """The rule over numbered candidates. `moving_s[q][p]` is the price in seconds of going from q to p; q to q is 0.

    The rule needs a metric: where the way back is cheaper than the way there, a candidate's history would be capped by
    the way back and never pay for the way there. So it reckons with the mean of both.
    """

    def __init__(self, current: int, moving_s: Sequence[Sequence[float]]) -> None:
        self.current = current
        self._moving_s = [[(a + b) / 2 for a, b in zip(*rows)] for rows in zip(moving_s, zip(*moving_s))]
        self.work_s = list(self._moving_s[current])  # as if the run had moved there before its first step

    def observe(self, step_s: Sequence[float]) -> int:
        """One more step, which would have taken `step_s[p]` under each candidate; returns where to go on."""
        every = range(len(step_s))
        stayed = [w + t for w, t in zip(self.work_s, step_s, strict=True)]
        self.work_s = [min(stayed[q] + self._moving_s[q][p] for q in every) for p in every]
        there = self._moving_s[self.current]
        # At a tie the move has paid for itself: whoever stays would owe the history of the other, and the way to it.
        best = min(
            (p for p in every if p != self.current), key=lambda p: self.work_s[p] + there[p], default=self.current
        )
        if self.work_s[best] + there[best] <= self.work_s[self.current] * (1 + 1e-12):
            self.current = best
        return self.current


@dataclass(frozen=True)
class Decision:
    """What to do from the next step on, and why: `step_s` are the candidates' periods under the present network."""

    plan: Plan
    level: Level
    gain: float  # present step over the new one's, as simulated; 1 when nothing changes
    moving_s: float
    step_s: tuple[float, ...]


class Adapter:
    """The candidates of one run: its plan, the planner's runner-ups, and the windows that suit a changed network."""

    def __init__(
        self,
        plan: Plan,
        candidates: Sequence[Plan],
        cluster: Cluster,
        workload: Workload,
        *,
        price: Callable[[Plan, Cluster, Workload], float] = period_s,
    ) -> None:
        self.plans = list({p.hash(): p for p in (plan, *candidates)}.values())
        self._workload = workload
        self._price = price
        self._priced: tuple[Cluster, list[float]] | None = None
        periods = self._periods(cluster)
        settle_s = SETTLING_STEPS * periods[0]
        price_s = [
            [0.0 if a is b else settle_s + moving_s(moves(a, b), cluster, workload) for b in self.plans]
            for a in self.plans
        ]
        self._moving_s = price_s
        self._rule = WorkFunction(0, price_s)

    @property
    def plan(self) -> Plan:
        return self.plans[self._rule.current]

    def observe(self, cluster: Cluster) -> Decision:
        """One step has run on this network. Call it with the same object while nothing changes: pricing is by identity."""
        before = self._rule.current
        periods = self._periods(cluster)
        after = self._rule.observe(periods)
        return Decision(
            self.plans[after],
            level_of(self.plans[before], self.plans[after]),
            periods[before] / periods[after],
            self._moving_s[before][after],
            tuple(periods),
        )

    def _periods(self, cluster: Cluster) -> list[float]:
        if self._priced is None or self._priced[0] is not cluster:
            found = [self._price(p, cluster, self._workload) for p in self.plans]
            if not all(math.isfinite(t) and t > 0 for t in found):
                raise ValueError(f"a candidate's step takes {found} seconds; leave out what cannot run")
            self._priced = (cluster, found)
        return self._priced[1]
