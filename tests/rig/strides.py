"""Tensors of one element or none whose strides are any number: to torch they are contiguous, and yet not flat."""

from __future__ import annotations

import torch

__all__ = ["ODD"]


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Behind two other numbers of a larger memory."""
    memory = torch.arange(1, 41).to(dtype)
    return memory.as_strided(shape, strides, 2)


ODD = {
    f"{str(dtype).removeprefix('torch.')} {shape} {strides}": _tensor(dtype, shape, strides)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    for shape, strides in (((1,), (12,)), ((1, 1), (12, 7)), ((1, 1), (0, 3)), ((0,), (5,)), ((0, 3), (7, 9)))
}
