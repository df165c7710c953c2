"""One byte stream over several TCP connections, encrypted: what a direct path puts under a FramedStream.

The idea: what is written is cut into numbered records, each sealed with AES-256-GCM under the stream's key of that
direction; the number is the nonce. One connection carries all until its window is full: on a thin line several would drive
one another's packets out of the queue before it. Then a record goes to whichever has room, so that the windows of several
connections add up on a long fat link. The receiver opens records in order; one that comes early waits in its connection,
of which nothing more is then read. So a connection never costs more memory than one record. Bytes are copied once at
either end: from the payload into the record when a connection takes it, and from the record into the payload.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import sys
import termios
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from meshcee.figures import Rate

__all__ = ["Bundle", "Connection"]

RECORD_BYTES = 128 * 1024
HEADER = struct.Struct("!QI")  # number, bytes that follow
_INT = struct.Struct("i")
_TAG_BYTES = 16
_MEMORY_BYTES = HEADER.size + RECORD_BYTES + _TAG_BYTES + HEADER.size  # a record, and the header of the next
# That the kernel holds of all connections, and at least of one, beyond what is under way. Chosen from few runs on a busy machine
# (docs/benchmarks.md): both much less and no limit were slower.
_UNSENT_BYTES = (4 << 20, 512 * 1024)
# Under way on the first connection, but for what a queue holds: Linux lets it have some 2.7 MB, so all are used from here on.
FULL_BYTES = 1 << 20
_TCP_INFO = struct.Struct(
    "=16xI4xI40xI76xI"
)  # as Linux has it: segment size, segments under way, round trip and its least, us
_SO_MAX_PACING_RATE = 47 if sys.platform == "linux" else None  # Python does not name it
_NO_LIMIT = 2**32 - 1
_SILENT_S = 30  # a machine that answers nothing for so long is gone


class Connection(asyncio.BufferedProtocol):
    """One TCP connection. A greeting of known size is handed to `greeted` (b"" when it was lost before), and nothing more
    is read until a bundle has taken the connection over.
    """

    def __init__(self, greeting_bytes: int, greeted: Callable[[Connection, bytes], None]) -> None:
        self.lost = False
        self._greeted = greeted
        self.transport: asyncio.Transport | None = None
        self._bundle: Bundle | None = None
        self._blocked = False  # the kernel has not taken all of what was written
        self._memory = memoryview(bytearray(greeting_bytes))
        self._end = 0  # of what has arrived
        self._stopped = False  # not reading
        self._outgoing = memoryview(b"")

    # -- before and after the bundle

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def join(self, bundle: Bundle, unsent_bytes: int) -> None:
        assert self.transport is not None
        self._bundle = bundle
        self._memory, self._end = memoryview(bytearray(_MEMORY_BYTES)), 0
        self._outgoing = memoryview(bytearray(_MEMORY_BYTES))
        if not self.transport.is_closing():
            _configure(self.transport.get_extra_info("socket"), unsent_bytes)
            self.transport.resume_reading()

    # -- records

    @property
    def is_receiving(self) -> bool:
        """A record has begun to come and is not opened."""
        return self._end > 0

    def under_way(self) -> int | None:
        """Bytes that were written and not yet acknowledged; None where the system does not tell."""
        if self.transport is None:
            return None
        try:
            fd = self.transport.get_extra_info("socket").fileno()
            (unacknowledged,) = _INT.unpack(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(_INT.size)))
        except (OSError, ValueError):  # closed, or not TCP as we know it
            return None
        return int(unacknowledged) + self.transport.get_write_buffer_size()

    def throttle(self, bytes_per_s: float) -> None:
        if self.transport is not None and _SO_MAX_PACING_RATE is not None:
            most = struct.pack("=I", int(min(max(bytes_per_s, 1), _NO_LIMIT)))
            with contextlib.suppress(OSError):
                self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, most)

    @property
    def free(self) -> bool:
        return not self._blocked and self.transport is not None

    @property
    def is_full(self) -> bool:
        """So much is under way that the window may be what holds it up; True where the system does not tell."""
        assert self.transport is not None
        connection = self.transport.get_extra_info("socket")
        if not hasattr(socket, "TCP_INFO"):
            return True
        try:
            told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            segment_bytes, under_way, round_trip_us, least_us = _TCP_INFO.unpack(told)
        except (OSError, struct.error):
            return True
        return bool(under_way * segment_bytes * least_us >= FULL_BYTES * round_trip_us)

    def seal(self, number: int, part: memoryview, key: AESGCM) -> None:
        """Send a record; only when `free`, since then the last one's memory is."""
        assert self.transport is not None
        size = len(part) + _TAG_BYTES
        record = self._outgoing[: HEADER.size + size]
        HEADER.pack_into(record, 0, number, size)
        key.encrypt_into(number.to_bytes(12, "big"), part, None, record[HEADER.size :])
        self.transport.write(record)

    def head(self, start: int) -> tuple[int, int] | None:
        """(number, bytes) of the record that begins at `start`, once its header has come."""
        return HEADER.unpack_from(self._memory, start) if self._end - start >= HEADER.size else None

    def sealed(self, start: int, size: int) -> memoryview | None:
        """The record whose header is at `start`, once it is whole."""
        begin = start + HEADER.size
        return self._memory[begin : begin + size] if self._end - begin >= size else None

    def settle(self, start: int, early: bool) -> None:
        """All before `start` was opened; read on unless a whole record waits for its turn."""
        rest = self._end - start
        if start and rest:
            self._memory[:rest] = self._memory[start : self._end]
        self._end = rest
        if early != self._stopped and self.transport is not None and not self.transport.is_closing():
            self._stopped = early
            (self.transport.pause_reading if early else self.transport.resume_reading)()

    # -- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=0)  # with this, uvloop writes at once

    def get_buffer(self, sizehint: int) -> memoryview:
        # Up to the end of the record and the next one's header: then hardly a byte is moved.
        head = self.head(0) if self._bundle is not None else None
        wanted = len(self._memory) if head is None else HEADER.size + head[1] + HEADER.size
        return self._memory[self._end : wanted]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        if self._bundle is not None:
            self._bundle.arrived(self, nbytes)
        elif self._end == len(self._memory):
            assert self.transport is not None
            self.transport.pause_reading()
            self._greeted(self, bytes(self._memory))

    def eof_received(self) -> bool:
        return False  # close

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost, self.transport = True, None
        if self._bundle is not None:
            self._bundle.lost(exc)
        elif self._end < len(self._memory):
            self._greeted(self, b"")

    def pause_writing(self) -> None:
        self._blocked = True

    def resume_writing(self) -> None:
        self._blocked = False
        if self._bundle is not None:
            self._bundle.pump()


class Bundle(asyncio.Transport):
    """An asyncio transport for `protocol` over connections whose greetings are done; both ends hold the same ones."""

    def __init__(self, connections: Sequence[Connection], seal_key: bytes, open_key: bytes) -> None:
        super().__init__()
        self.connections = list(connections)
        self._used = 1  # of these
        self._alive = len(connections)
        self._seal_key, self._open_key = AESGCM(seal_key), AESGCM(open_key)
        self._protocol: asyncio.BufferedProtocol | None = None
        self._queue: deque[memoryview] = deque()  # written and not yet sealed
        self._sealed = 0  # records
        self._opened = 0
        self._early: dict[int, Connection] = {}  # number of a record -> where it waits for its turn
        # Here and not in the stream: that sees a small frame come whole, as a record is opened when all of it is here.
        self._rate = Rate()
        self._receiving = False
        self._paused = False
        self._closing = False
        self._aborted = False
        self._why: Exception | None = None

    def start(self, protocol: asyncio.BufferedProtocol) -> None:
        self._protocol = protocol
        protocol.connection_made(self)
        if any(connection.lost for connection in self.connections):
            self.abort()
            error = ConnectionResetError("a direct connection was lost before it was used")
            asyncio.get_running_loop().call_soon(protocol.connection_lost, error)
            return
        together, at_least = _UNSENT_BYTES
        for connection in self.connections:
            connection.join(self, max(at_least, together // len(self.connections)))

    # -- asyncio.Transport, as far as a FramedStream needs it

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Of "rate": bytes per second that have come since it was last asked for, or None. Of "under_way": bytes that were
        written and not yet acknowledged by the other machine, or None. Of "peername": where the connections lead."""
        if name == "under_way":
            return self._under_way()
        if name == "peername" and (first := self.connections[0].transport) is not None:
            return first.get_extra_info(name, default)
        return self._take_rate() if name == "rate" else default

    def throttle(self, bytes_per_s: float) -> None:
        """Of each connection: a thin line has one that carries all."""
        for connection in self.connections:
            connection.throttle(bytes_per_s)

    def _under_way(self) -> int | None:
        total = sum(map(len, self._queue))
        for connection in self.connections:
            if (size := connection.under_way()) is None:
                return None
            total += size
        return total

    def _take_rate(self) -> float | None:
        if self._receiving:  # on a busy link there may be no moment in which nothing is on its way
            now_s = asyncio.get_running_loop().time()
            self._rate.end(now_s)
            self._rate.begin(now_s)
        return self._rate.take()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Always zero: the protocol is paused until the last byte is sealed, and its memory free."""

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if data and not self._closing:
            self._queue.append(memoryview(data))
            self.pump()

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self.pump()

    def abort(self) -> None:
        if not self._aborted:
            self._closing = self._aborted = True
            self._queue.clear()
            self._early.clear()
            for connection in self.connections:
                connection.abort()

    # -- called by the connections

    def pump(self) -> None:
        """Seal what was written into the connections that have room."""
        if self._aborted or self._protocol is None:
            return
        while self._queue and (connection := self._free()) is not None:
            part, rest = self._queue[0][:RECORD_BYTES], self._queue[0][RECORD_BYTES:]
            connection.seal(self._sealed, part, self._seal_key)
            self._sealed += 1
            if rest:
                self._queue[0] = rest
            else:
                self._queue.popleft()
        if bool(self._queue) != self._paused:
            self._paused = not self._paused
            (self._protocol.pause_writing if self._paused else self._protocol.resume_writing)()
        if self._closing and not self._queue:
            for connection in self.connections:
                connection.close()

    def _free(self) -> Connection | None:
        first = self.connections[0]
        if self._used == 1 and not first.free and not first.lost and first.is_full:
            self._used = len(self.connections)
        for i in range(self._used):
            connection = self.connections[(self._sealed + i) % self._used]
            if connection.free:
                return connection
        return None

    def arrived(self, connection: Connection, nbytes: int) -> None:
        """Open what can be opened, here and then wherever the next record has been waiting."""
        now_s = asyncio.get_running_loop().time()
        if self._receiving:
            self._rate.more(nbytes)
        else:
            self._rate.begin(now_s)
        self._open_all(connection)
        self._receiving = any(each.is_receiving for each in self.connections)
        if not self._receiving:
            self._rate.end(now_s)

    def _open_all(self, connection: Connection) -> None:
        turn: Connection | None = connection
        while turn is not None and not self._aborted:
            try:
                self._open(turn)
            except ValueError as error:
                self._why = ConnectionResetError(f"what came over a direct connection is not from the peer: {error}")
                self.abort()
            turn = self._early.pop(self._opened, None)

    def _open(self, connection: Connection) -> None:
        """Open records of this connection while their turn is now; ValueError when they are not what they must be."""
        start, early = 0, False
        while (head := connection.head(start)) is not None:
            number, size = head
            if not _TAG_BYTES < size <= RECORD_BYTES + _TAG_BYTES:
                raise ValueError(f"a record of {size} bytes")
            record = connection.sealed(start, size)
            if number != self._opened:
                if number < self._opened or self._early.setdefault(number, connection) is not connection:
                    raise ValueError(f"record {number} came twice")
                if len(self._early) == len(self.connections) and self._opened not in self._early:
                    raise ValueError(f"record {self._opened} is missing")
                early = record is not None
                break
            if record is None:
                break
            self._opened += 1
            start += HEADER.size + size
            self._deliver(number, record)
            if self._aborted:
                return
        connection.settle(start, early)

    def _deliver(self, number: int, record: memoryview) -> None:
        """Into the protocol's own memory, where it has enough in one piece."""
        assert self._protocol is not None
        size, nonce = len(record) - _TAG_BYTES, number.to_bytes(12, "big")
        try:
            buffer = memoryview(self._protocol.get_buffer(size))
            if len(buffer) >= size:
                self._open_key.decrypt_into(nonce, record, None, buffer[:size])
                self._protocol.buffer_updated(size)
                return
            rest = memoryview(self._open_key.decrypt(nonce, record, None))
        except InvalidTag:
            raise ValueError("a record that does not open") from None
        while rest and not self._aborted:
            buffer = memoryview(self._protocol.get_buffer(len(rest)))
            part = min(len(buffer), len(rest))
            buffer[:part] = rest[:part]
            rest = rest[part:]
            self._protocol.buffer_updated(part)

    def lost(self, error: Exception | None) -> None:
        """The stream is over with its first connection; it is reported with its last."""
        assert self._protocol is not None
        self._alive -= 1
        self._why = self._why or error
        if error is not None or not self._closing:
            self.abort()
        if not self._alive:
            self._protocol.connection_lost(self._why)


def _configure(connection: socket.socket, unsent_bytes: int) -> None:
    """Notice a machine that is gone, and keep little in the kernel; what the system does not know is left out."""
    options = {
        "SO_KEEPALIVE": (socket.SOL_SOCKET, 1),
        "TCP_KEEPIDLE": (socket.IPPROTO_TCP, _SILENT_S // 3),
        "TCP_KEEPINTVL": (socket.IPPROTO_TCP, _SILENT_S // 6),
        "TCP_USER_TIMEOUT": (socket.IPPROTO_TCP, _SILENT_S * 1000),
        "TCP_NOTSENT_LOWAT": (socket.IPPROTO_TCP, unsent_bytes),
    }
    for name, (level, value) in options.items():
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                connection.setsockopt(level, getattr(socket, name), value)
