"""Peers, a store and a network for elections, in simulated time: late looks, lost messages, crashes, restarts, halves.

The idea: the state machine of dht/election.py is the product's; what is around it, its shell's order included, is played here by
a queue of events, so that a minute of a stormy mesh takes a few milliseconds.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial

from dht.election import Believe, Election, Looked, Resigned, Save, Saved, Unsaved, Write, Wrote
from dht.records import CLOCK_SKEW_S, LeaseRecord, dated, is_ahead
from dht.terms import Term, Terms

__all__ = ["CONFIRM_S", "EVERY_S", "FAULTS", "REPLACED_S", "TTL_S", "Entry", "Peer", "World", "quiet_world"]

TTL_S, CONFIRM_S, EVERY_S = 8.0, 1.0, 1.0
# A lost lease is noticed after ttl; then come the turn, the confirmation, and a look before and after each.
REPLACED_S = TTL_S + 2 * CONFIRM_S + 4 * EVERY_S
FAULTS = ("crash", "leave", "restart", "forget", "split", "heal", "lossy", "slow", "full", "ahead", "behind", "well")
STEP_S = 2.0, 3600.0  # of a clock


@dataclass
class Peer:
    """One process after another with the same name. `disk` is what a restart finds."""

    name: str
    disk: Terms = field(default_factory=Terms)
    full: bool = False  # the disk, which then keeps what it has
    core: Election | None = None
    ahead_s: float = 0.0  # its wall clock, of the true time
    sent_at: float = 0.0  # the date of its last claim
    life: int = 0
    side: int = 0  # of a partition
    believed: list[tuple[float, Term | None]] = field(default_factory=list)


@dataclass
class Entry:
    claim: LeaseRecord
    visible_at: dict[str, float]  # for each peer that has not dropped it


class World:
    """Peers, the claims in the store, and the clock; `delay_s` bounds how long a claim takes to be seen."""

    def __init__(self, count: int, seed: int, *, delay_s: float = 0.1, watch: int = 0) -> None:
        self.now = 1000.0
        self.random = random.Random(seed)
        self.delay_s = delay_s
        self.loss = 0.0
        self.watchers = {f"w{i}" for i in range(watch)}  # who never claims: owners
        self.peers = {name: Peer(name) for name in (*(f"p{i}" for i in range(count)), *sorted(self.watchers))}
        self.entries: dict[int, dict[str, list[Entry]]] = {0: {}, 1: {}}
        self.claimed: dict[Term, tuple[str, int]] = {}  # term -> the life that claimed it
        self.claimed_twice: list[Term] = []
        self.forgetful: set[str] = set()  # peers that have lost their terms at least once
        self.behind: set[str] = (
            set()
        )  # peers that have begun with fewer terms than they had believed: their disk was full
        self.stepped = False  # a clock, ever
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._order), what))

    def after(self, pause_s: float, what: Callable[[], None]) -> None:
        self.at(self.now + pause_s, what)

    def run(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.one()
        self.now = until

    def one(self) -> None:
        """The next event."""
        self.now, _, what = heapq.heappop(self._queue)
        what()

    # -- what happens to peers

    def start(self, name: str, *, forget: bool = False) -> None:
        peer = self.peers[name]
        if peer.core is not None:
            return
        if forget:
            peer.disk = Terms()
            self.forgetful.add(name)
        if peer.full:
            self.behind.add(name)
        peer.life += 1
        peer.sent_at = 0.0
        peer.core = Election(
            name,
            eligible=name not in self.watchers,
            ttl_s=TTL_S,
            confirm_s=CONFIRM_S,
            terms=peer.disk,
            chance=self.random.random,
        )
        self.at(self.now + self.random.random() * EVERY_S, partial(self._look, peer, peer.life))

    def crash(self, name: str) -> None:
        self.peers[name].core = None
        self.peers[name].believed.append((self.now, None))

    def leave(self, name: str) -> None:
        """In order: it gives up what it holds, and then ends."""
        peer = self.peers[name]
        if peer.core is not None:
            self.do(peer, peer.life, list(peer.core.handle(Resigned())), partial(self.crash, name))

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

    def befall(self, kind: str, number: int) -> None:
        """A fault by name; `number` says whom it concerns."""
        names = list(self.peers)
        name = names[number % len(names)]
        if kind == "crash":
            self.crash(name)
        elif kind == "leave":
            self.leave(name)
        elif kind == "restart":
            self.start(name)
        elif kind == "forget":
            self.crash(name)
            self.start(name, forget=True)
        elif kind == "split":
            self.split(set(names[: number % len(names)]))
        elif kind == "heal":
            self.heal()
        elif kind == "lossy":
            self.loss = 0.4
        elif kind == "slow":
            self.delay_s = 3.0
        elif kind == "full":
            self.peers[name].full = True
        elif kind in ("ahead", "behind"):
            step_s = math.exp(self.random.uniform(*map(math.log, STEP_S)))
            self.step_clock(name, step_s if kind == "ahead" else -step_s)
        else:
            self.loss, self.delay_s = 0.0, 0.1
            self._make_room()
            self.set_clocks()

    def step_clock(self, name: str, ahead_s: float) -> None:
        self.peers[name].ahead_s = ahead_s
        self.stepped = True

    def set_clocks(self) -> None:
        """All show the true time."""
        for peer in self.peers.values():
            peer.ahead_s = 0.0

    def make_whole(self) -> None:
        """Nothing is wrong any more, and everybody is there."""
        self.loss, self.delay_s = 0.0, 0.1
        self._make_room()
        self.set_clocks()
        self.heal()
        for name in self.peers:
            self.start(name)

    def lie(self, counter: int, *, confirmed: bool = True, released: bool = False) -> None:
        """A member that is none of the peers claims, and every peer finds that."""
        claim = LeaseRecord("liar", self.now, counter, confirmed, released)
        for entries in self.entries.values():
            entries.setdefault("liar", []).append(Entry(claim, dict.fromkeys(self.peers, self.now)))

    def _make_room(self) -> None:
        for peer in self.peers.values():
            if peer.full and peer.core is None:
                self.behind.add(peer.name)
            peer.full = False

    # -- the store, and the shell around each state machine

    def _delay(self) -> float:
        return self.random.random() * self.delay_s

    def _look(self, peer: Peer, life: int) -> None:
        if peer.core is None or peer.life != life:
            return
        if not peer.full:
            peer.disk = max_of(peer.disk, peer.core.terms)  # what was refused is tried again
        found: dict[str, LeaseRecord] = {}
        wall = self.now + peer.ahead_s
        if self.random.random() >= self.loss:
            for name in self.entries[peer.side]:
                newest = max(self._seen(peer, name), key=lambda claim: claim.sent_at, default=None)
                if newest and newest.sent_at + TTL_S + CLOCK_SKEW_S > wall:
                    found[name] = newest
        pause_s = EVERY_S * (0.8 + 0.4 * self.random.random())
        again = partial(self.after, pause_s, partial(self._look, peer, life))
        self.do(peer, life, list(peer.core.handle(Looked(self.now, wall, found))), again)

    def _seen(self, peer: Peer, name: str) -> list[LeaseRecord]:
        """The claims of one peer that have come to this one. As a store does, it drops what is dated ahead of its clock."""
        come = [e for e in self.entries[peer.side][name] if e.visible_at.get(peer.name, math.inf) <= self.now]
        for entry in come:
            if is_ahead(entry.claim.sent_at, self.now + peer.ahead_s):
                del entry.visible_at[peer.name]
        return [e.claim for e in come if peer.name in e.visible_at]

    def do(self, peer: Peer, life: int, commands: list[object], then: Callable[[], None] = lambda: None) -> None:
        """As Elector does it: one command after the other, time passing at each write, and `then` the next look."""
        while commands:
            if peer.core is None or peer.life != life:
                return
            command, *commands = commands
            match command:
                case Save():
                    if not peer.full:
                        peer.disk = max_of(peer.disk, command.terms)
                    commands = [*commands, *peer.core.handle(Unsaved() if peer.full else Saved())]
                case Write():
                    self.write(peer, command.claim)
                    rest, ok = commands, self.random.random() >= self.loss

                    def written(rest: list[object] = rest, ok: bool = ok) -> None:
                        if peer.core is not None and peer.life == life:
                            self.do(peer, life, [*rest, *peer.core.handle(Wrote(self.now, ok))], then)

                    self.at(self.now + self._delay(), written)
                    return
                case Believe():
                    peer.believed.append((self.now, command.lease.term if command.lease else None))
        then()

    def write(self, peer: Peer, claim: LeaseRecord) -> None:
        assert claim.released or claim.counter <= peer.disk.counter, "claimed before it was on disk"
        if not claim.released:
            who = self.claimed.setdefault(claim.term, (peer.name, peer.life))
            if who != (peer.name, peer.life):
                self.claimed_twice.append(claim.term)
        if self.random.random() >= self.loss:
            visible = {name: self.now + self._delay() for name in self.peers}
            entries = self.entries[peer.side].setdefault(peer.name, [])
            peer.sent_at = dated(self.now + peer.ahead_s, peer.sent_at)
            entries.append(Entry(replace(claim, sent_at=peer.sent_at), visible))
            del entries[:-20]

    # -- what is asked of them

    def alive(self) -> list[Peer]:
        return [p for p in self.peers.values() if p.core is not None]

    def holders(self) -> list[str]:
        return [p.name for p in self.alive() if p.core is not None and p.core.holds]

    def leases(self) -> set[Term | None]:
        return {p.core.lease.term if p.core.lease else None for p in self.alive() if p.core is not None}

    def agreed(self, those: Collection[str] | None = None) -> bool:
        """Whether all who live, or those, believe in one of them, and this one alone in itself."""
        alive = [p for p in self.alive() if those is None or p.name in those]
        holders = [p.name for p in alive if p.core is not None and p.core.holds]
        leases = {p.core.lease.term if p.core.lease else None for p in alive if p.core is not None}
        return (
            len(holders) == 1 and len(leases) == 1 and None not in leases and {t[1] for t in leases if t} == {*holders}
        )

    def check_terms(self) -> None:
        """What holds whatever has happened: no term was claimed twice, and nobody went back to an older one."""
        assert {t for t in self.claimed_twice if t[1] not in self.forgetful} == set()
        for peer in self.peers.values():
            terms = [t for _, t in peer.believed if t is not None]
            if peer.name not in self.forgetful | self.behind:
                assert terms == sorted(terms), f"{peer.name} went back to an older term"

    def check_recovers(self) -> None:
        """Once all is whole, one coordinator within a bounded time, and it stays. Claims of before may have to die first."""
        self.make_whole()
        self.run(self.now + 2 * REPLACED_S + TTL_S + (CLOCK_SKEW_S if self.stepped else 0.0))
        assert self.agreed()
        (term,) = self.leases()
        self.run(self.now + 4 * TTL_S)
        assert self.agreed()
        assert self.leases() == {term}
        self.check_terms()


def max_of(one: Terms, other: Terms) -> Terms:
    """As TermFile keeps them."""
    return Terms(max(one.counter, other.counter), max(one.accepted, other.accepted))


def quiet_world(count: int, seed: int) -> World:
    world = World(count, seed)
    for name in world.peers:
        world.start(name)
    world.run(world.now + 4 * CONFIRM_S + 4 * EVERY_S)
    return world
