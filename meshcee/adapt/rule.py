"""When the network changes under a running plan: stay, or go over to another one.

The idea: the work function of metrical task systems (Borodin, Linial and Saks, 1992). For every cached candidate p it
keeps the least time in which all steps so far could have been run by whoever ends in p, moves included. The run goes over
to another candidate only when that one's history pays for the move. So there is no detector and no threshold, and a link
that flaps makes the run stay. A change never touches the batch or its gradient, only who computes what, and when.

One thing the history cannot tell: whether a link that is well again will stay so. After a change the run therefore rests:
better weather alone is no reason for another change until REST_STEPS later, worse weather is one at any time. Better weather
that has passed again shows that the link flaps, and the rest begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from meshcee.plan import Plan

__all__ = ["Adapter", "Decision", "Level", "WorkFunction", "level_of"]

SETTLING_STEPS = 2  # what a change costs besides moving: drain, offer, fill; 1 to 1.5 in the WAN lab
REST_STEPS = 50
WORSE = 1.1  # times the seconds of a step when the plan was chosen
MOST_CANDIDATES = 24


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

    The rule needs a metric. Where the way back is cheaper than the way there, a candidate's history would be capped by
    the way back and never pay for the way there. So it reckons with the mean of both.

    Without a rest it is the rule of the theorem.
    """

    def __init__(self, current: int, moving_s: Sequence[Sequence[float]], rest_steps: int = 0) -> None:
        self.current = current
        self._rest_steps = rest_steps
        self._since: int | None = None  # steps since the rest began; None before the first change
        self._chosen_s = 0.0  # a step of the current candidate when it was chosen
        self._tempted = False  # another candidate was better in the last step
        self._before: tuple[int, int | None, float, bool] = current, None, 0.0, False  # the last decision
        self._moving_s = _metric(moving_s)
        self.work_s = list(self._moving_s[current])  # as if the run had moved there before its first step

    def widen(self, moving_s: Sequence[Sequence[float]]) -> None:
        """More candidates, behind those that there are: as if they had been there all along and been nowhere."""
        known = len(self.work_s)
        self._moving_s = _metric(moving_s)
        for p in range(known, len(moving_s)):
            self.work_s.append(min(self.work_s[q] + self._moving_s[q][p] for q in range(known)))

    def keep(self, candidates: Sequence[int]) -> None:
        """Forget all but these, the current one among them."""
        self.current = candidates.index(self.current)
        self.work_s = [self.work_s[p] for p in candidates]
        self._moving_s = [[self._moving_s[q][p] for p in candidates] for q in candidates]

    def observe(self, step_s: Sequence[float]) -> int:
        """One more step, which would have taken `step_s[p]` under each candidate; returns where to go on."""
        every = range(len(step_s))
        self._rest(step_s)
        stayed = [w + t for w, t in zip(self.work_s, step_s, strict=True)]
        self.work_s = [min(stayed[q] + self._moving_s[q][p] for q in every) for p in every]
        there = self._moving_s[self.current]
        # At a tie the move has paid for itself: whoever stays would owe the history of the other, and the way to it.
        best = min(
            (p for p in every if p != self.current), key=lambda p: self.work_s[p] + there[p], default=self.current
        )
        if self.work_s[best] + there[best] <= self.work_s[self.current] * (1 + 1e-12) and self._may_move(step_s):
            self._before = self.current, self._since, self._chosen_s, self._tempted
            self.current, self._since, self._chosen_s, self._tempted = best, 0, step_s[best], False
        return self.current

    def stay(self) -> None:
        """The last decision is refused, before another step: the run has not moved. What the steps have shown stays."""
        self.current, self._since, self._chosen_s, self._tempted = self._before

    def _rest(self, step_s: Sequence[float]) -> None:
        was, self._tempted = self._tempted, min(step_s) * WORSE < step_s[self.current]
        if self._since is not None:
            self._since = 0 if was and not self._tempted else self._since + 1

    def _may_move(self, step_s: Sequence[float]) -> bool:
        rested = self._since is None or self._since > self._rest_steps
        return rested or step_s[self.current] > WORSE * self._chosen_s


def _metric(moving_s: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[(a + b) / 2 for a, b in zip(*rows)] for rows in zip(moving_s, zip(*moving_s))]


@dataclass(frozen=True)
class Decision:
    """What to do from the next step on, and why: `step_s` are the candidates' periods under the present network."""

    plan: Plan
    level: Level
    gain: float  # present step over the new one's, as priced; 1 when nothing changes
    moving_s: float
    step_s: tuple[float, ...]
    before: int = 0  # which of these it is decided in


Price = Callable[[Plan], float]  # a plan's period now; infinite when it cannot run


class Adapter:
    """The candidates of one run: its plan, and whatever searches under changed networks have found, the most promising of it."""

    def __init__(
        self, plan: Plan, price: Price, moving_s: Callable[[Plan, Plan], float], settle_s: float | None = None
    ) -> None:
        """`moving_s(a, b)`: what it takes to go from one plan to another, besides `settle_s`. That is SETTLING_STEPS of
        the first plan on the network that it was made for; without a word, on that of `price`."""
        self.plans = [plan]
        self._price = price
        self._periods = [price(plan)]
        self._settle_s = SETTLING_STEPS * self._periods[0] if settle_s is None else settle_s
        self._moving = moving_s
        self._moving_s = [[0.0]]
        self._rule = WorkFunction(0, self._moving_s, REST_STEPS)

    @property
    def plan(self) -> Plan:
        return self.plans[self._rule.current]

    def weather(self, price: Price, candidates: Sequence[Plan] = ()) -> None:
        """The network has changed: what plans take now, and what a search found for it."""
        known = {_what_runs(p) for p in self.plans}
        new = {_what_runs(p): p for p in candidates if _what_runs(p) not in known}
        self._price = price
        self._make_room(len(new))
        self.plans += list(new.values())[: MOST_CANDIDATES - len(self.plans)]
        self._periods = [price(p) for p in self.plans]
        self._moving_s = [
            [0.0 if a is b else self._settle_s + self._moving(a, b) for b in self.plans] for a in self.plans
        ]
        self._rule.widen(self._moving_s)

    def _make_room(self, count: int) -> None:
        """Forget plans that cannot run any more, as their peers have gone, then those with the worst history."""
        if len(self.plans) + count <= MOST_CANDIDATES:
            return
        others = [p for p in range(len(self.plans)) if p != self._rule.current]
        others.sort(key=lambda p: (math.isinf(self._price(self.plans[p])), self._rule.work_s[p]))
        kept = sorted([self._rule.current, *others[: max(0, MOST_CANDIDATES - count - 1)]])
        self.plans = [self.plans[p] for p in kept]
        self._rule.keep(kept)

    def observe(self, steps: int = 1) -> Decision:
        """So many more steps have run under this weather."""
        before = after = self._rule.current
        for _ in range(steps):
            if after == before:
                after = self._rule.observe(self._periods)
        return Decision(
            self.plans[after],
            level_of(self.plans[before], self.plans[after]),
            self._periods[before] / self._periods[after],
            self._moving_s[before][after],
            tuple(self._periods),
            before,
        )

    def stay(self) -> None:
        """The plan that `observe` has just decided on is refused: the run stays, and any further step may decide anew."""
        self._rule.stay()


def _what_runs(plan: Plan) -> str:
    """Its hash without what was predicted and who was left out, which change with the weather."""
    return replace(plan, predicted=None, left_out=()).hash()
