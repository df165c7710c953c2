"""How news are delivered to a peer that was told some a moment ago."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from meshcee.config import Timeouts
from meshcee.errors import JoinError
from peers.node.gossip import CONNECTED_S, GossipService
from peers.transport.base import Frame, Stream, Transport
from tests.peers.transport.harness import mesh


class Telling:
    """A peer that tells another; `dialled` are the addresses that each delivery was given."""

    def __init__(self, here: Transport, there: Transport) -> None:
        self.now_s, self.dialled = 0.0, list[Sequence[str]]()
        self.where, self.heard = tuple(there.addresses) or ("where it is",), asyncio.Queue[Frame](maxsize=8)
        self._here, self._to = here, there.peer_id
        agent: Any = SimpleNamespace(transport=self, timeouts=Timeouts(), peer_id=here.peer_id, directory=mock.Mock())
        agent.monotonic, agent.addresses_of = lambda: self.now_s, lambda peers: dict.fromkeys(peers, self.where)
        self._service = GossipService(agent)
        there.serve("gossip", self._hear)

    def serve(self, purpose: str, handler: Any) -> None:
        pass

    async def _hear(self, stream: Stream) -> None:
        stream.max_payload_bytes = 100
        await self.heard.put(await stream.recv())

    async def open(self, peer_id: str, purpose: str, addresses: Sequence[str]) -> Stream:
        self.dialled.append(addresses)
        return await self._here.open(peer_id, purpose, addresses)

    async def tell(self) -> Sequence[str]:
        await self._service.send(self._to, [b"news"])
        async with asyncio.timeout(5):
            assert [bytes(payload) for payload in (await self.heard.get()).payloads] == [b"news"]
        return self.dialled[-1]


@pytest.mark.parametrize("kind", ["memory", "libp2p"])
async def test_who_was_told_a_moment_ago_is_not_dialled_again(kind: str) -> None:
    async with mesh(kind) as (a, b):
        telling = Telling(a, b)
        assert await telling.tell() == telling.where
        assert await telling.tell() == ()
        telling.now_s += CONNECTED_S + 1
        assert await telling.tell() == telling.where, "the connection may be gone"
        telling.where = (*telling.where, *telling.where)
        assert await telling.tell() == telling.where, "it may be another process"


async def test_who_could_not_be_told_is_dialled() -> None:
    async with mesh("memory") as (a, b):
        telling = Telling(a, b)
        await telling.tell()
        for addresses in ((), telling.where):
            with mock.patch.object(a, "open", side_effect=JoinError("it is away")), pytest.raises(JoinError):
                await telling.tell()
            assert telling.dialled[-1] == addresses
