"""What an integer inside a program is for a given number of samples, without running the program.

The idea: integers come from shapes and arithmetic, and shapes are known; so a tensor without data stands in for each.
"""

from __future__ import annotations

from typing import Any

import torch

from meshcee.capture.graph.program import Program, Ref
from meshcee.errors import GraphError

__all__ = ["integer"]

DEPTH = 200  # steps of arithmetic from a shape to the integer


def integer(program: Program, number: int, batch: int, depth: int = DEPTH, *, usual: bool = True) -> int:
    """Value `number` of the program for so many samples; GraphError when it depends on more than shapes.

    Sizes that vary are as usual, or at their limit.
    """
    position = number - len(program.inputs)
    if position < 0 or depth == 0:
        raise GraphError(f"value {number} is no integer that follows from shapes")

    def known(argument: Any) -> Any:
        if not isinstance(argument, Ref):
            return argument
        value = program.value(argument.index)
        if value.is_tensor:
            return torch.empty(value.sizes(batch, usual=usual), dtype=value.dtype, device="meta")
        return integer(program, argument.index, batch, depth - 1, usual=usual)

    node = program.nodes[position]
    try:
        found = node.operator.call(*map(known, node.args), **{k: known(v) for k, v in node.kwargs.items()})
    except (RuntimeError, TypeError, ValueError, ArithmeticError) as error:
        raise GraphError(f"value {number} is no integer that follows from shapes: {error}") from error
    if not isinstance(found, int):
        raise GraphError(f"value {number} is no integer that follows from shapes")
    return found
