"""Tensors as (meta, payloads): what crosses a stage boundary, without a copy where memory allows.

The idea: a tensor on the wire is its raw bytes, in the order in which the bytes lie in memory, and a meta entry. The entry says
how to read the bytes. Strides are kept, because a kernel may round differently on a transposed tensor, on one with gaps or
on an expanded one. But the mesh must compute what one process would compute (strides.py). Gaps and copies of an expanded
dimension do not travel. Numbers and None travel in the meta. A tensor may also travel in fewer bytes by a codec
(`meshcee.codec`), which its entry names. Nothing is built before meta and sizes agree.

    meta entry    [dtype, shape]  [dtype, shape, strides]  [dtype, shape, codec]  [dtype, shape, codec, strides]
                  or an int, float, bool or None
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from meshcee.capture.graph import canonical, contiguous, dense, unexpanded
from meshcee.codec import Codec, codec_of, is_coded
from meshcee.errors import ProtocolError
from meshcee.files.layout import GRAIN_BYTES, laid_out, offset_of, placed

__all__ = ["Bring", "Encode", "Expected", "Value", "pack", "unpack"]

Buffer = bytes | bytearray | memoryview
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
        told = ", ".join(f"{len(found)} payloads of {sum(found)} bytes" for found in (sizes, got))
        raise ProtocolError(f"the tensors' meta describes other payloads than arrived: {told}")
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
    entry: list[Any] = [_NAMES[tensor.dtype], list(tensor.shape)]
    if not tensor.numel():
        return entry, torch.empty(0, dtype=torch.uint8)
    strides = canonical(tensor.shape, tensor.stride())
    entry += _said(tensor, strides)
    own = tensor[tuple(slice(0, size) for size in unexpanded(tensor.shape, strides))]
    own = laid_out(own, dense(own.shape, strides))
    return entry, own.as_strided((own.numel(),), (1,)).view(torch.uint8)


def _pack_coded(tensor: torch.Tensor, codec: str, payload: torch.Tensor) -> tuple[list[Any], torch.Tensor]:
    exact = codec_of(codec).worst == 0.0  # what is rounded arrives contiguous, as where it is compared with
    said = _said(tensor, canonical(tensor.shape, tensor.stride())) if exact else []
    return [_NAMES[tensor.dtype], list(tensor.shape), codec, *said], payload


def _said(tensor: torch.Tensor, strides: tuple[int, ...]) -> list[Any]:
    """How it lies in memory: nothing of strides where they are those of a contiguous tensor, nor of an offset of 0."""
    offset = offset_of(tensor)
    return [list(strides)] * (strides != contiguous(tensor.shape)) + [offset] * (offset > 0)


@dataclass(frozen=True)
class _Checked:
    """A tensor that an entry describes."""

    dtype: torch.dtype
    shape: list[int]
    strides: list[int] | None = None
    codec: Codec | None = None
    offset: int = 0  # `offset_of`

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Of what travels when there is no codec."""
        return tuple(self.shape) if self.strides is None else unexpanded(self.shape, self.strides)

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def wire_bytes(self) -> int:
        if self.codec is None:
            return self.dtype.itemsize * math.prod(self.own_shape)
        return self.codec.wire_bytes(self.dtype, math.prod(self.shape))

    @property
    def varies(self) -> bool:
        return self.codec is not None and self.codec.varies


def _check(entry: Any, codecs: Sequence[Codec]) -> _Checked | None:
    """The tensor that an entry describes, or None for a number; refuses everything else."""
    if entry is None or isinstance(entry, (bool, int, float)):
        return None
    if not isinstance(entry, list) or not 2 <= len(entry) <= 5:
        raise ProtocolError("a tensor's meta must be [dtype, shape], and then, if any, a codec, strides and an offset")
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
    rest = entry[2:]
    codec = rest.pop(0) if isinstance(rest[0], str) else None
    strides = rest.pop(0) if rest and isinstance(rest[0], list) else None
    offset = rest.pop(0) if rest else 0
    known = next((each for each in codecs if each.name == codec), None)
    if codec is not None and (known is None or not is_coded(dtype)):
        raise ProtocolError(f"a tensor of {dtype} came by codec {codec[:40]!r}, which the plan does not allow")
    if rest or type(offset) is not int or not 0 <= offset < GRAIN_BYTES or offset % dtype.itemsize:
        raise ProtocolError("a tensor's meta says more than a codec, strides and an offset, or an offset that is none")
    return _Checked(dtype, shape, None if strides is None else _checked_strides(shape, strides), known, offset)


def _checked_strides(shape: list[int], strides: list[Any]) -> list[int]:
    if len(strides) != len(shape):
        raise ProtocolError("a tensor's strides must be a list, one for each dimension")
    if not all(type(stride) is int and 0 <= stride <= _MAX_ELEMENTS for stride in strides):
        raise ProtocolError("a tensor's strides have one that is not a sensible number")
    if 0 in shape or canonical(shape, strides) != tuple(strides):
        raise ProtocolError("a tensor's strides do not fill its memory, or leave other gaps than they may")
    return strides


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
    strides = tensor.strides or contiguous(tensor.shape)
    if tensor.codec is not None:
        return placed(tensor.codec.decode(flat, tensor.dtype, tensor.shape), strides, tensor.offset)
    packed = flat.as_strided(tensor.shape, dense(tensor.own_shape, strides))
    return placed(packed, strides, tensor.offset)
