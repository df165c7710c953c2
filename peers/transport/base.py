"""What a transport is: frames over ordered streams between two authenticated peers.

The idea: everything above this file sees only `Frame`, `Stream` and `Transport`; libp2p and the in-process network
implement them and pass one conformance suite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Frame", "Handler", "Stream", "StreamClosed", "Transport", "closed", "frames", "passed"]

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Frame:
    """One message: a kind, a small msgpack-able header, and raw payloads (tensors as contiguous bytes)."""

    kind: str
    header: Mapping[str, Any] = field(default_factory=dict)
    payloads: Sequence[Buffer] = ()

    @property
    def payload_bytes(self) -> int:
        return sum(memoryview(p).nbytes for p in self.payloads)


class StreamClosed(ConnectionError):
    """The other end is gone: end of file, a reset, or our own `abort`. The message says which and names the peer."""


class Stream(Protocol):
    """An ordered, reliable, flow-controlled sequence of frames in both directions with one authenticated peer.

    `send` waits for byte credits (backpressure); many tasks may send, a frame is never interleaved with another. When
    it returns, the payloads' memory may be reused. Cancelling it retracts the frame and leaves the stream usable; but
    then leave the payloads' memory alone, a part of it may still be on its way.
    `recv` is for one task and may be cancelled without losing a frame; payloads arrive as writable memoryviews.
    Both raise StreamClosed when the other end is gone; recv raises ProtocolError on malformed input.
    """

    peer_id: str  # the remote peer, proven by the handshake
    purpose: str  # chosen by the opener: "join", "plan", "job", "stage", "probe", ...
    max_payload_bytes: int  # settable: a frame announcing more is refused before memory is spent
    sent_bytes: int
    received_bytes: int

    @property
    def received_payload_bytes(self) -> int:
        """Of payloads alone: what nobody sends but to get on with the work."""
        ...

    @property
    def closed(self) -> bool:
        """Nothing can be sent any more; frames that have arrived may still be received."""
        ...

    def rates(self) -> tuple[float | None, float | None]:
        """Bytes per second, out and in, of the large frames since the last call; None where that is not known."""
        ...

    def under_way(self) -> int | None:
        """Bytes that were sent and, as far as this end knows, have not arrived; None where it cannot know."""
        ...

    def throttle(self, bytes_per_s: float) -> None:
        """Send no faster from now on, where this end can see to it; inf is no limit."""
        ...

    async def send(self, frame: Frame) -> None: ...

    async def recv(self) -> Frame: ...

    async def aclose(self) -> None:
        """Polite, bounded close: what was sent is flushed."""
        ...

    def abort(self) -> None:
        """Immediate close; never blocks, may be called twice."""
        ...


Handler = Callable[[Stream], Awaitable[None]]


class Transport(Protocol):
    """A peer's way to reach others. Lifetime is `async with`; leaving it closes every stream, bounded in time."""

    @property
    def peer_id(self) -> str: ...

    @property
    def addresses(self) -> Sequence[str]:
        """Multiaddresses with /p2p/ID that others may dial."""
        ...

    def serve(self, purpose: str, handler: Handler) -> None:
        """Call `handler(stream)` in a task of the transport's TaskGroup for each accepted stream of this purpose.

        The stream is closed politely when the handler returns (its last frame arrives) and aborted when it raises; a
        handler's error is logged and never takes the transport down.
        """
        ...

    async def open(self, peer_id: str, purpose: str, addresses: Sequence[str] = ()) -> Stream:
        """Dial and handshake; `addresses` are hints where the peer listens, needed only before it is known otherwise.

        Raises JoinError (unreachable, protocol version, purpose not served), NotPermittedError (mesh key, identity).
        """
        ...


async def passed(source: Stream, target: Stream) -> None:
    """Frames from one stream to another, one at a time, until one of the two is over; then the target is closed as well."""
    await frames(source, target)
    await closed(target)


async def frames(source: Stream, target: Stream) -> None:
    with contextlib.suppress(StreamClosed):
        while True:
            await target.send(await source.recv())


async def closed(stream: Stream) -> None:
    """Say goodbye, unless the other side was first: what has come from it is still to be read."""
    if not stream.closed:
        await stream.aclose()
