"""The order in which einsum multiplies three tensors or more. Where opt_einsum is installed, torch asks it for one by their sizes.

The idea: a graph has one order for micro-batches of every size, and a plain loop takes the one for its own. What an order costs
grows with the size, so between two sizes with the same best order there is no other. Where that order changes, the job is refused.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from meshcee.capture.export.refusals import replaced
from meshcee.errors import CaptureError

__all__ = ["one_order"]

LONGEST = 1024  # of dimensions that vary beside the first


@contextlib.contextmanager
def one_order(most: int) -> Iterator[None]:
    """While a model is exported, for micro-batches of up to `most` samples. Raises CaptureError where the order would change."""
    library = torch.backends.opt_einsum.get_opt_einsum()
    if library is None:
        yield
        return
    asked = SimpleNamespace(contract_path=_Asked(library, most).contract_path)
    with replaced(torch.backends.opt_einsum, "get_opt_einsum", lambda: asked):
        yield


@dataclass(frozen=True)
class _Asked:
    library: Any
    most: int

    def contract_path(self, equation: str, *operands: torch.Tensor, optimize: str) -> tuple[Any, ...]:
        """As opt_einsum's, whose first item torch takes."""
        shapes = [tuple(operand.shape) for operand in operands]
        found = [
            self.library.contract_path(equation, *sizes, shapes=True, optimize=optimize)[0]
            for sizes in self._sizes(shapes)
        ]
        if any(path != found[0] for path in found):
            raise CaptureError(
                f"einsum({equation!r}) multiplies in another order for micro-batches of 1 and of {self.most} samples, as "
                "opt_einsum is installed here; write torch.backends.opt_einsum.enabled = False at the top of the job's file"
            )
        return (found[0],)

    def _sizes(self, shapes: Sequence[tuple[Any, ...]]) -> Iterator[list[tuple[int, ...]]]:
        """The shapes, with every free dimension at both of its ends."""
        expressions = [[getattr(size, "node", None) and size.node.expr for size in shape] for shape in shapes]
        symbols = sorted({s for shape in expressions for e in shape if e is not None for s in e.free_symbols}, key=str)
        ends = (1, self.most) if len(symbols) < 2 else (1, self.most, LONGEST)
        for values in itertools.product(ends, repeat=len(symbols)):
            chosen = dict(zip(symbols, values))
            yield [
                tuple(size if e is None else int(e.subs(chosen)) for size, e in zip(shape, exprs))
                for shape, exprs in zip(shapes, expressions)
            ]
