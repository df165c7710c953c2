"""How a tensor lies in memory, as far as kernels care: the order of dimensions, gaps between rows, what is expanded.

The idea: kernels round differently for rows with gaps, for a stride of two, for an expanded dimension, since another loop
runs. A product of matrices rounds by whether rows begin at multiples of 16 bytes, too, and beyond that by no gap's width. So a
tensor travels without its gaps, and where it arrives gets gaps again, the narrowest that leave rows so: the strides here called
canonical. Where a tensor as a whole begins is told beside them (`offset_of`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from meshcee.files.layout import laid_out

__all__ = ["canonical", "contiguous", "dense", "moved", "unexpanded"]

_LINE = 16  # elements: at least 16 bytes, and a cache line of fp32
_MOST = 16  # times the elements: tensors with wider gaps in all travel without them


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(size or 1 for size in shape[dim + 1 :]) for dim in range(len(shape)))


def canonical(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The strides with narrow gaps where there are gaps. Canonical strides are their own canonical strides."""
    if 0 in shape:
        return contiguous(shape)
    found, nominal, expected = list(strides), 1, 1
    for dim in _fast_first(shape, strides):
        found[dim] = expected
        if strides[dim] != nominal:  # no product of matrices looks at what lies between two numbers of one row
            found[dim] += 1 if expected == 1 else (strides[dim] - expected - 1) % _LINE + 1
        nominal, expected = strides[dim] * shape[dim], found[dim] * shape[dim]
    return tuple(found) if expected <= _MOST * math.prod(shape) else contiguous(shape)


def dense(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides in the same order without any gap."""
    found, expected = list(strides), 1
    for dim in _fast_first(shape, strides):
        found[dim], expected = expected, expected * shape[dim]
    return tuple(found)


def unexpanded(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The shape of what has memory of its own: an expanded dimension has size 1."""
    return tuple(1 if stride == 0 and size else size for size, stride in zip(shape, strides))


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On that device, with the same strides: torch's own `to` leaves gaps out."""
    return laid_out(tensor.to(device), tensor.stride())


def _fast_first(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Dimensions that have memory, the fastest first. One of size 1 has none to speak of, and keeps its stride."""
    own = [dim for dim in range(len(shape)) if shape[dim] != 1 and strides[dim] != 0]
    return sorted(own, key=lambda dim: (strides[dim], -dim))
