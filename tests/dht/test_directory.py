"""The directory and the elector over the in-process store, on virtual time: who is seen, for how long, and who leads."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from dht import directory as module
from dht.directory import EMPTY_EVERY, LINKS_LAST, REST_EVERY, Change, Directory
from dht.election import Elector
from dht.records import LeaseRecord, LinkRecord, PeerRecord, RunRecord, seal, topic
from dht.roster import Roster, differences
from dht.signing import Identity, MeshKey
from dht.store import MemoryStore, SharedMemory
from dht.terms import TermFile, Terms
from meshcee.config import Limits, Timeouts
from meshcee.errors import JoinError, NotPermittedError
from meshcee.events import Event
from meshcee.figures.profile import LinkProfile
from tests.rig.virtual_time import virtual_time

KEY = MeshKey.generate()
TIMES = Timeouts()


def now() -> float:
    return asyncio.get_running_loop().time()


class Flaky(MemoryStore):
    """Counts calls for missing peers; `blind` reads find nothing."""

    def __init__(self, shared: SharedMemory) -> None:
        super().__init__(shared)
        self.blind = False
        self.called: list[tuple[float, frozenset[str]]] = []
        self.written: list[str] = []  # keys
        self.searched: list[str] = []  # those of them whose nodes were looked for
        self.read: list[str] = []

    async def put(self, key: str, subkey: str, value: bytes, expires_at: float, *, quick: bool = False) -> bool:
        self.written.append(key)
        self.searched += [] if quick else [key]
        return await super().put(key, subkey, value, expires_at)

    async def get(self, key: str, *, quick: bool = False) -> Mapping[str, tuple[bytes, float]]:
        self.read.append(key)
        return {} if self.blind else await super().get(key)

    async def meet(self, addresses: Iterable[str]) -> frozenset[str]:
        met = await super().meet(addresses)
        self.called.append((now(), met))
        return met


class Peer:
    """A directory, running inside `async with peer.runs()`."""

    def __init__(
        self,
        shared: SharedMemory,
        name: str,
        *,
        identity: Identity | None = None,
        skew_s: float = 0.0,
        others: Sequence[str] = (),
    ) -> None:
        self.identity = identity or Identity.generate()
        self.peer_id = self.identity.peer_id
        self.store = Flaky(shared)
        self.store.others = others
        self.name = name
        self.skew_s = skew_s
        self.address = f"/ip4/192.0.2.1/tcp/1/p2p/{self.peer_id}"
        self.directory = Directory(
            self.store,
            self.identity,
            KEY,
            timeouts=TIMES,
            limits=Limits(),
            clock=self.clock,
            monotonic=now,
        )

    def clock(self) -> float:
        return now() + self.skew_s

    @property
    def record(self) -> PeerRecord:
        return PeerRecord(self.peer_id, 0.0, self.name, (self.address,))

    def elector(self, file: Path | None = None, *, eligible: bool = True) -> Elector:
        return Elector(
            self.directory, self.peer_id, eligible=eligible, terms=TermFile(file), clock=self.clock, monotonic=now
        )

    @contextlib.asynccontextmanager
    async def runs(self, *more: Elector) -> AsyncIterator[Directory]:
        """Until the block ends, and then not a word more: a crash."""
        await self.directory.publish(self.record)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.directory.announce_forever())]
            tasks += [group.create_task(self.directory.poll_forever())]
            tasks += [group.create_task(elector.run()) for elector in more]
            yield self.directory
            for task in tasks:
                task.cancel()


def shared() -> SharedMemory:
    return SharedMemory(now)


async def names(directory: Directory, *wanted: str) -> float:
    """Wait until exactly these are seen; how long that took."""
    began_s = now()
    async with asyncio.timeout(120):
        await directory.wait_for(lambda: sorted(r.name for r in directory.peers.values()) == sorted(wanted))
    return now() - began_s


@virtual_time
async def test_peers_join_change_and_leave() -> None:
    memory = shared()
    a, b = Peer(memory, "a"), Peer(memory, "b")
    seen: list[tuple[str, str]] = []
    async with a.runs() as here, asyncio.TaskGroup() as group:

        async def listen() -> None:
            async for change in here.events():
                seen.append((change.kind, change.record.name))

        listening = group.create_task(listen())
        assert await names(here, "a") <= 0.1
        async with b.runs() as there:
            assert await names(here, "a", "b") <= TIMES.directory_poll_s
            await there.publish(replace(b.record, busy=True))
            await here.wait_for(lambda: here.peers[b.peer_id].busy)
            await there.say_goodbye()
        assert await names(here, "a") <= TIMES.directory_poll_s
        listening.cancel()
    assert seen == [("joined", "a"), ("joined", "b"), ("changed", "b"), ("left", "b")]


@virtual_time
async def test_links_change_rarely_so_they_are_announced_rarely_and_stay_known() -> None:
    memory = shared()
    a, b = Peer(memory, "a"), Peer(memory, "b")
    async with a.runs() as here, b.runs() as there:
        await there.publish(LinkRecord(b.peer_id, 0.0, ((a.peer_id, LinkProfile(0.01, 1e6)),)))
        b.store.written.clear()
        for second in range(80):
            await asyncio.sleep(1)
            assert second < 4 or list(here.links) == [b.peer_id]
        announced = collections.Counter(b.store.written)
    assert announced[topic("peers", KEY)] == pytest.approx(80 / TIMES.announce_every_s, abs=1)
    assert announced[topic("links", KEY)] == pytest.approx(80 / TIMES.announce_every_s / LINKS_LAST, abs=1)


@virtual_time
async def test_most_announcements_need_no_search_and_each_claim_has_one() -> None:
    a = Peer(shared(), "a")
    async with a.runs(a.elector()) as here:
        await asyncio.sleep(60 * TIMES.announce_every_s)
        written, searched = collections.Counter(a.store.written), collections.Counter(a.store.searched)
        assert written[topic("peers", KEY)] >= 60
        assert 60 / REST_EVERY <= searched[topic("peers", KEY)] <= 2 + 60 / REST_EVERY
        assert searched[topic("lease", KEY)] == written[topic("lease", KEY)] > 10
        await here.publish(replace(a.record, busy=True))
        assert a.store.searched[-1] == topic("peers", KEY), "news is written where readers look"


@virtual_time
async def test_what_nobody_has_written_is_read_rarely_by_those_who_are_told() -> None:
    memory = shared()
    a, b, looker = (Peer(memory, name) for name in ("a", "b", "looker"))

    async def reads(peer: Peer) -> float:
        """Of runs, for each minute."""
        peer.store.read.clear()
        await asyncio.sleep(60.0)
        return collections.Counter(peer.store.read)[topic("runs", KEY)]

    async with a.runs() as here, b.runs() as there, asyncio.TaskGroup() as group:
        polling = group.create_task(looker.directory.poll_forever())
        assert await reads(a) <= 2 + 60 / TIMES.directory_poll_s / EMPTY_EVERY
        usual = 60 / TIMES.directory_poll_s / REST_EVERY
        assert await reads(looker) >= usual - 1, "nobody passes news on to it"
        run = RunRecord(b.peer_id, 0.0, "gpt", (1, 1), 3)
        began_s = now()
        await there.publish(run)
        await here.wait_for(lambda: here.runs)
        assert now() - began_s <= EMPTY_EVERY * TIMES.directory_poll_s
        assert await reads(a) >= usual - 1, "a run that is known is followed"
        await there.publish(replace(run, state="over"))
        await here.wait_for(lambda: b.peer_id in here.over)
        polling.cancel()


@virtual_time
async def test_what_is_renewed_is_written_with_the_next_announcement_and_not_passed_on() -> None:
    memory = shared()
    a, to, passed_on = Peer(memory, "a"), Identity.generate().peer_id, list[tuple[str, str]]()
    async with a.runs() as here:
        here.on_publish = lambda key, data: passed_on.append(key)
        before = LinkRecord(a.peer_id, 0.0, ((to, LinkProfile(0.01, 1e6)),))
        await here.publish(before)
        a.store.written.clear()
        here.renew(replace(before, links=((to, LinkProfile(0.01, 1e6 + 1)),)))
        await asyncio.sleep((LINKS_LAST + 1) * TIMES.announce_every_s)
        assert a.store.written.count(topic("links", KEY)) == 1
        assert (await here.read(LinkRecord))[a.peer_id].links[0][1].bandwidth_bytes_per_s == 1e6 + 1
        assert passed_on == [("links", a.peer_id)]


@virtual_time
async def test_who_falls_silent_is_gone_after_one_ttl_and_for_newcomers_at_once() -> None:
    memory = shared()
    a, b = Peer(memory, "a"), Peer(memory, "b")
    async with a.runs() as here:
        async with b.runs():
            await names(here, "a", "b")
        took_s = await names(here, "a")
        assert TIMES.record_ttl_s - TIMES.announce_every_s <= took_s <= TIMES.record_ttl_s + TIMES.directory_poll_s
        assert b.peer_id in await a.directory.read(PeerRecord)  # the store still has the ghost
        async with Peer(memory, "c").runs() as new:
            assert await names(new, "a", "c") <= 0.1
            for _ in range(20):
                await new.wait_for_change()
                assert b.peer_id not in new.peers | here.peers


@virtual_time
async def test_reads_that_fail_for_a_while_lose_nobody() -> None:
    memory = shared()
    a, b = Peer(memory, "a"), Peer(memory, "b")
    async with a.runs() as here, b.runs():
        await names(here, "a", "b")
        a.store.blind = True
        before_s = now()
        while now() - before_s < TIMES.record_ttl_s / 2:
            await here.wait_for_change()
            assert len(here.peers) == 2
        a.store.blind = False
        await asyncio.sleep(20)
        assert len(here.peers) == 2
        a.store.blind = True
        await names(here, "a")  # only ourselves, in the end


@virtual_time
async def test_a_crowd_is_read_rarely_and_still_not_forgotten() -> None:
    """200 peers are read every 6 s and their links every 25, less often than a record of a small mesh may be silent."""
    memory = shared()
    watcher, others = Peer(memory, "w"), [Identity.generate() for _ in range(200)]

    async def announce() -> None:
        while True:
            for identity in others:
                for record in (PeerRecord(identity.peer_id, now(), "x"), LinkRecord(identity.peer_id, now())):
                    sealed = seal(record, identity, KEY, now() + 18)
                    entries = memory.entries.setdefault(topic(record.kind, KEY), {})
                    entries[identity.peer_id] = (sealed, now() + 18)
            await asyncio.sleep(5)

    async with watcher.runs() as here, asyncio.TaskGroup() as group:
        task = group.create_task(announce())
        await here.wait_for(lambda: len(here.peers) == len(here.links) + 1 == 201)
        before_s = now()
        while now() - before_s < 90:
            await here.wait_for_change()
            assert (len(here.peers), len(here.links)) == (201, 200)
        task.cancel()
        async with asyncio.timeout(45):
            await here.wait_for(lambda: len(here.peers) == 1)  # silence is noticed, later than in a small mesh


@pytest.mark.parametrize("skew_s", [-9.0, 9.0])
@virtual_time
async def test_a_clock_that_is_off_within_bounds_makes_nobody_flap(skew_s: float) -> None:
    memory = shared()
    a, b = Peer(memory, "a"), Peer(memory, "b", skew_s=skew_s)
    async with a.runs() as here, b.runs() as there:
        await names(here, "a", "b")
        await names(there, "a", "b")
        before_s = now()
        while now() - before_s < 60:
            await here.wait_for_change()
            assert len(here.peers) == len(there.peers) == 2


@virtual_time
async def test_a_clock_too_far_ahead_is_set_aside_with_one_warning() -> None:
    memory = shared()
    a, b = Peer(memory, "a"), Peer(memory, "b", skew_s=30.0)
    with capture_logs() as logs:
        async with a.runs() as here, b.runs():
            await asyncio.sleep(30)
            assert set(here.peers) == {a.peer_id}
    said = [line for line in logs if line["log_level"] == "warning"]
    assert len(said) == 2  # b sees records that have expired by its clock, a sees one from the future
    assert any("clock" in line["error"] for line in said)


@virtual_time
async def test_what_strangers_store_is_set_aside() -> None:
    memory = shared()
    a, stranger = Peer(memory, "a"), Identity.generate()
    sealed = seal(PeerRecord(stranger.peer_id, now(), "x"), stranger, MeshKey(), now() + 60)
    with capture_logs() as logs:
        async with a.runs() as here:
            for data in (sealed, b"garbage"):
                memory.entries.setdefault(topic("peers", KEY), {})[stranger.peer_id] = (data, now() + 60)
                await asyncio.sleep(5)
                assert set(here.peers) == {a.peer_id}
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == [Event.RECORD_SET_ASIDE]


@virtual_time
async def test_links_and_runs_are_those_of_peers_that_are_here() -> None:
    memory = shared()
    a, b = Peer(memory, "a"), Peer(memory, "b")
    async with a.runs() as here:
        async with b.runs() as there:
            link = LinkProfile(0.1, 1e6, now())
            await there.publish(LinkRecord(b.peer_id, 0.0, ((a.peer_id, link),)))
            await there.publish(RunRecord(b.peer_id, 0.0, "gpt", (1, 1), 3))
            await names(here, "a", "b")
            await here.refresh()
            assert here.links[b.peer_id].links == ((a.peer_id, link),)
            assert here.runs[b.peer_id].step == 3
            await there.withdraw(RunRecord)
            await here.wait_for(lambda: not here.runs)
            assert b.peer_id in here.links
            await there.say_goodbye()
        await names(here, "a")
        assert here.links == {}


@virtual_time
async def test_of_two_processes_with_one_identity_the_later_one_has_to_go() -> None:
    memory = shared()
    a = Peer(memory, "a")
    with capture_logs() as logs:
        async with a.runs() as here:
            await asyncio.sleep(10)
            copy = Peer(memory, "copy", identity=a.identity)
            with pytest.raises(ExceptionGroup) as caught:
                async with copy.runs(), asyncio.timeout(60):
                    await asyncio.Event().wait()
            assert caught.group_contains(JoinError, match="'a' elsewhere already runs with this identity")
            await asyncio.sleep(20)
            assert here.peers[a.peer_id].name == "a"
    assert any(line["event"] == Event.IDENTITY_USED_TWICE for line in logs)


@virtual_time
async def test_a_peer_that_restarts_at_once_is_no_second_one() -> None:
    memory = shared()
    watcher = Peer(memory, "w")
    a = Peer(memory, "a")
    async with watcher.runs() as here:
        async with a.runs():
            await names(here, "a", "w")
        old = here.peers[a.peer_id].instance
        async with Peer(memory, "a", identity=a.identity).runs():
            await here.wait_for(lambda: a.peer_id in here.peers and here.peers[a.peer_id].instance != old)
            await asyncio.sleep(30)
            assert len(here.peers) == 2


@virtual_time
async def test_one_that_vanished_is_called_ever_more_rarely_until_it_is_back() -> None:
    memory = shared()
    a, b = Peer(memory, "a"), Peer(memory, "b")
    async with a.runs() as here:
        async with b.runs():
            await names(here, "a", "b")
        await names(here, "a")
        await asyncio.sleep(300)
        times = [when for when, met in a.store.called if met == {b.peer_id}]
        pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert pauses == sorted(pauses)
        assert 6 <= len(times) <= 12
        assert module.CALL_FIRST_S <= pauses[0] <= 2 * module.CALL_FIRST_S
        assert pauses[-1] <= module.CALL_MOST_S + module.CALL_FIRST_S
        async with b.runs():
            await names(here, "a", "b")
            before = len(a.store.called)
            await asyncio.sleep(300)
            assert len(a.store.called) == before
            await b.directory.say_goodbye()
        await names(here, "a")
        await asyncio.sleep(300)
        assert len(a.store.called) == before  # who says goodbye is not called


@virtual_time
async def test_a_seed_that_is_not_seen_is_called() -> None:
    memory, seed = shared(), Peer(shared(), "seed")
    a = Peer(memory, "a")
    a.store.seeds = [seed.address]
    async with a.runs():
        await asyncio.sleep(10)
    assert a.store.called[0][1] == {seed.peer_id}


@virtual_time
async def test_who_founds_a_mesh_calls_those_it_knows_from_before_until_they_are_there() -> None:
    """It has no seeds: after a start at another address two meshes stayed apart."""
    memory, other = shared(), Identity.generate()
    address = f"/ip4/192.0.2.1/tcp/1/p2p/{other.peer_id}"
    a, b = Peer(memory, "a", others=[address, "no address"]), Peer(memory, "b", identity=other)
    async with a.runs() as here:
        await asyncio.sleep(10)
        assert a.store.called[0][1] == {other.peer_id}
        async with b.runs() as there:
            await names(here, "a", "b")
            await there.say_goodbye()
            await names(here, "a")
        before = len(a.store.called)
        await asyncio.sleep(300)
        assert len(a.store.called) == before


@virtual_time
async def test_a_slow_listener_hears_of_the_present_not_of_every_step() -> None:
    memory = shared()
    a, b = Peer(memory, "a"), Peer(memory, "b")
    async with a.runs() as here:
        await names(here, "a")
        events = here.events()
        assert await anext(events) == Change("joined", here.peers[a.peer_id])
        for busy in (True, False) * 5:
            await b.directory.publish(replace(b.record, busy=busy))
            await here.wait_for(lambda busy=busy: here.peers.get(b.peer_id, b.record).busy == busy)  # type: ignore[misc]
        change = await anext(events)
        assert (change.kind, change.record.name, change.record.busy) == ("joined", "b", False)
        await events.aclose()  # type: ignore[attr-defined]


def test_a_roster_is_bounded_and_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dht.roster.MAX_RECORDS", 3)
    roster: Roster[PeerRecord] = Roster(8.0)
    many = {f"p{i}": PeerRecord(f"p{i}", 100.0, "x") for i in range(9)}
    assert len(roster.absorb(many, 100.0, 0.0)) == 3
    assert len(roster.absorb({}, 107.0, 7.0)) == 3
    assert roster.absorb({}, 109.0, 9.0) == {}
    late = {f"q{i}": PeerRecord(f"q{i}", 109.0, "x") for i in range(3)}
    assert len(roster.absorb(late, 109.0, 9.0)) == 3


def test_a_record_that_was_merely_sent_again_has_not_changed() -> None:
    one = PeerRecord("p", 1.0, "x", instance="i")
    assert differences({"p": one}, {"p": replace(one, sent_at=2.0)}) == []
    again = replace(one, instance="j")
    assert differences({"p": one}, {"p": again}) == [Change("left", one), Change("joined", again)]


# -- the elector


async def leader(*electors: Elector, other_than: str = "") -> LeaseRecord:
    """Wait until all believe in one lease."""
    async with asyncio.timeout(60):
        while True:
            leases = {e.lease.term if e.lease else None for e in electors}
            if len(leases) == 1 and (lease := electors[0].lease) is not None and lease.peer_id != other_than:
                return lease
            await asyncio.sleep(0.1)


@virtual_time
async def test_one_leads_a_lost_leader_is_replaced_and_a_leaving_one_at_once() -> None:
    memory = shared()
    peers = {p.peer_id: p for p in (Peer(memory, n) for n in "abc")}
    electors = {p: peer.elector() for p, peer in peers.items()}
    stacks = {p: contextlib.AsyncExitStack() for p in peers}
    for p, peer in peers.items():
        await stacks[p].enter_async_context(peer.runs(electors[p]))
    first = await leader(*electors.values())
    await asyncio.sleep(120)
    assert (await leader(*electors.values())).term == first.term  # renewed, not elected again

    await stacks.pop(first.peer_id).aclose()
    left = {p: e for p, e in electors.items() if p != first.peer_id}
    began_s = now()
    second = await leader(*left.values(), other_than=first.peer_id)
    assert second.counter == first.counter + 1
    assert now() - began_s <= TIMES.lease_ttl_s + 6 * TIMES.lease_confirm_s

    began_s = now()
    await electors[second.peer_id].resign()
    await stacks.pop(second.peer_id).aclose()
    (last,) = (e for p, e in left.items() if p != second.peer_id)
    await leader(last, other_than=second.peer_id)
    assert now() - began_s <= 6 * TIMES.lease_confirm_s
    for stack in stacks.values():
        await stack.aclose()


@virtual_time
async def test_a_leader_that_reaches_nobody_steps_down() -> None:
    memory = shared()
    a, b = Peer(memory, "a"), Peer(memory, "b")
    electors = {a.peer_id: a.elector(), b.peer_id: b.elector()}
    async with a.runs(electors[a.peer_id]), b.runs(electors[b.peer_id]):
        first = await leader(*electors.values())
        cut = a if first.peer_id == a.peer_id else b
        cut.store.reachable = False
        await asyncio.sleep(20)
        assert electors[cut.peer_id].lease is None
        cut.store.reachable = True
        assert (await leader(*electors.values())).peer_id != first.peer_id


@pytest.mark.parametrize("off_s", [(1000, 0, 0), (-1000, 0, 0), (1000, 900, 0), (1000, 0, 900), (1000, 1000, 1000)])
@virtual_time
async def test_clocks_that_were_off_and_are_set_right_keep_nobody_out(off_s: tuple[float, float, float]) -> None:
    memory = shared()
    peers = [Peer(memory, name) for name in ("a", "b", "owner")]
    electors = [peer.elector(eligible=peer.name != "owner") for peer in peers]
    async with contextlib.AsyncExitStack() as stack:
        for peer, elector in zip(peers, electors):
            await stack.enter_async_context(peer.runs(elector))
        first = await leader(*electors)
        off = sorted(
            peers, key=lambda peer: peer.peer_id != first.peer_id
        )  # the leader is the first whose clock is off
        for peer, skew_s in zip(off, off_s):
            peer.skew_s = skew_s
        await asyncio.sleep(60)
        for peer in peers:
            peer.skew_s = 0.0
        for pause_s in (0.0, 2 * TIMES.record_ttl_s):  # at once, and when what was heard before has been forgotten
            await asyncio.sleep(pause_s)
            async with asyncio.timeout(TIMES.directory_poll_s + TIMES.announce_every_s):
                for peer in peers:
                    await names(peer.directory, "a", "b", "owner")
            async with asyncio.timeout(TIMES.lease_ttl_s + 6 * TIMES.lease_confirm_s):
                await leader(*electors)


@virtual_time
async def test_terms_survive_a_restart_and_older_ones_are_refused(tmp_path: Path) -> None:
    memory, file = shared(), tmp_path / "deep" / "terms.json"
    a = Peer(memory, "a")
    elector = a.elector(file)
    async with a.runs(elector):
        assert (await leader(elector)).term == (1, a.peer_id)
        elector.accept((5, "z"))
        elector.accept((5, "z"))
    with pytest.raises(NotPermittedError, match="planned in term 4"):
        a.elector(file).accept((4, "zz"))
    assert TermFile(file).load() == Terms(1, (5, "z"))
    elector = a.elector(file)
    async with a.runs(elector):
        assert (await leader(elector)).term == (6, a.peer_id)
    assert [p.name for p in file.parent.iterdir()] == ["terms.json"]
