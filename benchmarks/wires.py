"""The links of an arena in the WAN lab: every pair of hosts has its own, which can be cut, halved or let trickle for a while.

The idea: blows on a link are counted, so they may overlap, and it is whole again when the last of them has ended. A link that is
cut carries nothing and breaks nothing: whoever uses it hears neither an answer nor an end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product

from benchmarks.lab import Host, Lab, Link, Network

__all__ = ["Pair", "Wires", "network_of"]

LATENCY_S = 1e-3  # one way
BANDWIDTH = 12.5e6  # bytes/s

Pair = tuple[str, str]


def network_of(hosts: Sequence[str]) -> Network:
    """Each host is a region of its own, so that no two pairs share a link."""
    links = tuple(Link(a, b, LATENCY_S, BANDWIDTH) for a, b in product(hosts, repeat=2))
    return Network(tuple(Host(host, host) for host in hosts), links)


class Wires:
    """Of a lab with such a network. Links are named by their two hosts, in any order."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._cuts: Counter[Pair] = Counter()
        self._halvings: Counter[Pair] = Counter()
        self._trickles: dict[Pair, float] = {}  # bytes/s, from one to the other

    async def cut(self, pairs: Iterable[Pair], times: int = 1) -> None:
        """`times` -1 mends what was cut once."""
        await self._change(self._cuts, pairs, times)

    async def halve(self, pairs: Iterable[Pair], times: int = 1) -> None:
        """`times` -1 doubles what was halved once."""
        await self._change(self._halvings, pairs, times)

    async def trickle(self, source: str, targets: Iterable[str], rate: float | None) -> None:
        """What `source` sends to them, at so many bytes/s; None: as ever. The last word counts."""
        for target in targets:
            if rate is None:
                self._trickles.pop((source, target), None)
            else:
                self._trickles[source, target] = rate
            await self._lab.set(self.link(source, target))

    async def _change(self, counted: Counter[Pair], pairs: Iterable[Pair], times: int) -> None:
        for a, b in pairs:
            pair = min(a, b), max(a, b)
            counted[pair] += times
            for ends in (pair, pair[::-1]):
                await self._lab.set(self.link(*ends))

    def link(self, source: str, target: str) -> Link:
        """As it is now."""
        pair = min(source, target), max(source, target)
        rate = self._trickles.get((source, target), BANDWIDTH / 2 ** self._halvings[pair])
        return Link(source, target, LATENCY_S, rate, loss=1.0 if self._cuts[pair] else 0.0)
