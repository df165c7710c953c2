"""Devices that come while a job runs: profiled beside the training, and told of once they can be planned with.

The idea: a device is no use to a planner before its links and its pace are known. Its links it measures by itself; then the owner
asks it for a profile of the job's blocks, as it asked the others before the first plan. No step waits for either.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping

import structlog

from meshcee.errors import MeshceeError
from meshcee.timing import BlockTimes
from peers.mesh_view import MeshView

__all__ = ["Newcomers"]

log = structlog.get_logger()

LINKS_S = 20.0  # that a device may take to measure its links to the members; then it is planned with what there is

Ask = Callable[[], Awaitable[Mapping[str, BlockTimes]]]


class Newcomers:
    """One job's. `times` are all profiles so far, by peer; `ask` gets those of the devices that are idle now."""

    def __init__(self, agent: MeshView, ask: Ask, times: Mapping[str, BlockTimes]) -> None:
        self.times = dict(times)
        self._agent = agent
        self._ask = ask
        self._known = set(times)
        self._seen_s: dict[str, float] = {}  # when each of the others was seen first
        self._asked: set[str] = set()
        self._asking: asyncio.Task[None] | None = None

    def look(self, members: Collection[str]) -> list[str]:
        """Devices that can be planned with since the last look, in words with peer ids. Called with every step."""
        present = self._agent.devices(members).keys()
        self._known = self._known & self._agent.directory.peers.keys() | {*members}
        now_s = self._agent.monotonic()
        self._seen_s = {p: self._seen_s.get(p, now_s) for p in present - self._known}
        if self._asking is None:
            if self._seen_s and (found := self._due(members)):
                self._asked = found
                self._asking = self._agent.beside(self._profile())
            return []
        if not self._asking.done():
            return []
        self._asking = None
        self._known |= self._asked
        return [f"{peer} has joined" for peer in sorted(self._asked & present)]

    def _due(self, members: Collection[str]) -> set[str]:
        """Of those who are new: whose links to all members are known, or who has had long enough to measure them."""
        links, now_s = self._agent.links(members), self._agent.monotonic()
        return {
            peer
            for peer, since_s in self._seen_s.items()
            if now_s - since_s >= LINKS_S or all({(peer, m), (m, peer)} <= links.keys() for m in members)
        }

    async def _profile(self) -> None:
        with contextlib.suppress(MeshceeError):  # its claimed speed stands in
            self.times |= await self._ask()
        log.info("devices have come while the job runs", peers=sorted(self._asked))

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
