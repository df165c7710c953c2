"""The election in simulated time: peers that look late, lose messages, crash, come back, forget, and are cut apart."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.directory import Directory
from dht.election import Believe, Election, Elector, Looked, Resigned, Save, Saved, Write, Wrote
from dht.records import CLOCK_SKEW_S, LeaseRecord
from dht.signing import Identity, MeshKey
from dht.store import MemoryStore, SharedMemory
from dht.terms import Term, Terms
from meshcee.config import Limits, Timeouts
from meshcee.errors import ProtocolError, StaleTermError

TTL_S, CONFIRM_S, EVERY_S = 8.0, 1.0, 1.0
# A lost lease is noticed after ttl; then come the turn, the confirmation, and a look before and after each.
REPLACED_S = TTL_S + 2 * CONFIRM_S + 4 * EVERY_S


@dataclass
class Peer:
    """One process after another with the same name. `disk` is what a restart finds."""

    name: str
    disk: Terms = field(default_factory=Terms)
    core: Election | None = None
    life: int = 0
    side: int = 0  # of a partition
    believed: list[tuple[float, Term | None]] = field(default_factory=list)


@dataclass
class Entry:
    claim: LeaseRecord
    visible_at: Mapping[str, float]


class World:
    """Peers, the claims in the store, and the clock; `delay_s` bounds how long a claim takes to be seen."""

    def __init__(self, count: int, seed: int, *, delay_s: float = 0.1) -> None:
        self.now = 1000.0
        self.random = random.Random(seed)
        self.delay_s = delay_s
        self.loss = 0.0
        self.peers = {f"p{i}": Peer(f"p{i}") for i in range(count)}
        self.entries: dict[int, dict[str, list[Entry]]] = {0: {}, 1: {}}
        self.claimed: dict[Term, tuple[str, int]] = {}  # term -> the life that claimed it
        self.claimed_twice: list[Term] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._order), what))

    def after(self, pause_s: float, what: Callable[[], None]) -> None:
        self.at(self.now + pause_s, what)

    def run(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, what = heapq.heappop(self._queue)
            what()
        self.now = until

    # -- what happens to peers

    def start(self, name: str, *, forget: bool = False) -> None:
        peer = self.peers[name]
        if peer.core is not None:
            return
        if forget:
            peer.disk = Terms()
        peer.life += 1
        peer.core = Election(
            name, eligible=True, ttl_s=TTL_S, confirm_s=CONFIRM_S, terms=peer.disk, chance=self.random.random
        )
        self.at(self.now + self.random.random() * EVERY_S, partial(self._look, peer, peer.life))

    def crash(self, name: str) -> None:
        self.peers[name].core = None
        self.peers[name].believed.append((self.now, None))

    def split(self, names: set[str]) -> None:
        for peer in self.peers.values():
            peer.side = 1 if peer.name in names else 0

    def heal(self) -> None:
        """Both sides' claims are found again, each after a while."""
        for name, entries in self.entries[1].items():
            self.entries[0].setdefault(name, []).extend(
                Entry(e.claim, {r: max(at, self.now + self._delay()) for r, at in e.visible_at.items()})
                for e in entries
            )
        self.entries[1] = {}
        self.split(set())

    # -- the store, and the shell around each state machine

    def _delay(self) -> float:
        return self.random.random() * self.delay_s

    def _look(self, peer: Peer, life: int) -> None:
        if peer.core is None or peer.life != life:
            return
        found: dict[str, LeaseRecord] = {}
        if self.random.random() >= self.loss:
            for name, entries in self.entries[peer.side].items():
                seen = [e.claim for e in entries if e.visible_at.get(peer.name, 0.0) <= self.now]
                newest = max(seen, key=lambda claim: claim.sent_at, default=None)
                if newest and newest.sent_at + TTL_S + CLOCK_SKEW_S > self.now:
                    found[name] = newest
        pause_s = EVERY_S * (0.8 + 0.4 * self.random.random())
        again = partial(self.after, pause_s, partial(self._look, peer, life))
        self._do(peer, life, list(peer.core.handle(Looked(self.now, self.now, found))), again)

    def _do(self, peer: Peer, life: int, commands: list[object], then: Callable[[], None] = lambda: None) -> None:
        """As Elector does it: one command after the other, time passing at each write, and `then` the next look."""
        while commands:
            if peer.core is None or peer.life != life:
                return
            command, *commands = commands
            match command:
                case Save():
                    peer.disk = command.terms
                    commands = [*commands, *peer.core.handle(Saved())]
                case Write():
                    self._write(peer, command.claim)
                    rest, ok = commands, self.random.random() >= self.loss

                    def written(rest: list[object] = rest, ok: bool = ok) -> None:
                        if peer.core is not None and peer.life == life:
                            self._do(peer, life, [*rest, *peer.core.handle(Wrote(self.now, ok))], then)

                    self.at(self.now + self._delay(), written)
                    return
                case Believe():
                    peer.believed.append((self.now, command.lease.term if command.lease else None))
        then()

    def _write(self, peer: Peer, claim: LeaseRecord) -> None:
        assert claim.counter <= peer.disk.counter, "claimed before it was on disk"
        if not claim.released:
            who = self.claimed.setdefault(claim.term, (peer.name, peer.life))
            if who != (peer.name, peer.life):
                self.claimed_twice.append(claim.term)
        if self.random.random() >= self.loss:
            visible = {name: self.now + self._delay() for name in self.peers}
            entries = self.entries[peer.side].setdefault(peer.name, [])
            entries.append(Entry(replace(claim, sent_at=self.now), visible))
            del entries[:-20]

    # -- what is asked of them

    def alive(self) -> list[Peer]:
        return [p for p in self.peers.values() if p.core is not None]

    def holders(self) -> list[str]:
        return [p.name for p in self.alive() if p.core is not None and p.core.holds]

    def leases(self) -> set[Term | None]:
        return {p.core.lease.term if p.core.lease else None for p in self.alive() if p.core is not None}

    def agreed(self) -> bool:
        holders, leases = self.holders(), self.leases()
        return (
            len(holders) == 1 and len(leases) == 1 and None not in leases and {t[1] for t in leases if t} == {*holders}
        )


def quiet_world(count: int, seed: int) -> World:
    world = World(count, seed)
    for name in world.peers:
        world.start(name)
    world.run(world.now + 4 * CONFIRM_S + 4 * EVERY_S)
    return world


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
def test_a_lost_holder_is_replaced_in_time_and_a_leaving_one_at_once(count: int, seed: int, says_so: bool) -> None:
    world = quiet_world(count, seed)
    (holder,) = world.holders()
    core = world.peers[holder].core
    assert core is not None
    if says_so:
        world._do(world.peers[holder], world.peers[holder].life, list(core.handle(Resigned())))
        world.run(world.now + 2 * world.delay_s)
    world.crash(holder)
    lost_at = world.now
    while not world.agreed() or holder in world.holders():
        world.run(world.now + 0.25)
        assert len(world.holders()) <= 1
        assert world.now - lost_at <= REPLACED_S - (TTL_S if says_so else 0)
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


faults = st.lists(
    st.tuples(
        st.floats(0, 60),
        st.sampled_from(["crash", "restart", "forget", "split", "heal", "lossy", "slow", "well"]),
        st.integers(0, 6),
    ),
    max_size=12,
)


@given(st.integers(1, 6), st.integers(0, 1 << 32), faults)
def test_whatever_happens_terms_are_safe_and_a_whole_mesh_has_one_coordinator(
    count: int, seed: int, what: list[tuple[float, str, int]]
) -> None:
    world = World(count, seed)
    names = list(world.peers)
    forgetful: set[str] = set()

    def fault(kind: str, n: int) -> None:
        name = names[n % count]
        if kind == "crash":
            world.crash(name)
        elif kind == "restart":
            world.start(name)
        elif kind == "forget":
            world.crash(name)
            forgetful.add(name)
            world.start(name, forget=True)
        elif kind == "split":
            world.split(set(names[: n % count]))
        elif kind == "heal":
            world.heal()
        elif kind == "lossy":
            world.loss = 0.4
        elif kind == "slow":
            world.delay_s = 3.0
        else:
            world.loss, world.delay_s = 0.0, 0.1

    for name in names:
        world.start(name)
    for when, kind, n in what:
        world.at(1000 + when, partial(fault, kind, n))
    world.run(1061)

    world.loss, world.delay_s = 0.0, 0.1
    world.heal()
    for name in names:
        world.start(name)
    world.run(world.now + 2 * REPLACED_S + TTL_S)  # claims of before may have to die first
    assert world.agreed()
    (term,) = world.leases()
    world.run(world.now + 4 * TTL_S)
    assert world.agreed()
    assert world.leases() == {term}

    assert {t for t in world.claimed_twice if t[1] not in forgetful} == set()
    for peer in world.peers.values():
        terms = [t for _, t in peer.believed if t is not None]
        if peer.name not in forgetful:
            assert terms == sorted(terms), f"{peer.name} went back to an older term"


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
        (claim("z", 9, 2.0, released=True), False),
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


async def test_a_leap_of_terms_is_refused_and_a_stale_one_too() -> None:
    directory = Directory(
        MemoryStore(SharedMemory()), Identity.generate(), MeshKey(), timeouts=Timeouts(), limits=Limits()
    )
    elector = Elector(directory, "me", eligible=True)
    elector.accept((3, "someone"))
    with pytest.raises(StaleTermError, match="plan again"):
        elector.accept((2, "someone"))
    with pytest.raises(ProtocolError, match="far beyond 3"):
        elector.accept((10**9, "someone"))
    assert elector.accepted == (3, "someone")
