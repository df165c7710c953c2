"""What a peer and its worker say to each other: a few small messages over a pair of sockets, and bytes in sealed memory.

The idea: a message is its length and msgpack, read as the class that is due now and no other. What is large goes beside it as a
descriptor of memory that nobody can change or shrink any more: so the reader checks what it reads.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgpack
from msgspec import Meta

from meshcee.errors import ProtocolError
from meshcee.fields import Count, plain, read, unpack

__all__ = ["LENGTH", "Confinement", "Task", "Verdict", "length_of", "message", "opened", "sealed", "understood"]

T = TypeVar("T", "Confinement", "Task", "Verdict")

LENGTH = struct.Struct(">I")
MOST_BYTES = 16 * 1024  # of one message
MOST_TEXT = 2000
ALIGNED = 64  # bytes: where each part of a memory begins
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_Text = Annotated[str, Meta(max_length=MOST_TEXT)]
_Texts = Annotated[tuple[_Text, ...], Meta(max_length=16)]


@dataclass(frozen=True)
class Confinement:
    """What a worker says when it is ready: guards that the kernel gave, those that it refused and why, and what is possible
    all the same."""

    got: _Texts
    missing: _Texts
    possible: _Texts


@dataclass(frozen=True)
class Task:
    """Bytes of each graph, in the memory that comes along; how many a graph may have; CPU seconds that the check may take."""

    sizes: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=16)]
    graph_bytes: Count
    cpu_s: Annotated[int, Meta(ge=1, le=1 << 20)]


@dataclass(frozen=True)
class Verdict:
    """What is wrong with the graphs; "" when nothing is."""

    wrong: _Text


def message(value: Confinement | Task | Verdict) -> bytes:
    body: bytes = msgpack.packb(plain(value))
    return LENGTH.pack(len(body)) + body


def length_of(prefix: bytes) -> int:
    """ProtocolError when a message is too long."""
    (length,) = LENGTH.unpack(prefix)
    if length > MOST_BYTES:
        raise ProtocolError(f"a worker's message has {length} bytes, more than {MOST_BYTES}")
    return int(length)


def understood(body: bytes, kind: type[T]) -> T:
    what = "a worker's message"
    return read(unpack(body, MOST_BYTES, what), kind, what)


def sealed(parts: Sequence[bytes]) -> int:
    """A descriptor of memory that holds these parts and can be changed by nobody; the caller closes it."""
    handle = os.memfd_create("meshcee", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        places, whole = _places([len(part) for part in parts])
        os.truncate(handle, whole)
        for place, part in zip(places, parts, strict=True):
            rest = memoryview(part)
            while rest:
                written = os.pwrite(handle, rest, place)
                rest, place = rest[written:], place + written
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(handle)
        raise
    return handle


def opened(handle: int, sizes: Sequence[int]) -> list[memoryview]:
    """The parts of a sealed memory, in place; ProtocolError when it can still change or has another size."""
    places, whole = _places(sizes)
    try:
        seals = fcntl.fcntl(handle, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError("a descriptor came that is no memory to be shared") from error
    if seals & _SEALS != _SEALS:
        raise ProtocolError("a memory came that its sender can still change")
    if (found := os.fstat(handle).st_size) != whole:
        raise ProtocolError(f"a memory of {whole} bytes was announced, one of {found} came")
    view = memoryview(mmap.mmap(handle, whole, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ))
    return [view[place : place + size] for place, size in zip(places, sizes)]


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each part begins, and how many bytes there are in all."""
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += -(-size // ALIGNED) * ALIGNED
    return places, max(end, ALIGNED)
