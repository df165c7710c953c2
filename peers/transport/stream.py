"""A Stream over any asyncio byte transport: a Unix socket to p2pd, a TCP socket, an in-process pipe.

The idea: the stream IS the transport's protocol object. Bytes land by callback in their final memory
(`BufferedProtocol`), so receiving needs no task and no copy. There is nothing to leak: what runs is the caller's
own `send`, `recv` or `aclose`. A slow consumer stops the other side by byte credits, a slow wire stops `send` by the
transport's own buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import cast

from meshcee.config import Limits
from meshcee.errors import ProtocolError
from meshcee.figures import Rate
from peers.transport.base import Frame, StreamClosed
from peers.transport.frame import (
    CREDIT,
    GOODBYE,
    MAX_CHUNK_BYTES,
    RETRACT,
    Arrived,
    Credit,
    Decoder,
    Encoder,
    Event,
    Goodbye,
    Retracted,
    Spent,
    frame_cost,
    views,
)
from peers.transport.window import ReceiveWindow, SendWindow

__all__ = ["FramedStream", "short"]

_JOINED_BYTES = 64 * 1024  # payloads up to this are copied into one write with their head: fewer system calls
_MAX_CREDIT = (1 << 32) - 1  # what one CREDIT record can hold


def short(peer_id: str) -> str:
    """A peer id as people want to read it: libp2p ids differ at their end."""
    return peer_id if len(peer_id) <= 12 else f"..{peer_id[-8:]}"


HELLO_BYTES = 2048  # of a header that a stranger may make us decode
FIRST_WINDOW_BYTES = 1 << 20  # lent to who opened a stream until we have taken its first frame and wait for another


class FramedStream(asyncio.BufferedProtocol):
    """base.Stream over an asyncio.Transport, to which it is attached by `attach` or by a protocol factory.

    Until `establish` it lends the small handshake window and accepts no payloads. Then it lends the whole window; a stream that
    came in lends FIRST_WINDOW_BYTES until its first frame was taken and another is awaited. So streams that others open, and
    that nobody reads, hold little memory.
    """

    def __init__(
        self, peer_id: str, *, purpose: str = "", limits: Limits | None = None, close_s: float = 3.0, check: bool = True
    ) -> None:
        self.peer_id = peer_id
        self.purpose = purpose
        self.sent_bytes = 0
        self.received_bytes = 0
        self.came_from = ""  # the multiaddress of the connection that brought it here, where the transport knows
        self.keep: object = None  # whatever must live as long as the connection does
        self._limits = limits or Limits()
        self._close_s = close_s
        self._encoder = Encoder(self._limits, check)
        self._decoder = Decoder(self._limits, check)
        self._decoder.max_payload_bytes = 0
        if not purpose:  # it came in, and may be a stranger's
            self._decoder.max_header_bytes = HELLO_BYTES
        self.transport: asyncio.Transport | None = None
        self._inbox: deque[tuple[Frame, int]] = deque()  # bounded by the receive window
        largest_head = frame_cost(self._limits.header_bytes, self._limits.payloads)
        self._incoming = ReceiveWindow(largest_head + MAX_CHUNK_BYTES)
        self.outgoing = SendWindow()
        self._sending = asyncio.Lock()
        self._senders = 0  # tasks that hold the lock or wait for it
        self._paused = False  # the transport's buffer is not empty
        self._closing = False  # we said goodbye
        self._why: str | None = None  # why the stream is over, once it is
        self._error: ProtocolError | None = None  # what the other side did wrong, for recv
        self._receiver: asyncio.Future[None] | None = None
        self._sender: asyncio.Future[None] | None = None
        self._lost = asyncio.Event()
        self._rate = Rate()  # of what arrives; what leaves is only known to have left when it has arrived

    def __repr__(self) -> str:
        return f"<stream {self.purpose!r} with {short(self.peer_id)}{', closed' if self._why else ''}>"

    # -- life

    def attach(self, transport: asyncio.Transport, early: bytes = b"") -> None:
        """Take over a transport; `early` is what its previous protocol had already read."""
        if transport.is_closing():
            self._end("it was closed before it was used")
            return
        transport.pause_reading()  # uvloop chooses its read callback when reading starts
        transport.set_protocol(self)
        self.connection_made(transport)
        if early:
            self._feed(early)
        transport.resume_reading()

    def establish(self, purpose: str) -> None:
        """The handshake succeeded: lend more, and accept payloads."""
        came_in, self.purpose = not self.purpose, purpose
        self._decoder.max_payload_bytes = self._limits.payload_bytes
        self._decoder.max_header_bytes = self._limits.header_bytes
        self._widen(min(self._limits.window_bytes, FIRST_WINDOW_BYTES) if came_in else self._limits.window_bytes)

    @property
    def max_payload_bytes(self) -> int:
        return self._decoder.max_payload_bytes

    @max_payload_bytes.setter
    def max_payload_bytes(self, value: int) -> None:
        self._decoder.max_payload_bytes = value

    @property
    def received_payload_bytes(self) -> int:
        return self._decoder.payload_bytes

    @property
    def closed(self) -> bool:
        return self._why is not None

    def rates(self) -> tuple[float | None, float | None]:
        seen = self._rate.take()
        below = self.transport.get_extra_info("rate") if self.transport is not None else None
        return None, below or seen

    def under_way(self) -> int | None:
        found: int | None = self.transport.get_extra_info("under_way") if self.transport is not None else None
        return found

    def throttle(self, bytes_per_s: float) -> None:
        if (throttle := getattr(self.transport, "throttle", None)) is not None:
            throttle(bytes_per_s)

    # -- sending

    async def send(self, frame: Frame) -> None:
        payloads: Sequence[memoryview] = views(frame) if frame.payloads else ()
        sizes = [len(view) for view in payloads]
        head, cost = self._encoder.head(frame, sizes)
        if (total := sum(sizes)) > _JOINED_BYTES:
            async with self._my_turn():
                await self._may_send(large=True)
                await self._send_chunks(head, cost, payloads)
            return
        data = b"".join((head, *self._encoder.chunks(payloads))) if total else head
        large = bool(payloads) or (len(head) > HELLO_BYTES and not self._incoming.shaking)
        if self._senders or not self._ready(large):
            async with self._my_turn():
                await self._may_send(large)
                self._spend_and_write(cost + total, data)
        else:
            self._spend_and_write(cost + total, data)

    def _spend_and_write(self, cost: int, data: bytes) -> None:
        self.outgoing.spend(cost)
        self.write_bytes(data)

    async def _send_chunks(self, head: bytes, cost: int, payloads: Sequence[memoryview]) -> None:
        """A large frame, from the payloads' own memory, which the transport may refer to until it has written all."""
        begun = complete = False
        try:
            records = self._encoder.chunks(payloads)
            for prelude, chunk in zip(records, records):
                if begun:
                    await self._may_send(large=True)
                    self._spend_and_write(len(chunk), bytes(prelude))
                else:
                    self._spend_and_write(cost + len(chunk), head + prelude)
                    begun = True
                self.write_bytes(chunk)
            complete = True
            await self._flushed()
        finally:
            if begun and not complete and self._why is None:
                self.write_bytes(self._encoder.control(RETRACT))

    @contextlib.asynccontextmanager
    async def _my_turn(self) -> AsyncIterator[None]:
        self._senders += 1
        try:
            async with self._sending:
                yield
        finally:
            self._senders -= 1

    def _ready(self, large: bool) -> bool:
        """Whether a frame may go now: there is credit, the transport has room, and no stranger's limit is in force there.

        A hello may cost more than the first window. The proof behind it goes all the same, as credit comes only after that.
        """
        window = self.outgoing
        least = 0 if window.accepted else -frame_cost(HELLO_BYTES, 0)
        return not self._paused and window.available > least and (window.accepted or not large) and not self._over

    async def _may_send(self, large: bool) -> None:
        """Wait until `_ready`; only the holder of the lock waits. StreamClosed when the stream is over."""
        while not self._ready(large) and not self._over:
            await self._wait_to_send()
        self._refuse_closed()

    async def _flushed(self) -> None:
        while self._paused and not self._over:
            await self._wait_to_send()
        self._refuse_closed()

    async def _wait_to_send(self) -> None:
        self._sender = asyncio.get_running_loop().create_future()
        try:
            await self._sender
        finally:
            self._sender = None

    @property
    def _over(self) -> bool:
        return self._why is not None or self._closing

    def _refuse_closed(self) -> None:
        if self._why is not None:
            raise StreamClosed(self._why)
        if self._closing:
            raise StreamClosed(f"{self!r} was closed here")

    def write_bytes(self, data: bytes | memoryview) -> None:
        assert self.transport is not None
        self.sent_bytes += len(data)
        self.transport.write(data)

    def _widen(self, window_bytes: int) -> None:
        if cost := self._incoming.widen(min(window_bytes, _MAX_CREDIT)):
            self._grant(cost)

    def _grant(self, cost: int) -> None:
        if self._why is None and self.transport is not None:
            self.write_bytes(self._encoder.control(CREDIT, cost))

    # -- receiving

    async def recv(self) -> Frame:
        if self._receiver is not None:
            raise RuntimeError(f"two tasks receive from {self!r}; frames have one order, so only one may")
        if self._incoming.frames_taken == 1:
            self._widen(self._limits.window_bytes)
        while not self._inbox:
            if self._error is not None:
                raise self._error
            if self._why is not None:
                raise StreamClosed(self._why)
            self._receiver = asyncio.get_running_loop().create_future()
            self._take(self._incoming.complete())  # whoever waits for a frame has room for it, however large
            try:
                await self._receiver
            finally:
                self._receiver = None
        frame, cost = self._inbox.popleft()
        self._incoming.frames_taken += not self._incoming.shaking
        self._take(cost)
        return frame

    def _take(self, cost: int) -> None:
        """Bytes have been taken out of the window: lend them again, when there are enough of them."""
        if cost and (grant := self._incoming.release(cost)):
            self._grant(grant)

    def _happened(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Arrived):
                self._rate.end(asyncio.get_running_loop().time())
                self._incoming.arrive(event.cost)
                if self._closing:
                    self._take(self._incoming.complete())  # nobody else will
                else:
                    self._inbox.append((event.frame, self._incoming.complete()))
                    self._wake(self._receiver)
            elif isinstance(event, Spent):
                self._incoming.arrive(event.cost)
                if self._receiver is not None and not self._inbox:
                    self._take(self._incoming.complete())
            elif isinstance(event, Credit):
                self.outgoing.grant(event.cost)
                self._wake(self._sender)
            elif isinstance(event, Retracted):
                self._take(self._incoming.complete())
            elif isinstance(event, Goodbye):
                transport = self.transport
                self._end("the other side closed it")
                if transport is not None:
                    transport.close()

    # -- the end

    async def aclose(self) -> None:
        """Say goodbye and wait, bounded, until the other side has read everything and closed."""
        try:
            if self._why is None and self.transport is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._close_s):
                        async with self._my_turn():
                            if self._why is None and not self._closing:
                                self._closing = True
                                self.write_bytes(self._encoder.control(GOODBYE))
                                self._drop_inbox()
                        await self._lost.wait()
        finally:
            self.abort()

    def abort(self) -> None:
        self._inbox.clear()
        transport, self.transport = self.transport, None
        self._end("it was closed here")
        if transport is not None:
            transport.abort()

    def _drop_inbox(self) -> None:
        """Nobody will take these frames; the other side must not wait for that before it can read our goodbye."""
        for _, cost in self._inbox:
            self._take(cost)
        self._inbox.clear()
        self._take(self._incoming.complete())
        self._wake(self._receiver)

    def _end(self, why: str) -> None:
        if self._why is None:
            self._why = f"the stream {self.purpose!r} with {short(self.peer_id)} is over: {why}"
        self._lost.set()
        self._decoder.close()
        self._wake(self._receiver)
        self._wake(self._sender)

    @staticmethod
    def _wake(waiter: asyncio.Future[None] | None) -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # Paused means: not everything is with the kernel yet. With this limit uvloop writes at once, not after this turn
        # of the loop.
        self.transport.set_write_buffer_limits(high=0)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._decoder.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.received_bytes += nbytes
        if self._why is not None:
            return
        if self._decoder.mid_frame:
            self._rate.more(nbytes)
        else:
            self._rate.begin(asyncio.get_running_loop().time())
        try:
            self._happened(self._decoder.advance(nbytes))
        except ProtocolError as error:
            self._misbehaved(error)
        if self._decoder.mid_frame and not self._rate.running:  # the next frame came right behind
            self._rate.begin(asyncio.get_running_loop().time())

    def _feed(self, data: bytes) -> None:
        self.received_bytes += len(data)
        try:
            self._happened(self._decoder.feed(data))
        except ProtocolError as error:
            self._misbehaved(error)

    def _misbehaved(self, error: ProtocolError) -> None:
        self._error = ProtocolError(f"{short(self.peer_id)}, stream {self.purpose!r}: {error}")
        transport, self.transport = self.transport, None
        self._end(f"the other side broke the protocol: {error}")
        if transport is not None:
            transport.abort()

    def eof_received(self) -> bool:
        return False  # close: half-open streams have no use here

    def connection_lost(self, exc: Exception | None) -> None:
        where = " in the middle of a frame" if self._decoder.mid_frame else ""
        self._end(
            "it was closed here" if self._closing else f"the connection was lost{where}{f': {exc}' if exc else ''}"
        )
        self.transport = None

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._wake(self._sender)
