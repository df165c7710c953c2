"""How many of a step's micro-batches each pipeline has next, from how long its last ones took.

The idea: sums go down the pipelines in the order of the micro-batches, so who has how many changes no number. The shares travel
with each step and may differ in every one: no epoch, no hand-over. Each micro-batch goes to who would be done with it first. Shares
change only where that gains more than the paces vary by themselves.

A pipeline of s stages takes (n + s - 1) paces for n micro-batches, as the first one passes all stages alone. Where that passage
overlaps with the step before, it takes fewer: two steps with unlike shares tell how many. Who did not learn that would think that
each change gains, and shares would swing for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshcee.plan import Plan

__all__ = ["Shares", "evened"]

LEAST_GAIN = 0.04  # of a step
LEAST_S = 1e-9  # of a pipeline's step; members may say what they like
VARIES = 2.0  # times what paces have varied between two steps
FORGETS = 0.8  # of how much they varied, each step
CLOSE = 0.5  # micro-batches, by which a first passage may seem shorter or longer than it can be


class Shares:
    """Of one epoch; the plan's own to begin with.

    most   micro-batches that each pipeline has memory for; 0: as many as in the plan
    """

    def __init__(self, plan: Plan, most: Sequence[int] = ()) -> None:
        self.counts = tuple(p.num_micro for p in plan.pipelines)
        self._fill: list[float] = [len(p.stages) - 1 for p in plan.pipelines]  # paces of the first passage
        self._most_fill = tuple(self._fill)
        self._most = tuple(max(n, most[i] if i < len(most) else 0) for i, n in enumerate(self.counts))
        self._heard: tuple[tuple[int, float], ...] = ()  # micro-batches and seconds of each pipeline's last step
        self._paces: tuple[float, ...] = ()
        self._noise = 0.0

    def hear(self, counts: Sequence[int], seconds: Sequence[float]) -> bool:
        """A step has been applied, in which the pipelines had `counts` micro-batches and took so long until their last W.

        Returns whether the shares of the next steps are others.
        """
        if any(s < LEAST_S for s in seconds):
            return False
        self._learn(tuple(zip(counts, seconds)))
        before, self._paces = self._paces, tuple(s / (n + c) for s, n, c in zip(seconds, counts, self._fill))
        varied = max((abs(a - b) / b for a, b in zip(self._paces, before)), default=0.0)
        least = max(LEAST_GAIN, VARIES * self._noise)
        self._noise = max(FORGETS * self._noise, min(varied, LEAST_GAIN))  # a jump is news, not noise
        if not before:  # the first step loads what later ones have: it tells of nobody's pace
            return False
        best = self._best()
        if self._ends_s(best) >= (1 - least) * self._ends_s(self.counts):
            return False
        self.counts = best
        return True

    def _learn(self, heard: tuple[tuple[int, float], ...]) -> None:
        """What the first passage takes, where a pipeline had more micro-batches and took longer, or fewer and less."""
        for i, ((n, s), (had, took)) in enumerate(zip(heard, self._heard)):
            if (n - had) * (s - took) > 0:
                fill, most = (took * n - s * had) / (s - took), self._most_fill[i]
                if -CLOSE < fill < most + CLOSE:  # else its pace has changed as well
                    self._fill[i] = min(max(0.0, fill), most)
        self._heard = heard

    def _ends_s(self, counts: Sequence[int]) -> float:
        return max(pace * (n + c) for pace, n, c in zip(self._paces, counts, self._fill))

    def _best(self) -> tuple[int, ...]:
        return dealt(sum(self.counts), self._paces, self._fill, self._most)


def dealt(total: int, paces: Sequence[float], fill: Sequence[float], most: Sequence[int]) -> tuple[int, ...]:
    """Whole numbers, one at least, that make the last to finish as early as possible: each goes where it is done first.

    paces  seconds of a micro-batch; a pipeline takes (n + fill) of them for n
    """
    found = [1] * len(paces)
    for _ in range(total - len(found)):
        room = [i for i, n in enumerate(found) if n < most[i]]
        i = min(room, key=lambda i: (paces[i] * (found[i] + 1 + fill[i]), i))
        found[i] += 1
    return tuple(found)


def evened(plan: Plan, paces: Sequence[float], most: Sequence[int]) -> Plan:
    """The plan with the shares that steps at such paces would come to."""
    counts = dealt(sum(p.num_micro for p in plan.pipelines), paces, [0.0] * len(paces), most)
    return replace(plan, pipelines=tuple(replace(p, num_micro=n) for p, n in zip(plan.pipelines, counts)))
