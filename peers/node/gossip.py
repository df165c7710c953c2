"""Gossip over streams: what dht/gossip.py decides to tell, delivered; what others tell, heard.

The idea: a stream a delivery. News are rare and small, and whom to tell is a matter of chance, so nothing is kept open. Who was
told a moment ago is still connected, so no address is dialled again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dht import MAX_RUMOURS, Gossiper
from meshcee.errors import JoinError, ProtocolError
from peers.mesh_view import MeshView
from peers.transport import Frame, Stream, StreamClosed
from peers.wire import messages

__all__ = ["CONNECTED_S", "GossipService"]

CONNECTED_S = 10.0  # a connection stays after its last stream


class GossipService:
    """Serves the stream `gossip` on every peer, and runs in the agent's TaskGroup."""

    def __init__(self, agent: MeshView) -> None:
        self._agent = agent
        self._told: dict[str, tuple[float, Sequence[str]]] = {}  # when, and where; in that order
        self._gossiper = Gossiper(agent.directory, agent.peer_id, self.send)
        self.run = self._gossiper.run
        agent.transport.serve("gossip", self._serve)

    async def send(self, peer_id: str, rumours: Sequence[bytes]) -> None:
        agent = self._agent
        where, now_s = agent.addresses_of([peer_id]).get(peer_id, ()), agent.monotonic()
        self._told = {p: told for p, told in self._told.items() if now_s - told[0] < CONNECTED_S}
        _, before = self._told.pop(peer_id, (0.0, None))
        try:
            async with asyncio.timeout(agent.timeouts.handshake_s):
                stream = await agent.transport.open(peer_id, "gossip", () if before == where else where)
                try:
                    stream.max_payload_bytes = 0
                    await stream.send(Frame(messages.NEWS, {}, rumours))
                    await stream.aclose()
                finally:
                    stream.abort()
        except (StreamClosed, TimeoutError) as error:
            raise JoinError(f"peer {peer_id} did not take the news: {error}") from error
        self._told[peer_id] = now_s, where

    async def _serve(self, stream: Stream) -> None:
        stream.max_payload_bytes = MAX_RUMOURS * self._agent.limits.record_bytes
        async with asyncio.timeout(self._agent.timeouts.handshake_s):
            frame = await stream.recv()
        if frame.kind != messages.NEWS or len(frame.payloads) > MAX_RUMOURS:
            raise ProtocolError(f"expected at most {MAX_RUMOURS} records, got a frame of kind {frame.kind!r}")
        for payload in frame.payloads:
            await self._gossiper.hear(bytes(payload))
