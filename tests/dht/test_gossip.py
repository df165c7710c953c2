"""Word of a change: how far it gets, how fast, at what price, and what is not passed on."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from dht.directory import Directory
from dht.gossip import EVERY_S, FANOUT, MAX_HOT, MAX_RUMOURS, MORE_TURNS, Gossip, Gossiper
from dht.records import CLOCK_SKEW_S, LeaseRecord, LinkRecord, PeerRecord, seal
from dht.signing import Identity, MeshKey
from dht.store import MemoryStore, SharedMemory
from meshcee.config import Limits, Timeouts
from meshcee.errors import ClockError, JoinError, MeshceeError, NotPermittedError, ProtocolError
from meshcee.figures.profile import LinkProfile
from tests.rig.virtual_time import virtual_time


@pytest.mark.parametrize("count", [10, 100, 1000])
@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_news_reach_everybody_in_few_turns_and_then_die(count: int, loss: float) -> None:
    chance = random.Random(count)
    peers = {f"p{i}": Gossip(chance) for i in range(count)}
    knows = {"p0"}
    sent = dict.fromkeys(peers, 0)
    peers["p0"].spread(("links", "p0"), b"news", count - 1)
    turns = 0
    while any(peers.values()):
        turns += 1
        told: list[str] = []
        for name, gossip in peers.items():
            if gossip:
                chosen, news = gossip.turn([p for p in peers if p != name])
                assert news == [b"news"]
                sent[name] += len(chosen)
                told += [p for p in chosen if chance.random() >= loss]
        for name in told:
            if name not in knows:
                knows.add(name)
                peers[name].spread(("links", "p0"), b"news", count - 1)
    assert len(knows) >= 0.99 * count
    most = math.ceil(math.log2(count)) + MORE_TURNS
    assert max(sent.values()) <= FANOUT * most
    assert turns <= 3 * most, "it has died out"


def test_an_older_version_is_told_no_more_and_the_rest_is_bounded() -> None:
    gossip = Gossip(random.Random(0))
    gossip.spread(("links", "a"), b"old", 3)
    gossip.spread(("links", "a"), b"new", 3)
    assert gossip.turn(["b"]) == (["b"], [b"new"])
    assert gossip.turn([]) == ([], [b"new"])
    for i in range(2 * MAX_HOT):
        gossip.spread(("links", str(i)), b"%d" % i, 1000)
    _, told = gossip.turn(["b"])
    assert len(told) == MAX_RUMOURS
    turns = 1
    while gossip:
        gossip.turn(["b"])
        turns += 1
    assert turns <= MAX_HOT * (math.ceil(math.log2(1001)) + MORE_TURNS) / MAX_RUMOURS + MORE_TURNS


KEY = MeshKey.generate()


def _now() -> float:
    return asyncio.get_running_loop().time()


class Mesh:
    """Directories that poll once an hour; news are all that they have of one another."""

    def __init__(self) -> None:
        self.shared = SharedMemory(_now)
        self.gossipers: dict[str, Gossiper] = {}
        self.identities: dict[str, Identity] = {}
        self.directories: dict[str, Directory] = {}
        self.deaf: set[str] = set()
        self.delivered = 0

    def add(self) -> str:
        identity = Identity.generate()
        slow = Timeouts(directory_poll_s=3600, announce_every_s=3600, record_ttl_s=3000)
        directory = Directory(
            MemoryStore(self.shared), identity, KEY, timeouts=slow, limits=Limits(), clock=_now, monotonic=_now
        )
        me = identity.peer_id
        chance = random.Random(len(self.identities))
        self.gossipers[me] = Gossiper(directory, me, self._send, chance=chance)
        self.identities[me], self.directories[me] = identity, directory
        return me

    async def _send(self, peer: str, rumours: Sequence[bytes]) -> None:
        await asyncio.sleep(0.05)
        if peer in self.deaf:
            raise JoinError("nobody is there")
        for data in rumours:
            self.delivered += 1
            await self.gossipers[peer].hear(data)

    @contextlib.asynccontextmanager
    async def runs(self) -> AsyncIterator[None]:
        for peer, directory in self.directories.items():
            await directory.publish(PeerRecord(peer, 0.0, peer[-4:]))
        for directory in self.directories.values():
            await directory.refresh()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(gossiper.run()) for gossiper in self.gossipers.values()]
            yield
            for task in tasks:
                task.cancel()

    async def until_all_know(self, links: tuple[tuple[str, LinkProfile], ...], writer: str) -> float:
        began_s = _now()
        for peer, directory in self.directories.items():
            if peer not in self.deaf:
                async with asyncio.timeout(60):
                    await directory.wait_for(
                        lambda d=directory: (found := d.links.get(writer)) is not None and found.links == links
                    )
        return _now() - began_s


@virtual_time
async def test_a_measured_link_is_known_everywhere_within_seconds() -> None:
    mesh = Mesh()
    first, *others = [mesh.add() for _ in range(40)]
    async with mesh.runs():
        for speed in (1e6, 2e6):
            links = ((others[0], LinkProfile(0.01, speed)),)
            await mesh.directories[first].publish(LinkRecord(first, 0.0, links))
            known = [p for p in others if (r := mesh.directories[p].links.get(first)) is not None and r.links == links]
            assert not known, "nobody has polled"
            mesh.directories[first].links[first] = LinkRecord(first, 0.0, links)  # who wrote it need not be told
            took_s = await mesh.until_all_know(links, first)
            assert took_s <= (math.ceil(math.log2(40)) + MORE_TURNS) * (EVERY_S + 0.05)


@virtual_time
async def test_who_is_gone_holds_up_nobody_and_a_goodbye_travels() -> None:
    mesh = Mesh()
    first, gone, *_ = [mesh.add() for _ in range(12)]
    async with mesh.runs():
        mesh.deaf.add(gone)
        await mesh.directories[first].say_goodbye()
        for peer, directory in mesh.directories.items():
            if peer not in (first, gone):
                async with asyncio.timeout(10):
                    await directory.wait_for(lambda d=directory: first not in d.peers)


@virtual_time
async def test_only_valid_news_of_the_right_kinds_are_heard() -> None:
    mesh = Mesh()
    me, other = mesh.add(), mesh.add()
    signer = mesh.identities[other]
    async with mesh.runs():
        expires_at = _now() + 60
        record = PeerRecord(other, _now() + 1, "renamed")

        async def refused(data: bytes, kind: type[MeshceeError]) -> None:
            before = dict(mesh.directories[me].peers)
            with pytest.raises(kind):
                await mesh.gossipers[me].hear(data)
            assert mesh.directories[me].peers == before

        await refused(b"nonsense", ProtocolError)
        await refused(bytes(Limits().record_bytes + 1), ProtocolError)
        await refused(seal(record, signer, MeshKey.generate(), expires_at), NotPermittedError)
        await refused(seal(LeaseRecord(other, _now(), 1), signer, KEY, expires_at), ProtocolError)
        await refused(seal(replace(record, sent_at=_now() + 2 * CLOCK_SKEW_S), signer, KEY, expires_at), ClockError)
        good = seal(record, signer, KEY, expires_at)
        await mesh.gossipers[me].hear(good)
        assert mesh.directories[me].peers[other].name == "renamed"
        assert await mesh.directories[me].hear(good) is None, "it is no news any more"
        assert await mesh.directories[other].hear(good) is None, "nobody is told of himself"
