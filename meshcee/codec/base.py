"""What a codec is, and the simplest one: the tensor's own bytes.

The idea: what a payload costs follows from (codec, type, count), so nothing needs to be declared that could lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from meshcee.files.tensor_files import flat_bytes

__all__ = ["Codec", "Plain", "is_coded"]


class Codec(Protocol):
    """Tensors of floats to bytes and back. Pure: the same tensor and seed give the same bytes.

    `worst` bounds the relative error (norm of the difference over norm of the tensor) when numbers are rounded to nearest.
    This bound holds for any tensor whose blocks lie within 1e-30 and 1e30. `budget` is the error that the guard allows. The
    budget lies well above the errors of ordinary activations and gradients, and below the errors that harm training
    (docs/benchmarks.md has both, measured).
    """

    name: str
    worst: float
    budget: float
    varies: bool  # payloads are as long as their numbers make them, not longer than `wire_bytes`

    def wire_bytes(self, dtype: torch.dtype, count: int) -> int:
        """Bytes of the payload of `count` elements of this type; where it `varies`, at most."""
        ...

    def encode(self, tensor: torch.Tensor, seed: int | None = None) -> torch.Tensor | None:
        """A flat uint8 tensor on the tensor's device, whatever its shape and strides (elements in logical order).

        With a seed numbers are rounded up or down by chance, so that the error has mean zero; without, to the nearest.
        None when it holds what this codec cannot express: another one must carry it. What `varies` is on the host.
        """
        ...

    def decode(self, payload: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Inverse of `encode` but for the error; a new contiguous tensor on the payload's device. `payload` has `wire_bytes`."""
        ...


def is_coded(dtype: torch.dtype) -> bool:
    """Whether tensors of this type may travel by another codec than `none`: ordinary floats; never integers, masks, bytes."""
    return dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Plain:
    """As it is."""

    name = "none"
    worst = 0.0
    budget = 0.0
    varies = False

    def wire_bytes(self, dtype: torch.dtype, count: int) -> int:
        return count * dtype.itemsize

    def encode(self, tensor: torch.Tensor, seed: int | None = None) -> torch.Tensor | None:
        return flat_bytes(tensor)

    def decode(self, payload: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        return payload.clone().view(dtype).view(tuple(shape))
