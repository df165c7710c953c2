"""Who is in the mesh, what their links are, and which job runs: records read from the store, every one expiring.

The idea: announce often, believe for as long as a record lives, and tell apart joined, left and changed. A peer that
leaves says so; one that dies is forgotten when its record expires.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import structlog

from dht.records import LinkRecord, PeerRecord, Record, RunRecord, open_sealed, seal
from dht.signing import Identity, MeshKey
from dht.store import Store
from meshcee.config import Limits, Timeouts
from meshcee.errors import MeshceeError

__all__ = ["Change", "Directory"]

log = structlog.get_logger()

R = TypeVar("R", bound=Record)
MAX_SKEW_S = 120.0  # records dated further ahead than this are set aside


@dataclass(frozen=True)
class Change:
    """A peer has "joined", "left" or "changed"; `record` is the newest that was seen of it."""

    kind: str
    record: PeerRecord


class Directory:
    """Reads and writes records of one mesh. `run` keeps it fresh; what it knows is in `peers`, `links` and `runs`."""

    def __init__(
        self,
        store: Store,
        identity: Identity,
        mesh_key: MeshKey,
        *,
        timeouts: Timeouts,
        limits: Limits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._identity = identity
        self._mesh_key = mesh_key
        self._timeouts = timeouts
        self._limits = limits
        self._clock = clock
        self.peers: dict[str, PeerRecord] = {}
        self.links: dict[str, LinkRecord] = {}
        self.runs: dict[str, RunRecord] = {}
        self.changes: asyncio.Queue[Change] = asyncio.Queue(maxsize=1024)
        self.changed = asyncio.Condition()
        self._own: dict[type[Record], Record] = {}
        self._suspects: set[str] = set()

    # -- writing -------------------------------------------------------------------------------------------------------

    async def publish(self, record: Record) -> bool:
        """Write our record now, and again until `withdraw`. False when no replica took it this time."""
        self._own[type(record)] = record
        return await self._write(record)

    async def withdraw(self, kind: type[Record]) -> None:
        """Stop publishing; the record expires by itself."""
        self._own.pop(kind, None)

    async def _write(self, record: Record) -> bool:
        now = self._clock()
        sealed = seal(replace(record, sent_at=now), self._identity, self._mesh_key)
        return await self._store.put(self._key(type(record)), record.peer_id, sealed, now + self._timeouts.record_ttl_s)

    def _key(self, kind: type[Record]) -> str:
        return f"meshcee/{self._mesh_key.fingerprint}/{kind.kind}"

    async def announce_forever(self) -> None:
        """Write what was published again and again, well before it expires."""
        while True:
            await asyncio.sleep(self._timeouts.announce_every_s)
            for record in list(self._own.values()):
                if not await self._write(record):
                    log.debug("record not stored", kind=record.kind)

    async def say_goodbye(self) -> None:
        """Tell the others at once that this peer leaves."""
        own = self._own.get(PeerRecord)
        self._own.clear()
        if isinstance(own, PeerRecord):
            await self._write(replace(own, left=True))

    # -- reading -------------------------------------------------------------------------------------------------------

    async def read(self, kind: type[R]) -> dict[str, R]:
        """Every valid record of this kind, by peer id; invalid ones are logged once each and set aside."""
        found: dict[str, R] = {}
        now = self._clock()
        for subkey, (data, _) in (await self._store.get(self._key(kind))).items():
            try:
                record = open_sealed(kind, subkey, data, self._mesh_key, self._limits)
            except MeshceeError as error:
                if subkey not in self._suspects and len(self._suspects) < 1024:
                    self._suspects.add(subkey)
                    log.warning("record set aside", kind=kind.kind, peer=subkey[:64], error=str(error))
                continue
            if record.sent_at > now + MAX_SKEW_S:
                log.warning("record from the future set aside: check that peer's clock", peer=subkey)
            elif record.sent_at + self._timeouts.record_ttl_s > now - MAX_SKEW_S:
                found[subkey] = record
        return found

    async def poll_forever(self) -> None:
        """Refresh what is known, at once and then every directory_poll_s."""
        while True:
            await self.refresh()
            await asyncio.sleep(self._timeouts.directory_poll_s)

    async def refresh(self) -> None:
        """Read everything once and note what has changed."""
        records, links, runs = await asyncio.gather(*(self.read(k) for k in (PeerRecord, LinkRecord, RunRecord)))
        peers = {p: r for p, r in records.items() if isinstance(r, PeerRecord) and not r.left}
        self.links = {p: r for p, r in links.items() if isinstance(r, LinkRecord) and p in peers}
        self.runs = {p: r for p, r in runs.items() if isinstance(r, RunRecord) and p in peers}
        for peer_id in peers.keys() - self.peers.keys():
            self._note(Change("joined", peers[peer_id]))
        for peer_id in self.peers.keys() - peers.keys():
            self._note(Change("left", self.peers[peer_id]))
        for peer_id in peers.keys() & self.peers.keys():
            if replace(peers[peer_id], sent_at=0) != replace(self.peers[peer_id], sent_at=0):
                self._note(Change("changed", peers[peer_id]))
        self.peers = peers
        async with self.changed:
            self.changed.notify_all()

    def _note(self, change: Change) -> None:
        if self.changes.full():  # nobody listens, or too slowly: the newest matter
            self.changes.get_nowait()
        self.changes.put_nowait(change)
        log.debug("peer " + change.kind, name=change.record.name, peer=change.record.peer_id)

    async def wait_for(self, condition: Callable[[], Any]) -> None:
        """Return once the condition holds; it is asked after every refresh."""
        async with self.changed:
            await self.changed.wait_for(condition)

    async def wait_for_change(self) -> None:
        """Return after the next refresh."""
        async with self.changed:
            await self.changed.wait()
