"""Where a program is cut into blocks.

The idea: a good cut has few bytes alive, and a useful set of cuts has them spread over the work. So every position
between two nodes is a candidate. Candidates are taken in order of live bytes (module boundaries first among equals). Each
taken candidate suppresses its neighbours within a fraction of a layer's work. Layers are what the module tree calls by number.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from meshcee.capture.graph import Analysis, Input, Node
from meshcee.capture.graph.analysis import PACKED, SMALL_BUFFER_BYTES
from meshcee.errors import UsageError

__all__ = ["find_cuts", "named_cuts", "positions"]

MAX_BLOCKS = 512
_WORSE = 1.5  # a cut near better ones may have this many times their live bytes


def positions(
    inputs: Sequence[Input],
    nodes: Sequence[Node],
    outputs: Sequence[int],
    analysis: Analysis,
    recomputed: frozenset[int],
) -> list[float | None]:
    """Live bytes, for one sample, at each position p (before node p); None where a cut would change the meaning.

    That is: where a value with several outputs is alive, and between the uses of a buffer that the forward pass writes.
    No cut may lie between the making and the last in-place change of a tensor. Nor inside of a module that uses a packed
    weight piece by piece, which both sides would hold whole.
    """
    base, count = len(inputs), len(nodes)
    delta = [0.0] * (count + 2)
    blocked = [0.0] * (count + 2)

    def span(table: list[float], start: int, stop: int, amount: float) -> None:
        """Adds to positions start..stop, both included."""
        if start <= stop:
            table[start] += amount
            table[stop + 1] -= amount

    last_use = last_uses(base, nodes, outputs, analysis, recomputed)
    for position, node in enumerate(nodes):
        number = base + position
        if number in recomputed:
            continue
        if node.value.multiple:
            span(blocked, position + 1, last_use[number], 1)
        elif node.value.is_tensor:
            span(
                delta,
                position + 1,
                last_use[number],
                node.value.nbytes(1, usual=True) * (2 if analysis.requires_grad[number] else 1),
            )
    for number, entry in enumerate(inputs):
        uses = sorted(analysis.users[number])
        large = entry.kind == "buffer" and entry.value.dtype in PACKED and entry.value.nbytes(1) > SMALL_BUFFER_BYTES
        if large and len(uses) > 1 and {nodes[use].scope for use in uses} == {scope := nodes[uses[0]].scope}:
            span(blocked, uses[0] + 1, max(p for p, node in enumerate(nodes) if node.scope == scope), 1)
    for group, writes in analysis.mutations.items():
        members = [n for n in range(base + count) if analysis.group[n] == group]
        made = [n - base for n in members if n >= base]
        if len(made) < len(members):  # a buffer: all its uses stay together
            uses = [u for n in members for u in analysis.users[n]]
            span(blocked, min([*made, *uses]) + 1, max(uses), 1)
        else:
            span(blocked, min(made) + 1, max(writes), 1)
    live: list[float | None] = []
    total, stops = 0.0, 0.0
    for p in range(count + 1):
        total += delta[p]
        stops += blocked[p]
        live.append(None if stops or p in (0, count) else total)
    return live


def last_uses(
    base: int, nodes: Sequence[Node], outputs: Sequence[int], analysis: Analysis, recomputed: frozenset[int]
) -> list[int]:
    """Position of each value's last reader, uses through recomputed values included; outputs live to the end."""
    last = [-1] * (base + len(nodes))
    for number in range(base + len(nodes) - 1, -1, -1):
        last[number] = max([len(nodes) if number in outputs else -1, last[number], *analysis.users[number]])
        if number >= base and number in recomputed:
            for r in nodes[number - base].refs:
                last[r] = max(last[r], last[number])
    return last


def find_cuts(
    inputs: Sequence[Input], nodes: Sequence[Node], live: Sequence[float | None], work: Sequence[float]
) -> list[int]:
    """Positions of the cuts, ascending. `work[i]` is node i's share of the whole, in FLOPs and parameters."""
    layers = _Layers.of(nodes, inputs)
    reach = 1.0 / (4 * max(layers.count, 4))
    total = sum(work) or 1.0
    done = [0.0]
    for w in work:
        done.append(done[-1] + w / total)
    candidates = sorted(
        (p for p in range(1, len(nodes)) if live[p] is not None),
        key=lambda p: (
            _rounded(live[p]),
            not layers.begins(nodes, p),
            _common_depth(nodes[p - 1].scope, nodes[p].scope),
            p,
        ),
    )
    chosen: list[int] = []
    for p in candidates:
        if len(chosen) >= MAX_BLOCKS - 1:
            break
        if done[p] < reach / 4 or 1 - done[p] < reach / 4:
            continue
        i = bisect.bisect(chosen, p)
        left = chosen[i - 1] if i else None
        right = chosen[i] if i < len(chosen) else None
        if any(q is not None and abs(done[q] - done[p]) < reach for q in (left, right)):
            continue
        beside = [live[q] or 0.0 for q in (left, right) if q is not None]
        # A cut that is worse than its neighbours is taken only where they leave more than a layer's work together.
        start, stop = (0.0 if left is None else done[left]), (1.0 if right is None else done[right])
        if beside and stop - start <= 6 * reach and (live[p] or 0.0) > _WORSE * max(beside):
            continue
        chosen.insert(i, p)
    return chosen


def named_cuts(nodes: Sequence[Node], live: Sequence[float | None], names: Sequence[str]) -> list[int]:
    """The user's own cuts: one after each named module."""
    chosen = []
    for name in names:
        inside = [i for i, n in enumerate(nodes) if n.scope.split("@")[0] == name or n.scope.startswith(name + ".")]
        if not inside:
            raise UsageError(f"cuts: the model has no module {name!r} that computes anything")
        p = inside[-1] + 1
        if live[p] is None:
            raise UsageError(f"cuts: a cut after {name!r} would separate values that must stay together; leave it out")
        chosen.append(p)
    return sorted(set(chosen))


@dataclass(frozen=True)
class _Layers:
    """What the module tree calls by number, at one depth of numbers: "stages.0", or "stages.0.blocks.1"."""

    depth: int
    count: int

    @classmethod
    def of(cls, nodes: Sequence[Node], inputs: Sequence[Input]) -> _Layers:
        """The deepest depth whose layers hold three weighted operators on average; else the first there is."""
        best = cls(1, 0)
        for depth in range(1, 8):
            sizes: dict[str, int] = {}
            for node in nodes:
                name = cls(depth, 0).name(node)
                if name is not None:
                    weighted = any(r < len(inputs) and inputs[r].kind == "parameter" for r in node.refs)
                    sizes[name] = sizes.get(name, 0) + weighted
            if not sizes:
                break
            if depth == 1 or sum(sizes.values()) >= 3 * len(sizes):
                best = cls(depth, len(sizes))
        return best

    def name(self, node: Node) -> str | None:
        """The layer that a node belongs to; another call of the same module is another layer."""
        path, _, call = node.scope.partition("@")
        parts = path.split(".")
        numbers = [i for i, part in enumerate(parts) if part.isdigit()]
        if len(numbers) < self.depth:
            return None
        return ".".join(parts[: numbers[self.depth - 1] + 1]) + "@" + call

    def begins(self, nodes: Sequence[Node], p: int) -> bool:
        name = self.name(nodes[p])
        return name is not None and name != self.name(nodes[p - 1])


def _rounded(live: float | None) -> float:
    """Live bytes to within a few per cent, so that a mask more or less does not outweigh a module boundary."""
    return float(f"{live or 0.0:.1e}")


def _common_depth(a: str, b: str) -> int:
    depth = 0
    for x, y in zip(a.split("@")[0].split("."), b.split("@")[0].split(".")):
        if x != y or not x:
            break
        depth += 1
    return depth
