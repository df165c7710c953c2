"""Small messages between two processes of one machine, each with at most one descriptor.

The idea: a message is a datagram of a pair of sockets that keeps their bounds and order, so nothing has to be put together again.
It is its class's name and its fields, and is read as one of the classes that the reader takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgpack
from msgspec import Meta

from meshcee.errors import ProtocolError
from meshcee.fields import Count, plain, read, unpack
from peers.transport.base import StreamClosed

__all__ = ["Allow", "Channel", "Comes", "Failed", "Open", "Opened", "Rates", "Throttle", "pair"]

MOST_BYTES = 16 * 1024
MOST_QUEUED = 1024  # that the other side has not taken
TURN = 64  # messages after which the loop has a turn
MOST_A_SECOND = 8192  # messages that a side takes, of LONG_BYTES at most; a longer one counts as several
LONG_BYTES = 1024
_Number = Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)]
_Speed = Annotated[float, Meta(ge=0)]
_Name = Annotated[str, Meta(max_length=256)]
_Text = Annotated[str, Meta(max_length=2000)]


@dataclass(frozen=True)
class Comes:
    """A peer has opened a stream of this purpose; its end comes along. Numbers of streams that come are positive."""

    stream: _Number
    peer: _Name
    purpose: _Name


@dataclass(frozen=True)
class Open:
    """Open a stream of this purpose to a peer. Numbers of these are negative."""

    stream: _Number
    peer: _Name
    purpose: _Name


@dataclass(frozen=True)
class Opened:
    """It is; its end comes along."""

    stream: _Number


@dataclass(frozen=True)
class Failed:
    """It is not, or is over as its peer broke the protocol: the name of the error and its text."""

    stream: _Number
    error: _Name
    text: _Text


@dataclass(frozen=True)
class Allow:
    """A frame of the stream may announce so many bytes of payload."""

    stream: _Number
    payload_bytes: Count


@dataclass(frozen=True)
class Throttle:
    """Send no faster on the stream; no figure is no limit."""

    stream: _Number
    bytes_per_s: _Speed | None


@dataclass(frozen=True)
class Rates:
    """Of the stream on the network, where they are known: bytes per second out and in, and bytes under way."""

    stream: _Number
    out: _Speed | None
    into: _Speed | None
    under_way: Count | None


class Channel:
    """One end. `kinds` are the messages that this side takes. `post` never waits; `receive` is for one task."""

    def __init__(self, end: socket.socket, kinds: tuple[type, ...]) -> None:
        end.setblocking(False)
        self._socket = end
        self._kinds: Mapping[str, type] = {kind.__name__: kind for kind in kinds}
        self._queue: deque[tuple[bytes, int]] = deque()
        self._loop = asyncio.get_running_loop()
        self._awake = asyncio.Event()  # there is something to be received, or nothing ever more
        self._why = ""  # it is over
        self._taken = self._turned = 0  # messages, and how many by the loop's last turn
        self._since_s = self._loop.time()  # of the last MOST_A_SECOND

    @property
    def closed(self) -> bool:
        return bool(self._why)

    def post(self, message: Any, handle: int = -1) -> None:
        """Send behind what was posted before. `handle` is this channel's from now on. StreamClosed when the other side is gone."""
        data = bytes(msgpack.packb([type(message).__name__, plain(message)]))
        if self._why or len(data) > MOST_BYTES or len(self._queue) >= MOST_QUEUED:
            _close(handle)
            if not self._why:
                self.close(f"{len(self._queue)} messages wait" if len(data) <= MOST_BYTES else "a message is too long")
            raise StreamClosed(self._why)
        self._queue.append((data, handle))
        if len(self._queue) == 1:
            self._write()

    def _write(self) -> None:
        while self._queue:
            data, handle = self._queue[0]
            try:
                socket.send_fds(self._socket, [data], [handle] if handle >= 0 else [])
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._write)
                return
            except OSError as error:
                self.close(f"the other process is gone: {error.strerror}")
                return
            self._queue.popleft()
            _close(handle)
        self._loop.remove_writer(self._socket)

    async def receive(self) -> tuple[Any, int]:
        """The next message and the descriptor that came along, which is the caller's, or -1.

        StreamClosed when the other process is gone, ProtocolError when what it sends is none of `kinds` or more than MOST_A_SECOND.
        The loop has turns also while there is always a message.
        """
        if self._taken - self._turned >= TURN:
            self._turned = self._taken
            await asyncio.sleep(0)
        while True:
            if self._why:
                raise StreamClosed(self._why)
            try:
                data, handles, flags, _ = socket.recv_fds(self._socket, MOST_BYTES, 4)
                break
            except BlockingIOError:
                await self._readable()
            except OSError as error:
                self.close(f"the other process is gone: {error.strerror}")
        try:
            if not data:
                self.close("the other process is gone")
                raise StreamClosed(self._why)
            self._count(len(data))
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(handles) > 1:
                raise ProtocolError("a message between processes is too long, or comes with too much")
            what = "a message between processes"
            name, fields = read(unpack(data, MOST_BYTES, what), tuple[_Name, dict[str, Any]], what)
            if name not in self._kinds:
                raise ProtocolError(f"{what} of kind {name!r} has no meaning here")
            return read(fields, self._kinds[name], what), handles[0] if handles else -1
        except BaseException:
            for handle in handles:
                os.close(handle)
            raise

    def _count(self, size: int) -> None:
        before, self._taken = self._taken, self._taken + 1 + size // LONG_BYTES
        if before // MOST_A_SECOND == self._taken // MOST_A_SECOND:
            return
        before_s, self._since_s = self._since_s, self._loop.time()
        if self._since_s - before_s < 1:
            raise ProtocolError(f"another process sends more than {MOST_A_SECOND} messages a second")

    async def _readable(self) -> None:
        self._awake.clear()
        self._loop.add_reader(self._socket, self._awake.set)
        try:
            await self._awake.wait()
        finally:
            if not self._why:
                self._loop.remove_reader(self._socket)

    def close(self, why: str = "it was closed here") -> None:
        if self._why:
            return
        self._why = f"the channel between two processes is over: {why}"
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._awake.set()
        while self._queue:
            _close(self._queue.popleft()[1])


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends' sockets."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _close(handle: int) -> None:
    if handle >= 0:
        with contextlib.suppress(OSError):
            os.close(handle)
