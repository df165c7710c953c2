"""The transport of a process that has no network: its streams are those of the peer beside it, which passes them on."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from meshcee.config import Limits, Timeouts
from meshcee.errors import JoinError, NotPermittedError, ProtocolError, UsageError
from meshcee.events import Event
from peers.transport.base import Handler, Stream, StreamClosed
from peers.transport.bridge.channel import Allow, Channel, Comes, Failed, Open, Opened, Rates, Throttle
from peers.transport.bridge.passing import joined
from peers.transport.patience import Seldom
from peers.transport.stream import FramedStream, short

__all__ = ["GIVES", "Bridged"]

GIVES = (Comes, Opened, Failed, Rates)  # what comes from the side with the network


class _Stream(FramedStream):
    """One that goes on elsewhere: what is asked of the network is asked of the other side."""

    number = 0
    channel: Channel | None = None
    under_way_bytes: int | None = None
    seen: tuple[tuple[float, float], ...] = (
        (0, 0.0),
        (0, 0.0),
    )  # out and in: bytes that were told of, and their seconds
    carried_bytes = (0, 0)  # sent and received, when rates were last told of

    def _ask(self, message: Allow | Throttle) -> None:
        if self.channel is not None and not self.closed:
            self.channel.post(message)

    @property
    def max_payload_bytes(self) -> int:
        return self._decoder.max_payload_bytes

    @max_payload_bytes.setter
    def max_payload_bytes(self, value: int) -> None:
        self._decoder.max_payload_bytes = value
        self._ask(Allow(self.number, value))

    def throttle(self, bytes_per_s: float) -> None:
        self._ask(Throttle(self.number, None if math.isinf(bytes_per_s) else bytes_per_s))

    def rates(self) -> tuple[float | None, float | None]:
        """Over all that was told of since the last call, by bytes."""
        out, into = (size / seconds if seconds else None for size, seconds in self.seen)
        self.seen = _Stream.seen
        return out, into

    def hear(self, rates: Rates) -> None:
        """The rates of another while, in which so much has gone as this end has carried since."""
        carried = self.sent_bytes, self.received_bytes
        self.seen = tuple(
            (size + more, seconds + more / speed) if speed else (size, seconds)
            for (size, seconds), speed, more in (
                (self.seen[0], rates.out, max(1, carried[0] - self.carried_bytes[0])),
                (self.seen[1], rates.into, max(1, carried[1] - self.carried_bytes[1])),
            )
        )
        self.carried_bytes, self.under_way_bytes = carried, rates.under_way

    def under_way(self) -> int | None:
        return self.under_way_bytes

    def fail(self, why: str) -> None:
        """The peer broke the protocol, as the other side found."""
        self._misbehaved(ProtocolError(why))


class Bridged:
    """base.Transport over a channel, whose messages it reads; `others` are for the user of `other`. Lifetime is `async with`."""

    def __init__(self, peer_id: str, channel: Channel, *, limits: Limits, timeouts: Timeouts) -> None:
        self.peer_id = peer_id
        self.addresses: Sequence[str] = ()
        self.limits, self.timeouts = limits, timeouts
        self._channel = channel
        self._handlers: dict[str, Handler] = {}
        self._streams: dict[int, _Stream] = {}
        self._opening: dict[int, asyncio.Future[socket.socket]] = {}
        self._number = 0
        self._group: asyncio.TaskGroup | None = None
        self._handling: set[asyncio.Task[None]] = set()
        self._failed = Seldom(Event.HANDLER_FAILED)

    def serve(self, purpose: str, handler: Handler) -> None:
        self._handlers[purpose] = handler

    async def open(self, peer_id: str, purpose: str, addresses: Sequence[str] = ()) -> Stream:
        """The side with the network knows the addresses."""
        if self._group is None:
            raise UsageError("the transport is not running: use it inside `async with`")
        self._number -= 1
        number = self._number
        coming = self._opening[number] = asyncio.get_running_loop().create_future()
        stream = self._made(number, peer_id, purpose)
        try:
            self._channel.post(Open(number, peer_id, purpose))
            async with asyncio.timeout(self.timeouts.dial_s + self.timeouts.handshake_s + self.timeouts.shutdown_s):
                await joined(await coming, stream)
        except BaseException as error:
            stream.abort()
            self._streams.pop(number, None)
            if coming.done() and not coming.cancelled() and coming.exception() is None:
                coming.result().close()
            if isinstance(error, TimeoutError | StreamClosed):
                raise JoinError(f"peer {short(peer_id)} was not reached: {error or 'nothing came in time'}") from error
            raise
        finally:
            del self._opening[number]
        return stream

    async def __aenter__(self) -> Self:
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        for task in list(self._handling):
            task.cancel()
        for stream in list(self._streams.values()):
            if error is None:
                group.create_task(stream.aclose())
            else:
                stream.abort()
        try:
            await group.__aexit__(None, None, None)
        finally:
            for stream in list(self._streams.values()):
                stream.abort()

    def take(self, message: Comes | Opened | Failed | Rates, handle: int) -> None:
        """One message of the side with the network. ProtocolError when it makes no sense."""
        end = socket.socket(fileno=handle) if handle >= 0 else None
        if (end is not None) != isinstance(message, Comes | Opened):
            if end is not None:
                end.close()
            raise ProtocolError("a stream comes as a descriptor, and nothing else does")
        match message:
            case Comes() if end is not None:
                self._come(message, end)
            case Opened() if end is not None:
                coming = self._opening.get(message.stream)
                if coming is None or coming.done():
                    end.close()
                else:
                    coming.set_result(end)
            case Failed():
                coming = self._opening.get(message.stream)
                if coming is None and (failed := self._streams.get(message.stream)) is not None:
                    failed.fail(message.text)
                elif coming is not None and not coming.done():
                    error = NotPermittedError if message.error == NotPermittedError.__name__ else JoinError
                    coming.set_exception(error(message.text))
            case Rates() if (stream := self._streams.get(message.stream)) is not None:
                stream.hear(message)

    def _come(self, message: Comes, end: socket.socket) -> None:
        handler = self._handlers.get(message.purpose)
        if self._group is None or handler is None:
            end.close()
            return
        task = self._group.create_task(self._handle(message, end, handler))
        self._handling.add(task)
        task.add_done_callback(self._handling.discard)

    async def _handle(self, message: Comes, end: socket.socket, handler: Handler) -> None:
        stream = self._made(message.stream, message.peer, message.purpose)
        try:
            await joined(end, stream)
            await handler(stream)
            await stream.aclose()
        except Exception as error:
            self._failed.ended(error, peer=short(message.peer), purpose=message.purpose)
        finally:
            stream.abort()
            self._streams.pop(message.stream, None)

    def _made(self, number: int, peer: str, purpose: str) -> _Stream:
        self._streams = {n: s for n, s in self._streams.items() if not s.closed}
        stream = _Stream(peer, purpose=purpose, limits=self.limits, close_s=self.timeouts.shutdown_s, check=False)
        stream.number, stream.channel = number, self._channel
        self._streams[number] = stream
        return stream
