"""Small changes of a candidate: blocks to a neighbour, devices in, out and elsewhere, windows, codecs, recomputation.

The idea: whatever changes the row of groups is followed by an exact cut of the blocks for the new row. So a move is
judged by the best that it can be. A move changes one pipeline, or moves a device or micro-batches from one to another.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from meshcee.planner.chain import Chain, Codecs, Layout, peers_of
from meshcee.planner.rows import Row, RowMoves, Rows, without

__all__ = ["SLACKS", "Moves", "all_shifted"]

SLACKS = ((0.7, 1), (0.7, 2), (0.85, 2), (1.0, 1), (1.0, 2), (1.3, 2), (1.6, 2), (2.0, 2), (3.0, 2))
PROMISING = 1.05  # a row is tried that takes at most this many times as long, by estimates
BETWEEN = 0.3  # of the moves, where there are several pipelines: from one to another


def shifted(chain: Chain, j: int, by: int, last: int | None = None) -> Chain | None:
    """The boundaries after stages j to `last` (j alone) moved by so many blocks; those between keep their sizes."""
    stages = list(chain.stages)
    for k in range(j, (j if last is None else last) + 1):
        at = stages[k].end + by
        stages[k], stages[k + 1] = replace(stages[k], end=at), replace(stages[k + 1], first=at)
    if any(s.first >= s.end for s in stages):
        return None
    return replace(chain, stages=tuple(stages))


def all_shifted(layout: Layout) -> Iterator[Layout]:
    """Every run of boundaries one block to either side."""
    for i, chain in enumerate(layout):
        for j in range(len(chain.stages) - 1):
            for last in range(j, len(chain.stages) - 1):
                for by in (-1, 1):
                    if (other := shifted(chain, j, by, last)) is not None:
                        yield (*layout[:i], other, *layout[i + 1 :])


class Moves:
    """Draws one move at a time."""

    def __init__(self, rows: Rows, codecs: Sequence[str], rng: random.Random) -> None:
        self.rows, self.codecs, self.random = rows, codecs, rng
        self.workload = rows.workload
        self._row_moves = RowMoves(rows, rng)
        self._used: set[str] = set()  # by the layout
        kinds: list[tuple[int, Callable[[Chain], Chain | None]]] = [
            (6, self._shift),
            (self._row_moves.weight, self._other_row),
            (4, self._windows),
            (1, self._toggle),
            (2 if len(codecs) > 1 else 0, self._recode),
        ]
        self._weights, self._kinds = [w for w, _ in kinds], [f for _, f in kinds]

    def propose(self, layout: Layout) -> Layout | None:
        """A neighbour, or None when the drawn move has no meaning here."""
        drawn = self.random.random()
        if drawn < 0.03:
            return self._resize(layout)
        if len(layout) > 1 and drawn < BETWEEN:
            a, b = self.random.sample(range(len(layout)), 2)
            return self._balance(layout, a, b) if self.random.random() < 0.5 else self._hand_over(layout, a, b)
        self._used = set(peers_of(layout))
        move = self.random.choices(self._kinds, self._weights)[0]
        return self._changed(layout, move)

    def shake(self, layout: Layout) -> Layout | None:
        """Other windows, or now and then a block moved."""
        return self._changed(layout, self._shift if self.random.random() < 0.15 else self._windows)

    def _changed(self, layout: Layout, move: Callable[[Chain], Chain | None]) -> Layout | None:
        i = self.random.randrange(len(layout)) if len(layout) > 1 else 0
        other = move(layout[i])
        return None if other is None else (*layout[:i], other, *layout[i + 1 :])

    # -- several pipelines -----------------------------------------------------------------------------------------

    def _balance(self, layout: Layout, a: int, b: int) -> Layout | None:
        """Micro-batches of one pipeline to another."""
        count = self.random.choice((1, 1, 2, 4))
        if layout[a].num_micro <= count:
            return None
        changed = list(layout)
        changed[a] = replace(layout[a], num_micro=layout[a].num_micro - count)
        changed[b] = replace(layout[b], num_micro=layout[b].num_micro + count)
        return tuple(changed)

    def _hand_over(self, layout: Layout, a: int, b: int) -> Layout | None:
        """A device of one pipeline to another, as a stage of its own or into a group."""
        source, target = list(self._row(layout[a])), list(self._row(layout[b]))
        j = self.random.randrange(len(source))
        k = self.random.randrange(len(source[j]))
        peer = source[j][k]
        source[j : j + 1] = [rest] if (rest := without(source[j], k)) else []
        if not source:  # the last device takes its pipeline's micro-batches along
            gone = layout[a].num_micro
            layout = tuple(replace(c, num_micro=c.num_micro + gone) if i == b else c for i, c in enumerate(layout))
        at = self.random.randrange(len(target) + 1)
        if at < len(target) and self.rows.runs.group != 1 and self.random.random() < 0.5:
            target[at] = (*target[at], peer)
        else:
            target.insert(at, (peer,))
        first, second = self._cut(layout[a], tuple(source)) if source else None, self._cut(layout[b], tuple(target))
        if second is None or (source and first is None):
            return None
        changed = [first if i == a else second if i == b else c for i, c in enumerate(layout)]
        return tuple(c for c in changed if c is not None)

    def _resize(self, layout: Layout) -> Layout | None:
        """Micro-batches of double or half the size."""
        if self.workload.micro_batch is not None:
            return None
        size = self.random.choice((layout[0].micro_batch * 2, layout[0].micro_batch // 2))
        if size < 1 or self.workload.global_batch % size:
            return None
        changed = []
        for chain in layout:
            num_micro, rest = divmod(chain.num_micro * chain.micro_batch, size)
            if rest:
                return None
            other = self._cut(replace(chain, micro_batch=size, num_micro=num_micro), self._row(chain))
            if other is None:
                return None
            changed.append(other)
        return tuple(changed)

    # -- the row stays ---------------------------------------------------------------------------------------------

    def _shift(self, chain: Chain) -> Chain | None:
        if len(chain.stages) < 2:
            return None
        j = self.random.randrange(len(chain.stages) - 1)
        last = self.random.randrange(j, len(chain.stages) - 1) if self.random.random() < 0.15 else j
        return shifted(chain, j, self.random.choice((-1, 1)), last)

    def _windows(self, chain: Chain) -> Chain | None:
        if self.random.random() < 0.3:
            return replace(chain, slack=self.random.choice(SLACKS), extra=())
        extra = list(chain.extra or (0,) * len(chain.stages))
        j = self.random.randrange(len(extra))
        for i in range(j + 1) if self.random.random() < 0.5 else (j,):
            extra[i] += self.random.choice((-2, -1, 1, 2))
        return replace(chain, extra=tuple(extra))

    def _toggle(self, chain: Chain) -> Chain | None:
        stages = list(chain.stages)
        j = self.random.randrange(len(stages))
        stages[j] = replace(stages[j], recompute=not stages[j].recompute)
        return replace(chain, stages=tuple(stages))

    def _recode(self, chain: Chain) -> Chain | None:
        if not chain.codecs:
            return None
        codecs = list(chain.codecs)
        j = self.random.randrange(len(codecs))
        codecs[j] = Codecs(self.random.choice(self.codecs), self.random.choice(self.codecs))
        return replace(chain, codecs=tuple(codecs))

    # -- the row changes -------------------------------------------------------------------------------------------

    def _row(self, chain: Chain) -> Row:
        return tuple(s.peers for s in chain.stages)

    def _other_row(self, chain: Chain) -> Chain | None:
        row = self._row_moves.propose(self._row(chain), self._used)
        return None if row is None else self._cut(chain, row)

    def _cut(self, chain: Chain, row: Row) -> Chain | None:
        """The best cut of the blocks for this row of groups; codecs stay where the row is as long as before.

        None also where estimates think that it takes much longer than the row of before.
        """
        codec = chain.codecs[0].out if chain.codecs else self.codecs[0]
        before = self.rows.best(self._row(chain), chain.micro_batch, codec, chain.num_micro)
        limit_s = math.inf if before is None else PROMISING * before[0]
        found = self.rows.best(row, chain.micro_batch, codec, chain.num_micro, limit_s)
        if found is None:
            return None
        codecs = chain.codecs if len(chain.codecs) == len(row) - 1 else found[1].codecs
        return replace(found[1], codecs=codecs, slack=chain.slack)
