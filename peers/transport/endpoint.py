"""What every transport does, whatever carries its bytes: accept, dial, hand streams to handlers, close in bounded time.

The idea: a transport is an Endpoint plus `_connect` (dial a byte stream) and a call of `_accepted` for each byte stream
that comes in. Every task lives in the endpoint's one TaskGroup; a handler's error ends its stream and nothing else.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Coroutine, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import structlog

from dht import ENROL, Members
from meshcee.config import Limits, Timeouts
from meshcee.errors import JoinError, MeshceeError, ProtocolError, UsageError
from meshcee.events import Event
from peers.transport import handshake
from peers.transport.base import Handler, Stream, StreamClosed
from peers.transport.patience import Patience, Seldom
from peers.transport.stream import FramedStream, short

if TYPE_CHECKING:
    from peers.transport.direct import Direct, Path

__all__ = ["Endpoint"]

log = structlog.get_logger(__name__)

MAX_STRANGERS = 256  # handshakes under way with peers that never proved the key: each may cost 100 kB for `handshake_s`


class Endpoint(ABC):
    """Base of the transports. `mesh_key` is the mesh's shared secret; b"" means an open mesh."""

    makes = FramedStream

    def __init__(
        self,
        peer_id: str,
        mesh_key: bytes,
        *,
        timeouts: Timeouts | None = None,
        limits: Limits | None = None,
        members: Members | None = None,
    ) -> None:
        self.peer_id = peer_id
        self.members = members or Members()
        self.members.on_change.append(self._hang_up_on_the_revoked)
        self.addresses: Sequence[str] = ()
        self.timeouts = timeouts or Timeouts()
        self.limits = limits or Limits()
        self.direct: Direct | None = None  # set where streams may leave for connections of their own; started with us
        self._mesh_key = mesh_key
        self._handlers: dict[str, Handler] = {}
        self._accepted_per_peer: Counter[str] = Counter()
        self.streams: set[FramedStream] = set()
        self._handling: set[asyncio.Task[None]] = set()
        self._strangers: dict[FramedStream, None] = {}  # accepted, of peers that never proved the key; oldest first
        self._patience = Patience(lambda: asyncio.get_running_loop().time())
        self._seldom = {event: Seldom(event) for event in (Event.STREAM_REFUSED, Event.HANDLER_FAILED)}
        self._group: asyncio.TaskGroup | None = None
        self._closing = False

    # -- to be provided by the transport

    @abstractmethod
    async def _start(self) -> None:
        """Begin to listen."""

    @abstractmethod
    async def _stop(self) -> None:
        """Stop listening; bounded by the caller."""

    @abstractmethod
    async def _connect(self, stream: FramedStream, addresses: Sequence[str]) -> None:
        """Dial `stream.peer_id` and attach the stream; raises JoinError."""

    # -- base.Transport

    def serve(self, purpose: str, handler: Handler) -> None:
        """Hand accepted streams of this purpose to `handler`; a second call replaces the first."""
        self._handlers[purpose] = handler

    async def open(self, peer_id: str, purpose: str, addresses: Sequence[str] = ()) -> Stream:
        if self._group is None or self._closing:
            raise UsageError("the transport is not running: use it inside `async with`")
        if peer_id == self.peer_id:
            raise JoinError(
                f"peer {short(peer_id)} is this peer itself: two peers with one identity, or its own address to join; "
                "give each peer an identity file of its own"
            )
        stream = self.make_stream(peer_id, purpose)
        try:
            try:
                async with asyncio.timeout(self.timeouts.dial_s):
                    await self._connect(stream, addresses)
            except TimeoutError as error:
                raise JoinError(
                    f"peer {short(peer_id)} did not answer within {self.timeouts.dial_s:g} s: "
                    "check that it runs and that its address and port are reachable from here"
                ) from error
            path = self.direct.to(peer_id, purpose) if self.direct is not None else None
            shaking = handshake.dial(stream, self.peer_id, purpose, self._mesh_key, members=self.members, path=path)
            return await self._shake(stream, shaking, path)
        except BaseException:
            stream.abort()
            self._forget(stream)
            raise

    async def __aenter__(self) -> Self:
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        try:
            if self.direct is not None:
                await self.direct.start()
            await self._start()
        except BaseException:
            if self.direct is not None:
                self.direct.stop()
            await self._group.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._group is not None
        self._closing = True
        if self.direct is not None:
            self.direct.stop()
        try:
            async with asyncio.timeout(self.timeouts.shutdown_s):
                await self._stop()
        except Exception as problem:
            log.warning("transport.stop_failed", peer=short(self.peer_id), error=repr(problem))
        finally:
            for task in list(self._handling):
                task.cancel()
            for stream in list(self.streams):
                if error is None:
                    self._group.create_task(stream.aclose())
                else:
                    stream.abort()
            try:
                # The group is not told of the body's error, which would reach the caller wrapped in an ExceptionGroup.
                await self._group.__aexit__(None, None, None)
            finally:
                for stream in list(self.streams):
                    stream.abort()

    # -- streams

    def make_stream(self, peer_id: str, purpose: str = "", check: bool = True) -> FramedStream:
        for over in [s for s in self.streams if s.closed]:
            self._forget(over)
        stream = self.makes(peer_id, purpose=purpose, limits=self.limits, close_s=self.timeouts.shutdown_s, check=check)
        self.streams.add(stream)
        return stream

    @cached_property
    def _past(self) -> list[int]:
        """Bytes sent and received by streams that are over."""
        return [0, 0]

    def _forget(self, stream: FramedStream) -> None:
        if stream in self.streams:
            self.streams.remove(stream)
            self._past[0] += stream.sent_bytes
            self._past[1] += stream.received_bytes

    def carried_bytes(self) -> tuple[int, int]:
        """Sent and received, by all streams that there have been."""
        sent, received = self._past
        return sent + sum(s.sent_bytes for s in self.streams), received + sum(s.received_bytes for s in self.streams)

    def _accepted(self, stream: FramedStream) -> None:
        """A byte stream came in: shake hands and handle it in a task of ours.

        Strangers who never finish a handshake keep nobody out: the oldest one makes way, and members do not count. Those who fail
        again and again cost no handshake any more.
        """
        # Refusing in words needs a handshake, so a few more than the limit may be under way; beyond that, hang up.
        too_many = self._accepted_per_peer[stream.peer_id] >= 2 * self._cap
        if self._group is None or self._closing or too_many or self._patience.is_over(stream.peer_id):
            stream.abort()
            self._forget(stream)
            return
        if stream.peer_id not in self._patience:
            if len(self._strangers) >= MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.abort()
            self._strangers[stream] = None
        self._accepted_per_peer[stream.peer_id] += 1
        task = self._group.create_task(self._handle(stream))
        self._handling.add(task)
        task.add_done_callback(self._handling.discard)

    def _hang_up_on_the_revoked(self) -> None:
        for stream in list(self.streams):
            if self.members.is_revoked(stream.peer_id):
                self._patience.forget(stream.peer_id)
                stream.abort()

    @property
    def _cap(self) -> int:
        return self.limits.streams_per_peer

    async def _handle(self, stream: FramedStream) -> None:
        try:
            if (welcome := await self._welcome(stream)) is None:
                return
            stream = welcome
            await self._handlers[stream.purpose](stream)
            await stream.aclose()
        except Exception as error:
            self._seldom[Event.HANDLER_FAILED].ended(error, peer=short(stream.peer_id), purpose=stream.purpose)
        finally:
            self._strangers.pop(stream, None)
            stream.abort()
            self._forget(stream)
            self._accepted_per_peer[stream.peer_id] -= 1
            if not self._accepted_per_peer[stream.peer_id]:
                del self._accepted_per_peer[stream.peer_id]

    async def _welcome(self, stream: FramedStream) -> FramedStream | None:
        """Shake hands as the accepting side; None when the stream was refused, which was then logged."""

        def refusal(purpose: str) -> str | None:
            if self._accepted_per_peer[stream.peer_id] > self._cap:
                return f"it has {self._cap} streams to this peer already: close some"
            if purpose not in self._handlers:
                return f"this peer does not serve {purpose!r} at the moment"
            return None

        path = self.direct.here(self.addresses) if self.direct is not None else None
        shaking = handshake.accept(
            stream, self.peer_id, self._mesh_key, members=self.members, refusal=refusal, path=path
        )
        try:
            welcome = await self._shake(stream, shaking, path)
        except MeshceeError as error:
            if stream in self._strangers:  # else it made way for another one
                self._patience.failed(stream.peer_id)
            if isinstance(error.__cause__, StreamClosed):  # nobody was refused: whoever opened it is gone
                log.debug(Event.STREAM_CLOSED, peer=short(stream.peer_id), reason=str(error))
            else:
                self._seldom[Event.STREAM_REFUSED].log(peer=short(stream.peer_id), error=str(error))
            return None
        finally:
            is_stranger = stream in self._strangers
            self._strangers.pop(stream, None)
        if welcome.purpose != ENROL:
            self._patience.proven(stream.peer_id)
        elif is_stranger:  # it has proven an invite, which ever new identities can: a stranger until it is a member
            self._strangers[welcome] = None
        return welcome

    async def _shake(self, stream: FramedStream, shaking: Coroutine[Any, Any, str], path: Path | None) -> FramedStream:
        """Run one side of a handshake under its time-out; JoinError or NotPermittedError mean that it is closed.

        The stream to use from then on is another when there is a direct path.
        """
        try:
            async with asyncio.timeout(self.timeouts.handshake_s):
                done = await shaking
            bundle = path.bundle() if path is not None else None
        except TimeoutError as error:
            stream.abort()
            raise JoinError(
                f"peer {short(stream.peer_id)} did not finish the handshake within {self.timeouts.handshake_s:g} s: "
                "check that it is a meshcee peer and not overloaded"
            ) from error
        except StreamClosed as error:
            raise JoinError(f"peer {short(stream.peer_id)} hung up during the handshake: {error}") from error
        except ProtocolError as error:
            stream.abort()
            raise JoinError(f"peer {short(stream.peer_id)} does not answer as a meshcee peer does: {error}") from error
        except MeshceeError:
            await stream.aclose()  # so that a refusal of ours arrives
            raise
        finally:
            if path is not None:
                path.close()
        if bundle is not None:
            assert self._group is not None
            self._group.create_task(self._leave(stream))
            came_from = stream.came_from
            # What does not open is not what was sent: no checksums.
            stream = self.make_stream(stream.peer_id, stream.purpose, check=False)
            stream.came_from = came_from
            bundle.start(stream)
        stream.establish(done)
        return stream

    async def _leave(self, stream: FramedStream) -> None:
        """A stream on which hands were shaken for another."""
        await stream.aclose()
        self._forget(stream)
