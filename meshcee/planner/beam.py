"""A search over rows of groups by estimate: a beam, each round replaced by the best of its neighbours.

The idea: a row that would be slower than what is known, however it is cut, is not cut. A beam can be taken further, so
that most work goes where the best rows are.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from meshcee.planner.chain import Chain
from meshcee.planner.rows import Row, Rows

__all__ = ["Beam", "best_of"]

HOPELESS = 1.1  # a row that takes this many times as long as the best one is of no use
Shape = tuple[tuple[int, ...], ...]


class Beam:
    """Rows of one micro-batch size and codec, as far as they were looked at."""

    def __init__(self, rows: Rows, micro_batch: int, codec: str, width: int) -> None:
        self.rows, self.micro_batch, self.codec, self.width = rows, micro_batch, codec, width
        self.best_s = math.inf
        self._judged: dict[Shape, tuple[float, Chain, Row]] = {}
        self._seen: set[Shape] = set()
        self._expanded: set[Shape] = set()
        self._sets: dict[tuple[int, ...], float] = {}  # the best estimate with so many devices of each class
        self._random = random.Random(0)
        self._waiting: list[Row] = []  # neighbours that are still to be judged

    def judge(self, row: Row) -> None:
        """Estimate a row, unless it was seen or can be of no use."""
        # in which order a group lists its members changes little, and would fill the beam with one row
        if (shape := tuple(tuple(sorted(g)) for g in self.rows.shape(row))) in self._seen:
            return
        self._seen.add(shape)
        counts = self.rows.counts([p for group in row for p in group])
        # the first row of each set of devices is always cut: it may stand beside another one
        limit_s = HOPELESS * self.best_s if counts in self._sets else math.inf
        found = self.rows.best(row, self.micro_batch, self.codec, limit_s=limit_s)
        if found is not None:
            self._judged[shape] = (*found, row)
            self.best_s = min(self.best_s, found[0])
            self._sets[counts] = min(self._sets.get(counts, math.inf), found[0])

    def run(self, work: int) -> None:
        """Go on for so many cells of the dynamic programs over rows."""
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

    def ranked(self) -> list[tuple[float, Chain]]:
        """Everything that was judged, best first."""
        return sorted(((e, c) for e, c, _ in self._judged.values()), key=lambda x: x[0])


def best_of(beams: Sequence[Beam], count: int) -> list[Beam]:
    """The beams with the best rows so far."""
    return sorted((b for b in beams if math.isfinite(b.best_s)), key=lambda b: b.best_s)[:count]
