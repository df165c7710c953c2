"""The lines and queues of the emulated network, on any clock: packets in, packets out with the time they arrive.

The idea: a packet crosses its path hop by hop, as events in one heap. A line is a number: when it is free again. A packet
that reaches it at t leaves at max(t, free) + bytes / bandwidth, or is dropped if it would have to wait for more bytes than
the queue holds. Events are handled at the time they were due, not at the time the process was woken, so a late wake-up
delays packets but costs no bandwidth. A message never overtakes another one between the same two regions.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.lab.network import Link, Network

__all__ = ["Line", "Queues"]


@dataclass(slots=True)
class Line:
    """One direction of a port, or of a link between two regions."""

    name: str
    bandwidth_bytes_per_s: float | None
    queue_bytes: float
    free_at: float = 0.0
    passed_bytes: int = 0
    passed: int = 0  # packets
    dropped: int = 0  # packets: the queue was full
    lost: int = 0  # packets: the link's own loss

    def leaves(self, at: float, size: int) -> float | None:
        """When `size` bytes that are here at `at` have left; None when the queue is full."""
        self.passed += 1
        self.passed_bytes += size
        bandwidth = self.bandwidth_bytes_per_s
        if bandwidth is None:
            return at
        free_at = self.free_at
        if free_at > at:
            if (free_at - at) * bandwidth + size > self.queue_bytes:
                self.dropped += 1
                self.passed -= 1
                self.passed_bytes -= size
                return None
            at = free_at
        self.free_at = at = at + size / bandwidth
        return at


@dataclass(slots=True)
class _Crossing:
    """From one region to another: its line, latency and loss, which a trace may change."""

    line: Line
    latency_s: float
    loss: float
    last_arrival: float = field(default=0.0)


class Queues:
    """The network in motion. Times are seconds of any one clock; packets are opaque."""

    def __init__(self, network: Network, *, seed: int = 0) -> None:
        self._network = network
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, int, int, bytes]] = []  # due, order, hop, route, packet
        self._count = 0
        self._crossings: dict[tuple[str, str], _Crossing] = {}
        for link in network.links:
            line = self._line(f"{link.source}>{link.target}", link.bandwidth_bytes_per_s)
            self._crossings[link.source, link.target] = _Crossing(line, link.latency_s, link.loss)
        ports = [
            [self._line(f"{host.name} {way}", host.port_bytes_per_s) for way in ("out", "in")] for host in network.hosts
        ]
        self._width = len(network.hosts)
        self._routes: list[tuple[Line, _Crossing, Line]] = [
            (ports[i][0], self._crossings[a.region, b.region], ports[j][1])
            for i, a in enumerate(network.hosts)
            for j, b in enumerate(network.hosts)
        ]
        self._lines = [line for pair in ports for line in pair] + [c.line for c in self._crossings.values()]
        self._changes = [(change.at_s, change.link) for change in network.changes]
        self._trace_from: float | None = None

    def _line(self, name: str, bandwidth_bytes_per_s: float | None) -> Line:
        return Line(name, bandwidth_bytes_per_s, self._network.queue_bytes(bandwidth_bytes_per_s or 0.0))

    def set(self, link: Link) -> None:
        """Change a link, for what has not yet been queued."""
        crossing = self._crossings[link.source, link.target]
        crossing.latency_s, crossing.loss = link.latency_s, link.loss
        crossing.line.bandwidth_bytes_per_s = link.bandwidth_bytes_per_s
        crossing.line.queue_bytes = self._network.queue_bytes(link.bandwidth_bytes_per_s or 0.0)

    def start_trace(self, now: float) -> None:
        """The trace's zero is now; started again, it begins from the network as it was first."""
        self.reset()
        self._trace_from = now

    def reset(self) -> None:
        """The network as it was first; its trace does not run."""
        for link in self._network.links:
            self.set(link)
        self._changes = [(change.at_s, change.link) for change in self._network.changes]
        self._trace_from = None

    def put(self, now: float, source: int, target: int, packet: bytes) -> None:
        """A packet from one host to another, by their places in the network's list."""
        self._step(now, 0, source * self._width + target, packet)

    def next_due(self) -> float | None:
        """When something happens next; None when nothing is under way."""
        due = self._events[0][0] if self._events else None
        if self._trace_from is not None and self._changes:
            change = self._trace_from + self._changes[0][0]
            due = change if due is None else min(due, change)
        return due

    def arrived(self, now: float) -> Iterator[tuple[int, bytes]]:
        """The packets that have reached their host by now, with the place of the host."""
        while self._trace_from is not None and self._changes and self._trace_from + self._changes[0][0] <= now:
            self.set(self._changes.pop(0)[1])
        events = self._events
        while events and events[0][0] <= now:
            due, _, hop, route, packet = heapq.heappop(events)
            if hop == 3:
                yield route % self._width, packet
            else:
                self._step(due, hop, route, packet)

    def _step(self, at: float, hop: int, route: int, packet: bytes) -> None:
        """Through one line after the other, at once as long as they take no time; the rest becomes an event."""
        size = len(packet)
        out, crossing, into = self._routes[route]
        if hop == 0:
            leaves = out.leaves(at, size)
            if leaves is None:
                return
            hop = 1
            if leaves > at:
                self._later(leaves, hop, route, packet)
                return
        if hop == 1:
            if crossing.loss and self._random.random() < crossing.loss:
                crossing.line.lost += 1
                return
            leaves = crossing.line.leaves(at, size)
            if leaves is None:
                return
            arrives = max(leaves + crossing.latency_s, crossing.last_arrival)
            crossing.last_arrival = arrives
            # A port without a limit costs no event of its own.
            self._later(arrives, 2 if into.bandwidth_bytes_per_s is not None else 3, route, packet)
            return
        leaves = into.leaves(at, size)
        if leaves is not None:
            self._later(leaves, 3, route, packet)

    def _later(self, due: float, hop: int, route: int, packet: bytes) -> None:
        self._count += 1
        heapq.heappush(self._events, (due, self._count, hop, route, packet))

    def stats(self) -> dict[str, dict[str, Any]]:
        """By line: bytes and packets that passed, were dropped by a full queue, or lost."""
        return {
            line.name: {
                "bytes": line.passed_bytes,
                "packets": line.passed,
                "dropped": line.dropped,
                "lost": line.lost,
            }
            for line in self._lines
            if line.passed or line.dropped or line.lost
        }
