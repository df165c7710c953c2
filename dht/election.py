"""Which peer plans: a lease that one peer holds, renewed while it lives, taken over when it is gone.

The idea: claims lie under one key; the highest term wins; a claimant believes its own claim only after it has waited
and still sees nothing higher. A DHT is no consensus: two may hold for a moment, which the members' refusal of older
terms makes harmless. The term's counter is on disk before it is claimed, so it never goes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from dht.directory import Directory
from dht.records import LeaseRecord

__all__ = ["Elector"]

log = structlog.get_logger()


class Elector:
    """`lease` is what this peer believes. `persist(counter)` must be durable when it returns."""

    def __init__(
        self,
        directory: Directory,
        peer_id: str,
        *,
        eligible: bool,
        counter: int = 0,
        persist: Callable[[int], None] = lambda counter: None,
        confirm_s: float = 1.0,
        every_s: float = 1.0,
    ) -> None:
        self._directory = directory
        self._peer_id = peer_id
        self._eligible = eligible
        self._counter = counter
        self._persist = persist
        self._confirm_s = confirm_s
        self._every_s = every_s
        self.lease: LeaseRecord | None = None

    async def run(self) -> None:
        """Watch the claims; claim when there is none; renew or step down."""
        while True:
            await self.look()
            if self.lease is None and self._eligible and not await self._someone_before_us():
                await self._claim()
            await asyncio.sleep(self._every_s)

    async def look(self) -> None:
        claims = await self._directory.read(LeaseRecord)
        highest = max(claims.values(), key=lambda claim: claim.term, default=None)
        mine = self.lease is not None and self.lease.peer_id == self._peer_id
        if highest is not None and mine and highest.peer_id != self._peer_id:
            log.info("stepping down", term=highest.term)
            await self._directory.withdraw(LeaseRecord)
        if highest is None and mine:
            return  # our own renewal is on its way
        if highest is not None:
            self._counter = max(self._counter, highest.counter)
        if highest is not None and highest.peer_id == self._peer_id and not mine:
            return  # our claim, not yet confirmed
        self.lease = highest

    async def _someone_before_us(self) -> bool:
        """Peers claim in the order of their ids, a confirmation apart, so that a lost lease is not stormed."""
        before = sum(1 for p, r in self._directory.peers.items() if p < self._peer_id and r.device is not None)
        await asyncio.sleep(min(before, 5) * self._confirm_s)
        await self.look()
        return self.lease is not None

    async def _claim(self) -> None:
        self._counter += 1
        self._persist(self._counter)
        claim = LeaseRecord(self._peer_id, 0.0, self._counter)
        await self._directory.publish(claim)
        await asyncio.sleep(self._confirm_s)
        claims = await self._directory.read(LeaseRecord)
        highest = max(claims.values(), key=lambda c: c.term, default=None)
        if highest is not None and highest.term == claim.term:
            self.lease = claim
            log.info("coordinator", term=claim.term)
        else:
            await self._directory.withdraw(LeaseRecord)
