"""A peer: owns everything that runs in it, in one TaskGroup, from the first announcement to a bounded shutdown.

The idea: the agent is handed a transport and a store and knows nothing of libp2p or hivemind, so the same code runs on
real machines, in one process and under virtual time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType

import structlog
from dht.directory import Directory
from dht.election import Elector
from dht.records import RunRecord

from dht.signing import Identity, MeshKey
from dht.store import Store
from meshcee.config import Limits, Timeouts
from meshcee.profile import DeviceProfile
from peers.compute import Compute
from peers.coordinator import PlanService
from peers.member import Member
from peers.profiler import measure_device, serve_probe
from peers.transport.base import Transport

__all__ = ["Agent", "AgentOptions"]

log = structlog.get_logger()

PROBE_EVERY_S = 60.0  # each link is measured again after this long


@dataclass(frozen=True)
class AgentOptions:
    """What the user said about this peer. Without a `compute` it holds no stage; an observer does not announce itself."""

    name: str
    region: str | None = None
    memory_bytes: int | None = None
    observes: bool = False


class Agent:
    """Lifetime is `async with`: inside, the peer is announced, elects, serves, and may own jobs."""

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
    ) -> None:
        self.options = options
        self.identity = identity
        self.mesh_key = mesh_key
        self.transport = transport
        self.timeouts = timeouts
        self.limits = limits
        self._compute = compute
        self._device: DeviceProfile | None = None
        self._member: Member | None = None
        self._group: asyncio.TaskGroup | None = None
        self._run: RunRecord | None = None
        self._accepted_term = (0, "")
        self.directory = Directory(store, identity, mesh_key, timeouts=timeouts, limits=limits)
        self.elector = Elector(store, identity, mesh_key, timeouts=timeouts, limits=limits)
        self._plans = PlanService(self)
        transport.serve("probe", serve_probe)

    @property
    def peer_id(self) -> str:
        return self.transport.peer_id

    # -- lifetime ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Agent:
        if self._compute is not None:
            self._device = await measure_device(self._compute, self.options.memory_bytes)
            self._member = Member(
                self.transport,
                self._compute,
                memory_bytes=self._device.memory_bytes,
                timeouts=self.timeouts,
                limits=self.limits,
                accept=self._accept,
            )
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._group is not None
        await self._group.__aexit__(kind, error, trace)
