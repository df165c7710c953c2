"""The wire format: frames as a run of small checked records, and a decoder that believes nothing.

The idea: everything on the wire is a record with the same 16-byte prelude (magic, version, type, size, checksum). A
frame is one DATA record (msgpack: kind, header, payload sizes) and then CHUNK records of raw payload bytes. CREDIT
records may stand between chunks, so two sides that send large frames to each other never wait for each other. RETRACT
takes back a half-sent frame. GOODBYE says that nothing follows. The decoder does no I/O: it lends memory
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
from meshcee.fields import refuse_deep
from peers.transport.base import Frame

__all__ = [
    "FRAME_VERSION",
    "MAX_CHUNK_BYTES",
    "PRELUDE_BYTES",
    "Arrived",
    "Credit",
    "Decoder",
    "Encoder",
    "Event",
    "Goodbye",
    "Retracted",
    "Spent",
    "frame_cost",
    "views",
]

# The layout of records never changes within one libp2p protocol name, so that two versions of meshcee can always read
# each other's HELLO and say which of them is too old.
FRAME_VERSION = 1
MAGIC = b"mc"
DATA, CHUNK, CREDIT, RETRACT, GOODBYE = range(1, 6)

# magic (2 bytes), version (1), type (1), size (4); checksum (8). The first half is handled as one number, its "word": it is
# also the checksum's seed, so that a record's checksum covers the whole record.
_PRELUDE = struct.Struct("!QQ")
PRELUDE_BYTES = _PRELUDE.size
_TAG = int.from_bytes(MAGIC + bytes([FRAME_VERSION, 0]), "big")
_SIZE = (1 << 32) - 1
_STRING, _INTEGER = frozenset({str}), frozenset({int})
MAX_CHUNK_BYTES = 4 << 20
HEAD_BYTES = 1024  # that a stream holds for packing heads, more where one is longer; msgpack would take 256 KiB
MAX_KIND_CHARS = 64
_SCRATCH_BYTES = 128 * 1024  # what one read may take while no payload is being filled: a frame of 64 KiB comes whole
_MANY_BYTES = 64 * 1024  # a payload of this size is worth the half microsecond that untouched memory costs
_LINE_BYTES = 64


@dataclass(slots=True)
class Spent:
    """Bytes that arrived of a frame that is not whole yet; they count against the window."""

    cost: int


@dataclass(slots=True)
class Arrived:
    """A frame is whole; `cost` counts against the window too, on top of what was spent on its beginning."""

    frame: Frame
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


Event = Spent | Arrived | Credit | Retracted | Goodbye


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


class Encoder:
    """Frames in, records out; refuses what the other side would refuse."""

    def __init__(self, limits: Limits, check: bool = True) -> None:
        self._limits = limits
        self._check = check
        self._chunk_bytes = min(limits.chunk_bytes, MAX_CHUNK_BYTES)
        self._pack = msgpack.Packer(use_bin_type=True, buf_size=HEAD_BYTES).pack

    def head(self, frame: Frame, sizes: Sequence[int]) -> tuple[bytes, int]:
        """The DATA record of a frame with payloads of these sizes, and its cost in the window."""
        kind = frame.kind
        if not 0 < len(kind) <= MAX_KIND_CHARS:
            raise ProtocolError(f"a frame's kind has 1 to {MAX_KIND_CHARS} characters, got {kind!r}")
        if len(sizes) > self._limits.payloads:
            raise ProtocolError(f"frame {kind!r} has {len(sizes)} payloads, over {self._limits.payloads}: split it")
        try:
            body: bytes = self._pack((kind, dict(frame.header), sizes))
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"the header of frame {kind!r} cannot be sent: {error}") from error
        size = len(body)
        if size > self._limits.header_bytes:
            raise ProtocolError(
                f"the header of frame {kind!r} has {size} bytes, more than {self._limits.header_bytes}: "
                "put large values into payloads"
            )
        return self._prelude(DATA, size, body) + body, frame_cost(size, len(sizes))

    def chunks(self, payloads: Sequence[memoryview]) -> Iterator[bytes | memoryview]:
        """A prelude and its bytes, in turns, for every CHUNK; lazily, so that checksums come while the wire is busy."""
        for payload in payloads:
            for start in range(0, len(payload), self._chunk_bytes):
                chunk = payload[start : start + self._chunk_bytes]
                yield self._prelude(CHUNK, len(chunk), chunk)
                yield chunk

    def control(self, kind: int, size: int = 0) -> bytes:
        """A CREDIT, RETRACT or GOODBYE record."""
        return self._prelude(kind, size, b"")

    def _prelude(self, kind: int, size: int, body: bytes | memoryview) -> bytes:
        word = (_TAG | kind) << 32 | size
        return _PRELUDE.pack(word, xxhash.xxh3_64_intdigest(body, word) if self._check else 0)


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} is not allowed")


def _decode_head(body: memoryview, limits: Limits, max_payload_bytes: int) -> tuple[str, dict[str, Any], list[int]]:
    try:
        message = msgpack.unpackb(body, raw=False, strict_map_key=True, ext_hook=_no_extension, max_ext_len=0)
    except (ValueError, TypeError, UnicodeDecodeError, OverflowError) as error:  # msgpack's errors are ValueErrors
        raise ProtocolError(f"a frame's header is not valid msgpack: {error}") from error
    refuse_deep(message, "a frame's header")
    if type(message) is not list or len(message) != 3:
        raise ProtocolError("a frame's header must be [kind, header, payload sizes]")
    kind, header, sizes = message
    if type(kind) is not str or not 0 < len(kind) <= MAX_KIND_CHARS:
        raise ProtocolError(f"a frame's kind must be a string of 1 to {MAX_KIND_CHARS} characters")
    if type(header) is not dict or not _STRING.issuperset(map(type, header)):
        raise ProtocolError(f"the header of frame {kind!r} must be a map with string keys")
    if type(sizes) is not list or (sizes and not (_INTEGER.issuperset(map(type, sizes)) and min(sizes) >= 0)):
        raise ProtocolError(f"the payload sizes of frame {kind!r} must be a list of non-negative integers")
    if len(sizes) > limits.payloads:
        raise ProtocolError(f"frame {kind!r} announces {len(sizes)} payloads, more than {limits.payloads}")
    if sum(sizes) > max_payload_bytes:
        raise ProtocolError(f"frame {kind!r} announces {sum(sizes)} payload bytes, more than {max_payload_bytes}")
    return kind, header, sizes


class Decoder:
    """Bytes in, events out. After a ProtocolError it stays refused."""

    def __init__(self, limits: Limits, check: bool = True) -> None:
        self.max_payload_bytes = limits.payload_bytes  # may be changed at any time; holds from the next frame on
        self.max_header_bytes = limits.header_bytes  # likewise
        self._limits = limits
        self._check = check
        self._view = _memory(PRELUDE_BYTES + max(limits.header_bytes, _SCRATCH_BYTES))
        self._start = 0  # the view holds unparsed bytes [start, end)
        self._end = 0
        self._head: tuple[int, int] | None = None  # (word, checksum) of the DATA record whose body is awaited
        self._frame: tuple[str, dict[str, Any], list[int]] | None = None  # the frame in assembly
        self._payloads: list[memoryview] = []
        self.payload_bytes = 0  # that have come, of all payloads
        self._filled = 0  # bytes of the last payload that are in place, whole chunks and the current one
        self._chunk = (0, 0)  # (word, checksum) of the current chunk
        self._chunk_left = 0
        self._spent = 0  # to be reported before the next event
        self._direct = False  # the last get_buffer lent payload memory
        self._error: ProtocolError | None = None

    @property
    def mid_frame(self) -> bool:
        """Whether an end of file now would cut something off."""
        return self._frame is not None or self._head is not None or self._end > self._start

    def get_buffer(self, size_hint: int = -1) -> memoryview:
        """Memory to fill next; never empty."""
        if self._chunk_left and self._error is None:
            self._direct = True
            return self._payloads[-1][self._filled : self._filled + self._chunk_left]
        self._direct = False
        if self._start:
            rest = self._end - self._start
            self._view[:rest] = self._view[self._start : self._end]
            self._start, self._end = 0, rest
        if self._error is not None:
            self._end = 0  # what still comes is thrown away
        return self._view[self._end :] if self._end else self._view

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
            if self._spent:
                self._report_spent(events)
        except ProtocolError as error:
            self._error = error
            raise
        return events

    def close(self) -> None:
        """No more is read: the memory for that is given back, however long somebody still refers to the stream."""
        self._view, self._start, self._end, self._head, self._frame = _memory(HEAD_BYTES), 0, 0, None, None
        self._payloads, self._filled, self._chunk_left = [], 0, 0

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
                if ready < self._head[0] & _SIZE:
                    break
                self._parse_head(*self._head, events)
            elif ready >= PRELUDE_BYTES:
                word, digest = _PRELUDE.unpack_from(self._view, self._start)
                self._start += PRELUDE_BYTES
                if word >> 32 == _TAG | DATA:
                    self._begin_frame(word, digest)
                else:
                    self._parse_prelude(word, digest, events)
            else:
                break
        if self._start == self._end:
            self._start = self._end = 0

    def _parse_prelude(self, word: int, digest: int, events: list[Event]) -> None:
        size, kind = word & _SIZE, (word >> 32) - _TAG
        if kind == CHUNK:
            if self._frame is None or not self._payloads:
                raise ProtocolError("payload bytes arrived outside a frame")
            if not 0 < size <= min(MAX_CHUNK_BYTES, len(self._payloads[-1]) - self._filled):
                raise ProtocolError(f"a chunk of {size} bytes does not fit the payload that was announced")
            self._chunk = (word, digest)
            self._chunk_left = size
        elif kind in (CREDIT, RETRACT, GOODBYE):
            self._verify(b"", word, digest, "a control record")
            self._report_spent(events)
            events.append(self._control(kind, size))
        elif word >> 48 != _TAG >> 16:
            raise ProtocolError("what arrived is not a meshcee frame")
        elif word >> 40 != _TAG >> 8:
            raise ProtocolError(f"the other side frames with version {word >> 40 & 0xFF}, we with {FRAME_VERSION}")
        else:
            raise ProtocolError(f"record type {kind} is unknown")

    def _begin_frame(self, word: int, digest: int) -> None:
        if self._frame is not None:
            raise ProtocolError("a frame began inside another")
        if word & _SIZE > self.max_header_bytes:
            raise ProtocolError(f"a header of {word & _SIZE} bytes is announced, more than {self.max_header_bytes}")
        self._head = (word, digest)

    def _control(self, kind: int, size: int) -> Event:
        if kind == CREDIT:
            if not size:
                raise ProtocolError("a credit of nothing")
            return Credit(size)
        if kind == RETRACT:
            if self._frame is None or size:
                raise ProtocolError("a frame is taken back that was not begun")
            self._frame, self._payloads, self._filled = None, [], 0
            return Retracted()
        if self._frame is not None or size:
            raise ProtocolError("the other side said goodbye in the middle of a frame")
        return Goodbye()

    def _parse_head(self, word: int, digest: int, events: list[Event]) -> None:
        size = word & _SIZE
        body = self._view[self._start : self._start + size]
        self._verify(body, word, digest, "a frame's header")
        self._head = None
        self._start += size
        kind, header, sizes = _decode_head(body, self._limits, self.max_payload_bytes)
        self._spent += frame_cost(size, len(sizes))
        if sizes:
            self._frame, self._payloads, self._filled = (kind, header, sizes), [], 0
            self._next_payload(events)
        else:
            events.append(Arrived(Frame(kind, header), self._spent))
            self._spent = 0

    def _fill(self, size: int, events: list[Event]) -> None:
        """`size` more bytes of the current chunk are in place."""
        self._filled += size
        self.payload_bytes += size
        self._chunk_left -= size
        if self._chunk_left:
            return
        word, digest = self._chunk
        payload = self._payloads[-1]
        self._verify(payload[self._filled - (word & _SIZE) : self._filled], word, digest, "a payload chunk")
        self._spent += word & _SIZE
        if self._filled == len(payload):
            self._next_payload(events)

    def _next_payload(self, events: list[Event]) -> None:
        """Begin the next payload that has bytes, or complete the frame."""
        assert self._frame is not None
        kind, header, sizes = self._frame
        while len(self._payloads) < len(sizes):
            size = sizes[len(self._payloads)]
            self._payloads.append(_memory(size))
            self._filled = 0
            if size:
                return
        events.append(Arrived(Frame(kind, header, tuple(self._payloads)), self._spent))
        self._frame, self._payloads, self._spent = None, [], 0

    def _report_spent(self, events: list[Event]) -> None:
        if self._spent:
            events.append(Spent(self._spent))
            self._spent = 0

    def _verify(self, body: bytes | memoryview, word: int, digest: int, what: str) -> None:
        if self._check and xxhash.xxh3_64_intdigest(body, word) != digest:
            raise ProtocolError(f"the checksum of {what} is wrong: it was damaged on its way")


def _memory(size: int) -> memoryview:
    """Memory for a payload. numpy leaves it untouched, so that an announced payload costs nothing until it comes.

    It begins at a multiple of 64, as torch's does: tensors need not be copied then (`meshcee/stage/tensors.py`).
    """
    if size < _MANY_BYTES:
        return memoryview(bytearray(size))
    try:
        memory = np.empty(size + _LINE_BYTES, np.uint8)
        first = -memory.ctypes.data % _LINE_BYTES
        return memory[first : first + size].data
    except MemoryError as error:
        raise ProtocolError(f"a payload of {size} bytes is announced, which this peer cannot hold") from error
