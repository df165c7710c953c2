"""What the blocks of a graph cost, and what they are called."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshcee.capture.graph import Analysis, Input, Node, Program
from meshcee.figures import BlockCost

__all__ = ["costs_of", "work_of"]


def work_of(inputs: Sequence[Input], nodes: Sequence[Node], analysis: Analysis) -> list[float]:
    """A node's share of the FLOPs plus its share of the parameter bytes, which count wherever they are used."""
    flops = sum(analysis.flops) or 1.0
    parameters = [0.0] * len(nodes)
    for number, entry in enumerate(inputs):
        if entry.kind in ("parameter", "buffer"):
            for position in analysis.users[number]:
                parameters[position] += entry.value.nbytes(1)
    total = sum(parameters) or 1.0
    return [f / flops + p / total for f, p in zip(analysis.flops, parameters)]


def costs_of(program: Program, analysis: Analysis) -> tuple[BlockCost, ...]:
    base, count = len(program.inputs), program.samples or 1  # of a graph for one number of samples, figures are of all
    costs = []
    seen: set[int] = set()
    for b in range(program.num_blocks):
        spec = program.slice(b, b + 1)
        inside = [i for i, n in enumerate(program.nodes) if n.block == b]
        own = []
        for number in dict.fromkeys(r for i in inside for r in program.nodes[i].refs):
            if number < base and program.inputs[number].kind in ("parameter", "buffer") and number not in seen:
                seen.add(number)
                own.append(program.inputs[number])
        costs.append(
            BlockCost(
                name=_block_name([program.nodes[i] for i in inside], base),
                flops=sum(analysis.flops[i] for i in inside),
                parameter_bytes=sum(p.value.nbytes(1) for p in own),
                trainable_bytes=sum(p.value.nbytes(1) for p in own if p.trainable),
                activation_bytes=int(sum(analysis.saved_bytes[i] for i in inside)),
                boundary_bytes=-(-sum(v.nbytes(1, usual=True) for v in spec.sent) // count),
                boundary_grad_bytes=-(-sum(v.nbytes(1, usual=True) for v in spec.sent if v.requires_grad) // count),
                parameters=tuple(spec.parameters),
                full_bytes=sum(p.value.nbytes(1) for p in own if p.trainable and p.value.dtype == torch.float32),
            )
        )
    return tuple(costs)


def _block_name(nodes: Sequence[Node], base: int) -> str:
    """The modules a block covers: their common path, or "first..last"; those with parameters speak for the rest."""
    weighted = [n for n in nodes if any(r < base for r in n.refs)]
    paths = [p for n in (weighted or nodes) if (p := n.scope.split("@")[0])]
    if not paths:
        return "loss"
    split = [p.split(".") for p in paths]
    shared = []
    for level in zip(*split):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    # "model" or "model.layers" alone would say nothing: then the ends of the range do.
    if shared and (len(set(paths)) == 1 or any(part.isdigit() for part in shared)):
        return ".".join(shared)
    skip = max(len(shared) - 1, 0)
    return f"{paths[0]}..{'.'.join(split[-1][skip:])}"
