"""A peer: owns everything that runs in it, in one TaskGroup, from the first announcement to a bounded shutdown.

The idea: the agent is handed a transport and a store and knows nothing of libp2p or hivemind. So the same code runs on
real machines, in one process and under virtual time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import structlog

from dht import Identity, Members, MeshKey, PeerRecord, Store, TermFile
from meshcee import __version__
from meshcee.config import Limits, Timeouts
from meshcee.figures import DeviceProfile
from peers.device import Compute, Graphs, measure_device
from peers.member import Member
from peers.mesh_view import MeshView
from peers.node.gossip import GossipService
from peers.planning import PlanService
from peers.transport import PROTOCOL_VERSION, Stream, Transport
from peers.wire import Offer

if TYPE_CHECKING:
    from peers.measure import Measuring
    from peers.node.datasets.service import DataService, Source
    from peers.node.device_process import DeviceProcess
    from peers.node.lent import Lent

__all__ = ["Agent", "AgentOptions"]

log = structlog.get_logger()


@dataclass(frozen=True)
class AgentOptions:
    """What the user said about this peer. An observer looks without announcing itself."""

    name: str
    region: str | None = None
    memory_bytes: int | None = None
    observes: bool = False
    host: str = ""  # of peers that share cores and memory; "": this one shares with nobody
    threads_said: bool = False
    direct_sums: bool = False  # jobs that ask for them may open connections from here that are not encrypted
    measuring: Callable[[MeshView], Measuring] | None = None  # of links and blocks; without, plans are given
    datasets: Mapping[str, Source] = field(default_factory=dict)  # that jobs of others may be fed from here
    shelves: bool = True  # it keeps the journals of others' runs


class Agent(MeshView):
    """Lifetime is `async with`: inside, the peer is announced, elects, serves, and may own jobs.

    It lends a `device`, which computes in this process or in its own. Without one it holds no stage: then it is an owner or an
    observer, and never coordinator. `graphs` reads those of others; without, this process does.
    """

    def __init__(
        self,
        options: AgentOptions,
        identity: Identity,
        mesh_key: MeshKey,
        transport: Transport,
        store: Store,
        device: Compute | DeviceProcess | None,
        *,
        timeouts: Timeouts,
        limits: Limits,
        terms: TermFile | None = None,
        graphs: Graphs | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        members: Members | None = None,
    ) -> None:
        super().__init__(
            identity,
            mesh_key,
            transport,
            store,
            may_coordinate=device is not None,
            timeouts=timeouts,
            limits=limits,
            host=options.host,
            terms=terms,
            clock=clock,
            monotonic=monotonic,
            members=members,
        )
        self.options = options
        self.mesh_key = mesh_key
        self.compute = device if isinstance(device, Compute) else None
        self._process = None if isinstance(device, Compute) else device
        self._graphs = graphs or Graphs(limits)
        self._device: DeviceProfile | None = None
        self.member: Lent | None = None
        self._measuring = options.measuring(self) if options.measuring is not None else None
        self.measures = self._measuring is not None
        PlanService(self)
        self.gossip = GossipService(self)
        self.shelf: Shelf | None = None
        if options.shelves:
            from peers.state.shelf import Shelf

            self.shelf = Shelf(transport, timeouts, monotonic)
        transport.serve("join", _greeted)
        self.data: DataService | None = None
        if options.datasets:
            from peers.node.datasets import DataService

            self.data = DataService(self, options.name, options.datasets, lambda: self.member)

    @property
    def lends(self) -> bool:
        """Whether it lends a device."""
        return self.compute is not None or self._process is not None

    # -- lifetime ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Agent:
        if self.compute is not None:
            await self.compute.get_ready()
        if self.lends:
            await self._graphs.get_ready()  # before the mesh counts on this device, and before the device is measured
        if self.compute is not None:
            self.member = await self._lend_here(self.compute)
        elif self._process is not None:
            asked = self._measuring.for_process() if self._measuring is not None else {}
            self._device = await self._process.lend(self, self.options, asked)
            self.member = self._process
        await self._group.__aenter__()
        await self.announce()
        running = [
            self.directory.announce_forever(),
            self.directory.poll_forever(),
            self.elector.run(),
            self.gossip.run(),
        ]
        if self.member is not None:
            running.append(self._watch_member(self.member))
            if self._measuring is not None:
                running += self._measuring.measure_links(self.member)
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

    async def _lend_here(self, compute: Compute) -> Member:
        options, measuring = self.options, self._measuring
        device = self._device = await measure_device(
            compute, options.memory_bytes, host=options.host, threads_said=options.threads_said
        )
        member = Member(
            self.transport,
            compute,
            memory_bytes=device.memory_bytes,
            timeouts=self.timeouts,
            graphs=self._graphs,
            accept=self._accept,
            sign=self.sign,
            **(measuring.for_member() if measuring is not None else {}),
        )
        if measuring is not None:
            measuring.lend(compute, device, member, self._graphs)
        return member

    async def _accept(self, owner: str, offer: Offer) -> None:
        self.elector.accept(offer.term)
        offer.check_consent(self.options.name, direct_sums=self.options.direct_sums)

    async def judge(self, *case: Any) -> Any:
        from peers.member.audit import again

        async with Compute() as compute:
            return await again(compute, *case)

    async def announce(self) -> None:
        """Tell the mesh what this peer is now."""
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
                guards=self._graphs.guards,
                datasets=tuple((name, one.samples) for name, one in self.options.datasets.items()),
            )
        )

    async def leave(self) -> bool:
        """Take no further part in jobs; hold a stage, and supply data, until their jobs go on without this peer, at most leave_s.

        Returns whether it did; then, or after that time, end the agent.
        """
        if self.member is None:
            return True
        self.member.leave()
        parts: list[Lent | DataService] = [self.member] if self.data is None else [self.member, self.data]
        try:
            async with asyncio.timeout(self.timeouts.leave_s), asyncio.TaskGroup() as group:
                for part in parts:
                    group.create_task(part.wait_until_unneeded())
        except TimeoutError:
            for part in parts:
                await part.drop()
            return False
        return True

    async def _watch_member(self, member: Lent) -> None:
        """Announce at once when this peer becomes busy or idle, or is about to leave."""
        while True:
            await member.busy_changed.wait()
            member.busy_changed.clear()
            await self.announce()


async def _greeted(stream: Stream) -> None:
    """A newcomer shook hands; that was all it wanted."""
