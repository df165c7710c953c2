"""Where records live: one small protocol, and the in-process store that tests use.

The idea: a store is a dictionary of dictionaries whose entries expire; it is no compare-and-swap, and nothing above it
may pretend that it is. Of two entries the one that expires last stays, but one dated ahead of the store's clock hides no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from dht.addresses import peer_of
from dht.records import date_of, is_ahead

__all__ = ["MemoryStore", "SharedMemory", "Store"]


class Store(Protocol):
    """`key -> subkey -> (value, expires_at)`; expires_at is wall-clock seconds since the epoch."""

    @property
    def seeds(self) -> Sequence[str]:
        """Addresses (ending in /p2p/ID) of the peers through which this store was joined."""
        ...

    @property
    def others(self) -> Sequence[str]:
        """Addresses of peers that were seen before the start: they are called, and whether they answer does not matter."""
        ...

    async def put(self, key: str, subkey: str, value: bytes, expires_at: float, *, quick: bool = False) -> bool:
        """Write; False when no replica took it (a newer value, or nobody reachable).

        The nodes nearest to the key are looked for; `quick`: those that the last look found, and that are met since, will do.
        """
        ...

    async def get(self, key: str, *, quick: bool = False) -> Mapping[str, tuple[bytes, float]]:
        """Every unexpired entry under the key; empty when there is none, or nobody answered.

        All replicas are asked; `quick`: the first that has anything will do, so entries may be missing or old.
        """
        ...

    async def meet(self, addresses: Iterable[str]) -> frozenset[str]:
        """Make sure that the peers at these addresses and we share one store; the ids of those who answered."""
        ...


class SharedMemory:
    """The dictionary that the MemoryStores of one test or of one `--local` run share."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.entries: dict[str, dict[str, tuple[bytes, float]]] = {}

    def rank(self, entry: tuple[bytes, float]) -> tuple[bool, float]:
        """Of two entries in one place the higher stays."""
        value, expires_at = entry
        return not is_ahead(date_of(value), self.clock()), expires_at


class MemoryStore:
    """A Store over a dictionary shared in one process; `reachable=False` cuts this peer off from it.

    With another `shared` it is on another side of a partition.
    """

    def __init__(self, shared: SharedMemory) -> None:
        self.shared = shared
        self.seeds: Sequence[str] = ()
        self.others: Sequence[str] = ()
        self.reachable = True

    async def put(self, key: str, subkey: str, value: bytes, expires_at: float, *, quick: bool = False) -> bool:
        if not self.reachable or expires_at <= self.shared.clock():
            return False
        table = self.shared.entries.setdefault(key, {})
        entry = (value, expires_at)
        if subkey in table and self.shared.rank(table[subkey]) > self.shared.rank(entry):
            return False
        table[subkey] = entry
        return True

    async def get(self, key: str, *, quick: bool = False) -> Mapping[str, tuple[bytes, float]]:
        if not self.reachable:
            return {}
        now = self.shared.clock()
        table = self.shared.entries.get(key, {})
        return {s: entry for s, entry in table.items() if entry[1] > now}

    async def meet(self, addresses: Iterable[str]) -> frozenset[str]:
        return frozenset(peer for a in addresses if (peer := peer_of(a))) if self.reachable else frozenset()
