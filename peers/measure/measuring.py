"""What one peer measures while it runs: its links, one at a time, and a job's blocks when an owner asks.

The idea: the peer plugs this in and trains without it; then it takes part in plans that somebody else has made.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import Any, Protocol

import structlog

from meshcee.config import Timeouts
from meshcee.errors import MeshceeError
from meshcee.figures import DeviceProfile
from meshcee.planner import whom_to_probe
from peers.device import Compute, Graphs, quiet
from peers.measure.block_profiler import BlockProfiler
from peers.measure.link_report import ALIKE, LinkReport
from peers.measure.probe import LIGHT_S, TARGET_S, Turns, probe_link
from peers.measure.sounding import Wishes
from peers.mesh_view import LINK_TTL_S, MeshView
from peers.transport import StreamClosed, Transport

__all__ = ["Measuring", "lend_profiles"]

log = structlog.get_logger()

PROBE_EVERY_S = 60.0  # each link is measured again after this long, or later
MOST_EVERY_S = 480.0  # after twice as long each time that it was ALIKE, but no longer than this
PROBE_SHARE = 0.02  # of a peer's time, at most, in which links that were measured before are measured again


class Busy(Protocol):
    """Who trains, now and then: meanwhile little is measured."""

    @property
    def is_busy(self) -> bool: ...


def lend_profiles(
    transport: Transport,
    compute: Compute,
    device: DeviceProfile,
    member: Busy,
    graphs: Graphs,
    *,
    shared: bool,
    timeouts: Timeouts,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Serve profiles of blocks on this device; `shared`: other peers of its host may measure too."""
    profiler = BlockProfiler(
        compute,
        memory_bytes=device.memory_bytes,
        graphs=graphs,
        is_busy=lambda: member.is_busy,
        timeouts=timeouts,
        clock=clock,
        quiet=quiet if shared and device.kind == "cpu" else nullcontext,
    )
    transport.serve("profile", profiler.serve)


class Measuring:
    """One peer's. It answers other peers' probes; a peer that lends a device runs what `measure_links` returns."""

    def __init__(self, agent: MeshView) -> None:
        self._agent = agent
        self._member: Busy
        self._links = LinkReport(agent.peer_id, agent.directory, clock=agent.clock, monotonic=agent.monotonic)
        self._tried: dict[str, float] = {}  # when each link was last tried: one that fails does not hold up others
        self._rests_s: dict[str, float] = {}  # for how long one that fails is not tried again, unless somebody asks
        self._every_s: dict[str, float] = {}  # after how long each link is measured again
        self._wishes = Wishes(agent)
        self._turns = Turns(agent.peer_id, agent.timeouts.join_s)
        agent.transport.serve("probe", self._turns.serve)

    def for_member(self) -> dict[str, Callable[..., Any]]:
        """Of its sessions: whom a member reports what crossed its links, and what it may know of them."""
        return {"begun": self._links.begin, "bandwidth": self._links.bandwidth}

    def for_process(self) -> dict[str, Callable[..., Any]]:
        """The same for a member in a process of its own, which is told what is known."""
        return {"begun": self._links.begin, "bandwidths": self._links.bandwidths}

    def lend(self, compute: Compute, device: DeviceProfile, member: Busy, graphs: Graphs) -> None:
        """Serve profiles of blocks on this device."""
        agent = self._agent
        shared, transport, timeouts = bool(agent.host), agent.transport, agent.timeouts
        lend_profiles(
            transport, compute, device, member, graphs, shared=shared, timeouts=timeouts, clock=agent.monotonic
        )

    def measure_links(self, member: Busy) -> list[Coroutine[Any, Any, None]]:
        """What is to run as long as a device is lent."""
        self._member = member
        return [self._probe_forever(), self._links.run()]

    async def _probe_forever(self) -> None:
        """Measure the links to others that lend a device, one at a time, new ones first.

        Links measured before are measured again ever more rarely while they stay as they are. This takes at most PROBE_SHARE of
        this peer's time on the wire. While the peer trains, with little, and only when the owner of a job asks
        (peers/measure/sounding.py), or the figure is so old that soon nobody would believe it.
        """
        rest_until_s = 0.0
        while True:
            target, known = self._stalest_link(may_repeat=self._agent.monotonic() >= rest_until_s)
            wish = self._wishes.take() if target is None or target in self._rests_s else None
            asked = wish is not None
            if wish is not None:
                target, known = wish, False
            if target is None:
                await self._wishes.wait(self._agent.timeouts.directory_poll_s)
                continue
            record = self._agent.directory.peers[target]
            start_s, now = self._agent.monotonic(), self._agent.clock()
            self._tried[target] = now
            try:
                where, clock = (self._agent.transport, target, record.addresses, now), self._agent.monotonic
                light = asked or self._member.is_busy
                target_s = LIGHT_S if light else TARGET_S
                with self._turns.own(target) as answered:
                    async with asyncio.timeout(self._agent.timeouts.join_s):
                        probed = await probe_link(*where, clock=clock, target_s=target_s, answered=answered)
                if asked:
                    self._wishes.probed(target, probed.sent_bytes / probed.link.bandwidth_bytes_per_s)
            except (MeshceeError, StreamClosed, TimeoutError) as error:
                log.debug("link not measured", peer=record.name, error=str(error))
                first_s = self._agent.timeouts.directory_poll_s
                self._rests_s[target] = min(2 * self._rests_s.get(target, first_s), MOST_EVERY_S)
                await asyncio.sleep(self._agent.timeouts.directory_poll_s)
                continue
            finally:
                if known:
                    now_s = self._agent.monotonic()
                    rest_until_s = now_s + (now_s - start_s) / PROBE_SHARE
            failed = self._rests_s.pop(target, None) is not None
            if (before := self._links.known.get(target)) is not None and not light:
                faster = probed.link.bandwidth_bytes_per_s / before.bandwidth_bytes_per_s
                twice_s = min(2 * self._every_s.get(target, PROBE_EVERY_S), MOST_EVERY_S)
                self._every_s[target] = twice_s if 1 / ALIKE < faster < ALIKE else PROBE_EVERY_S
            await self._links.probed(target, probed.link, awaited=asked or failed)

    def _stalest_link(self, *, may_repeat: bool) -> tuple[str | None, bool]:
        """The link that it is most time to measure, and whether it was measured before."""
        busy = self._member.is_busy
        now = self._agent.clock()
        lending = [p for p, r in self._agent.directory.peers.items() if r.device is not None]
        published = {(p, to): link for p, r in self._agent.directory.links.items() for to, link in r.links}
        published |= {(self._agent.peer_id, to): link for to, link in self._links.known.items()}
        due: list[tuple[bool, float, str]] = []
        failing = {peer for peer, rests_s in self._rests_s.items() if rests_s >= PROBE_EVERY_S}
        for peer in whom_to_probe(self._agent.peer_id, lending, published, failing):
            known, tried = self._links.known.get(peer), self._tried.get(peer, 0.0)
            if known is None:
                is_due = now - tried >= self._rests_s.get(peer, 0.0)
            else:
                after_s = LINK_TTL_S / 2 if busy else self._every_s.get(peer, PROBE_EVERY_S)
                is_due = may_repeat and now - known.measured_at > after_s
            if is_due:
                due.append((known is not None or peer in self._rests_s, tried, peer))
        if not due:
            return None, False
        _, _, target = min(due)
        return target, target in self._links.known
