"""The links that begin at this peer: what probes and steps have shown of each, told to the mesh.

The idea: one figure a link, and the newest counts, whoever found it out. A probe is news where its figures are not ALIKE those
last told; else the next announcement carries it. What steps show is news once it has held for several of them and is another than
the mesh knows, and not again for a while. So a link that flaps makes no more noise than one that is probed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from dht import MAX_LINKS, Directory, LinkRecord
from meshcee.adapt import FAST, SHIFT, Senses, as_shown
from meshcee.figures import LinkProfile, Observed
from meshcee.planner import NEAR_LATENCY_S
from peers.wire import Crossed

__all__ = ["ALIKE", "OLD_S", "REST_S", "LinkReport"]

ALIKE = 1.25  # times as fast, or as slow
REST_S = 3.0  # between two changes of one link that steps have shown, at least
OLD_S = 600.0  # of a figure that steps bear out: it is dated anew, well before nobody believes it any more


class LinkReport:
    """`run` in the agent's TaskGroup tells what steps have shown, so that no step waits for it.

    known  peer -> the link to it, as published
    """

    def __init__(
        self, me: str, directory: Directory, *, clock: Callable[[], float], monotonic: Callable[[], float]
    ) -> None:
        self.known: dict[str, LinkProfile] = {}
        self._me, self._directory = me, directory
        self._clock, self._monotonic = clock, monotonic
        self._senses = Senses({})
        self._told: dict[str, LinkProfile] = {}  # when there were news last
        self._rests_until_s: dict[str, float] = {}
        self._news = asyncio.Event()

    async def probed(self, peer: str, link: LinkProfile, *, awaited: bool = False) -> None:
        """Newer than what steps have shown so far. `awaited`: it is news, alike or not."""
        self.known[peer] = link
        self._senses.assume((self._me, peer), link.bandwidth_bytes_per_s)
        told = self._told.get(peer)
        if awaited or told is None or not _alike(told, link):
            await self._publish()
        else:
            self._directory.renew(self._record())

    def bandwidth(self, peer: str) -> float:
        """Bytes per second, as published; inf where it is FAST, or nobody has measured."""
        known = self.known.get(peer)
        return known.bandwidth_bytes_per_s if known is not None and known.bandwidth_bytes_per_s < FAST else math.inf

    def bandwidths(self) -> dict[str, float]:
        """Those that are finite, the newest first."""
        newest = sorted(self.known, key=lambda peer: -self.known[peer].measured_at)
        return {peer: speed for peer in newest if (speed := self.bandwidth(peer)) < math.inf}

    def begin(self) -> Crossed:
        """A plan begins, of which each step is to be told: for how fast it is, a link's bandwidth counts where frames queued."""
        self._senses = Senses.of({(self._me, peer): link for peer, link in self.known.items()})
        return self._hear

    def _hear(self, rates: Mapping[str, float], depths: Mapping[str, float]) -> None:
        me, now_s = self._me, self._monotonic()
        rates = {peer: rate for peer, rate in rates.items() if peer in self.known}  # a device may name anybody
        self._senses.hear(Observed({}, {(me, p): x for p, x in rates.items()}, {(me, p): x for p, x in depths.items()}))
        for peer in rates:
            known = self.known.get(peer)
            if known is None or now_s < self._rests_until_s.get(peer, -math.inf):
                continue
            before = min(known.bandwidth_bytes_per_s, FAST)
            shown = self._senses.rates.get((me, peer), before)
            if abs(shown / before - 1) >= SHIFT:
                known = as_shown(known, shown)
            elif self._clock() - known.measured_at < OLD_S:
                continue
            self.known[peer] = replace(known, measured_at=self._clock())
            self._rests_until_s[peer] = now_s + REST_S
            self._news.set()

    async def run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            await self._publish()

    async def _publish(self) -> None:
        record = self._record()
        self._told = dict(record.links)
        await self._directory.publish(record)

    def _record(self) -> LinkRecord:
        alive = self._directory.peers
        newest = sorted(self.known.items(), key=lambda x: -x[1].measured_at)
        links = tuple((peer, link) for peer, link in newest if peer in alive)[:MAX_LINKS]
        return LinkRecord(self._me, 0.0, links)


def _alike(one: LinkProfile, other: LinkProfile) -> bool:
    """Whether it can wait for an announcement. Above FAST a probe shows the machine rather than the link, and so it does between
    the near."""
    fast = [min(link.bandwidth_bytes_per_s, FAST) for link in (one, other)]
    near = [max(link.latency_s, NEAR_LATENCY_S) for link in (one, other)]
    return max(fast) < ALIKE * min(fast) and max(near) < ALIKE * min(near)
