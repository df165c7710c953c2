"""Who is in the mesh, what their links are, and which job runs: our own records announced, everybody's read.

The idea: announce often, believe what keeps changing (see roster.py), and keep the mesh in one piece. A seed, a peer that was
known before the start, or one that has vanished without a word is called up again now and then. So two halves of a mesh find
each other.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import structlog

from dht.addresses import peer_of
from dht.membership import Members
from dht.records import (
    CLOCK_SKEW_S,
    MAX_TTL_S,
    LinkRecord,
    PeerRecord,
    Record,
    RevokedRecord,
    RunRecord,
    check,
    dated,
    learn_list,
    open_sealed,
    seal,
    topic,
)
from dht.roster import Change, Roster, differences
from dht.signing import Identity, MeshKey
from dht.store import Store
from meshcee.config import Limits, Timeouts
from meshcee.errors import ClockError, JoinError, MeshceeError, ProtocolError
from meshcee.events import Event

__all__ = ["Change", "Directory", "read_lists"]

log = structlog.get_logger()

R = TypeVar("R", bound=Record)

REST_EVERY = 4  # polls of peers for one of links and runs, and for one that asks all replicas: a third of the traffic
EMPTY_EVERY = 16  # polls for one of what nobody has written: no node has it, so all are asked
LINKS_LAST = 8  # lives of a peer's record that its links' figures are good for: they are announced so much more rarely
LISTS_EVERY = 16  # announcements for one of what admins have revoked
CROWD = 32  # beyond so many peers, polls become rarer in proportion
CALL_FIRST_S, CALL_MOST_S = 2.0, 60.0  # pauses between two calls of a peer that has vanished
CALLED_AT_ONCE = 4
MAX_VANISHED = 64
FORGET_S = 3600.0
_PASSED_ON: Mapping[str, type[Record]] = {kind.kind: kind for kind in (PeerRecord, LinkRecord, RunRecord)}


class Directory:
    """Reads and writes the records of one mesh; what it knows is in `peers`, `links` and `runs`, our own included.

    `announce_forever` and `poll_forever` run in the owner's TaskGroup; the latter raises JoinError when an older
    process with our identity is at work elsewhere.
    """

    def __init__(
        self,
        store: Store,
        identity: Identity,
        mesh_key: MeshKey,
        *,
        timeouts: Timeouts,
        limits: Limits,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        members: Members | None = None,
    ) -> None:
        self.members = members or Members()
        self._store = store
        self._identity = identity
        self._mesh_key = mesh_key
        self._timeouts = timeouts
        self._limits = limits
        self._clock = clock
        self._monotonic = monotonic
        self.peers: dict[str, PeerRecord] = {}
        self.links: dict[str, LinkRecord] = {}
        self.runs: dict[str, RunRecord] = {}
        self.over: set[str] = set()  # owners who have said that their run is
        self.changed = asyncio.Condition()  # notified after every refresh and whatever is heard
        self.on_publish: Callable[[tuple[str, str], bytes], None] | None = None  # (kind, peer) and the sealed record
        self._started_at = clock()
        self._instance = secrets.token_hex(8)
        self._own: dict[type[Record], Record] = {}
        self._sent_at: dict[type[Record], float] = {}
        self._rosters: dict[type[Record], Roster[Any]] = {
            kind: Roster(self.ttl_s(kind)) for kind in (PeerRecord, LinkRecord, RunRecord)
        }
        self._suspects: set[tuple[str, str]] = set()
        # Whose clock was off, when their records were read, and whether those were the last.
        self._off: tuple[str, float, bool] = ("", -math.inf, False)
        self._double: tuple[str, float] | None = None  # instance and sent_at of another process that is us
        self._vanished: dict[str, tuple[float, tuple[str, ...]]] = {}  # since when, where it was
        for address in store.others:  # from the start on
            if (peer := peer_of(address)) is not None:
                self._vanished[peer] = monotonic(), (*self._vanished.get(peer, (0.0, ()))[1], address)
        self._calls: dict[str, tuple[float, float]] = {}  # next call of a peer, and the pause after it

    # -- writing -------------------------------------------------------------------------------------------------------

    async def publish(self, record: Record) -> bool:
        """Write our record now, and again until `withdraw`. False when no replica took it this time."""
        if isinstance(record, PeerRecord):
            record = replace(
                record, started_at=record.started_at or self._started_at, instance=record.instance or self._instance
            )
        self._own[type(record)] = record
        return await self.write(record, is_news=True)

    def tell(self, record: Record) -> None:
        """Pass our record on now, and write it with the next announcement: for news that nobody can wait for, as a
        write to replicas that have just died takes seconds."""
        self._own[type(record)] = record
        self._pass_on(record, self._seal(record)[0])

    def renew(self, record: Record) -> None:
        """Write our record with the next announcement: it says nothing that is news."""
        self._own[type(record)] = record

    async def withdraw(self, kind: type[Record]) -> None:
        """Stop publishing; the record expires by itself."""
        self._own.pop(kind, None)

    async def write(
        self, record: Record, ttl_s: float | None = None, *, is_news: bool = False, quick: bool = False
    ) -> bool:
        """Write our record once, dated now; `quick` as in `Store.put`. News are passed on besides, not only left for others to
        find."""
        sealed, expires_at = self._seal(record, ttl_s)
        if is_news:
            self._pass_on(record, sealed)
        key = topic(record.kind, self._mesh_key)
        return await self._store.put(key, record.peer_id, sealed, expires_at, quick=quick)

    def ttl_s(self, kind: type[Record]) -> float:
        ttl_s = self._timeouts.record_ttl_s
        return min(LINKS_LAST * ttl_s, MAX_TTL_S - CLOCK_SKEW_S) if kind is LinkRecord else ttl_s

    def _seal(self, record: Record, ttl_s: float | None = None) -> tuple[bytes, float]:
        """Dated now, and when it expires."""
        kind = type(record)
        sent_at = self._sent_at[kind] = dated(self._clock(), self._sent_at.get(kind, 0.0))
        expires_at = sent_at + (ttl_s or self.ttl_s(kind)) + CLOCK_SKEW_S
        return seal(
            replace(record, sent_at=sent_at),
            self._identity,
            self._mesh_key,
            expires_at,
            self._limits,
            self.members.shown,
        ), expires_at

    def _pass_on(self, record: Record, sealed: bytes) -> None:
        if self.on_publish is not None:
            self.on_publish((record.kind, record.peer_id), sealed)

    async def announce_forever(self) -> None:
        """Write what was published again and again, well before it is believed gone."""
        every_s = self._timeouts.announce_every_s
        due_s = self._monotonic() + every_s
        for turn in itertools.count(1):
            await asyncio.sleep(max(0.0, due_s - self._monotonic()))
            due_s = max(due_s, self._monotonic() - every_s) + every_s
            for kind, record in list(self._own.items()):
                if kind is LinkRecord and turn % LINKS_LAST:
                    continue
                if not await self.write(record, quick=turn % REST_EVERY != 0):
                    log.debug("record not stored", kind=record.kind)
            if turn % LISTS_EVERY == 0:
                for told in list(self.members.lists.values()):  # whose admin may be away
                    await self._keep_list(told.data)

    async def say_goodbye(self) -> None:
        """Tell the others at once that this peer leaves."""
        own = self._own.get(PeerRecord)
        self._own.clear()
        if isinstance(own, PeerRecord):
            await self.write(replace(own, left=True), is_news=True)

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def off(self) -> str:
        """Whose clock is ahead of this machine's, or behind, as their records say that were read last."""
        return self._off[0] if self._off[2] else ""

    def off_since(self, at_s: float) -> str:
        """The same, of all records that were read since."""
        return self._off[0] if self._off[1] >= at_s else ""

    async def read(self, kind: type[R], *, quick: bool = False) -> dict[str, R]:
        """Every valid record of this kind, by peer id; invalid ones are logged once each and set aside."""
        found: dict[str, R] = {}
        now, off = self._clock(), ""
        for subkey, (data, _) in (await self._store.get(topic(kind.kind, self._mesh_key), quick=quick)).items():
            try:
                found[subkey] = open_sealed(
                    kind, subkey, data, self._mesh_key, self._limits, now=now, members=self.members
                )
            except MeshceeError as error:
                off = str(error) if isinstance(error, ClockError) else off
                if (kind.kind, subkey) not in self._suspects and len(self._suspects) < 1024:
                    self._suspects.add((kind.kind, subkey))
                    log.warning(Event.RECORD_SET_ASIDE, kind=kind.kind, peer=subkey[:64], error=str(error))
        if kind is PeerRecord:
            self._off = (off, self._monotonic(), True) if off else (*self._off[:2], False)
        return found

    async def poll_forever(self) -> None:
        """Refresh what is known, at once and then every directory_poll_s; call up those who have vanished."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._poll())
            group.create_task(self._call_up())

    async def _poll(self) -> None:
        await self.refresh()
        for turn in itertools.count(1):
            await asyncio.sleep(self._timeouts.directory_poll_s * self._crowd())
            thorough = turn % REST_EVERY == 0
            is_told = PeerRecord in self._own  # others pass news on to whom they know
            empty = not is_told or turn % EMPTY_EVERY == REST_EVERY // 2
            await self.refresh(everything=turn % REST_EVERY == REST_EVERY // 2, quick=not thorough, empty=empty)

    async def refresh(self, *, everything: bool = True, quick: bool = False, empty: bool = True) -> None:
        """Read peers, and with `everything` links, runs and the lists of who is revoked, and note what has changed.

        quick  as in `Store.get`
        empty  of runs also where none is known
        """

        async def read(kind: type[R], some: object = True) -> dict[str, R]:
            return await self.read(kind, quick=quick) if everything and (empty or some) else {}

        _, found, links, runs = await asyncio.gather(
            self.read_revoked(quick=quick) if everything else asyncio.sleep(0),
            self.read(PeerRecord, quick=quick),
            read(LinkRecord),
            read(RunRecord, self.runs or self.over),
        )
        self._look_for_double(found.pop(self._identity.peer_id, None))
        await self._settle(found, links, runs)

    async def hear(self, data: bytes) -> tuple[str, str] | None:
        """A sealed record that a peer has passed on: (kind, peer) if it is newer than what was known, else None.

        ProtocolError or NotPermittedError when it is not valid, or of a kind that is not passed on.
        """
        envelope = check(data, self._mesh_key, self._limits)
        if envelope.kind == RevokedRecord.kind:
            return (envelope.kind, envelope.signer) if await self._learn(data) else None
        kind = _PASSED_ON.get(envelope.kind)
        if kind is None:
            raise ProtocolError(f"a record of kind {envelope.kind!r} is not passed on from peer to peer")
        signer = envelope.signer
        now = self._clock()
        record = open_sealed(kind, signer, data, self._mesh_key, self._limits, now=now, members=self.members)
        if signer == self._identity.peer_id or not self._rosters[kind].is_news(record, now):
            return None
        tables: dict[type[Record], dict[str, Any]] = {k: {} for k in _PASSED_ON.values()}
        tables[kind][signer] = record
        await self._settle(tables[PeerRecord], tables[LinkRecord], tables[RunRecord])
        return kind.kind, signer

    async def read_revoked(self, *, quick: bool = False) -> None:
        """Learn from the store who is revoked; what is refused counts for nothing, as in `read`."""
        if not self.members.root:
            return
        for data, _ in (await self._store.get(topic(RevokedRecord.kind, self._mesh_key), quick=quick)).values():
            if await self._learn(data):
                self._spread(RevokedRecord.kind, data)

    async def revoke(self, data: bytes) -> bool:
        """A list that an admin of this machine has sealed: believe it, store it, pass it on. Whether a replica took it."""
        if await self._learn(data):
            self._spread(RevokedRecord.kind, data)
        return await self._keep_list(data)

    async def _learn(self, data: bytes) -> bool:
        """Whether it is news; then those whom it names are gone here at once."""
        if not learn_list(data, self._mesh_key, self._limits, self.members, self._clock()):
            return False
        await self._settle({}, {}, {})
        return True

    async def _keep_list(self, data: bytes) -> bool:
        envelope = check(data, self._mesh_key, self._limits)
        return await self._store.put(topic(envelope.kind, self._mesh_key), envelope.signer, data, envelope.expires_at)

    def _spread(self, kind: str, data: bytes) -> None:
        if self.on_publish is not None:
            self.on_publish((kind, check(data, self._mesh_key, self._limits).signer), data)

    async def _settle(
        self, found: dict[str, PeerRecord], links: Mapping[str, LinkRecord], runs: Mapping[str, RunRecord]
    ) -> None:
        """Take in what was read or heard; what is known of the others stays."""
        me = self._identity.peer_id
        own = self._own.get(PeerRecord)
        if isinstance(own, PeerRecord):
            found[me] = replace(own, sent_at=self._sent_at[PeerRecord])
        told = self._live(PeerRecord, found)
        gone = self.members.is_revoked
        peers = {p: r for p, r in told.items() if not r.left and (p != me or own is not None) and not gone(p)}
        live_links, live_runs = self._live(LinkRecord, links), self._live(RunRecord, runs)
        self.links = {p: r for p, r in live_links.items() if p in peers}
        self.runs = {p: r for p, r in live_runs.items() if p in peers and r.state != "over"}
        self.over = {p for p, r in live_runs.items() if r.state == "over"}
        for change in differences(self.peers, peers):
            self._note(change, said_goodbye=change.record.peer_id in told)
        self.peers = peers
        async with self.changed:
            self.changed.notify_all()

    def _live(self, kind: type[R], found: Mapping[str, R]) -> dict[str, R]:
        roster = cast(Roster[R], self._rosters[kind])
        return roster.absorb(found, self._clock(), self._monotonic(), self._rarer_s(kind))

    def _crowd(self) -> float:
        """How many times rarer than in a small mesh we poll."""
        return max(1.0, len(self.peers) / CROWD)

    def _rarer_s(self, kind: type[Record]) -> float:
        """By how much two reads of this kind lie further apart than in a small mesh, and half of it, as they take longer."""
        polls = 1 if kind is PeerRecord else REST_EVERY
        return 1.5 * polls * self._timeouts.directory_poll_s * (self._crowd() - 1)

    def _note(self, change: Change, *, said_goodbye: bool) -> None:
        record = change.record
        log.debug("peer " + change.kind, name=record.name, peer=record.peer_id)
        if change.kind == "left" and not said_goodbye and record.addresses:
            self._vanished[record.peer_id] = (self._monotonic(), record.addresses)
            while len(self._vanished) > MAX_VANISHED:
                del self._vanished[next(iter(self._vanished))]
        elif change.kind == "joined":
            self._vanished.pop(record.peer_id, None)

    def _look_for_double(self, record: PeerRecord | None) -> None:
        """Two processes with one identity: the one that came later has to go, by itself."""
        own = self._own.get(PeerRecord)
        if not isinstance(own, PeerRecord) or record is None or record.left or record.instance == own.instance:
            return
        if record.sent_at <= own.started_at:  # what we ourselves published before a restart
            return
        before, self._double = self._double, (record.instance, record.sent_at)
        if before is None or before[0] != record.instance or before[1] >= record.sent_at:
            return  # seen once: it may have died a moment ago
        if (record.started_at, record.instance) < (own.started_at, own.instance):
            raise JoinError(
                f"peer {record.name!r} elsewhere already runs with this identity ({record.peer_id}): "
                "an identity file must not be copied; start this peer with a file of its own"
            )
        log.warning(Event.IDENTITY_USED_TWICE, name=record.name, addresses=record.addresses)

    async def events(self) -> AsyncIterator[Change]:
        """Everything that happens from now on, beginning with those who are here. However slowly it is read, it holds
        no more than two views of the mesh: what came and went in between is left out."""
        seen: dict[str, PeerRecord] = {}
        while True:
            for change in differences(seen, now := self.peers):
                yield change
            seen = now
            if seen is self.peers:
                await self.wait_for_change()

    async def wait_for(self, condition: Callable[[], Any]) -> None:
        """Return once the condition holds; it is asked after every refresh and whatever is heard."""
        async with self.changed:
            await self.changed.wait_for(condition)

    async def wait_for_change(self) -> None:
        """Return after the next refresh, or when something is heard."""
        async with self.changed:
            await self.changed.wait()

    # -- keeping the mesh in one piece -----------------------------------------------------------------------------------

    async def _call_up(self) -> None:
        """Two meshes that could not see each other for a while do not merge by themselves (hivemind #624)."""
        while True:
            await asyncio.sleep(CALL_FIRST_S)
            missing = self._missing()
            self._calls = {peer: call for peer, call in self._calls.items() if peer in missing}
            now_s = self._monotonic()
            due = [peer for peer in missing if self._calls.get(peer, (0.0, 0.0))[0] <= now_s]
            due.sort(key=lambda peer: self._calls.get(peer, (0.0, 0.0))[0])
            for peer in due[:CALLED_AT_ONCE]:
                pause_s = self._calls.get(peer, (0.0, CALL_FIRST_S / 2))[1] * 2
                self._calls[peer] = (now_s + pause_s, min(pause_s, CALL_MOST_S / 2))
            if due:
                met = await self._store.meet([a for peer in due[:CALLED_AT_ONCE] for a in missing[peer]])
                if met:
                    log.info("met again", peers=sorted(met))

    def _missing(self) -> dict[str, tuple[str, ...]]:
        """Seeds that we do not see and peers that vanished without a word: peer id -> addresses."""
        now_s = self._monotonic()
        self._vanished = {p: x for p, x in self._vanished.items() if now_s - x[0] < FORGET_S}
        found = {peer: addresses for peer, (_, addresses) in self._vanished.items()}
        for seed in self._store.seeds:
            peer = peer_of(seed)
            if peer is not None:
                found[peer] = (*(a for a in found.get(peer, ()) if a != seed), seed)
        return {p: a for p, a in found.items() if p not in self.peers and p != self._identity.peer_id}


async def read_lists(store: Store, mesh_key: MeshKey, limits: Limits, members: Members) -> None:
    """Before there is a directory: teach members what the store has of who is revoked."""
    if members.root:
        for data, _ in (await store.get(topic(RevokedRecord.kind, mesh_key))).values():
            learn_list(data, mesh_key, limits, members, time.time())
