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


def integer(program: Program, number: int, batch: int) -> int:
    """Value `number` of the program for so many samples; GraphError when it depends on more than shapes.

    Sizes that vary are as usual. Each value on the way is computed once, however many read it.
    """
    found: dict[int, int] = {}

    def known(argument: Any, depth: int) -> Any:
        if not isinstance(argument, Ref):
            return argument
        value = program.value(argument.index)
        if value.is_tensor:
            return torch.empty(value.sizes(batch, usual=True), dtype=value.dtype, device="meta")
        return at(argument.index, depth - 1)

    def at(number: int, depth: int) -> int:
        if number in found:
            return found[number]
        position = number - len(program.inputs)
        if position < 0 or depth == 0:
            raise GraphError(f"value {number} is no integer that follows from shapes")
        node = program.nodes[position]
        args, kwargs = [known(a, depth) for a in node.args], {k: known(v, depth) for k, v in node.kwargs.items()}
        try:
            made = node.call(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, ArithmeticError) as error:
            raise GraphError(f"value {number} is no integer that follows from shapes: {error}") from error
        if not isinstance(made, int):
            raise GraphError(f"value {number} is no integer that follows from shapes")
        found[number] = made
        return made

    return at(number, DEPTH)
