"""How a tensor lies in memory: its strides, gaps and all, and where it begins.

The idea: kernels round by both, so what travels or waits in a file is laid out again as eager code had it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["GRAIN_BYTES", "copied", "laid_out", "memory_at", "offset_of", "placed"]

GRAIN_BYTES = 16  # kernels round by what is left when an address is divided by this
_LINE_BYTES = 64  # of a cache; torch's allocations begin at a multiple


def laid_out(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The same numbers with these strides, gaps and expanded dimensions as well; a copy only where they are others."""
    if tensor.stride() == tuple(strides):
        return tensor
    made = torch.empty_strided(tuple(tensor.shape), tuple(strides), dtype=tensor.dtype, device=tensor.device)
    own = tuple(slice(None if stride else 1) for stride in strides)
    made[own].copy_(tensor[own])
    return made


def offset_of(tensor: torch.Tensor) -> int:
    """Bytes from the last multiple of 16 to where its memory begins, on a CPU; 0 elsewhere, and of what torch has allocated.

    MKL rounds a product of matrices by these, of a slice, say, or of a mapped file's weights. It was seen with AVX2; whole
    multiples of 16 changed no bit, and NumPy's memory begins at any of them.
    """
    is_known = tensor.device.type == "cpu" and tensor.layout == torch.strided and not isinstance(tensor, FakeTensor)
    return tensor.data_ptr() % GRAIN_BYTES // tensor.itemsize * tensor.itemsize if is_known else 0


def placed(tensor: torch.Tensor, strides: Sequence[int], offset: int, *, copy: bool = False) -> torch.Tensor:
    """As `laid_out`, and it begins at this offset, a multiple of the type's size; a copy where it does not, or if asked for."""
    if not copy and tensor.stride() == tuple(strides) and offset_of(tensor) == offset:
        return tensor
    made = torch.empty_strided(tuple(tensor.shape), tuple(strides), dtype=tensor.dtype, device=tensor.device)
    if offset and made.numel() and tensor.device.type == "cpu" and not isinstance(made, FakeTensor):
        held = memory_at(made.untyped_storage().nbytes(), offset)
        made = held.view(tensor.dtype).as_strided(made.shape, made.stride())
    own = tuple(slice(None if stride else 1) for stride in strides)
    made[own].copy_(tensor[own])
    return made


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, gaps and all, which begins where it does."""
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    return placed(tensor, tensor.stride(), offset_of(tensor), copy=True)


def memory_at(count: int, offset: int) -> torch.Tensor:
    """So many bytes, more than none, in a storage of their own that begins at this offset."""
    memory = np.empty(count + _LINE_BYTES, dtype=np.uint8)
    first = (offset - memory.ctypes.data) % _LINE_BYTES
    return torch.frombuffer(memory[first : first + count].data, dtype=torch.uint8)
