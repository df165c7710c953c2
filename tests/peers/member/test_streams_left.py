"""Whoever opens a stream to a peer that then does nothing gives it up, and keeps no descriptor: one every five seconds is many."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from dht.signing import Identity
from meshcee.capture import capture
from meshcee.config import Limits, Timeouts
from meshcee.errors import JoinError, PeerLostError
from meshcee.files.home import Home
from peers.member.service import Session
from peers.node.gossip import GossipService
from peers.owner.epoch import Owner
from peers.owner.feed import Feed
from peers.state.journal import Journal
from peers.state.keeping import Supplies
from peers.transport.base import Stream
from peers.transport.memory import MemoryNetwork, MemoryTransport
from peers.transport.stream import FramedStream
from tests.peers.member.test_training import make_job
from tests.rig.mesh_fixture import even_plan, members
from tests.rig.virtual_time import virtual_time

MICRO = 6


class Lending(FramedStream):
    """Nothing: no payload may be sent to it."""

    def establish(self, purpose: str) -> None:
        self.purpose = purpose


class NeverGrants(MemoryTransport):
    """Shakes hands, and waits."""

    makes = Lending

    def __init__(self, network: MemoryNetwork, peer_id: str, purpose: str) -> None:
        super().__init__(network, peer_id, b"")
        self.serve(purpose, self._wait)

    async def _wait(self, stream: Stream) -> None:
        await asyncio.Event().wait()


@virtual_time
async def test_news_that_a_peer_does_not_take() -> None:
    network = MemoryNetwork()
    async with network.transport("a") as ours, NeverGrants(network, "b", "gossip"):
        agent: Any = SimpleNamespace(transport=ours, timeouts=Timeouts(), peer_id="a", directory=mock.Mock())
        agent.monotonic, agent.addresses_of = (lambda: 0.0), (lambda peers: {})
        with pytest.raises(JoinError, match="did not take the news"):
            await GossipService(agent).send("b", [b"news"])
        assert all(stream.closed for stream in ours.streams)


@virtual_time
async def test_the_end_of_a_run_that_a_keeper_does_not_take(tmp_path: Path) -> None:
    network, me = MemoryNetwork(), Identity.generate()
    async with network.transport(me.peer_id) as ours, NeverGrants(network, "b", "journal"):
        agent = mock.Mock(timeouts=Timeouts(), peer_id=me.peer_id, sign=me.sign, clock=lambda: 0.0, transport=ours)
        agent.directory.peers, agent.addresses_of = {"b": mock.Mock()}, lambda peers: {}
        journal = Journal(agent)
        journal.begin("words", Home(tmp_path).new_run("x"), 1, mock.Mock(peers=()), resumed=False)
        await journal.end()
        assert [stream.closed for stream in ours.streams] == [True]


@virtual_time
async def test_a_neighbour_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Stream] = []

    async def attach(session: Session, stream: Stream) -> None:
        held.append(stream)
        await asyncio.Event().wait()

    monkeypatch.setattr(Session, "attach", attach)
    job, network = make_job(), MemoryNetwork()
    captured = capture(job)
    plan = even_plan(captured.train.num_blocks, 2, job.batch_size, MICRO)
    said: Any = {"addresses": {}, "names": {}, "timeouts": Timeouts(), "limits": Limits(), "kept": Supplies()}
    async with members(network, 2, Limits()), network.transport("owner") as transport:
        owner = Owner(job, captured, plan, (1, "p0"), (1, 1), transport, **said)
        with pytest.raises(PeerLostError):
            await owner.train(Feed(job, captured, MICRO), mock.AsyncMock())
        await asyncio.sleep(1)
        assert [stream.closed for stream in held] == [True]
