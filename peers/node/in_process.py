"""Peers inside one process, as `--local` and `local=N` ask for: agents as everywhere, over memory instead of libp2p.

The idea: whoever joins gets a Mesh, and cannot tell whether its peers are near or far. Real machines are put together in
peers/node/assemble.py, a wing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dht import Identity, Members, MemoryStore, MeshKey, Role, SharedMemory, TermFile, certify
from meshcee.config import Limits, Timeouts
from peers.device import Compute, Pace, resolve_device
from peers.node.agent import Agent, AgentOptions
from peers.node.early import JoinOptions
from peers.node.mesh import Mesh
from peers.transport import MemoryNetwork

if TYPE_CHECKING:
    from meshcee.files.home import Home
    from peers.node.device_process import DeviceProcess

__all__ = ["QUICK", "InProcess", "join"]

LASTING_S = 10 * 365 * 86400.0  # of a mesh inside one process, whose clock may be any
QUICK = Timeouts(announce_every_s=0.5, directory_poll_s=0.05, lease_confirm_s=0.05)  # within one process


@asynccontextmanager
async def join(options: JoinOptions, home: Home | None = None) -> AsyncIterator[Mesh]:
    """A Mesh that may own jobs."""
    if options.local is None:
        from peers.node.assemble import an_owner

        async with an_owner(options, home) as mesh:
            yield mesh
        return
    async with InProcess(replace(options, direct_sums=True)) as here:
        for i in range(options.local):
            await here.start(f"local-{i}")
        yield await here.own(options.name, home)


class InProcess:
    """Peers in this event loop: the same agents over memory instead of libp2p. Lifetime is `async with`.

    On a loop of virtual time `clock` and `monotonic` are its own.
    """

    def __init__(
        self,
        options: JoinOptions,
        network: MemoryNetwork | None = None,
        timeouts: Timeouts = QUICK,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.network = network or MemoryNetwork()
        self.agents: dict[str, Agent] = {}
        self.stores: dict[str, MemoryStore] = {}
        self._options = options
        self._timeouts = options.over(timeouts)
        self._clock, self._monotonic = clock, monotonic
        self.memory = SharedMemory(clock)
        self._key = MeshKey()
        self.root = Identity.generate()  # everybody here was let in by it
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> InProcess:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    async def start(
        self,
        name: str,
        *,
        lends: bool = True,
        role: Role = "own",
        identity: Identity | None = None,
        terms: TermFile | None = None,
        pace: Pace | None = None,
        clock: Callable[[], float] | None = None,
        device: Compute | DeviceProcess | None = None,
        **said: Any,
    ) -> Agent:
        """One more peer, or one that comes back with its identity; one that lends no device may own jobs. `clock` is the peer's
        own wall clock, where that differs from the mesh's. A `device` runs already. `said`: of its user, besides (AgentOptions)."""
        identity, quick, clock = identity or Identity.generate(), self._timeouts, clock or self._clock
        if lends and device is None:
            device = await self._stack.enter_async_context(
                Compute(resolve_device(self._options.device), pace or self._options.pace)
            )
        members = self.members_for(identity.peer_id, role, clock)
        transport = await self._stack.enter_async_context(
            self.network.transport(identity.peer_id, self._key.secret, timeouts=quick, members=members)
        )
        transport.addresses = ()
        store = self.stores[name] = MemoryStore(self.memory)
        ours = self._options
        options = AgentOptions(
            name, memory_bytes=ours.memory_bytes, direct_sums=ours.direct_sums, shelves=ours.shelves, **said
        )
        if self._options.measures:
            from peers.measure import Measuring

            options = replace(options, measuring=Measuring)
        made = Agent(
            options,
            identity,
            self._key,
            transport,
            store,
            device,
            timeouts=quick,
            limits=Limits(),
            terms=terms,
            clock=clock,
            monotonic=self._monotonic,
            members=members,
        )
        self.agents[name] = await self._stack.enter_async_context(made)
        return made

    def members_for(self, peer_id: str, role: Role = "own", clock: Callable[[], float] | None = None) -> Members:
        """As a peer begins that was let in with this role."""
        shown = certify(self.root, b"", self.root.peer_id, peer_id, role, "", self._clock(), LASTING_S)
        return Members(self.root.peer_id, shown, clock=clock or self._clock)

    async def own(self, name: str, home: Home | None, clock: Callable[[], float] | None = None) -> Mesh:
        """A Mesh that may own jobs here."""
        owner = await self.start(name, lends=False, clock=clock)
        await owner.wait_for_devices(sum(agent.lends for agent in self.agents.values()))
        mesh = Mesh(owner, await self._stack.enter_async_context(asyncio.TaskGroup()), home)
        self._stack.push_async_callback(mesh.end)
        return mesh

    def crash(self, name: str) -> None:
        """As if its process had been killed: all that the others notice is that nothing comes any more."""
        self.network.kill(self.agents[name].peer_id)
        self.stores[name].reachable = False
