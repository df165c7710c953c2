"""What a peer and the process that reads a dataset say to each other: a small message, and the raw bytes of tensors behind it.

The idea: a message is its length and msgpack, and says how many bytes follow. So the peer knows what it is going to hold before it
takes it. No object of the process ever becomes one of the peer's.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgpack
from msgspec import Meta

from meshcee.errors import ProtocolError
from meshcee.fields import Count, Name, plain, read, unpack

__all__ = ["INDEX_BYTES", "Answer", "Ask", "payloads_of", "receive", "send"]

T = TypeVar("T", "Ask", "Answer")

_LENGTH = struct.Struct(">I")
INDEX_BYTES = 8
MOST_BYTES = 64 * 1024  # of one message
_Text = Annotated[str, Meta(max_length=4000)]


@dataclass(frozen=True)
class Ask:
    """For the samples of these indices, as this step of a run with this seed reads them. `inputs` is what the job expects of one
    sample: name, type and shape."""

    seed: int
    step: int
    count: Count
    inputs: tuple[tuple[Name, Name, tuple[Count, ...]], ...]


@dataclass(frozen=True)
class Answer:
    """First how many samples there are; then tensors by name, with what `meshcee.stage.tensors` says of each. Or an error, whole
    and without what the user's own exception said, which may be of the data."""

    samples: Count = 0
    names: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    tensors: Annotated[tuple[Any, ...], Meta(max_length=256)] = ()
    sizes: Annotated[tuple[Count, ...], Meta(max_length=256)] = ()
    error: _Text = ""
    brief: _Text = ""


def send(channel: socket.socket, message: Ask | Answer, payloads: Sequence[Any] = ()) -> None:
    body: bytes = msgpack.packb(plain(message))
    channel.sendall(_LENGTH.pack(len(body)) + body)
    for payload in payloads:
        channel.sendall(payload)


def receive(channel: socket.socket, kind: type[T]) -> T:
    """EOFError where the other side has ended, ProtocolError for another message."""
    what = "a message of the process that reads a dataset"
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    if length > MOST_BYTES:
        raise ProtocolError(f"{what} has {length} bytes, more than {MOST_BYTES}")
    return read(unpack(bytes(_exactly(channel, length)), MOST_BYTES, what), kind, what)


def payloads_of(channel: socket.socket, sizes: Sequence[int]) -> list[bytearray]:
    return [_exactly(channel, size) for size in sizes]


def _exactly(channel: socket.socket, count: int) -> bytearray:
    found = bytearray(count)
    rest = memoryview(found)
    while rest:
        if not (taken := channel.recv_into(rest)):
            raise EOFError("it ended")
        rest = rest[taken:]
    return found
