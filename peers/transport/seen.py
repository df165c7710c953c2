"""From which address a peer is seen to come: behind a router with translation it is the router's, which the peer cannot know.

The idea: whoever accepts a connection knows where it comes from, and says so when asked. A stream that another member passes on
comes from nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dht import checked
from meshcee.errors import ProtocolError
from meshcee.fields import read
from peers.transport.base import Frame, Stream, Transport
from peers.transport.stream import FramedStream

__all__ = ["SEEN", "seen_from", "tell_whence"]

SEEN = "seen"  # the purpose, and the kind of the answer


@dataclass(frozen=True)
class Seen:
    """`address` is a multiaddress; "" where nobody knows."""

    address: str


async def tell_whence(stream: Stream) -> None:
    """To whoever asks."""
    await stream.send(Frame(SEEN, {"address": stream.came_from if isinstance(stream, FramedStream) else ""}))


async def seen_from(transport: Transport, peer_id: str, addresses: Sequence[str]) -> str:
    """The multiaddress by which that peer sees this one; "" where it does not know. Raises JoinError, also of an older peer,
    StreamClosed and ProtocolError; time-outs are the caller's."""
    stream = await transport.open(peer_id, SEEN, addresses)
    stream.max_payload_bytes = 0
    try:
        frame = await stream.recv()
        if frame.kind != SEEN:
            raise ProtocolError(f"expected from where this peer comes, got a frame of kind {frame.kind!r}")
        found = read(frame.header, Seen, "from where this peer comes").address
        return checked(found) if found else ""
    finally:
        await stream.aclose()
