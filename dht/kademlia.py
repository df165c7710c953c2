"""A Store over hivemind's Kademlia node, in our own event loop.

The idea: one DHTNode on a P2P instance that somebody else owns and restarts; every call is bounded in time, and a
shutdown that hangs (it does, when p2pd was killed) is left behind after a moment.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import structlog

from meshcee.config import Timeouts

with warnings.catch_warnings():  # hivemind imports much of torch that warns of its own deprecations
    warnings.simplefilter("ignore")
    from hivemind.dht.node import DHTNode

__all__ = ["KademliaStore"]

log = structlog.get_logger()


class KademliaStore:
    """Lifetime is `async with`. An observer (`client_mode`) keeps no records of others."""

    def __init__(self, p2p: Any, seeds: Sequence[str], *, client_mode: bool, timeouts: Timeouts) -> None:
        self._p2p = p2p
        self._seeds = list(seeds)
        self._client_mode = client_mode
        self._timeouts = timeouts
        self._node: Any = None

    async def __aenter__(self) -> KademliaStore:
        await self.rebind(self._p2p)
        return self

    async def rebind(self, p2p: Any) -> None:
        """A node on this P2P: the first, or one after p2pd was restarted."""
        await self._drop()
        self._p2p = p2p
        self._node = await DHTNode.create(
            p2p=p2p,
            initial_peers=self._seeds,
            client_mode=self._client_mode,
            cache_locally=False,
            cache_on_store=False,
            cache_nearest=0,
            num_replicas=5,
            reuse_get_requests=False,
            wait_timeout=self._timeouts.dial_s,
            bootstrap_timeout=self._timeouts.dial_s,
            ensure_bootstrap_success=False,
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._drop()

    async def _drop(self) -> None:
        node, self._node = self._node, None
        if node is None:
            return
        try:
            async with asyncio.timeout(self._timeouts.shutdown_s):
                await node.shutdown()
        except TimeoutError:
            log.debug("the DHT node did not shut down in time")

    async def put(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        try:
            async with asyncio.timeout(self._timeouts.dial_s):
                return bool(await self._node.store(key, subkey=subkey, value=value, expiration_time=expires_at))
        except (TimeoutError, OSError, EOFError, AttributeError) as error:
            log.debug("record not stored", key=key, error=repr(error))
            return False

    async def get(self, key: str) -> Mapping[str, tuple[bytes, float]]:
        try:
            async with asyncio.timeout(self._timeouts.dial_s):
                found = await self._node.get(key, latest=True)
        except (TimeoutError, OSError, EOFError, AttributeError) as error:
            log.debug("records not read", key=key, error=repr(error))
            return {}
        if found is None or not isinstance(found.value, dict):
            return {}
        return {
            str(subkey): (entry.value, float(entry.expiration_time))
            for subkey, entry in found.value.items()
            if isinstance(entry.value, bytes)
        }
