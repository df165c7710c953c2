"""What the lab emulates: hosts in regions, the lines that they share, latencies, and a trace of changes.

The idea: a path is a row of queues, as on a real network: the sender's port, the line between two regions, the receiver's
port. Each line is a first-in-first-out queue of bounded length at one bandwidth, so TCP sees delay that grows and packets
that are lost just as it would on the wire. All that is needed is plain data, which travels to the router as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from meshcee.errors import UsageError
from meshcee.figures.scenario import Scenario

__all__ = ["PREFIX", "PREFIX6", "Change", "Host", "Link", "Network", "address_of", "nat_address", "pair_of_hosts"]

PREFIX, PREFIX6 = 16, 64  # hosts are on one network by the number of their device; there is no route to anything else
MIN_QUEUE_BYTES = 48 * 1024


@dataclass(frozen=True)
class Host:
    """One network namespace. Its port has a bandwidth in each direction; None is no limit.

    Hosts that are `behind` a router of the same name reach all others by that one's address, and only one another are reached.
    A host that is `inside` another one is one more device of that machine, with an address and links of its own.
    With `ipv6` its address is of that kind. A firewall before it lets nobody in at TCP ports that are `closed`.
    """

    name: str
    region: str
    port_bytes_per_s: float | None = None
    behind: str = ""
    inside: str = ""
    ipv6: bool = False
    closed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Link:
    """From one region to another, or within one; what crosses in this direction shares it."""

    source: str
    target: str
    latency_s: float  # one way
    bandwidth_bytes_per_s: float | None = None  # None is no limit, e.g. inside a region, where ports limit
    loss: float = 0.0  # the share of packets that vanish, on top of what a full queue drops


@dataclass(frozen=True)
class Change:
    """From `at_s` after the trace has been started, the link is this one."""

    at_s: float
    link: Link


@dataclass(frozen=True)
class Network:
    """All hosts, and a link for each ordered pair of regions, and for each region with itself."""

    hosts: tuple[Host, ...]
    links: tuple[Link, ...]
    changes: tuple[Change, ...] = ()
    queue_s: float = field(
        default=0.1
    )  # how long a queue may get, as its bandwidth drains it; at least MIN_QUEUE_BYTES

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        if not 1 <= len(names) <= 250 or len(set(names)) < len(names):
            raise UsageError("a lab has 1 to 250 hosts, each with a name of its own")
        for place, host in enumerate(self.hosts):
            if host.inside and (host.inside not in names[:place] or self.hosts[names.index(host.inside)].inside):
                raise UsageError(f"{host.name} is inside {host.inside}, which is no machine that stands before it")
            if host.ipv6 and host.behind:
                raise UsageError(f"{host.name} is behind a router, which translates IPv4 only")
        between = {(link.source, link.target) for link in self.links}
        regions = {host.region for host in self.hosts}
        if missing := sorted((a, b) for a in regions for b in regions if (a, b) not in between):
            raise UsageError(f"the lab has no link from {missing[0][0]} to {missing[0][1]}; add one")

    def device(self, place: int) -> int:
        """The number of this host's device on its machine."""
        machine = self.hosts[place].inside
        return 1 + sum(host.inside == machine for host in self.hosts[:place]) if machine else 0

    def address(self, place: int) -> str:
        """Of the host at this place."""
        device = self.device(place)
        return f"fd77:{device:x}::{place + 1:x}" if self.hosts[place].ipv6 else address_of(place, device)

    def queue_bytes(self, bandwidth_bytes_per_s: float) -> float:
        return max(MIN_QUEUE_BYTES, bandwidth_bytes_per_s * self.queue_s)

    @classmethod
    def of(cls, scenario: Scenario, *, loss: Mapping[tuple[str, str], float] | None = None) -> Network:
        """The network of a testbed. `loss` is by ordered pair of regions: testbed files have none."""
        cluster, lost = scenario.cluster, loss or {}
        hosts = tuple(Host(d.name, d.region, _finite(d.port_bytes_per_s)) for d in cluster.devices.values())
        regions = {host.region for host in hosts}
        links = {(r, r): Link(r, r, cluster.inside_latency_s[r], None, lost.get((r, r), 0.0)) for r in regions}
        for a, b, edge in cluster.graph.edges(data=True):
            if a[0] == b[0] == "@" and {a[1:], b[1:]} <= regions:
                pair = (a[1:], b[1:])
                links[pair] = Link(*pair, edge["latency"], _finite(edge["bandwidth"]), lost.get(pair, 0.0))
        if unknown := sorted(set(lost) - set(links)):
            raise UsageError(f"loss is given for {unknown[0]}, but regions are {', '.join(sorted(regions))}")
        changes, now = [], dict(links)
        for change in sorted(scenario.trace, key=lambda change: change.at_s):
            for pair in (change.between, change.between[::-1]):
                if pair not in links:
                    continue
                first, last = links[pair], now[pair]
                latency_s, bandwidth = last.latency_s, last.bandwidth_bytes_per_s
                if change.extra_latency_s is not None:
                    latency_s = first.latency_s + change.extra_latency_s
                if change.bandwidth_bytes_per_s is not None:
                    bandwidth = change.bandwidth_bytes_per_s
                now[pair] = Link(*pair, latency_s, bandwidth, last.loss)
                changes.append(Change(change.at_s, now[pair]))
        return cls(hosts, tuple(links.values()), tuple(changes))

    def slower(self, factor: float) -> Network:
        """The same network in slow motion: a second on the first takes `factor` seconds on this one."""

        def slow(link: Link) -> Link:
            return replace(
                link, latency_s=link.latency_s * factor, bandwidth_bytes_per_s=rate(link.bandwidth_bytes_per_s)
            )

        def rate(bytes_per_s: float | None) -> float | None:
            return None if bytes_per_s is None else bytes_per_s / factor

        return Network(
            tuple(replace(host, port_bytes_per_s=rate(host.port_bytes_per_s)) for host in self.hosts),
            tuple(map(slow, self.links)),
            tuple(Change(change.at_s * factor, slow(change.link)) for change in self.changes),
            self.queue_s * factor,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Network:
        return cls(
            tuple(Host(**{**host, "closed": tuple(host["closed"])}) for host in data["hosts"]),
            tuple(Link(**link) for link in data["links"]),
            tuple(Change(change["at_s"], Link(**change["link"])) for change in data["changes"]),
            data["queue_s"],
        )


def address_of(place: int, device: int = 0) -> str:
    """The IPv4 address of the host at this place in the network's list, which is that device of its machine."""
    return f"10.{77 + device}.0.{place + 1}"


def nat_address(place: int) -> str:
    """The IPv4 address outside of the router at this place among the names of those that hosts are behind."""
    return f"10.77.255.{place + 1}"


def pair_of_hosts(bandwidth_bytes_per_s: float, rtt_s: float, *, loss: float = 0.0) -> Network:
    """Hosts "here" and "there", each in a region of its own: the smallest network with a link."""
    link = (rtt_s / 2, bandwidth_bytes_per_s, loss)
    links = (Link("a", "b", *link), Link("b", "a", *link), Link("a", "a", 0.0), Link("b", "b", 0.0))
    return Network((Host("here", "a"), Host("there", "b")), links, queue_s=max(0.1, rtt_s))


def _finite(bandwidth_bytes_per_s: float) -> float | None:
    return bandwidth_bytes_per_s if math.isfinite(bandwidth_bytes_per_s) else None
