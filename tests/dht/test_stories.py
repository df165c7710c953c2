"""What befell other systems' elections and directories, told again here: each says which line keeps it from happening.

The stories are from bug reports (exo #2197, #2059; parallax #166; hivemind #246). The last test takes the lines away, one by one,
and each story ends badly.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

import pytest

from dht.election import Election
from dht.records import LeaseRecord, PeerRecord
from dht.roster import Roster
from dht.signing import Identity
from dht.store import SharedMemory
from dht.terms import Terms
from meshcee.errors import StaleTermError
from tests.dht.test_directory import TIMES, Peer, names, now, shared
from tests.dht.world import CONFIRM_S, EVERY_S, REPLACED_S, World, quiet_world
from tests.mutation import breaks, changed
from tests.rig.virtual_time import virtual_time


@pytest.mark.parametrize("seed", range(20))
def test_wedge_a_holder_restarts_at_once_without_its_terms(seed: int) -> None:
    """exo #2197: it campaigns from zero, is taken for stale, and nobody leads again.

    Traces from happening by `seen` in Election, which counts our own claim of an earlier life: without it the new life
    claims a term that the old one has had.
    """
    world = quiet_world(4, seed)
    (holder,), (before,) = world.holders(), world.leases()
    assert before is not None
    world.crash(holder)
    world.run(world.now + 0.2)
    world.start(holder, forget=True)
    world.run(world.now + REPLACED_S)
    assert world.agreed()
    (after,) = world.leases()
    assert after is not None
    assert after[0] > before[0]
    assert world.claimed_twice == []


@pytest.mark.parametrize("seed", range(20))
def test_wedge_a_claimant_dies_before_it_confirms(seed: int) -> None:
    """exo #2197: a candidacy that nobody will ever evaluate blocks the round.

    Traces from happening by Roster, through which Election._looked sees claims: one that does not change for a ttl is as good as
    none, however long the store keeps it.
    """
    world = World(4, seed)
    for name in world.peers:
        world.start(name)
    while not any(p.core is not None and p.core.own_claim is not None for p in world.alive()):
        world.one()
    claimant = next(p.name for p in world.alive() if p.core is not None and p.core.own_claim is not None)
    world.run(world.now + 2 * world.delay_s)  # the claim is in the store
    world.crash(claimant)
    world.run(world.now + REPLACED_S)
    assert world.agreed()


def test_flap_a_claim_is_seen_after_the_election() -> None:
    """exo #2059: a candidate's delayed message topples the coordinator that was elected without it.

    Traces from happening by `before_us` in Election._defend: a holder gives way to its own number only when it is confirmed.
    """
    world = World(2, seed=1, delay_s=0.0)
    late, early = sorted(world.peers, reverse=True)  # of equal numbers the later name counts for more
    world.start(early)
    world.run(world.now + 4 * CONFIRM_S + 4 * EVERY_S)
    assert world.holders() == [early]
    (term,) = world.leases()
    assert term is not None
    world.start(late)
    world.peers[late].disk = Terms(counter=term[0])
    world.write(world.peers[late], LeaseRecord(late, 0.0, term[0]))  # as it was written before the election
    for _ in range(40):
        world.run(world.now + 0.5)
        assert world.holders() == [early]
        assert world.leases() <= {term, None}


@pytest.mark.parametrize("seed", range(20))
def test_split_two_halves_lead_themselves_and_one_of_them_gives_way(seed: int) -> None:
    """exo #2059: after a partition two masters go on, and what the old one has said comes back.

    Traces from happening by `before_us` in Election._defend (a confirmed claim of a higher term ends ours), and by
    Elector.accept for what was planned meanwhile (see the next story).
    """
    world = quiet_world(5, seed)
    (holder,), (old,) = world.holders(), world.leases()
    world.split({name for name in world.peers if name != holder})
    world.run(world.now + 2 * REPLACED_S)
    assert len(world.holders()) == 2
    world.heal()
    world.run(world.now + 3 * EVERY_S + CONFIRM_S)
    assert world.agreed()
    assert old not in world.leases()


@virtual_time
async def test_split_what_the_old_coordinator_planned_is_refused() -> None:
    """Traces from happening by the comparison with `accepted` in Election.accept."""
    memory = shared()
    peers = {peer.peer_id: peer for peer in (Peer(memory, name) for name in "abc")}
    electors = {peer_id: peer.elector() for peer_id, peer in peers.items()}
    async with contextlib.AsyncExitStack() as stack:
        for peer_id, peer in peers.items():
            await stack.enter_async_context(peer.runs(electors[peer_id]))
        await asyncio.sleep(10)
        (old,) = {e.lease.term if e.lease else None for e in electors.values()}
        assert old is not None
        apart = SharedMemory(now)
        for peer_id, peer in peers.items():
            if peer_id != old[1]:
                peer.store.shared = apart
        await asyncio.sleep(30)
        new = {electors[p].lease for p in peers if p != old[1]}
        assert len({lease.term for lease in new if lease is not None}) == 1
        for peer_id, elector in electors.items():
            if peer_id != old[1]:
                with pytest.raises(StaleTermError):
                    elector.accept(old)


@pytest.mark.parametrize("seed", range(5))
def test_storm_a_hundred_lose_their_coordinator(seed: int) -> None:
    """Everybody campaigns at once, over and over.

    Traces from happening by `any(not c.confirmed ...)` in Election._follow: while somebody claims, nobody else begins to.
    """
    world = quiet_world(100, seed)
    (holder,) = world.holders()
    before = len(world.claimed)
    world.crash(holder)
    world.run(world.now + REPLACED_S)
    assert world.agreed()
    assert len(world.claimed) - before <= 20
    world.run(world.now + 60)
    assert len(world.claimed) - before <= 20, "and not again"


@pytest.mark.parametrize("seed", range(10))
def test_storm_comings_and_goings_are_no_reason_to_elect(seed: int) -> None:
    """Each connection starts a campaign. Traces from happening by `best is not None` in Election._follow: who believes, waits."""
    world = quiet_world(12, seed)
    (holder,), (term,) = world.holders(), world.leases()
    others = [name for name in world.peers if name != holder]
    claimed = len(world.claimed)
    for i in range(40):
        name = others[i % len(others)]
        world.after(i * 1.0, partial(world.crash, name))
        world.after(i * 1.0 + 0.7, partial(world.start, name, forget=i % 2 == 0))
    world.run(world.now + 60)
    assert world.leases() == {term}
    assert len(world.claimed) == claimed


@virtual_time
async def test_ghosts_who_leaves_and_rejoins_many_times_is_one_peer() -> None:
    """parallax #166: three machines, four nodes, and the plan waits for one that will never answer.

    Traces from happening by the key of a record, which is its peer's id (Directory.write), and by Roster, which forgets who is
    silent; a peer that comes under a new id is another one, and the old one is gone after a ttl.
    """
    memory = shared()
    watcher, returning = Peer(memory, "w"), Identity.generate()
    async with watcher.runs() as here:
        for _ in range(4):
            async with Peer(memory, "a", identity=returning).runs():
                await here.wait_for(lambda: returning.peer_id in here.peers)
        for _ in range(3):
            async with Peer(memory, "b").runs():
                await asyncio.sleep(1.5)
        await names(here, "w")
        assert len(await watcher.directory.read(PeerRecord)) > 1, "the store still has them"
        async with Peer(memory, "a", identity=returning).runs():
            await names(here, "a", "w")
            await asyncio.sleep(2 * TIMES.record_ttl_s)
            assert len(here.peers) == 2


STALE = "return {p: h.record for p, h in self._heard.items() if h.silent_s(mono_s) < limit_s}"
GIVES_WAY = "before_us = other.term > claim.term and (other.confirmed or other.counter > claim.counter)"
SEEDS = [(seed,) for seed in range(5)]


@pytest.mark.parametrize(
    ("story", "arguments", "function", "line", "instead"),
    [
        (
            test_wedge_a_holder_restarts_at_once_without_its_terms,
            SEEDS,
            Election,
            "(*others.values(), *([own] if own else []))",
            "others.values()",
        ),
        (
            test_flap_a_claim_is_seen_after_the_election,
            [()],
            Election,
            GIVES_WAY,
            "before_us = other.term > claim.term",
        ),
        (
            test_split_two_halves_lead_themselves_and_one_of_them_gives_way,
            SEEDS,
            Election,
            GIVES_WAY,
            "before_us = False",
        ),
        (
            test_split_what_the_old_coordinator_planned_is_refused,
            [()],
            Election.accept,
            "if term < accepted:",
            "if False:",
        ),
        (
            test_storm_a_hundred_lose_their_coordinator,
            SEEDS,
            Election,
            "any(not c.confirmed for c in others.values())",
            "False",
        ),
        (
            test_storm_comings_and_goings_are_no_reason_to_elect,
            SEEDS,
            Election,
            "best is not None or",
            "",
        ),
        (
            test_ghosts_who_leaves_and_rejoins_many_times_is_one_peer,
            [()],
            Roster.absorb,
            STALE,
            STALE.partition(" if")[0] + "}",
        ),
    ],
    ids=lambda value: value.__name__.removeprefix("test_") if hasattr(value, "__name__") else "",
)
def test_without_its_line_a_story_ends_badly(
    story: Callable[..., None],
    arguments: list[tuple[int, ...]],
    function: Callable[..., object],
    line: str,
    instead: str,
) -> None:
    with changed(function, line, instead):
        assert any(breaks(partial(story, *one)) for one in arguments)
