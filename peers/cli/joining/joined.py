"""What a peer has joined, in one sentence: whose mesh, how many are there, who plans, who is near, and by whom it is reached.

The idea: all of it stands in the records that every peer reads, so nobody is asked. Links take a moment to be measured: `look`
waits for them, within bounds, and what is not known by then is said to be unknown or left out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dht import LinkRecord, PeerRecord
from meshcee.figures import FEW, LinkProfile
from meshcee.planner.regions import find_regions
from peers.cli.joining.ports import opened
from peers.mesh_view import MeshView

__all__ = ["Joined", "joined", "look"]

LOOK_S = 15.0  # a link takes about a second to be measured, and its record another to be read
BOUNDARY_BYTES = 1e6  # of a tensor that crosses links: what "near" is judged by
MOST_NAMES = 3


@dataclass(frozen=True)
class Joined:
    """What one peer knows of its mesh; None is not known (yet)."""

    founder: str | None  # the name of the machine that has made the invite
    key: str  # what the mesh's key is called; "" in an open mesh
    others: int  # peers that lend a device, besides this one
    coordinator: str | None = None
    region: str | None = None  # a hint that most peers of this one's region were given
    near: tuple[str, ...] | None = None  # peers of the same region
    latency_s: float | None = None  # to the nearest of the region, or of all where nobody is in it
    nearest: str | None = None
    reached_by: int = 0  # peers that have measured a link to this one

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing that a while could bring. In a large mesh not everybody measures everybody."""
        known = self.coordinator is not None and (self.near is not None or not self.others)
        return known and (self.others >= FEW or self.reached_by == self.others)

    def facts(self) -> dict[str, Any]:
        """For scripts."""
        return {"joined": asdict(self)}

    @property
    def whose(self) -> str:
        if self.founder is not None:
            return f"the mesh of {self.founder}"
        return f"mesh {self.key}" if self.key else "an open mesh"

    def sentence(self) -> str:
        """For people."""
        if not self.others:
            return f"joined {self.whose}: no other peer lends a device there yet"
        found = [
            f"{_count(self.others)} there besides this one",
            f"coordinator {self.coordinator}" if self.coordinator else "nobody coordinates yet",
        ]
        if self.near is None:
            found.append("no link is measured yet")
        elif self.near:
            named = ", ".join(self.near[:MOST_NAMES]) + (
                f" and {len(self.near) - MOST_NAMES} more" if len(self.near) > MOST_NAMES else ""
            )
            where = f"you are in {f'region {self.region}' if self.region else 'a region'} with {named}"
            found.append(where + (f" ({_ms(self.latency_s)})" if self.latency_s is not None else ""))
        elif self.latency_s is not None:
            found.append(f"nobody is near: {self.nearest} is the nearest ({_ms(self.latency_s)})")
        found.append(f"reached by {self.reached_by} of {self.others}")
        return f"joined {self.whose}: " + ", ".join(found)

    def advice(self) -> str | None:
        """The next thing to do where nobody reaches this peer."""
        if not self.others or self.reached_by or self.others >= FEW:
            return None
        ports, options = opened()
        return (
            f"No peer has reached this one yet. Behind a router or a firewall, let {ports} in, and start this peer so: "
            f"meshcee peer --join LINE {options}; `meshcee doctor --join LINE` looks closer."
        )


def _count(peers: int) -> str:
    return f"{peers} peer{'s' if peers > 1 else ''}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def joined(
    me: str,
    at: str,
    fingerprint: str,
    peers: Mapping[str, PeerRecord],
    links: Mapping[str, LinkRecord],
    coordinator: str | None,
) -> Joined:
    """From what is known: `at` is the peer that has made the invite; it and the fingerprint are "" in an open mesh."""
    names = {peer: record.name for peer, record in peers.items()}
    others = sorted((p for p, r in peers.items() if r.device is not None and p != me), key=lambda p: (names[p], p))
    everybody = [me, *others]
    measured = {(p, to): link for p, r in links.items() for to, link in r.links if {p, to} <= set(everybody)}
    mesh = names.get(at), fingerprint
    plans = names.get(coordinator, f"…{coordinator[-8:]}") if coordinator is not None else None
    reached = sum((other, me) in measured for other in others)
    ours = {other: _between(me, other, measured) for other in others}
    known = {other: seconds for other, seconds in ours.items() if seconds is not None}
    if not known:
        return Joined(*mesh, len(others), plans, reached_by=reached)
    region = next(group for group in find_regions(everybody, measured, BOUNDARY_BYTES) if me in group)
    near = [p for p in others if p in region]
    nearest = min((p for p in known if not near or p in near), key=known.__getitem__, default=None)
    return Joined(
        *mesh,
        len(others),
        plans,
        _hint(region, peers),
        tuple(names[p] for p in near),
        known[nearest] if nearest is not None else None,
        names[nearest] if nearest is not None else None,
        reached,
    )


def _between(me: str, other: str, links: Mapping[tuple[str, str], LinkProfile]) -> float | None:
    found = [links[pair].latency_s for pair in ((me, other), (other, me)) if pair in links]
    return min(found, default=None)


def _hint(region: Collection[str], peers: Mapping[str, PeerRecord]) -> str | None:
    """As most of its peers were told where they are."""
    said = [hint for p in region if p in peers and (hint := peers[p].region) is not None]
    return max(dict.fromkeys(said), key=said.count, default=None)


async def look(agent: MeshView, at: str, fingerprint: str, within_s: float = LOOK_S) -> Joined:
    """Once everything is known, or after that time with what is known by then."""

    def now() -> Joined:
        lease = agent.lease
        directory = agent.directory
        return joined(
            agent.peer_id, at, fingerprint, directory.peers, directory.links, lease.peer_id if lease else None
        )

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await agent.directory.wait_for(lambda: now().is_whole)
    return now()
