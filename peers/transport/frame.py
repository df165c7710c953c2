"""The wire format: frames as a run of small checked records, and a decoder that believes nothing.

The idea: everything on the wire is a record with the same 16-byte prelude (magic, version, type, size, checksum). A
frame is one DATA record (msgpack: kind, header, payload sizes) and then CHUNK records of raw payload bytes. CREDIT
records may stand between chunks, so two sides that send large frames to each other never wait for each other; RETRACT
takes back a half-sent frame; GOODBYE says that nothing follows. The decoder does no I/O: it lends memory
(`get_buffer`), is told how much of it was filled (`advance`), and returns events. Payload bytes land in their final
memory at once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import xxhash

from meshcee.config import Limits
from meshcee.errors import ProtocolError
from peers.transport.base import Frame

__all__ = [
    "FRAME_VERSION",
    "MAX_CHUNK_BYTES",
    "PRELUDE_BYTES",
    "Credit",
    "Decoder",
    "Event",
    "Goodbye",
    "Retracted",
    "Spent",
    "control_record",
    "encode_chunks",
    "encode_head",
    "frame_cost",
]

# The layout of records never changes within one libp2p protocol name, so that two versions of meshcee can always read
# each other's HELLO and say which of them is too old.
FRAME_VERSION = 1
MAGIC = b"mc"
DATA, CHUNK, CREDIT, RETRACT, GOODBYE = range(1, 6)

_PRELUDE = struct.Struct("!2sBBIQ")  # magic, version, type, size, checksum
_CHECKED = 8  # the prelude's bytes before the checksum: covered by it in every record but CHUNK
PRELUDE_BYTES = _PRELUDE.size
MAX_CHUNK_BYTES = 4 << 20
MAX_KIND_CHARS = 64
_SCRATCH_BYTES = 64 * 1024  # what one read may take while no payload is being filled


@dataclass(frozen=True, slots=True)
class Spent:
    """Bytes that arrived and count against the window until the consumer has taken them."""

    cost: int


@dataclass(frozen=True, slots=True)
class Credit:
    """The other side lets us send this many bytes more."""

    cost: int


@dataclass(frozen=True, slots=True)
class Retracted:
    """The frame in assembly will not be completed."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The other side sends nothing more and waits for us to close."""


Event = Spent | Credit | Retracted | Goodbye | Frame


def frame_cost(header_bytes: int, payloads: int) -> int:
    """What a frame's head weighs in the window: a byte of msgpack can become an object of 64 bytes."""
    return 512 + 64 * header_bytes + 128 * payloads


def views(frame: Frame) -> list[memoryview]:
    """The payloads as flat views of bytes, without copying; they must be C-contiguous."""
    flat = []
    for payload in frame.payloads:
        view = memoryview(payload)
        flat.append(view.cast("B") if view.nbytes else memoryview(b""))
    return flat


def encode_head(frame: Frame, sizes: Sequence[int], limits: Limits, check: bool = True) -> bytes:
    """The DATA record of a frame; refuses what the other side would refuse."""
    if not 0 < len(frame.kind) <= MAX_KIND_CHARS:
        raise ProtocolError(f"a frame's kind has 1 to {MAX_KIND_CHARS} characters, got {frame.kind!r}")
    if len(sizes) > limits.payloads:
        raise ProtocolError(f"frame {frame.kind!r} has {len(sizes)} payloads, more than {limits.payloads}: split it")
    try:
        body: bytes = msgpack.packb([frame.kind, dict(frame.header), list(sizes)], use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"the header of frame {frame.kind!r} cannot be sent: {error}") from error
    if len(body) > limits.header_bytes:
        raise ProtocolError(
            f"the header of frame {frame.kind!r} has {len(body)} bytes, more than {limits.header_bytes}: "
            "put large values into payloads"
        )
    checked = _PRELUDE.pack(MAGIC, FRAME_VERSION, DATA, len(body), 0)[:_CHECKED]
    digest = xxhash.xxh3_64_intdigest(checked + body) if check else 0
    return checked + digest.to_bytes(8, "big") + body


def encode_chunks(
    payloads: Sequence[memoryview], chunk_bytes: int, check: bool = True
) -> Iterator[tuple[bytes, memoryview]]:
    """(prelude, bytes) of each CHUNK record, lazily, so that checksums are computed while the wire is busy."""
    chunk_bytes = min(chunk_bytes, MAX_CHUNK_BYTES)
    for payload in payloads:
        for start in range(0, len(payload), chunk_bytes):
            chunk = payload[start : start + chunk_bytes]
            digest = xxhash.xxh3_64_intdigest(chunk) if check else 0
            yield _PRELUDE.pack(MAGIC, FRAME_VERSION, CHUNK, len(chunk), digest), chunk


def control_record(kind: int, size: int = 0, check: bool = True) -> bytes:
    """A CREDIT, RETRACT or GOODBYE record."""
    checked = _PRELUDE.pack(MAGIC, FRAME_VERSION, kind, size, 0)[:_CHECKED]
    return checked + (xxhash.xxh3_64_intdigest(checked) if check else 0).to_bytes(8, "big")


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} is not allowed")


def _decode_head(body: memoryview, limits: Limits, max_payload_bytes: int) -> tuple[str, dict[str, Any], list[int]]:
    try:
        message = msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=True,
            ext_hook=_no_extension,
            max_ext_len=0,
        )
    except (ValueError, TypeError, UnicodeDecodeError, OverflowError) as error:  # msgpack's errors are ValueErrors
        raise ProtocolError(f"a frame's header is not valid msgpack: {error}") from error
    if not isinstance(message, list) or len(message) != 3:
        raise ProtocolError("a frame's header must be [kind, header, payload sizes]")
    kind, header, sizes = message
    if not isinstance(kind, str) or not 0 < len(kind) <= MAX_KIND_CHARS:
        raise ProtocolError(f"a frame's kind must be a string of 1 to {MAX_KIND_CHARS} characters")
    if not isinstance(header, dict) or not all(isinstance(key, str) for key in header):
        raise ProtocolError(f"the header of frame {kind!r} must be a map with string keys")
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ProtocolError(f"the payload sizes of frame {kind!r} must be a list of non-negative integers")
    if len(sizes) > limits.payloads:
        raise ProtocolError(f"frame {kind!r} announces {len(sizes)} payloads, more than {limits.payloads}")
    if sum(sizes) > max_payload_bytes:
        raise ProtocolError(
            f"frame {kind!r} announces {sum(sizes)} payload bytes, more than the {max_payload_bytes} allowed here"
        )
    return kind, header, sizes


class Decoder:
    """Bytes in, events out. After a ProtocolError it stays refused."""

    def __init__(self, limits: Limits, check: bool = True) -> None:
        self.max_payload_bytes = limits.payload_bytes  # may be changed at any time; holds from the next frame on
        self._limits = limits
        self._check = check
        self._scratch = bytearray(PRELUDE_BYTES + max(limits.header_bytes, _SCRATCH_BYTES))
        self._view = memoryview(self._scratch)
        self._start = 0  # the scratch holds unparsed bytes [start, end)
        self._end = 0
        self._head: tuple[int, int] | None = None  # (size, checksum) of the DATA record whose body is awaited
        self._frame: tuple[str, dict[str, Any], list[int]] | None = None  # the frame in assembly
        self._payloads: list[memoryview] = []
        self._filled = 0  # bytes of the last payload that are in place, whole chunks and the current one
        self._chunk_left = 0
        self._chunk_size = 0
        self._chunk_check = 0
        self._direct = False  # the last get_buffer lent payload memory
        self._error: ProtocolError | None = None

    @property
    def mid_frame(self) -> bool:
        """Whether an end of file now would cut something off."""
        return self._frame is not None or self._head is not None or self._end > self._start

    def get_buffer(self) -> memoryview:
        """Memory to fill next; never empty."""
        if self._error is not None:
            return self._view
        self._direct = self._chunk_left > 0
        if self._direct:
            return self._payloads[-1][self._filled : self._filled + self._chunk_left]
        if self._start:
            rest = self._end - self._start
            self._scratch[:rest] = self._scratch[self._start : self._end]
            self._start, self._end = 0, rest
        return self._view[self._end :]

    def advance(self, size: int) -> list[Event]:
        """`size` bytes of the lent memory were filled: the events that they complete, in order."""
        if self._error is not None:
            raise self._error
        events: list[Event] = []
        try:
            if self._direct:
                self._fill(size, events)
            else:
                self._end += size
                self._parse(events)
        except ProtocolError as error:
            self._error = error
            raise
        return events

    def feed(self, data: bytes | bytearray | memoryview) -> list[Event]:
        """Copy `data` through the decoder, for sources that hand out bytes."""
        events: list[Event] = []
        view = memoryview(data)
        while len(view):
            buffer = self.get_buffer()
            size = min(len(buffer), len(view))
            buffer[:size] = view[:size]
            events += self.advance(size)
            view = view[size:]
        return events

    def _parse(self, events: list[Event]) -> None:
        while True:
            ready = self._end - self._start
            if self._chunk_left:
                if not ready:
                    break
                size = min(ready, self._chunk_left)
                target = self._payloads[-1]
                target[self._filled : self._filled + size] = self._view[self._start : self._start + size]
                self._start += size
                self._fill(size, events)
            elif self._head is not None:
                if ready < self._head[0]:
                    break
                self._parse_head(*self._head, events)
            elif ready >= PRELUDE_BYTES:
                self._parse_prelude(events)
            else:
                break
        if self._start == self._end:
            self._start = self._end = 0

    def _parse_prelude(self, events: list[Event]) -> None:
        magic, version, kind, size, digest = _PRELUDE.unpack_from(self._view, self._start)
        if magic != MAGIC:
            raise ProtocolError("what arrived is not a meshcee frame")
        if version != FRAME_VERSION:
            raise ProtocolError(f"the other side frames with version {version}, we with {FRAME_VERSION}")
        if kind == DATA:
            if self._frame is not None:
                raise ProtocolError("a frame began inside another")
            if size > self._limits.header_bytes:
                raise ProtocolError(f"a header of {size} bytes is announced, more than {self._limits.header_bytes}")
            self._head = (size, digest)  # its bytes stay in the scratch until the body is there, for the checksum
            self._start += PRELUDE_BYTES
            return
        if kind == CHUNK:
            self._begin_chunk(size, digest, events)
        elif kind in (CREDIT, RETRACT, GOODBYE):
            self._verify(self._view[self._start : self._start + _CHECKED], digest, "a control record")
            if kind == CREDIT:
                if not size:
                    raise ProtocolError("a credit of nothing")
                events.append(Credit(size))
            elif kind == RETRACT:
                if self._frame is None or size:
                    raise ProtocolError("a frame is taken back that was not begun")
                self._frame, self._payloads, self._filled = None, [], 0
                events.append(Retracted())
            else:
                if self._frame is not None or size:
                    raise ProtocolError("the other side said goodbye in the middle of a frame")
                events.append(Goodbye())
        else:
            raise ProtocolError(f"record type {kind} is unknown")
        self._start += PRELUDE_BYTES

    def _parse_head(self, size: int, digest: int, events: list[Event]) -> None:
        body = self._view[self._start : self._start + size]
        if self._check:
            checked = _PRELUDE.pack(MAGIC, FRAME_VERSION, DATA, size, 0)[:_CHECKED]
            self._verify(checked + bytes(body), digest, "a frame's header")
        self._head = None
        self._start += size
        kind, header, sizes = _decode_head(body, self._limits, self.max_payload_bytes)
        events.append(Spent(frame_cost(size, len(sizes))))
        self._frame, self._payloads, self._filled = (kind, header, sizes), [], 0
        self._next_payload(events)

    def _begin_chunk(self, size: int, digest: int, events: list[Event]) -> None:
        if self._frame is None or not self._payloads:
            raise ProtocolError("payload bytes arrived outside a frame")
        if not 0 < size <= min(MAX_CHUNK_BYTES, len(self._payloads[-1]) - self._filled):
            raise ProtocolError(f"a chunk of {size} bytes does not fit the payload that was announced")
        self._chunk_left = self._chunk_size = size
        self._chunk_check = digest

    def _fill(self, size: int, events: list[Event]) -> None:
        """`size` more bytes of the current chunk are in place."""
        self._filled += size
        self._chunk_left -= size
        if self._chunk_left:
            return
        chunk = self._payloads[-1][self._filled - self._chunk_size : self._filled]
        self._verify(chunk, self._chunk_check, "a payload chunk")
        events.append(Spent(self._chunk_size))
        if self._filled == len(self._payloads[-1]):
            self._next_payload(events)

    def _next_payload(self, events: list[Event]) -> None:
        """Begin the next payload that has bytes, or complete the frame."""
        assert self._frame is not None
        kind, header, sizes = self._frame
        while len(self._payloads) < len(sizes):
            size = sizes[len(self._payloads)]
            try:
                # numpy leaves the memory untouched, so an announced payload costs nothing until its bytes come.
                self._payloads.append(np.empty(size, np.uint8).data)
            except MemoryError as error:
                raise ProtocolError(f"frame {kind!r} announces {size} bytes, which this peer cannot hold") from error
            self._filled = 0
            if len(self._payloads[-1]):
                return
        events.append(Frame(kind, header, tuple(self._payloads)))
        self._frame, self._payloads = None, []

    def _verify(self, data: bytes | memoryview, digest: int, what: str) -> None:
        if self._check and xxhash.xxh3_64_intdigest(data) != digest:
            raise ProtocolError(f"the checksum of {what} is wrong: it was damaged on its way")
