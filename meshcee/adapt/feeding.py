"""The owner's links to the members that it feeds, as steps show them.

The idea: a member sees how fast its inputs come, and tells with each step. Where they take much of the step, what has held for
several steps is the link's bandwidth from then on. Where they do not, it makes no difference how fast they could come.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from meshcee.adapt.senses import FAST, LASTING_STEPS, SHIFT, Feeds, Shift
from meshcee.figures import LinkProfile

__all__ = ["Feeding"]

MATTERS = 0.5  # of a step, that inputs are on their way
UNKNOWN = LinkProfile(0.0, FAST)  # nobody has measured it: few bytes cross it


class Feeding:
    """One job's. `links`: peer -> the owner's link to it, as it measured it before the plan, or as steps have shown since."""

    def __init__(self, links: Mapping[str, LinkProfile]) -> None:
        self.links = dict(links)
        self._rates: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=LASTING_STEPS))

    def restart(self) -> None:
        """Another plan begins: others are fed."""
        self._rates.clear()

    def hear(self, fed: Mapping[str, tuple[int, float]], step_s: float) -> list[Shift]:
        """One more step, in which peers were sent so many bytes, and saw them come at this rate; what has shifted."""
        shifts: list[Shift] = []
        for peer, (size, rate) in fed.items():
            row = self._rates[peer]
            row.append(min(rate, FAST))
            if len(row) < LASTING_STEPS:
                continue
            link, now = self.links.get(peer, UNKNOWN), median(row)
            before = min(link.bandwidth_bytes_per_s, FAST)
            if abs(now / before - 1) >= SHIFT and size / min(now, before) >= MATTERS * step_s:
                row.clear()
                self.links[peer] = replace(link, bandwidth_bytes_per_s=now, bandwidth_range_bytes_per_s=None)
                shifts.append(Feeds(peer, now / before))
        return shifts
