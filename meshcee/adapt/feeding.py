"""The owner's data and its links to the members that it feeds, as steps show them.

The idea: a member sees how fast its inputs come, and tells with each step; the owner sees how long it reads. Where that takes
much of the step, what has held for several steps counts from then on. Where it does not, it makes no difference how fast it
could be.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from meshcee.adapt.senses import FAST, LASTING_STEPS, SHIFT, Feeds, Reads, Shift
from meshcee.figures import LinkProfile

__all__ = ["Feeding"]

MATTERS = 0.5  # of a step, that inputs are read, or on their way
UNKNOWN = LinkProfile(0.0, FAST)  # nobody has measured any: few bytes cross them


class Feeding:
    """One job's. `links`: peer -> the link that feeds it, as measured before the plan, or as steps have shown since.
    `data_s`: what reading the samples of a step takes, likewise.
    """

    def __init__(self, links: Mapping[str, LinkProfile], data_s: float = 0.0) -> None:
        self.links, self.data_s = dict(links), data_s
        self._reads: deque[float] = deque(maxlen=LASTING_STEPS)
        self._rates: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=LASTING_STEPS))

    def restart(self) -> None:
        """Another plan begins: others are fed."""
        self._rates.clear()
        self._reads.clear()

    def hear(self, fed: Mapping[str, tuple[int, float]], step_s: float, data_s: float | None = None) -> list[Shift]:
        """One more step, in which peers were sent so many bytes, and saw them come at this rate; what has shifted. `data_s`: in
        which its samples were read, where that is known.
        """
        shifts: list[Shift] = []
        if data_s is not None:
            self._reads.append(data_s)
        if len(self._reads) == LASTING_STEPS:
            read_s = median(self._reads)
            if abs(read_s - self.data_s) >= SHIFT * self.data_s and max(read_s, self.data_s) >= MATTERS * step_s:
                self._reads.clear()
                self.data_s = read_s
                shifts.append(Reads(read_s))
        # As it is priced.
        unknown = min(self.links.values(), key=lambda link: link.bandwidth_bytes_per_s, default=UNKNOWN)
        for peer, (size, rate) in fed.items():
            row = self._rates[peer]
            row.append(min(rate, FAST))
            if len(row) < LASTING_STEPS:
                continue
            link, now = self.links.get(peer, unknown), median(row)
            before = min(link.bandwidth_bytes_per_s, FAST)
            if abs(now / before - 1) >= SHIFT and size / min(now, before) >= MATTERS * step_s:
                row.clear()
                self.links[peer] = replace(link, bandwidth_bytes_per_s=now, bandwidth_range_bytes_per_s=None)
                shifts.append(Feeds(peer, now / before))
        return shifts
