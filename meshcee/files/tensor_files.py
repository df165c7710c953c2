"""Tensors in safetensors files, one at a time: read from a checkpoint, written as they come.

The idea: neither side ever holds more than one tensor. A `Checkpoint` opens the file of a tensor when it is asked for
it. A `TensorFile` is told all names, types and shapes first, so each tensor has its place in the file and may be written
in any order, as members send it. The file appears under its name only when it is whole.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

import safetensors
import torch

from meshcee.errors import UsageError
from meshcee.files import disk
from meshcee.files.strict_json import loads

__all__ = [
    "DTYPES",
    "Checkpoint",
    "Layout",
    "OnDemand",
    "TensorFile",
    "byte_view",
    "flat_bytes",
    "head_of",
    "nbytes_of",
    "save",
]

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # name -> type and shape

INDEX = "model.safetensors.index.json"  # as Hugging Face names them
SINGLE = "model.safetensors"
INDEX_BYTES = 64 << 20

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor in logical order as flat uint8, on its device; a copy only where it is not contiguous.

    One element may have any stride and is contiguous, and `reshape` leaves that stride: hence `as_strided`.
    """
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor in the order of its elements; not copied where it is contiguous."""
    view: memoryview = flat_bytes(tensor).numpy().data
    return view


def head_of(layout: Layout) -> tuple[bytes, dict[str, int], int]:
    """What a file of these tensors begins with, where each lies behind that, and how many bytes they are."""
    header: dict[str, object] = {}
    starts: dict[str, int] = {}
    at = 0
    # Wide types first, so that every tensor is aligned to its type; the format knows no gaps.
    for name, (dtype, shape) in sorted(layout.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
        if dtype not in _NAMES:
            raise UsageError(f"safetensors cannot hold {name!r} of type {dtype}")
        size = dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        starts[name] = at
        at += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, starts, at


class OnDemand(Mapping[str, torch.Tensor]):
    """Tensors by name, each made or read when it is asked for, and not kept."""

    def __init__(self, names: Iterable[str], read: Callable[[str], torch.Tensor]) -> None:
        self._names = dict.fromkeys(names)
        self._read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Checkpoint(Mapping[str, torch.Tensor]):
    """A checkpoint by name: a .safetensors file, or a folder with one, or with shards and their index.

    Item access reads that tensor alone, into memory of its own. Raises UsageError on files that are missing or damaged.
    """

    def __init__(self, files: Mapping[str, Path], layout: Layout) -> None:
        self._files = dict(files)
        self.layout = dict(layout)

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Find the files and read their headers."""
        files = cls._find(Path(path))
        layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for file in sorted(set(files.values())):
            with cls._open(file) as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    if files.get(name) == file:
                        rows = opened.get_slice(name)
                        dtype = DTYPES.get(rows.get_dtype())
                        if dtype is None:
                            raise UsageError(
                                f"{file}: {name!r} is of type {rows.get_dtype()}; convert it to one of torch"
                            )
                        layout[name] = (dtype, tuple(rows.get_shape()))
        if absent := files.keys() - layout.keys():
            name = min(absent)
            raise UsageError(f"{files[name]} does not hold {name!r}, which the index says it does; fetch it again")
        return cls(files, layout)

    @classmethod
    def _find(cls, path: Path) -> dict[str, Path]:
        """Tensor -> the file that holds it."""
        index = path / INDEX if path.is_dir() else path
        if path.is_dir() and not index.is_file():
            index = path / SINGLE
        if not index.is_file():
            raise UsageError(
                f"there are no weights at {path}: give a .safetensors file, or a folder with {SINGLE} or {INDEX}"
            )
        if index.suffix != ".json":
            with cls._open(index) as opened:
                return dict.fromkeys(opened.keys(), index)
        try:
            if index.stat().st_size > INDEX_BYTES:
                raise ValueError(f"it is larger than {INDEX_BYTES} bytes")
            files = loads(index.read_text())["weight_map"]
            if any(Path(file).name != file for file in files.values()):
                raise ValueError("a shard lies in another folder")
            return {str(name): index.parent / file for name, file in files.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{index} is not an index of safetensors shards: {error!r}") from error

    @staticmethod
    def _open(file: Path) -> safetensors.safe_open:
        try:
            return safetensors.safe_open(file, framework="pt")
        except (OSError, safetensors.SafetensorError) as error:
            raise UsageError(f"{file} cannot be read as safetensors: {error}") from error

    def __getitem__(self, name: str) -> torch.Tensor:
        # Opened anew each time: what is mapped counts as resident for as long as the file is open.
        with self._open(self._files[name]) as opened:
            tensor: torch.Tensor = opened.get_tensor(name).clone()
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)


class TensorFile:
    """A .safetensors file that is written tensor by tensor, in any order. `with` makes it: whole, or not at all.

    >>> with TensorFile(path, {"w": (torch.float32, (2, 3))}) as file:
    ...     file.write("w", torch.zeros(2, 3))

    Leaving the block without an error demands that every tensor was written, then moves the file to its name.
    Tensors may be on any device; `write` blocks for as long as the disk does and holds no reference afterwards.
    """

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path = path
        self.layout = dict(layout)
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.part")
        self._file: disk.File | None = None
        self._head, starts, size = head_of(self.layout)
        self._offsets = {name: len(self._head) + start for name, start in starts.items()}
        self._size = len(self._head) + size
        self._missing = set(self.layout)

    def __enter__(self) -> TensorFile:
        try:
            self._file = disk.File(self._partial)
            self._file.resize(self._size)
            self._file.write(self._head, 0)
        except OSError as error:
            self._drop()
            raise self._refused(error) from error
        return self

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Once for each name of the layout; ValueError if it is another tensor than announced."""
        if name not in self._missing or self.layout[name] != (tensor.dtype, tuple(tensor.shape)):
            raise ValueError(f"{name!r} of {tensor.dtype}{tuple(tensor.shape)} was not announced, or came twice")
        assert self._file is not None
        try:
            if tensor.numel():
                self._file.write(byte_view(tensor.detach().cpu().contiguous()), self._offsets[name])
        except OSError as error:
            raise self._refused(error) from error
        self._missing.discard(name)

    def _refused(self, error: OSError) -> UsageError:
        error.filename = str(self.path)
        return disk.kind_of(error)(f"cannot write {disk.refusal(error, self._size)}; {disk.remedy(error)}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._drop()
            return
        if self._missing:
            self._drop()
            raise ValueError(f"{min(self._missing)!r} and {len(self._missing) - 1} others were never written")
        assert self._file is not None
        try:
            self._file.close()
            disk.move(self._partial, self.path)
            disk.sync_folder(self.path.parent)
        except OSError as refused:
            self._drop()
            raise self._refused(refused) from refused

    def _drop(self) -> None:
        if self._file is not None:
            self._file.abort()
        with contextlib.suppress(OSError):
            disk.remove(self._partial)


def nbytes_of(layout: Layout) -> int:
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in layout.values())


def save(path: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write a .safetensors file, whole or not at all, a tensor at a time."""
    # Asked for twice: once for what it is and once for what it holds, so that no two are in memory.
    with TensorFile(path, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}) as file:
        for name in state:
            file.write(name, state[name])
