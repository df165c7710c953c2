"""The side with the network: streams of the transport are passed on to the other process, frame by frame.

The idea: what crosses is what both ends would say anyway. This side reads frames as any peer does, with every check that they have,
and knows nothing of what they mean. Of each direction of a stream it holds at most a window (`window_bytes`) and one frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from meshcee.config import Limits, Timeouts
from meshcee.errors import JoinError, MeshceeError, NotPermittedError, ProtocolError, leaves
from peers.transport.base import Stream, StreamClosed, Transport, closed, frames, passed
from peers.transport.bridge.channel import Allow, Channel, Comes, Failed, Open, Opened, Rates, Throttle
from peers.transport.stream import FramedStream

__all__ = ["TAKES", "Passing", "joined"]

TAKES = (Open, Allow, Throttle)  # from the other process
RATES_EVERY_S = 1.0
MOST_OPENING = 256
ENDING_S = 0.2  # a process that ends closes its sockets one after the other


async def joined(end: socket.socket, stream: FramedStream) -> None:
    """Attach a stream to its end of a pair of sockets: both sides are known, so no hands are shaken."""
    end.setblocking(False)
    await asyncio.get_running_loop().create_connection(lambda: stream, sock=end)
    stream.establish(stream.purpose)


class _Local(FramedStream):
    """The end of a stream that goes over."""

    was_lost = False  # the other process has ended it without a word, or has ended itself

    def connection_lost(self, exc: Exception | None) -> None:
        self.was_lost = not self.closed
        super().connection_lost(exc)


class Passing:
    """Streams of `transport` that come for `serves` go over; the other process may open those of `opens`.

    Both map a purpose to the most payload bytes of a frame until the other process has said how many it takes.
    `addresses` gives hints where a peer listens, or raises JoinError. `run` lasts as long as the other process. When that ends,
    `farewell` has the last word on each stream that had come.
    """

    def __init__(
        self,
        transport: Transport,
        channel: Channel,
        *,
        serves: Mapping[str, int],
        opens: Mapping[str, int],
        addresses: Callable[[str], Awaitable[Sequence[str]]],
        limits: Limits,
        timeouts: Timeouts,
        farewell: Callable[[Stream], Awaitable[None]] | None = None,
    ) -> None:
        self._transport = transport
        self._channel = channel
        self._opens = opens
        self._addresses = addresses
        self._farewell = farewell
        self._limits, self._timeouts = limits, timeouts
        self._group: asyncio.TaskGroup | None = None
        self._passed: dict[int, Stream] = {}
        self._number = 0
        self._opening: set[int] = set()
        self._is_over = asyncio.Event()  # the other process has gone, or talks nonsense
        for purpose, first_bytes in serves.items():
            self.serve(purpose, first_bytes)

    def serve(self, purpose: str, first_bytes: int) -> None:
        """Streams that come for this purpose go over, with this first limit."""
        self._transport.serve(purpose, partial(self._come, first_bytes))

    async def run(self, other: Callable[[Any, int], None] | None = None) -> None:
        """Take the other process's messages; `other` gets those that have nothing to do with streams.

        StreamClosed when that process is gone, ProtocolError when it talks nonsense.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                while True:
                    message, handle = await self._channel.receive()
                    if isinstance(message, TAKES) and handle >= 0:
                        socket.close(handle)
                        raise ProtocolError("a descriptor came with a message that needs none")
                    if isinstance(message, Open):
                        if message.stream in self._opening or len(self._opening) >= MOST_OPENING:
                            raise ProtocolError(
                                f"more than {MOST_OPENING} streams are to be opened at once, or one twice"
                            )
                        self._opening.add(message.stream)
                        group.create_task(self._open(message))
                    elif isinstance(message, Allow) and message.stream in self._passed:
                        allowed = min(message.payload_bytes, self._limits.payload_bytes)
                        self._passed[message.stream].max_payload_bytes = allowed
                    elif isinstance(message, Throttle) and message.stream in self._passed:
                        speed = message.bytes_per_s
                        self._passed[message.stream].throttle(float("inf") if speed is None else speed)
                    elif not isinstance(message, TAKES) and other is not None:
                        other(message, handle)
        except* (StreamClosed, ProtocolError):
            self._is_over.set()
            raise
        finally:
            self._group = None
            for number, stream in self._passed.items():
                if number < 0 or self._farewell is None or not self._is_over.is_set():
                    stream.abort()

    async def dial(self, purpose: str) -> Stream:
        """A stream from this side to the other process, which sees one of its own peer's. StreamClosed where it has ended."""
        ours, theirs = socket.socketpair()
        peer, close_s = self._transport.peer_id, self._timeouts.shutdown_s
        stream = FramedStream(peer, purpose=purpose, limits=self._limits, close_s=close_s, check=False)
        with theirs:  # once it is closed the stream ends by itself
            await joined(ours, stream)
            self._number += 1
            self._channel.post(Comes(stream=self._number, peer=peer, purpose=purpose), theirs.detach())
        return stream

    async def _come(self, first_bytes: int, stream: Stream) -> None:
        stream.max_payload_bytes = first_bytes
        if self._group is None:
            raise StreamClosed("this peer's device is not there at the moment")
        self._number += 1
        await self._pass(self._number, stream, partial(Comes, peer=stream.peer_id, purpose=stream.purpose))

    async def _open(self, asked: Open) -> None:
        try:
            if asked.purpose not in self._opens or asked.stream >= 0 or asked.stream in self._passed:
                raise NotPermittedError(f"a stream of purpose {asked.purpose!r} may not be opened from there")
            stream = await self._transport.open(asked.peer, asked.purpose, await self._addresses(asked.peer))
            stream.max_payload_bytes = self._opens[asked.purpose]
        except (MeshceeError, StreamClosed) as error:
            self._fail(asked, error)
            return
        finally:
            self._opening.remove(asked.stream)
        try:
            await self._pass(asked.stream, stream, Opened)
        except (StreamClosed, ProtocolError):
            pass  # both ends have heard
        except OSError as error:  # this machine has no sockets left
            self._fail(asked, error)
        finally:
            stream.abort()

    def _fail(self, asked: Open, error: Exception) -> None:
        kind = NotPermittedError if isinstance(error, NotPermittedError) else JoinError
        self._channel.post(Failed(asked.stream, kind.__name__, str(error)[:2000]))

    async def _pass(self, number: int, stream: Stream, told: Callable[..., Any]) -> None:
        """Until one end is over; then the other one ends as well, once what was sent has arrived there."""
        ours, theirs = socket.socketpair()
        ours_is_open = True
        local = _Local(
            stream.peer_id, purpose=stream.purpose, limits=self._limits, close_s=self._timeouts.shutdown_s, check=False
        )
        self._passed[number] = stream
        try:
            await joined(ours, local)
            ours_is_open = False
            self._channel.post(told(stream=number), theirs.detach())
            async with asyncio.TaskGroup() as group:
                telling = group.create_task(self._tell(number, stream))
                ways = [group.create_task(way) for way in (passed(stream, local), self._back(local, stream, number))]
                for way in ways:
                    await asyncio.wait([way])
                telling.cancel()
        except* ProtocolError as failures:
            error = leaves(failures)[0]
            with contextlib.suppress(StreamClosed, ProtocolError, TimeoutError):
                self._channel.post(Failed(number, ProtocolError.__name__, str(error)[:2000]))
                async with asyncio.timeout(self._timeouts.shutdown_s):
                    while True:  # until the other process has heard, and ends its stream
                        await local.recv()
            raise error from None
        finally:
            del self._passed[number]
            local.abort()
            theirs.close()
            if ours_is_open:
                ours.close()

    async def _back(self, local: _Local, stream: Stream, number: int) -> None:
        await frames(local, stream)
        if local.was_lost and number > 0 and self._farewell is not None:
            with contextlib.suppress(StreamClosed, TimeoutError):
                async with asyncio.timeout(ENDING_S):
                    await self._is_over.wait()
                await self._farewell(stream)
        await closed(stream)

    async def _tell(self, number: int, stream: Stream) -> None:
        before = (0, 0)
        while True:
            await asyncio.sleep(RATES_EVERY_S)
            now = stream.sent_bytes, stream.received_bytes
            if now != before:
                try:
                    self._channel.post(Rates(number, *stream.rates(), stream.under_way()))
                except StreamClosed:  # the other process has gone: the ways end by themselves, after the last word
                    return
            before = now
