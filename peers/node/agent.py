"""A peer: owns everything that runs in it, in one TaskGroup, from the first announcement to a bounded shutdown.

The idea: the agent is handed a transport and a store and knows nothing of libp2p or hivemind. So the same code runs on
real machines, in one process and under virtual time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType

import structlog

from dht import Identity, MeshKey, PeerRecord, Store, TermFile
from meshcee import __version__
from meshcee.config import Limits, Timeouts
from meshcee.errors import MeshceeError
from meshcee.figures import DeviceProfile
from meshcee.planner import whom_to_probe
from peers.device import Compute, quiet
from peers.measure import LIGHT_S, TARGET_S, BlockProfiler, LinkReport, Wishes, measure_device, probe_link, serve_probe
from peers.member import Member
from peers.mesh_view import MeshView
from peers.node.gossip import GossipService
from peers.planning import PlanService
from peers.state import Shelf
from peers.transport import PROTOCOL_VERSION, Stream, StreamClosed, Transport

__all__ = ["Agent", "AgentOptions"]

log = structlog.get_logger()

PROBE_EVERY_S = 60.0  # each link is measured again after this long, or later
PROBE_SHARE = 0.02  # of a peer's time, at most, in which links that were measured before are measured again


@dataclass(frozen=True)
class AgentOptions:
    """What the user said about this peer. An observer looks without announcing itself."""

    name: str
    region: str | None = None
    memory_bytes: int | None = None
    observes: bool = False
    host: str = ""  # of peers that share cores and memory; "": this one shares with nobody
    threads_said: bool = False


class Agent(MeshView):
    """Lifetime is `async with`: inside, the peer is announced, elects, serves, and may own jobs.

    Without a `compute` it holds no stage: then it is an owner or an observer, and never coordinator.
    """

    def __init__(
        self,
        options: AgentOptions,
        identity: Identity,
        mesh_key: MeshKey,
        transport: Transport,
        store: Store,
        compute: Compute | None,
        *,
        timeouts: Timeouts,
        limits: Limits,
        terms: TermFile | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            identity,
            mesh_key,
            transport,
            store,
            may_coordinate=compute is not None,
            timeouts=timeouts,
            limits=limits,
            host=options.host,
            terms=terms,
            clock=clock,
            monotonic=monotonic,
        )
        self.options = options
        self.mesh_key = mesh_key
        self.compute = compute
        self._device: DeviceProfile | None = None
        self.member: Member | None = None
        self._links = LinkReport(self.peer_id, self.directory, clock=clock, monotonic=monotonic)
        self._tried: dict[str, float] = {}  # when each link was last tried: one that fails does not hold up others
        PlanService(self)
        self.gossip = GossipService(self)
        self._wishes = Wishes(self)
        self.shelf = Shelf(transport, timeouts, monotonic)
        transport.serve("probe", serve_probe)
        transport.serve("join", _greeted)

    @property
    def lends(self) -> bool:
        """Whether it lends a device."""
        return self.compute is not None

    # -- lifetime ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Agent:
        if self.compute is not None:
            self._device = await measure_device(
                self.compute,
                self.options.memory_bytes,
                host=self.options.host,
                threads_said=self.options.threads_said,
            )
            self.member = Member(
                self.transport,
                self.compute,
                memory_bytes=self._device.memory_bytes,
                timeouts=self.timeouts,
                limits=self.limits,
                accept=lambda owner, term: self.elector.accept(term),
                begun=self._links.begin,
                bandwidth=self._links.bandwidth,
            )
            member = self.member
            profiler = BlockProfiler(
                self.compute,
                memory_bytes=self._device.memory_bytes,
                limits=self.limits,
                is_busy=lambda: member.is_busy,
                clock=self.monotonic,
                quiet=quiet if self.options.host and self._device.kind == "cpu" else nullcontext,
            )
            self.transport.serve("profile", profiler.serve)
        await self._group.__aenter__()
        await self._announce()
        running = [
            self.directory.announce_forever(),
            self.directory.poll_forever(),
            self.elector.run(),
            self.gossip.run(),
        ]
        if self.compute is not None:
            running += [self._probe_forever(), self._watch_member(self.member), self._links.run()]
        self._tasks = [self._group.create_task(task) for task in running]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.member is not None:
            self.member.is_leaving = True
            await self.member.drop()  # before the compute thread ends, which would look like a failure of ours
        try:
            async with asyncio.timeout(self.timeouts.shutdown_s):
                await self.elector.resign()
                await self.directory.say_goodbye()
        except TimeoutError:
            log.info("the mesh did not hear that this peer leaves")
        finally:
            for task in self._tasks:
                task.cancel()
            await self._group.__aexit__(kind, error, trace)

    async def _announce(self) -> None:
        if self.options.observes:
            return
        await self.directory.publish(
            PeerRecord(
                peer_id=self.peer_id,
                sent_at=0.0,
                name=self.options.name,
                addresses=tuple(self.transport.addresses),
                region=self.options.region,
                device=self._device,
                busy=self.member is not None and self.member.is_busy,
                leaving=self.member is not None and self.member.is_leaving,
                protocol=PROTOCOL_VERSION,
                software=__version__,
            )
        )

    async def leave(self) -> bool:
        """Take no further part in jobs, and hold a stage until its job goes on without this peer, at most leave_s.

        Returns whether it did; then, or after that time, end the agent.
        """
        if self.member is None:
            return True
        self.member.leave()
        try:
            async with asyncio.timeout(self.timeouts.leave_s):
                await self.member.wait_until_idle()
        except TimeoutError:
            await self.member.drop()
            return False
        return True

    async def _watch_member(self, member: Member | None) -> None:
        """Announce at once when this peer becomes busy or idle, or is about to leave."""
        assert member is not None
        while True:
            await member.busy_changed.wait()
            member.busy_changed.clear()
            await self._announce()

    # -- links ---------------------------------------------------------------------------------------------------------

    async def _probe_forever(self) -> None:
        """Measure the links to others that lend a device, one at a time, new ones first.

        Links measured before are measured again so rarely that this takes at most PROBE_SHARE of this peer's time on
        the wire. While the peer trains, only when the owner of a job asks (peers/measure/sounding.py).
        """
        rest_until_s = 0.0
        while True:
            target, known = self._stalest_link(may_repeat=self.monotonic() >= rest_until_s)
            asked = target is None
            if target is None and (target := self._wishes.take()) is None:
                await self._wishes.wait(self.timeouts.directory_poll_s)
                continue
            record = self.directory.peers[target]
            start_s, now = self.monotonic(), self.clock()
            self._tried[target] = now
            try:
                async with asyncio.timeout(self.timeouts.join_s):
                    where = self.transport, target, record.addresses
                    target_s = LIGHT_S if asked else TARGET_S
                    probed = await probe_link(*where, now, clock=self.monotonic, target_s=target_s)
                    if asked:
                        self._wishes.probed(target, probed.sent_bytes / probed.link.bandwidth_bytes_per_s)
            except (MeshceeError, StreamClosed, TimeoutError) as error:
                log.debug("link not measured", peer=record.name, error=str(error))
                await asyncio.sleep(self.timeouts.directory_poll_s)
                continue
            finally:
                if known:
                    now_s = self.monotonic()
                    rest_until_s = now_s + (now_s - start_s) / PROBE_SHARE
            await self._links.probed(target, probed.link)

    def _stalest_link(self, *, may_repeat: bool) -> tuple[str | None, bool]:
        """The link that it is most time to measure, and whether it was measured before."""
        busy = self.member is not None and self.member.is_busy
        now = self.clock()
        lending = [p for p, r in self.directory.peers.items() if r.device is not None]
        published = {(p, to): link for p, r in self.directory.links.items() for to, link in r.links}
        published |= {(self.peer_id, to): link for to, link in self._links.known.items()}
        due: list[tuple[bool, float, str]] = []
        for peer in whom_to_probe(self.peer_id, lending, published):
            known = self._links.known.get(peer)
            if known is None or (may_repeat and not busy and now - known.measured_at > PROBE_EVERY_S):
                due.append((known is not None, self._tried.get(peer, 0.0), peer))
        if not due:
            return None, False
        known_before, _, target = min(due)
        return target, known_before


async def _greeted(stream: Stream) -> None:
    """A newcomer shook hands; that was all it wanted."""
