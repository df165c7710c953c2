"""The election in simulated time: peers that look late, lose messages, crash, come back, forget, and are cut apart."""

from __future__ import annotations

import errno
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from dht.directory import Directory
from dht.election import (
    MOST_ELECTIONS_MISSED,
    Believe,
    Election,
    Elector,
    Looked,
    Resigned,
    Save,
    Saved,
    Unsaved,
    Write,
    Wrote,
)
from dht.records import CLOCK_SKEW_S, LeaseRecord
from dht.signing import Identity, MeshKey
from dht.store import MemoryStore, SharedMemory
from dht.terms import Term, TermFile, Terms
from meshcee.config import Limits, Timeouts
from meshcee.errors import ProtocolError, StaleTermError
from meshcee.events import Event
from meshcee.files import disk
from tests.dht.world import CONFIRM_S, EVERY_S, FAULTS, REPLACED_S, TTL_S, World, quiet_world
from tests.mutation import breaks, changed
from tests.rig.disks import RefusingDisk


@given(st.integers(1, 7), st.integers(0, 1 << 32))
def test_a_quiet_mesh_soon_has_one_coordinator_and_keeps_it(count: int, seed: int) -> None:
    world = World(count, seed)
    for name in world.peers:
        world.start(name)
    held: set[str] = set()
    for _ in range(400):
        world.run(world.now + 0.25)
        assert len(world.holders()) <= 1
        held |= {*world.holders()}
        if world.now > 1000 + 4 * CONFIRM_S + 4 * EVERY_S:
            assert world.agreed()
    assert len(held) == 1


@given(st.integers(2, 6), st.integers(0, 1 << 32), st.booleans())
@example(count=3, seed=143740, says_so=True)  # the loser of an election claims in the next one, seven seconds later
def test_a_lost_holder_is_replaced_in_time_and_a_leaving_one_at_once(count: int, seed: int, says_so: bool) -> None:
    world = quiet_world(count, seed)
    (holder,) = world.holders()
    core = world.peers[holder].core
    assert core is not None
    if says_so:
        world.do(world.peers[holder], world.peers[holder].life, list(core.handle(Resigned())))
        world.run(world.now + 2 * world.delay_s)
    world.crash(holder)
    lost_at = world.now
    while not world.agreed() or holder in world.holders():
        world.run(world.now + 0.25)
        assert len(world.holders()) <= 1
        assert world.now - lost_at <= REPLACED_S - (TTL_S if says_so else 0) + 0.5  # two of the looks above
    if not says_so:
        assert world.now - lost_at > TTL_S / 3  # a live lease was not challenged


@given(st.integers(2, 6), st.integers(0, 1 << 32), st.lists(st.booleans(), min_size=1, max_size=6))
def test_joining_leaving_and_returning_peers_trigger_no_election(count: int, seed: int, forget: list[bool]) -> None:
    world = quiet_world(count, seed)
    (holder,), (term,) = world.holders(), world.leases()
    others = [name for name in world.peers if name != holder]
    for i, forgets in enumerate(forget):
        name = others[i % len(others)]
        world.crash(name)
        world.run(world.now + world.random.random() * 2 * TTL_S)
        world.start(name, forget=forgets)
        world.run(world.now + world.random.random() * TTL_S)
        assert world.holders() == [holder]
        assert world.leases() <= {term, None}
    world.run(world.now + TTL_S)
    assert world.leases() == {term}


faults = st.lists(st.tuples(st.floats(0, 60), st.sampled_from(FAULTS), st.integers(0, 6)), max_size=12)


@given(st.integers(1, 6), st.integers(0, 1 << 32), faults)
def test_whatever_happens_terms_are_safe_and_a_whole_mesh_has_one_coordinator(
    count: int, seed: int, what: list[tuple[float, str, int]]
) -> None:
    world = World(count, seed)
    for name in world.peers:
        world.start(name)
    for when, kind, n in what:
        world.at(1000 + when, partial(world.befall, kind, n))
    world.run(1061)
    world.check_recovers()


def storm(seed: int) -> None:
    """Faults of all kinds for two minutes, and delays longer than a claim waits for others."""
    chance = random.Random(f"storm {seed}")
    world = World(chance.randrange(2, 9), seed, delay_s=chance.choice((0.1, 1.0, 6.0)), watch=seed % 3)
    world.loss = chance.choice((0.0, 0.2, 0.6))
    for name in world.peers:
        world.start(name)
    for _ in range(chance.randrange(3, 40)):
        world.at(1000 + chance.uniform(0, 120), partial(world.befall, chance.choice(FAULTS), chance.randrange(8)))
    world.run(1121)
    world.check_recovers()


def test_storms() -> None:
    for seed in range(100):
        storm(seed)


@pytest.mark.slow
def test_thousands_of_storms() -> None:
    for seed in range(100, 5000):
        storm(seed)


@pytest.mark.parametrize("forgets", [False, True])
def test_a_claimant_or_holder_that_dies_between_any_two_events_is_replaced_in_time(forgets: bool) -> None:
    """Whoever is furthest on the way to holding dies after the n-th event, for every n, and comes back."""
    died: set[str] = set()
    for n in range(120):
        world = World(4, seed=n % 3)
        for name in world.peers:
            world.start(name)
        for _ in range(n):
            world.one()
        claims = {
            p.name: p.core.own_claim for p in world.alive() if p.core is not None and p.core.own_claim is not None
        }
        if not claims:
            continue
        states = ("saving", "writing", "confirming", "holding")
        victim = max(claims, key=lambda name: (states.index(claims[name].state), claims[name].claim.term))  # type: ignore[union-attr]
        died.add(claims[victim].state)  # type: ignore[union-attr]
        world.crash(victim)
        world.after(world.random.random() * 2 * TTL_S, partial(world.start, victim, forget=forgets))
        lost_at = world.now
        while not world.agreed():
            world.run(world.now + 0.25)
            assert len({peer.core.lease.term for peer in world.alive() if peer.core and peer.core.holds}) <= 1
            assert world.now - lost_at <= REPLACED_S + 2 * TTL_S, f"after event {n}"
        world.check_terms()
    assert died >= {"writing", "confirming", "holding"}


@given(st.integers(2, 5), st.integers(0, 1 << 32))
def test_of_two_halves_that_meet_again_one_coordinator_remains(count: int, seed: int) -> None:
    world = quiet_world(count, seed)
    (holder,) = world.holders()
    world.split({name for name in world.peers if name != holder})
    world.run(world.now + 2 * REPLACED_S)
    assert len(world.holders()) == 2  # each half goes on by itself; the owner's log decides which one matters
    world.heal()
    world.run(world.now + 3 * EVERY_S + CONFIRM_S)
    assert world.agreed()


steps = st.lists(st.tuples(st.floats(0, 60), st.integers(0, 5), st.floats(-4000, 4000)), min_size=1, max_size=6)


@given(st.integers(2, 6), st.integers(0, 1 << 32), steps)
@example(3, 0, [(0.0, 0, 1000.0)])
@example(3, 0, [(0.0, 0, 1000.0), (0.0, 1, 900.0)])  # two believe each other
@example(3, 0, [(0.0, 0, 1000.0), (0.0, 1, 1000.0), (30.0, 0, 0.0)])  # one of them is set right first
def test_once_all_clocks_are_right_again_no_date_of_before_keeps_a_mesh_from_agreeing(
    count: int, seed: int, what: list[tuple[float, int, float]]
) -> None:
    """A claim dated ahead was looked upon as its peer's newest word until the date came."""
    world = quiet_world(count, seed)
    names = list(world.peers)
    for when, n, ahead_s in what:
        world.at(world.now + when, partial(world.step_clock, names[n % count], ahead_s))
    world.run(world.now + 61)
    world.check_recovers()


@given(st.integers(3, 6), st.integers(0, 1 << 32), st.integers(0, 5), st.floats(30, 4000), st.booleans())
def test_those_whose_clocks_are_right_agree_without_one_whose_clock_is_off(
    count: int, seed: int, n: int, by_s: float, ahead: bool
) -> None:
    world = quiet_world(count, seed)
    off = list(world.peers)[n % count]
    world.step_clock(off, by_s if ahead else -by_s)
    world.run(world.now + 2 * REPLACED_S + 2 * CLOCK_SKEW_S)
    assert world.agreed([name for name in world.peers if name != off])


@given(st.integers(1, 6), st.integers(0, 1 << 32), st.lists(st.floats(-4.0, 4.0), min_size=6, max_size=6))
def test_clocks_that_differ_by_less_than_is_allowed_change_nothing(count: int, seed: int, ahead_s: list[float]) -> None:
    world = World(count, seed)
    for name, by_s in zip(world.peers, ahead_s):
        world.step_clock(name, by_s)
        world.start(name)
    world.run(world.now + REPLACED_S)
    assert world.agreed()
    held = world.holders()
    world.run(world.now + 4 * TTL_S)
    assert world.holders() == held
    assert world.agreed()


leaps = st.lists(
    st.tuples(st.floats(0, 60), st.integers(MOST_ELECTIONS_MISSED + 10, 1 << 53), st.booleans()),
    min_size=1,
    max_size=12,
)


@given(st.integers(2, 5), st.integers(0, 1 << 32), leaps, st.booleans())
def test_claims_that_leap_win_no_lease_and_keep_nobody_from_one(
    count: int, seed: int, what: list[tuple[float, int, bool]], forgets: bool
) -> None:
    """One record with the highest counter that there is made every later claim one that others refuse."""
    world = quiet_world(count, seed)
    (holder,) = world.holders()
    for when, counter, confirmed in what:
        world.at(world.now + when, partial(world.lie, counter, confirmed=confirmed))
    other = next(name for name in world.peers if name != holder)
    world.at(world.now + 20.0, partial(world.crash, other))
    world.at(world.now + 25.0, partial(world.start, other, forget=forgets))  # and finds a liar and the holder
    world.run(world.now + 61.0)
    assert world.agreed()
    assert world.holders() == [holder]
    world.crash(holder)
    world.lie(1 << 53)
    world.run(world.now + REPLACED_S + 2 * TTL_S)
    assert world.agreed()
    assert all(peer.core.terms.counter < 100 for peer in world.alive() if peer.core is not None)


def squatted(count: int, seed: int, every_s: float, releases: int) -> None:
    """Somebody claims ever higher, confirms nothing, and withdraws every `releases`th claim (0: none)."""
    world = quiet_world(count, seed)
    since = world.now
    for turn in range(int(6 * TTL_S / every_s)):
        highest = max(peer.core.terms.counter for peer in world.alive() if peer.core is not None)
        world.lie(highest + 1, confirmed=False, released=releases > 0 and turn % releases == releases - 1)
        world.run(world.now + every_s)
        if world.now > since + REPLACED_S + (2 if releases else 1) * TTL_S:  # the time without a claim does not count
            assert world.agreed()
            assert world.holders()


@given(st.integers(2, 5), st.integers(0, 1 << 32), st.floats(0.5, 6.0), st.sampled_from((0, 3, 4, 5)))
def test_a_claim_that_is_never_confirmed_keeps_nobody_from_the_lease(
    count: int, seed: int, every_s: float, releases: int
) -> None:
    squatted(count, seed, every_s, releases)


def test_without_its_limit_such_a_claim_stands_in_the_way() -> None:
    with changed(Election, "known[p][0] < self._ttl_s", "True"):
        assert breaks(lambda: squatted(3, 1, 2.0, 0))


def test_who_was_away_for_long_follows_a_term_far_beyond_its_own() -> None:
    election = core(terms=Terms(12, (12, "old")))
    far = claim("a", 50_000, 0.0)
    commands = election.handle(looked(0.5, far, claim("liar", 1 << 53, 0.0)))
    assert commands == [Save(Terms(50_000, (50_000, "a"))), Believe(far)]
    assert election.leaps == {"liar": 1 << 53}
    assert election.handle(looked(1.0, replace(far, sent_at=0.8), claim("b", 60_000, 0.8))) == []
    assert election.leaps == {"b": 60_000}


def test_a_term_that_a_plan_came_with_moves_no_bound_of_claims() -> None:
    election = core(terms=Terms(5))
    election.handle(looked(0.5, claim("a", 5, 0.0)))
    assert election.accept(Term(5 + MOST_ELECTIONS_MISSED // 2, "owner"))
    election.handle(looked(1.0, claim("b", 6 + MOST_ELECTIONS_MISSED, 0.8)))
    assert election.leaps == {"b": 6 + MOST_ELECTIONS_MISSED}


def test_who_holds_an_older_term_than_a_plan_came_with_gives_it_up() -> None:
    election = holding(3)
    assert not election.accept(Term(3, "m"))
    assert election.handle(looked(2.0)) == []
    assert election.accept(Term(4, "z"))
    assert election.handle(looked(2.1)) == [Write(claim("m", 3, 0.0, released=True)), Believe(None)]


def test_with_a_full_disk_terms_of_plans_do_not_add_up_either() -> None:
    election = core(terms=Terms(5), chance=lambda: 0.0)
    assert election.accept(Term(100, "owner"))
    assert [election.handle(looked(now)) for now in (0.0, 0.1)] == [[], [Save(Terms(101, Term(100, "owner")))]]
    election.handle(Unsaved())
    assert election.terms == Terms(5, Term(100, "owner"))


async def test_a_claim_that_others_would_refuse_ends_no_peer() -> None:
    directory = Directory(
        MemoryStore(SharedMemory()), Identity.generate(), MeshKey(), timeouts=Timeouts(), limits=Limits()
    )
    at = iter(range(1, 100))
    file = TermFile()
    file.save(Terms(1 << 53, (1 << 53, "liar")))
    poisoned = Elector(
        directory, "me", eligible=True, terms=file, monotonic=lambda: float(next(at)), chance=lambda: 0.0
    )
    with capture_logs() as logs:
        for _ in range(4):
            await poisoned.look()
    assert poisoned.lease is None
    assert any(line["event"] == Event.CLAIM_NOT_WRITTEN for line in logs)


# -- single decisions, one by one


def core(**options: object) -> Election:
    settings = {"eligible": True, "ttl_s": 8.0, "confirm_s": 1.0, "terms": Terms(), "chance": lambda: 0.5} | options
    return Election("m", **settings)  # type: ignore[arg-type]


def looked(now: float, *claims: LeaseRecord) -> Looked:
    return Looked(now, now, {c.peer_id: c for c in claims})


def claim(peer: str, counter: int, sent_at: float, confirmed: bool = True, released: bool = False) -> LeaseRecord:
    return LeaseRecord(peer, sent_at, counter, confirmed, released)


def holding(counter: int) -> Election:
    election = core(terms=Terms(counter - 1))
    assert election.handle(looked(0.0)) == []
    assert election.handle(looked(0.4)) == []  # its turn is at 0.5
    assert election.handle(looked(0.6)) == [Save(Terms(counter))]
    mine = LeaseRecord("m", 0.0, counter)
    assert election.handle(Saved()) == [Write(mine)]
    assert election.handle(Wrote(0.7, True)) == []
    assert election.handle(looked(1.6)) == []  # not yet
    confirmed = replace(mine, confirmed=True)
    assert election.handle(looked(1.8)) == [
        Save(Terms(counter, (counter, "m"))),
        Write(confirmed),
        Believe(confirmed),
    ]
    assert election.handle(Wrote(1.9, True)) == []
    return election


def test_the_way_to_a_lease_and_its_renewal() -> None:
    election = holding(3)
    assert election.handle(looked(3.0)) == []
    assert election.handle(looked(5.0)) == [Write(claim("m", 3, 0.0))]


@pytest.mark.parametrize(
    ("other", "gives_way"),
    [
        (claim("a", 3, 2.0), False),  # lower
        (claim("z", 3, 2.0), True),  # higher, as a pair
        (claim("z", 3, 2.0, confirmed=False), False),  # one who had not seen us
        (claim("a", 4, 2.0, confirmed=False), True),
        (claim("z", 9, 2.0, confirmed=False, released=True), False),  # it was never held
        (claim("z", 3, 2.0, released=True), True),  # some may have followed it, and follow us no more
        (claim("a", 3, 2.0, released=True), False),
        (claim("z", 9, -9.0), False),  # dead
    ],
)
def test_a_holder_gives_way_to_higher_terms_only(other: LeaseRecord, gives_way: bool) -> None:
    election = holding(3)
    commands = election.handle(looked(2.5, other))
    assert (Write(replace(claim("m", 3, 0.0), released=True)) in commands) == gives_way
    assert election.holds != gives_way


@pytest.mark.parametrize(
    ("other", "gives_way"),
    [
        (claim("a", 3, 1.0), True),  # one who holds is not challenged with its own number
        (claim("a", 3, 1.0, confirmed=False), False),  # of two claimants the higher goes on
        (claim("z", 3, 1.0, confirmed=False), True),
        (claim("z", 2, 1.0), False),
    ],
)
def test_a_claimant_gives_way_before_it_is_confirmed(other: LeaseRecord, gives_way: bool) -> None:
    election = core(terms=Terms(2))
    for now in (0.0, 0.6):
        election.handle(looked(now))
    election.handle(Saved())
    election.handle(Wrote(0.7, True))
    commands = election.handle(looked(1.2, other))
    assert (Write(claim("m", 3, 0.0, confirmed=False, released=True)) in commands) == gives_way
    election.handle(looked(1.9, other))
    assert election.holds != gives_way


def test_who_may_not_claim_says_that_a_later_term_was_held_than_the_one_that_holds() -> None:
    watcher = core(eligible=False)
    watcher.handle(looked(0.0, claim("z", 3, 0.0)))
    assert watcher.lease is not None
    old = claim("b", 3, 2.0)
    assert watcher.handle(looked(2.0, old, claim("z", 3, 1.0, released=True))) == [Believe(None)]
    assert watcher.handle(looked(9.0, claim("b", 3, 9.0))) == []  # it may be about to give way
    assert watcher.handle(looked(10.5, claim("b", 3, 10.0))) == [Write(claim("m", 4, 0.0, released=True))]


def test_a_claimant_takes_a_number_beyond_terms_that_are_over() -> None:
    election = core()
    for now in (0.0, 0.6):
        election.handle(looked(now, claim("z", 7, 0.0, released=True)))
    assert election.own_claim is not None
    assert election.own_claim.claim.counter == 8


@given(st.integers(1, 5), st.integers(1, 2), st.integers(0, 1 << 32))
def test_halves_with_leases_of_one_number_agree_though_the_higher_one_was_given_up(
    count: int, watch: int, seed: int
) -> None:
    """An owner has followed a coordinator that left while the mesh was in halves; on the other side another has the same number."""
    world = World(count + 2, seed, watch=watch)
    for name in world.peers:
        world.start(name)
    world.split({"p0", *world.watchers})
    world.run(world.now + 2 * REPLACED_S)
    assert "p0" in world.holders()
    (world.leave if seed % 2 else world.crash)("p0")
    world.run(world.now + (seed % 7) * TTL_S / 2)
    world.heal()
    world.run(world.now + 3 * TTL_S + 2 * REPLACED_S)
    assert world.agreed()


def test_a_holder_whom_nobody_hears_steps_down() -> None:
    election = holding(3)
    for now in (5.0, 8.0, 9.8):
        for command in election.handle(looked(now)):
            assert isinstance(command, Write)
            assert election.handle(Wrote(now, False)) == []
    assert Believe(None) in election.handle(looked(9.9))
    assert not election.holds


def test_a_lease_older_than_what_was_accepted_is_not_believed() -> None:
    election = core(terms=Terms(7, (7, "x")), eligible=False)
    assert election.handle(looked(0.0, claim("a", 6, 0.0))) == []
    assert election.handle(looked(1.0, claim("a", 8, 1.0))) == [Save(Terms(8, (8, "a"))), Believe(claim("a", 8, 1.0))]
    assert election.handle(looked(2.0, claim("a", 8, 2.0))) == []
    assert election.handle(looked(11.0, claim("a", 8, 2.0))) == [Believe(None)]


def test_our_own_claim_of_an_earlier_life_gives_its_number_only() -> None:
    election = core()
    assert election.handle(looked(0.0, claim("m", 41, 0.0))) == []
    assert election.handle(looked(1.0, claim("m", 41, 0.0))) == [Save(Terms(42))]


def test_a_number_that_the_disk_refuses_is_not_claimed_with_and_tries_do_not_add_up() -> None:
    election = Election("m", eligible=True, ttl_s=8.0, confirm_s=1.0, terms=Terms(4), chance=lambda: 0.0)
    for second in range(0, 3000, 2):
        election.handle(Looked(float(second), float(second), {}))
        assert election.handle(Looked(second + 1.0, second + 1.0, {})) == [Save(Terms(5))]
        assert election.handle(Unsaved()) == []
    election.handle(Looked(3000.0, 3000.0, {}))
    election.handle(Looked(3001.0, 3001.0, {}))
    assert election.handle(Saved()) == [Write(LeaseRecord("m", 0.0, 5))]


async def test_terms_that_the_disk_refuses_are_believed_and_written_later(tmp_path: Path) -> None:
    directory = Directory(
        MemoryStore(SharedMemory()), Identity.generate(), MeshKey(), timeouts=Timeouts(), limits=Limits()
    )
    file = TermFile(tmp_path / "terms")
    elector = Elector(directory, "me", eligible=False, terms=file)
    with disk.using(RefusingDisk(tmp_path, errno.EROFS)):
        elector.accept((3, "a"))
        with pytest.raises(StaleTermError):
            elector.accept((2, "b"))
        await elector.look()
        assert file.load() == Terms()
    await elector.look()
    assert file.load() == Terms(0, (3, "a"))


async def test_a_leap_of_terms_is_refused_and_a_stale_one_too() -> None:
    directory = Directory(
        MemoryStore(SharedMemory()), Identity.generate(), MeshKey(), timeouts=Timeouts(), limits=Limits()
    )
    elector = Elector(directory, "me", eligible=True)
    elector.accept((3, "someone"))
    with pytest.raises(StaleTermError, match="plan again"):
        elector.accept((2, "someone"))
    with pytest.raises(ProtocolError, match="far beyond 0"):
        elector.accept((10**9, "someone"))
    assert elector.accepted == (3, "someone")


async def test_offers_lift_the_accepted_term_no_further_than_claims_have_shown(tmp_path: Path) -> None:
    """Each offer lifted it by a thousand, until others passed over all claims of this peer."""
    directory = Directory(
        MemoryStore(SharedMemory()), Identity.generate(), MeshKey(), timeouts=Timeouts(), limits=Limits()
    )
    highest = MOST_ELECTIONS_MISSED // 2
    for _ in range(2):  # and after a restart
        elector = Elector(directory, "me", eligible=True, terms=TermFile(tmp_path / "terms"))
        elector.accept((highest, "someone"))
        with pytest.raises(ProtocolError, match="far beyond 0"):
            elector.accept((highest + 1, "someone"))
    assert elector.accepted == (highest, "someone")


@given(st.integers(1, 5), st.integers(0, 1 << 32), st.integers(0, 5), st.booleans())
def test_all_agree_again_after_one_has_accepted_the_highest_term_that_an_offer_may_have(
    count: int, seed: int, n: int, restarts: bool
) -> None:
    world = World(count, seed, watch=1)
    for name in world.peers:
        world.start(name)
    world.run(world.now + 4 * CONFIRM_S + 4 * EVERY_S)
    name = list(world.peers)[n % len(world.peers)]
    core = world.peers[name].core
    assert core is not None
    highest = core.terms.counter + MOST_ELECTIONS_MISSED // 2
    assert core.accept(Term(highest, "owner"))
    if restarts:
        world.peers[name].disk = core.terms
        world.crash(name)
        world.start(name)
    world.run(world.now + 2 * REPLACED_S + 2 * TTL_S)
    assert world.agreed()
