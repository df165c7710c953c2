"""Which blocks of a program are the same work: measured once, they are known wherever they stand.

The idea: a block is described by its operators, and by the types and shapes of what the operators read and make. The
description also tells how the operators refer to one another, with numbers of the block's own. Blocks with one description
cost the same on the same device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from meshcee.capture.graph.program import Input, Program, Ref, StageSpec, Value

__all__ = ["alike", "tied"]


def alike(program: Program) -> tuple[int, ...]:
    """For every block the first block that is the same work: itself, or an earlier one."""
    first: dict[str, int] = {}
    found = []
    for block in range(program.num_blocks):
        found.append(first.setdefault(_description(program.slice(block, block + 1)), block))
    return tuple(found)


def tied(program: Program) -> tuple[tuple[int, int, int], ...]:
    """(first block, last block, bytes) of the trainable parameters that blocks share, bytes of one pair added up.

    When two stages hold such a pair, the gradient travels from the later one to the earlier in every micro-batch.
    """
    base = len(program.inputs)
    ends: dict[int, tuple[int, int]] = {}
    for node in program.nodes:
        for r in node.refs:
            if r < base and program.inputs[r].trainable:
                ends[r] = (ends.get(r, (node.block, 0))[0], node.block)
    sizes: dict[tuple[int, int], int] = {}
    for number, (first, last) in ends.items():
        if first != last:
            sizes[first, last] = sizes.get((first, last), 0) + program.inputs[number].value.nbytes(1)
    return tuple((first, last, size) for (first, last), size in sorted(sizes.items()))


def _description(spec: StageSpec) -> str:
    local: dict[int, int] = {}
    for number in (*spec.received_numbers, *(n for n, _ in spec.inputs), *(n for n, _ in spec.nodes)):
        local.setdefault(number, len(local))
    parts = [
        (spec.is_first, spec.is_last),
        [_value(v) for v in spec.received],
        [local[n] for n in spec.sent_numbers],
        [_input(entry) for _, entry in spec.inputs],
        [
            (n.operator.name, _linked(n.args, local), _linked(n.kwargs, local), _value(n.value), n.no_grad)
            for _, n in spec.nodes
        ],
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _value(value: Value) -> tuple[Any, ...]:
    return value.dtype, value.shape, value.order, value.requires_grad, value.multiple


def _input(entry: Input) -> tuple[Any, ...]:
    name = entry.name if entry.kind == "raw" else ""
    return entry.kind, name, entry.trainable, entry.mutated, entry.strides, _value(entry.value)


def _linked(argument: Any, local: Mapping[int, int]) -> Any:
    if isinstance(argument, Ref):
        return f"#{local[argument.index]}"
    if isinstance(argument, list | tuple):
        return [_linked(a, local) for a in argument]
    if isinstance(argument, Mapping):
        return [(k, _linked(v, local)) for k, v in sorted(argument.items())]
    return argument
