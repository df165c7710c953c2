"""Puts a peer together: over libp2p and the DHT on real machines, or many in one process for `--local`.

The idea: one place knows which transport goes with which store; everything above takes an Agent or a Mesh.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from dht.signing import Identity, MeshKey, Token
from dht.store import MemoryStore, SharedMemory
from meshcee.config import Limits, Timeouts
from peers.agent import Agent, AgentOptions
from peers.compute import Compute
from peers.home import Home
from peers.mesh import Mesh
from peers.transport.memory import MemoryNetwork

__all__ = ["JoinOptions", "Node", "agent", "join"]


@dataclass(frozen=True)
class JoinOptions:
    """How to take part. `local` means that many peers inside this process instead of a mesh."""

    token: str | None = None
    local: int | None = None
    name: str = "owner"
    compute: bool = False
    observes: bool = False
    device: str = "cpu"
    memory_bytes: int | None = None
    region: str | None = None
    listen: str = "0.0.0.0:0"
    announce: str | None = None
    identity: Path | None = None
    open: bool = False
    valid_s: float = 7 * 86400
    shape: str | None = None
    shape_device: str | None = None


@asynccontextmanager
async def join(options: JoinOptions, home: Home | None = None) -> AsyncIterator[Mesh]:
    """A Mesh that may own jobs."""
    if options.local is not None:
        async with _in_process(options, home) as mesh:
            yield mesh
        return
    async with agent(options, home or Home()) as node, asyncio.TaskGroup() as group:
        yield Mesh(node, group, home)


@asynccontextmanager
async def _in_process(options: JoinOptions, home: Home | None) -> AsyncIterator[Mesh]:
    """`local` peers and an owner in this event loop: the same agents over memory instead of libp2p."""
    assert options.local is not None
    network, shared, key = MemoryNetwork(), SharedMemory(), MeshKey()
    quick = Timeouts(announce_every_s=0.5, directory_poll_s=0.05, lease_confirm_s=0.05)

    async def one(stack: AsyncExitStack, name: str, compute: Compute | None) -> Agent:
        identity = Identity.generate()
        transport = await stack.enter_async_context(network.transport(identity.peer_id, key.secret, timeouts=quick))
        transport.addresses = ()
        return await stack.enter_async_context(
            Agent(
                AgentOptions(name, memory_bytes=options.memory_bytes),
                identity,
                key,
                transport,
                MemoryStore(shared),
                compute,
                timeouts=quick,
                limits=Limits(),
            )
        )

    async with AsyncExitStack() as stack:
        for i in range(options.local):
            compute = await stack.enter_async_context(Compute(options.device))
            await one(stack, f"local-{i}", compute)
        owner = await one(stack, options.name, None)
        await owner.wait_for_devices(options.local)
        group = await stack.enter_async_context(asyncio.TaskGroup())
        yield Mesh(owner, group, home)


class Node(Agent):
    """An Agent on a real network; knows how to invite others."""
