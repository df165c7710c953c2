"""Which peer plans: a lease that one peer holds, renewed while it lives, taken over when it is gone.

The idea: a pure state machine decides, a small shell reads, writes and saves for it. Claims lie side by side under one
key, and the highest term wins; a claimant believes itself only after it has waited and looked again. A DHT is no
consensus, so two may hold for a moment: in different terms, and every member refuses the older one. So nobody claims, or goes on
holding, a lower term than one that was held and given up.

    vacant --(nobody claims, our turn)--> saving --> writing --> confirming --> holding
       ^                                    |           |            |             |
       '------------------------------------'-----------'---(someone is before us)-'
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import structlog

from dht.directory import Directory
from dht.records import LeaseRecord
from dht.roster import Roster
from dht.terms import NONE, Term, TermFile, Terms
from meshcee import events
from meshcee.errors import ProtocolError, StaleTermError
from meshcee.files import Trouble

__all__ = ["Believe", "Election", "Elector", "Looked", "Resigned", "Save", "Saved", "Unsaved", "Write", "Wrote"]

log = structlog.get_logger()

MOST_ELECTIONS_MISSED = 1000  # while a peer was cut off
_Waiting = tuple[float, float]  # for how long a peer has shown claims unconfirmed, and when the last was seen
# Not the generator that `random` shares: a user's dataset may draw from that one on another thread, and must repeat.
CHANCE = random.Random()
MOST_TOLD = 64  # warnings about leaps
THOROUGH_EVERY = 4  # looks for one that asks all replicas, while a lease holds


# -- what happens to the state machine, and what it asks for


@dataclass(frozen=True)
class Looked:
    """One read of the claims. `mono_s` and `wall` are the times at which it was asked for."""

    mono_s: float
    wall: float
    claims: Mapping[str, LeaseRecord]


@dataclass(frozen=True)
class Saved:
    """The terms of the last Save are on disk."""


@dataclass(frozen=True)
class Unsaved:
    """The disk has refused the terms: what is believed holds as long as this process, and nothing is claimed."""


@dataclass(frozen=True)
class Wrote:
    """The last Write has reached the store, or `ok` is False."""

    mono_s: float
    ok: bool


@dataclass(frozen=True)
class Resigned:
    """This peer leaves."""


@dataclass(frozen=True)
class Save:
    """Put the terms on disk, then say Saved."""

    terms: Terms


@dataclass(frozen=True)
class Write:
    """Put our claim into the store (the shell fills in `sent_at`), then say Wrote."""

    claim: LeaseRecord


@dataclass(frozen=True)
class Believe:
    """From now on this lease holds, or none does."""

    lease: LeaseRecord | None


Event = Looked | Saved | Unsaved | Wrote | Resigned
Command = Save | Write | Believe


@dataclass
class _Mine:
    """Our own claim. `renewed_s` is when the store last took it, `before` the counter before it was made."""

    claim: LeaseRecord
    state: str  # "saving", "writing", "confirming", "holding"
    before: int
    written_s: float = 0.0
    renewed_s: float = 0.0


class Election:
    """The state machine of one peer. `chance()` is uniform over [0, 1): who claims first when a lease is lost."""

    def __init__(
        self, peer_id: str, *, eligible: bool, ttl_s: float, confirm_s: float, terms: Terms, chance: Callable[[], float]
    ) -> None:
        self.peer_id = peer_id
        self.terms = terms
        self.lease: LeaseRecord | None = None
        self._eligible = eligible
        self._ttl_s = ttl_s
        self._confirm_s = confirm_s
        self._chance = chance
        self._others: Roster[LeaseRecord] = Roster(ttl_s)
        self.own_claim: _Mine | None = None
        self._claim_at_s: float | None = None  # while vacant: when it is our turn
        self._waiting: dict[str, _Waiting] = {}
        self._looked_s: float | None = None
        self._is_anchored = False  # a claim of this mesh has been believed since the start: terms go on from there
        self.leaps: dict[str, int] = {}  # of the last look: whose claims were passed over, and their counters

    @property
    def holds(self) -> bool:
        return self.own_claim is not None and self.own_claim.state == "holding"

    @property
    def is_settled(self) -> bool:
        """Somebody's lease holds, and we do not claim against it."""
        return self.lease is not None and (self.own_claim is None or self.holds)

    def handle(self, event: Event) -> list[Command]:
        """The next state, and what is to be done, in this order."""
        match event:
            case Looked():
                return self._looked(event)
            case Saved():
                return self._saved()
            case Unsaved():
                return self._unsaved()
            case Wrote():
                return self._wrote(event)
            case Resigned():
                self._eligible = False
                return self._give_up(None)

    def accept(self, term: Term) -> bool:
        """A plan made under this term has come; whether the term is news. StaleTermError where a newer one is known.

        Terms rise by one with each election; a leap (ProtocolError) would only shut out every coordinator. What plans say moves no
        bound: else each one would move it further, and others would pass over the claims of this peer. So half of what they follow
        is left for its next claim.
        """
        if term[0] > self.terms.counter + MOST_ELECTIONS_MISSED // 2:
            raise ProtocolError(
                f"term {term[0]} is far beyond {self.terms.counter}, the highest seen: no coordinator has it"
            )
        accepted = self.terms.accepted
        if term < accepted:
            raise StaleTermError(
                f"this was planned in term {term[0]}, but the coordinator of term {accepted[0]} is known: plan again"
            )
        self.terms = replace(self.terms, accepted=max(term, accepted))
        return term > accepted

    # -- a look at the claims

    def _looked(self, event: Looked) -> list[Command]:
        claims = dict(event.claims)
        own = claims.pop(self.peer_id, None)  # possibly of an earlier life: only its number counts
        claims = self._without_leaps(claims)
        living = self._others.absorb(claims, event.wall, event.mono_s)
        others = self._without_idle({p: c for p, c in living.items() if not c.released}, event.mono_s)
        over = max((c.term for c in living.values() if c.released and c.confirmed), default=NONE)
        seen = max((over[0], *(c.counter for c in (*others.values(), *([own] if own else [])))))
        if seen > self.terms.counter:
            self.terms = replace(self.terms, counter=seen)  # saved with the next claim
        if self.own_claim is not None:
            return self._defend(self.own_claim, event.mono_s, others, max(over, self.terms.accepted))
        return self._follow(event.mono_s, others)

    def _without_leaps(self, claims: Mapping[str, LeaseRecord]) -> dict[str, LeaseRecord]:
        """Terms rise by one with each election. A claim far beyond would shut every coordinator out, so nobody looks at it.

        Who has been away, or is new, may be far behind: for them the lowest of the claims that are confirmed counts.
        """
        known = self.terms.counter
        if not self._is_anchored:
            confirmed = [c.counter for c in claims.values() if c.confirmed and not c.released]
            known = max(known, min(confirmed, default=0))
        likely = {p: c for p, c in claims.items() if c.counter <= known + MOST_ELECTIONS_MISSED}
        self.leaps = {p: c.counter for p, c in claims.items() if p not in likely}
        self._is_anchored = self._is_anchored or self.holds or any(c.confirmed for c in likely.values())
        return likely

    def _without_idle(self, claims: Mapping[str, LeaseRecord], now_s: float) -> dict[str, LeaseRecord]:
        """A claim is confirmed within moments, or given up. One that only keeps others from claiming counts for nothing.

        Nor does the next of the same peer, until it confirms one or has been quiet for as long. Only the time with a claim counts:
        who has lost an election and withdrawn is free to claim in the next.
        """
        before_s, self._looked_s = self._looked_s, now_s
        known = {p: x for p, x in self._waiting.items() if now_s - x[1] < self._ttl_s}
        for peer, claim in claims.items():
            if claim.confirmed:
                known.pop(peer, None)
            elif peer not in known:
                known[peer] = (0.0, now_s)
            else:
                shown_s, last_s = known[peer]
                # Where the look before found none, this claim keeps others from claiming for some looks more.
                known[peer] = (shown_s + (now_s - last_s if last_s == before_s else self._ttl_s / 2), now_s)
        self._waiting = known
        return {p: c for p, c in claims.items() if p not in known or known[p][0] < self._ttl_s}

    def _defend(self, mine: _Mine, now_s: float, others: Mapping[str, LeaseRecord], over: Term) -> list[Command]:
        """We hold or claim: give way to who is before us, else confirm or renew. `over` is the highest term that was held and given
        up, or that a plan came with. Who has followed that follows no lower one, so ours would be of no use."""
        claim, holding = mine.claim, mine.state == "holding"
        if over > claim.term:
            return self._give_up(others)
        for other in others.values():
            # Of two unconfirmed claims the higher goes on; one that is confirmed is not challenged with its own number.
            if holding:
                before_us = other.term > claim.term and (other.confirmed or other.counter > claim.counter)
            else:
                before_us = other.term > claim.term or (other.confirmed and other.counter >= claim.counter)
            if before_us:
                return self._give_up(others)
        if holding and now_s - mine.renewed_s >= self._ttl_s:
            return self._give_up(others)  # nobody has heard of us for so long: the others have gone on
        if mine.state == "confirming" and now_s - mine.written_s >= self._confirm_s:
            mine.state = "holding"
            mine.claim = replace(claim, confirmed=True)
            self.terms = replace(self.terms, accepted=claim.term)
            self.lease = mine.claim
            return [Save(self.terms), Write(mine.claim), Believe(mine.claim)]
        if holding and now_s - mine.written_s >= self._ttl_s / 3:
            mine.written_s = now_s
            return [Write(mine.claim)]
        return []

    def _give_up(self, others: Mapping[str, LeaseRecord] | None) -> list[Command]:
        """Withdraw our claim, so that nobody waits for it; follow whoever is there."""
        mine, self.own_claim = self.own_claim, None
        self._claim_at_s = None
        commands: list[Command] = []
        if mine is not None and mine.state != "saving":
            commands.append(Write(replace(mine.claim, released=True)))
        return commands + self._believe(self._best(others or {}))

    def _follow(self, now_s: float, others: Mapping[str, LeaseRecord]) -> list[Command]:
        """Believe the highest confirmed claim; when nobody claims, claim, each peer after a while of its own.

        Who may not claim, and finds only claims older than what it has followed, says so in the end by a term that is over.
        """
        best = self._best(others)
        commands = self._believe(best)
        if best is not None or any(not c.confirmed for c in others.values()) or not (self._eligible or others):
            self._claim_at_s = None
        elif self._claim_at_s is None:
            self._claim_at_s = now_s + (self._chance() * self._confirm_s if self._eligible else self._ttl_s)
        elif now_s >= self._claim_at_s:
            self._claim_at_s = None
            if not self._eligible:
                over = LeaseRecord(self.peer_id, 0.0, self.terms.accepted[0] + 1, confirmed=True, released=True)
                return [*commands, Write(over)]
            before, counter = self.terms.counter, max(self.terms.counter, self.terms.accepted[0]) + 1
            self.terms = replace(self.terms, counter=counter)
            self.own_claim = _Mine(LeaseRecord(self.peer_id, 0.0, counter), "saving", before)
            commands.append(Save(self.terms))
        return commands

    def _best(self, others: Mapping[str, LeaseRecord]) -> LeaseRecord | None:
        valid = [c for c in others.values() if c.confirmed and c.term >= self.terms.accepted]
        return max(valid, key=lambda claim: claim.term, default=None)

    def _believe(self, lease: LeaseRecord | None) -> list[Command]:
        before, self.lease = self.lease, lease
        commands: list[Command] = []
        if lease is not None and lease.term > self.terms.accepted:
            self.terms = Terms(max(self.terms.counter, lease.counter), lease.term)
            commands.append(Save(self.terms))
        if (before.term if before else None) != (lease.term if lease else None):
            commands.append(Believe(lease))
        return commands

    # -- our claim makes its way

    def _saved(self) -> list[Command]:
        if self.own_claim is None or self.own_claim.state != "saving":
            return []
        self.own_claim.state = "writing"
        return [Write(self.own_claim.claim)]

    def _unsaved(self) -> list[Command]:
        """A number that might be forgotten is not claimed with, or it would be claimed twice: others may claim."""
        if self.own_claim is not None and self.own_claim.state == "saving":
            self.terms = replace(self.terms, counter=self.own_claim.before)  # tries do not add up to a leap
            self.own_claim = None
        return []

    def _wrote(self, event: Wrote) -> list[Command]:
        mine = self.own_claim
        if mine is None:
            return []
        if mine.state == "writing":
            if not event.ok:
                self.own_claim = None  # unheard: the next look begins anew, with the next number
                return []
            mine.state = "confirming"
            mine.written_s = mine.renewed_s = event.mono_s
        elif event.ok:
            mine.written_s = mine.renewed_s = event.mono_s
        return []


WHAT = "the file of accepted terms"


class Elector:
    """The shell: `run` in the owner's TaskGroup; `lease` is what this peer believes.

    A peer that is not eligible only watches. `terms` keeps what must survive a restart; one file per mesh.
    """

    def __init__(
        self,
        directory: Directory,
        peer_id: str,
        *,
        eligible: bool,
        terms: TermFile | None = None,
        ttl_s: float = 8.0,
        confirm_s: float = 1.0,
        every_s: float | None = None,
        chance: Callable[[], float] = CHANCE.random,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lease: LeaseRecord | None = None
        self.changed = asyncio.Condition()  # notified whenever `lease` becomes another
        self._directory = directory
        self._file = terms or TermFile()
        self._is_saved = True
        self._trouble = Trouble(monotonic)
        self._ttl_s = ttl_s
        self._every_s = min(confirm_s, ttl_s / 4) if every_s is None else every_s
        self._clock = clock
        self._monotonic = monotonic
        self._one = asyncio.Lock()
        self._told: set[str] = set()  # peers whose leaps are in the log
        self._core = Election(
            peer_id, eligible=eligible, ttl_s=ttl_s, confirm_s=confirm_s, terms=self._file.load(), chance=chance
        )

    async def run(self) -> None:
        """Watch the claims; claim when there is none; renew or step down."""
        for turn in itertools.count():
            await self.look(quick=self._core.is_settled and turn % THOROUGH_EVERY != 0)
            await asyncio.sleep(self._every_s)

    async def look(self, *, quick: bool = False) -> None:
        """One look at the claims, now; `quick` as in `Store.get`."""
        async with self._one:
            if not self._is_saved:
                await self._save(self._core.terms)
            mono_s, wall = self._monotonic(), self._clock()
            claims = await self._directory.read(LeaseRecord, quick=quick)
            commands = self._core.handle(Looked(mono_s, wall, claims))
            for peer_id in self._core.leaps.keys() - self._told:
                if len(self._told) < MOST_TOLD:
                    self._told.add(peer_id)
                    log.warning("claim passed over", peer=peer_id, term=self._core.leaps[peer_id], why="it leaps")
            await self._do(commands)

    async def resign(self) -> None:
        """Leave: whoever comes next need not wait for our lease to run out."""
        async with self._one:
            await self._do(self._core.handle(Resigned()))

    @property
    def accepted(self) -> Term:
        """The highest term that this peer has believed or accepted; it survives a restart."""
        return self._core.terms.accepted

    def accept(self, term: Term) -> None:
        """A plan made under this term has come: on disk, if that takes it. StaleTermError or ProtocolError as in `Election`."""
        if self._core.accept(term):
            with self._trying():
                self._file.save(self._core.terms)

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        """To save the terms. What the disk refuses is tried again before every look."""
        try:
            yield
        except OSError as error:
            self._is_saved = False
            self._trouble.tell(WHAT, error)
        else:
            self._is_saved = True
            self._trouble.over(WHAT)

    async def _save(self, terms: Terms) -> bool:
        with self._trying():
            await asyncio.to_thread(self._file.save, terms)
        return self._is_saved

    async def _do(self, commands: list[Command]) -> None:
        while commands:
            command, *commands = commands
            match command:
                case Save():
                    saved = await self._save(command.terms)
                    commands += self._core.handle(Saved() if saved else Unsaved())
                case Write():
                    try:
                        ok = await self._directory.write(command.claim, self._ttl_s)
                    except ProtocolError as error:  # others would refuse it; this peer goes on without the lease
                        log.warning(events.Event.CLAIM_NOT_WRITTEN, error=str(error))
                        ok = False
                    commands += self._core.handle(Wrote(self._monotonic(), ok))
                case Believe():
                    self.lease = command.lease
                    log.debug("coordinator", term=command.lease.term if command.lease else None)
                    async with self.changed:
                        self.changed.notify_all()
