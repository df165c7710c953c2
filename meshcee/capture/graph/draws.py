"""Random operators of a member that has some rows of a micro-batch: drawn for all rows, so that masks are eager's.

The idea: a generator's numbers depend on how many are drawn before. So a random operator runs on tensors of the whole
micro-batch, zeros in the rows that others compute, and our rows of the result are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshcee.capture.graph.analysis import resolve
from meshcee.capture.graph.program import Node, Program, is_random
from meshcee.capture.graph.rows import Cut, cuts_of
from meshcee.errors import PlanError

__all__ = ["whole_draws"]


def whole_draws(
    program: Program, first: int, end: int, rows: tuple[int, int], samples: int
) -> dict[int, Callable[..., Any]]:
    """For `StageSpec.build`: the random nodes of blocks [first, end) as functions of the values that they read."""
    base, cuts = len(program.inputs), None
    found: dict[int, Callable[..., Any]] = {}
    for i, node in enumerate(program.nodes):
        if first <= node.block < end and is_random(node):
            cuts = cuts or cuts_of(program)
            found[base + i] = _Draw(node, base + i, program, cuts, rows, samples).run
    return found


class _Draw:
    def __init__(
        self, node: Node, number: int, program: Program, cuts: tuple[Cut, ...], rows: tuple[int, int], samples: int
    ) -> None:
        mixed = next((cuts[n].mixed for n in (*node.refs, number) if cuts[n].mixed), "")
        if mixed or node.value.multiple:
            why = mixed or f"{node.operator.name} has several outputs"
            raise PlanError(f"the model cannot be shared by samples here: {why}; use one device a stage")
        self.node = node
        self.refs = tuple(dict.fromkeys(node.refs))
        self.cuts: Mapping[int, Cut] = {n: cuts[n] for n in (*self.refs, number)}
        self.orders = {n: program.value(n).order for n in self.refs}
        self.cut = cuts[number]
        self.first, self.end = rows
        self.samples = samples

    def run(self, *values: Any) -> Any:
        own = dict(zip(self.refs, values, strict=True))
        whole = {n: self._widened(n, value) for n, value in own.items()}
        node = self.node
        args = [resolve(a, whole) for a in node.args]
        out = node.call(*args, **{k: resolve(v, whole) for k, v in node.kwargs.items()})
        if self.cut.dim is None:
            return out
        kept = self._rows(out, self.cut.dim)
        for place in node.writes:
            target: torch.Tensor = resolve(node.args[place], own)
            return target.copy_(kept)
        return kept

    def _rows(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        each = whole.shape[dim] // self.samples
        return whole.narrow(dim, self.first * each, (self.end - self.first) * each)

    def _widened(self, number: int, value: Any) -> Any:
        cut, count = self.cuts[number], self.end - self.first
        if not isinstance(value, torch.Tensor):
            return value * self.samples // count if cut.per_sample else value
        if cut.dim is None:
            return value
        each = value.shape[cut.dim] // count
        shape = list(value.shape)
        shape[cut.dim] = each * self.samples
        # In the memory order that the whole micro-batch would have: masks are drawn in the order of memory.
        order = self.orders[number]
        whole = value.new_zeros([shape[d] for d in order])
        whole = whole.permute([order.index(d) for d in range(len(order))])
        place = whole.narrow(cut.dim, self.first * each, count * each)
        place.copy_(value)  # autograd follows: the gradient of our rows comes back
        return whole
