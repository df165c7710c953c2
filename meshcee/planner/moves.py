"""Small changes of a candidate: blocks to a neighbour, devices in, out and elsewhere, windows, codecs, recomputation.

The idea: whatever changes the row of groups is followed by an exact cut of the blocks for the new row, so that a move is
judged by the best that it can be.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from meshcee.planner.chain import Chain, Codecs
from meshcee.planner.classes import class_key
from meshcee.planner.rows import Rows

__all__ = ["SLACKS", "Moves"]

Row = list[tuple[str, ...]]

SLACKS = ((0.7, 1), (0.7, 2), (0.85, 2), (1.0, 1), (1.0, 2), (1.3, 2), (1.6, 2), (2.0, 2), (3.0, 2))


def shifted(chain: Chain, j: int, by: int) -> Chain | None:
    """The boundary after stage j moved by so many blocks."""
    stages = list(chain.stages)
    a, b = stages[j], stages[j + 1]
    at = a.end + by
    if not a.first < at < b.end:
        return None
    stages[j], stages[j + 1] = replace(a, end=at), replace(b, first=at)
    return replace(chain, stages=tuple(stages))


class Moves:
    """Draws one move at a time."""

    def __init__(
        self,
        rows: Rows,
        codecs: Sequence[str],
        rng: random.Random,
    ) -> None:
        self.rows, self.codecs, self.random = rows, codecs, rng
        self.cluster, self.workload, self.classes = rows.cluster, rows.workload, rows.classes
        self._kinds: list[tuple[int, Callable[[Chain], Chain | None]]] = [
            (6, self._shift),
            (3, self._swap),
            (3, self._insert),
            (3, self._drop),
            (2, self._replace),
            (2, self._relocate),
            (2, self._regroup),
            (4, self._windows),
            (1, self._resize),
            (1, self._toggle),
            (2 if len(codecs) > 1 else 0, self._recode),
        ]

    def propose(self, chain: Chain) -> Chain | None:
        """A neighbour, or None when the drawn move has no meaning here."""
        weights = [w for w, _ in self._kinds]
        return self.random.choices([f for _, f in self._kinds], weights)[0](chain)

    def shake(self, chain: Chain) -> Chain | None:
        """Other windows, or now and then a block moved."""
        return self._shift(chain) if self.random.random() < 0.15 else self._windows(chain)

    # -- the row stays ---------------------------------------------------------------------------------------------

    def _shift(self, chain: Chain) -> Chain | None:
        if len(chain.stages) < 2:
            return None
        return shifted(chain, self.random.randrange(len(chain.stages) - 1), self.random.choice((-1, 1)))

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
        return [s.peers for s in chain.stages]

    def _swap(self, chain: Chain) -> Chain | None:
        row = self._row(chain)
        if len(row) < 2:
            return None
        i, j = self.random.sample(range(len(row)), 2)
        if self._same(row[i], row[j]):
            return None
        row[i], row[j] = row[j], row[i]
        return self._cut(chain, row)

    def _relocate(self, chain: Chain) -> Chain | None:
        row = self._row(chain)
        if len(row) < 3:
            return None
        group = row.pop(self.random.randrange(len(row)))
        row.insert(self.random.randrange(len(row) + 1), group)
        return self._cut(chain, row)

    def _drop(self, chain: Chain) -> Chain | None:
        row = self._row(chain)
        j = self.random.randrange(len(row))
        if len(row[j]) > 1 and self.random.random() < 0.5:
            gone = self.random.randrange(len(row[j]))
            row[j] = row[j][:gone] + row[j][gone + 1 :]
        elif len(row) > 1:
            del row[j]
        return self._cut(chain, row)

    def _unused(self, chain: Chain) -> str | None:
        used = set(chain.peers)
        free = [left[0] for c in self.classes if (left := [p for p in c.peers if p not in used])]
        return self.random.choice(free) if free else None

    def _insert(self, chain: Chain) -> Chain | None:
        peer, row = self._unused(chain), self._row(chain)
        if peer is None:
            return None
        row.insert(self.random.randrange(len(row) + 1), (peer,))
        return self._cut(chain, row)

    def _replace(self, chain: Chain) -> Chain | None:
        peer, row = self._unused(chain), self._row(chain)
        j = self.random.randrange(len(row))
        if peer is None or self._same(row[j], (peer,)):
            return None
        gone = self.random.randrange(len(row[j]))
        row[j] = (*row[j][:gone], peer, *row[j][gone + 1 :])
        return self._cut(chain, row)

    def _regroup(self, chain: Chain) -> Chain | None:
        """Two groups become one, one becomes two, or an unused device joins a group."""
        row = self._row(chain)
        j = self.random.randrange(len(row))
        kind = self.random.randrange(3)
        if kind == 0 and len(row[j]) > 1:
            at = self.random.randrange(1, len(row[j]))
            row[j : j + 1] = [row[j][:at], row[j][at:]]
        elif kind == 1 and j + 1 < len(row):
            row[j : j + 2] = [row[j] + row[j + 1]]
        else:
            peer = self._unused(chain)
            if peer is None:
                return None
            row[j] = (*row[j], peer)
        return self._cut(chain, row)

    def _resize(self, chain: Chain) -> Chain | None:
        if self.workload.micro_batch is not None:
            return None
        size = self.random.choice((chain.micro_batch * 2, chain.micro_batch // 2))
        if size < 1 or self.workload.global_batch % size:
            return None
        other = replace(chain, micro_batch=size, num_micro=self.workload.global_batch // size)
        return self._cut(other, self._row(chain))

    def _same(self, a: tuple[str, ...], b: tuple[str, ...]) -> bool:
        devices = self.cluster.devices
        return [class_key(devices[p]) for p in a] == [class_key(devices[p]) for p in b] and len(self.classes) < len(
            devices
        )

    def _cut(self, chain: Chain, row: Row) -> Chain | None:
        """The best cut of the blocks for this row of groups; codecs stay where the row is as long as before."""
        codec = chain.codecs[0].out if chain.codecs else self.codecs[0]
        found = self.rows.best(tuple(row), chain.micro_batch, codec)
        if found is None:
            return None
        codecs = chain.codecs if len(chain.codecs) == len(row) - 1 else found[1].codecs
        return replace(found[1], codecs=codecs, slack=chain.slack)
