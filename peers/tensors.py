"""Tensors as (meta, payloads): what crosses a stage boundary, without a copy where memory allows.

The idea: a tensor on the wire is its raw bytes in the order in which they lie in memory, and a meta entry that says
how to read them; strides are kept, because a kernel may round differently on a transposed tensor and
the mesh must compute what one process would. Numbers and None travel in the meta. A tensor may also travel in fewer
bytes by a codec (`meshcee.codec`), which its entry names. Nothing is built before meta and sizes agree.

    meta entry    [dtype, shape]  or  [dtype, shape, strides]  or  [dtype, shape, codec]  or  an int, float, bool or None
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from meshcee.codec import Codec, is_coded
from meshcee.errors import ProtocolError
from peers.transport.base import Buffer

__all__ = ["Bring", "Encode", "Expected", "Value", "pack", "unpack"]

Value = torch.Tensor | int | float | bool | None
Expected = tuple[torch.dtype, Sequence[int]] | type | None  # dtype and shape, a number's type, or anything
Encode = Callable[[int, torch.Tensor], tuple[str, torch.Tensor] | None]  # codec and payload; None: as it is
Bring = Callable[[int, torch.Tensor], torch.Tensor]  # the numbers or the code of a value, to where it is wanted

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
        torch.bool,
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_DIMENSIONS = 32
_MAX_ELEMENTS = 1 << 48
_MAX_ENTRIES = 4096
_INT64 = range(-(1 << 63), 1 << 63)


def pack(
    values: Sequence[Value],
    encode: Encode | None = None,
    to_host: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu,
) -> tuple[list[Any], list[Buffer]]:
    """Meta for a frame's header, and one payload per tensor, which `to_host` copies from its device.

    A dense CPU tensor that is not encoded is not copied: do not write to it before `send` has returned.
    """
    meta: list[Any] = []
    payloads: list[Buffer] = []
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            coded = encode(index, value) if encode is not None else None
            entry, payload = _pack_tensor(value) if coded is None else _pack_coded(value, *coded)
            meta.append(entry)
            payloads.append(to_host(payload).numpy().data if payload.numel() else b"")
        elif value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and value in _INT64):
            meta.append(value)
        else:
            raise ProtocolError(f"cannot send a {type(value).__name__} between stages: {value!r}")
    return meta, payloads


def unpack(
    meta: Any,
    payloads: Sequence[Buffer],
    expected: Sequence[Expected] | None = None,
    *,
    codecs: Sequence[Codec] = (),
    limit_bytes: int | None = None,
    bring: Bring | None = None,
) -> list[Value]:
    """Inverse of `pack`. CPU tensors over the payloads' own memory; ProtocolError on anything that does not fit.

    Only these `codecs` are accepted, and no more than `limit_bytes` of decoded tensors. What `bring` returns of a payload
    takes its place, so values are built on that device.
    """
    if not isinstance(meta, list) or len(meta) > _MAX_ENTRIES:
        raise ProtocolError(f"tensors' meta must be a list of at most {_MAX_ENTRIES} entries")
    if expected is not None and len(expected) != len(meta):
        raise ProtocolError(f"{len(meta)} values arrived, {len(expected)} were expected")
    checked = [_check(entry, codecs) for entry in meta]
    sizes = [tensor.wire_bytes for tensor in checked if tensor is not None]
    got = [memoryview(payload).nbytes for payload in payloads]
    varies = [tensor.varies for tensor in checked if tensor is not None]
    if len(sizes) != len(got) or any(not 0 < g <= s if v else g != s for s, g, v in zip(sizes, got, varies)):
        raise ProtocolError(f"the tensors' meta describes payloads of {sizes} bytes, {got} arrived")
    for index, want in enumerate(expected or ()):
        _check_expected(index, want, meta[index], checked[index])
    total = sum(tensor.nbytes for tensor in checked if tensor is not None)
    if limit_bytes is not None and total > limit_bytes:
        raise ProtocolError(f"the tensors' meta describes {total} bytes, at most {limit_bytes} were expected")
    buffers = iter(payloads)
    return [
        meta[i] if tensor is None else _build(tensor, next(buffers), bring and partial(bring, i))
        for i, tensor in enumerate(checked)
    ]


def _pack_tensor(tensor: torch.Tensor) -> tuple[list[Any], torch.Tensor]:
    """The entry, and the tensor's bytes where it lies."""
    if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
        raise ProtocolError(f"cannot send a tensor of {tensor.dtype} with layout {tensor.layout}")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    shape = list(tensor.shape)
    entry: list[Any] = [_NAMES[tensor.dtype], shape]
    if not tensor.numel():
        return entry, torch.empty(0, dtype=torch.uint8)
    strides = list(tensor.stride())
    if not _is_dense(shape, strides):  # overlapping or with gaps
        tensor = tensor.contiguous()
    elif strides != _contiguous_strides(shape):
        entry.append(strides)
    return entry, tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _pack_coded(tensor: torch.Tensor, codec: str, payload: torch.Tensor) -> tuple[list[Any], torch.Tensor]:
    return [_NAMES[tensor.dtype], list(tensor.shape), codec], payload


def _contiguous_strides(shape: list[int]) -> list[int]:
    return [math.prod(size or 1 for size in shape[dim + 1 :]) for dim in range(len(shape))]


def _is_dense(shape: list[int], strides: list[int]) -> bool:
    """Whether every element has its own place and no place is empty; a dimension of size 1 may have any stride."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class _Checked:
    """A tensor that an entry describes."""

    dtype: torch.dtype
    shape: list[int]
    strides: list[int] | None = None
    codec: Codec | None = None

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def wire_bytes(self) -> int:
        return self.nbytes if self.codec is None else self.codec.wire_bytes(self.dtype, math.prod(self.shape))

    @property
    def varies(self) -> bool:
        return self.codec is not None and self.codec.varies


def _check(entry: Any, codecs: Sequence[Codec]) -> _Checked | None:
    """The tensor that an entry describes, or None for a number; refuses everything else."""
    if entry is None or isinstance(entry, (bool, int, float)):
        return None
    if not isinstance(entry, list) or len(entry) not in (2, 3):
        raise ProtocolError("a tensor's meta must be [dtype, shape], and then strides or a codec")
    name, shape = entry[0], entry[1]
    if not isinstance(name, str) or name not in _DTYPES:
        raise ProtocolError(f"a tensor's dtype {str(name)[:40]!r} is unknown")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
        raise ProtocolError(f"a tensor's shape must be a list of at most {_MAX_DIMENSIONS} sizes")
    if not all(type(size) is int and 0 <= size <= _MAX_ELEMENTS for size in shape):
        raise ProtocolError("a tensor's shape has a size that is not a sensible number")
    if math.prod(size or 1 for size in shape) > _MAX_ELEMENTS:  # zeros too must not hide an overflow
        raise ProtocolError("a tensor's shape is absurdly large")
    dtype = _DTYPES[name]
    if len(entry) == 2:
        return _Checked(dtype, shape)
    if isinstance(entry[2], str):
        codec = next((codec for codec in codecs if codec.name == entry[2]), None)
        if codec is None or not is_coded(dtype):
            raise ProtocolError(f"a tensor of {dtype} came by codec {entry[2][:40]!r}, which the plan does not allow")
        return _Checked(dtype, shape, codec=codec)
    strides = entry[2]
    if not isinstance(strides, list) or len(strides) != len(shape):
        raise ProtocolError("a tensor's strides must be a list, one for each dimension")
    if not all(type(stride) is int and 0 <= stride <= _MAX_ELEMENTS for stride in strides):
        raise ProtocolError("a tensor's strides have one that is not a sensible number")
    if 0 in shape or not _is_dense(shape, strides):
        raise ProtocolError("a tensor's strides do not fill its memory")
    return _Checked(dtype, shape, strides)


def _check_expected(index: int, want: Expected, entry: Any, tensor: _Checked | None) -> None:
    if want is None:
        return
    if isinstance(want, tuple):
        if tensor is None or tensor.dtype != want[0] or tensor.shape != list(want[1]):
            got = f"{tensor.dtype} {tensor.shape}" if tensor else repr(entry)
            raise ProtocolError(f"value {index} must be a tensor {want[0]} {list(want[1])}, got {got}")
    elif tensor is not None or type(entry) is not want:
        raise ProtocolError(f"value {index} must be a number of type {want.__name__}")


def _build(
    tensor: _Checked, payload: Buffer, bring: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    if 0 in tensor.shape:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    if memoryview(payload).readonly:
        payload = bytearray(payload)  # torch has no read-only tensors
    flat = torch.frombuffer(payload, dtype=tensor.dtype if tensor.codec is None else torch.uint8)
    if bring is not None:
        flat = bring(flat)
    if tensor.codec is not None:
        return tensor.codec.decode(flat, tensor.dtype, tensor.shape)
    return flat.view(tensor.shape) if tensor.strides is None else flat.as_strided(tensor.shape, tensor.strides)
