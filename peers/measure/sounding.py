"""Links that somebody asks about: measured again at once, where probes would rest because a peer trains.

The idea: a plan that does without a link never shows when that link is well again. So the owner of the job asks an end of
it; that peer probes the link next, with little and seldom enough that training goes on beside it. The figure reaches the
owner like every other, by gossip.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable

from meshcee.errors import MeshceeError, ProtocolError
from peers.mesh_view import MeshView
from peers.transport import Frame, Stream, StreamClosed
from peers.wire import messages, need

__all__ = ["SHARE", "Wishes", "sound"]

ASK_S = 1.0
REST_S = 2.0  # between two probes of one link that were asked for, at least
SHARE = 0.05  # of a link's time, at most, goes into them


class Wishes:
    """Peers to which a link is to be measured now. Serves the stream `sound`."""

    def __init__(self, agent: MeshView) -> None:
        self._agent = agent
        self._peers: dict[str, None] = {}  # in the order in which they were asked for
        self._rests_until_s: dict[str, float] = {}
        self._news = asyncio.Event()
        agent.transport.serve("sound", self._serve)

    async def _serve(self, stream: Stream) -> None:
        stream.max_payload_bytes = 0
        async with asyncio.timeout(self._agent.timeouts.handshake_s):
            frame = await stream.recv()
        if frame.kind != messages.SOUND:
            raise ProtocolError(f"expected a peer to probe, got a frame of kind {frame.kind!r}")
        peer = need(frame.header, "peer", str)
        if peer in self._agent.directory.peers and peer != self._agent.peer_id:
            self._peers[peer] = None
            self._news.set()

    def take(self) -> str | None:
        """The next one, if any; each is given once, and not again for a while."""
        self._news.clear()
        now_s = self._agent.monotonic()
        self._rests_until_s = {p: s for p, s in self._rests_until_s.items() if s > now_s}
        while self._peers:
            peer = next(iter(self._peers))
            del self._peers[peer]
            if peer in self._agent.directory.peers and peer not in self._rests_until_s:
                self._rests_until_s[peer] = now_s + REST_S
                return peer
        return None

    def probed(self, peer: str, busy_s: float) -> None:
        """The link to it was measured and in use for so long, so it rests."""
        self._rests_until_s[peer] = self._agent.monotonic() + max(REST_S, busy_s / SHARE)

    async def wait(self, seconds: float) -> None:
        """Until there is one, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()


async def sound(agent: MeshView, pairs: Collection[tuple[str, str]]) -> None:
    """Ask the first peer of each pair to probe the second; who cannot be asked is not."""
    addresses = agent.addresses_of({source for source, _ in pairs})
    async with asyncio.TaskGroup() as group:
        for source, target in pairs:
            if source in addresses:
                group.create_task(_ask(agent, source, addresses[source], target))


async def _ask(agent: MeshView, source: str, addresses: Iterable[str], target: str) -> None:
    with contextlib.suppress(MeshceeError, StreamClosed, TimeoutError):
        async with asyncio.timeout(ASK_S):
            stream = await agent.transport.open(source, "sound", tuple(addresses))
            try:
                await stream.send(Frame(messages.SOUND, {"peer": target}))
                await stream.aclose()
            finally:
                stream.abort()
