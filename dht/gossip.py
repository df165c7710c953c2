"""Word of a change, from peer to peer: faster than the next poll of the DHT, and bounded in traffic.

The idea: rumour mongering (Demers et al., 1987). Whoever hears something new tells a few peers chosen by chance, for as
many turns as the logarithm of the mesh's size, and then no more. The DHT stays the truth that everybody polls, so a
rumour that dies early costs time and nothing else.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

from dht.directory import Directory
from meshcee.errors import MeshceeError

__all__ = ["EVERY_S", "FANOUT", "MAX_RUMOURS", "Gossip", "Gossiper"]

log = structlog.get_logger()

EVERY_S = 0.2  # between two turns of a peer that has something to tell
FANOUT = 2  # peers told in a turn
MORE_TURNS = 2  # beyond the logarithm, so that hardly anybody is left out
MAX_RUMOURS = 32  # in one turn; records are a few kilobytes at most
MAX_HOT = 1024


@dataclass
class _Hot:
    data: bytes
    turns: int


class Gossip:
    """What one peer still tells. Pure: `spread` when something is new, `turn` when it is time."""

    def __init__(self, chance: random.Random | None = None) -> None:
        self._chance = chance or random.Random()
        self._hot: dict[tuple[str, str], _Hot] = {}

    def __bool__(self) -> bool:
        return bool(self._hot)

    def spread(self, key: tuple[str, str], data: bytes, others: int) -> None:
        """Tell this for as many turns as a mesh of so many other peers needs; an older version is told no more.

        Messages of one change: FANOUT * (log2(others + 1) + MORE_TURNS) a peer, at most.
        """
        self._hot.pop(key, None)
        while len(self._hot) >= MAX_HOT:
            del self._hot[next(iter(self._hot))]  # the oldest has been told most
        self._hot[key] = _Hot(data, math.ceil(math.log2(others + 1)) + MORE_TURNS)

    def turn(self, others: Sequence[str]) -> tuple[list[str], list[bytes]]:
        """Whom to tell now, and what."""
        chosen = self._chance.sample(others, min(FANOUT, len(others)))
        told = list(self._hot.items())[-MAX_RUMOURS:]
        for key, rumour in told:
            rumour.turns -= 1
            if rumour.turns <= 0:
                del self._hot[key]
        return chosen, [rumour.data for _, rumour in told]


class Gossiper:
    """The shell: `run` in the owner's TaskGroup. `send` delivers sealed records to a peer; that it fails costs nothing."""

    def __init__(
        self,
        directory: Directory,
        me: str,
        send: Callable[[str, Sequence[bytes]], Awaitable[None]],
        *,
        every_s: float = EVERY_S,
        chance: random.Random | None = None,
    ) -> None:
        self._directory = directory
        self._me = me
        self._send = send
        self._every_s = every_s
        self._gossip = Gossip(chance)
        self._news = asyncio.Event()
        self._telling: set[str] = set()
        directory.on_publish = self._spread

    async def hear(self, data: bytes) -> None:
        """A record that another peer has passed on. ProtocolError or NotPermittedError when it is no valid one."""
        if (key := await self._directory.hear(data)) is not None:
            self._spread(key, data)

    def _spread(self, key: tuple[str, str], data: bytes) -> None:
        self._gossip.spread(key, data, len(self._directory.peers))
        self._news.set()

    async def run(self) -> None:
        """Tell what is new, one turn after another, as long as there is something."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._news.wait()
                # Whoever is slow to answer, or gone, holds up nobody else.
                others = [p for p in self._directory.peers if p != self._me and p not in self._telling]
                chosen, rumours = self._gossip.turn(others)
                if not self._gossip:
                    self._news.clear()
                for peer in chosen:
                    self._telling.add(peer)
                    group.create_task(self._tell(peer, rumours))
                await asyncio.sleep(self._every_s)

    async def _tell(self, peer: str, rumours: Sequence[bytes]) -> None:
        try:
            await self._send(peer, rumours)
        except MeshceeError as error:
            log.debug("a peer was not told", peer=peer, error=str(error))
        finally:
            self._telling.discard(peer)
