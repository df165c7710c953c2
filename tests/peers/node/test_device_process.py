"""A device in a process of its own trains what it trains in the peer's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import torch

from meshcee.config import Limits, Timeouts
from peers.device.graphs import Graphs
from peers.node.device_process import DeviceProcess
from peers.transport.memory import MemoryNetwork
from tests.peers.member.test_training import make_job
from tests.peers.transport.harness import nowhere
from tests.rig.mesh_fixture import train


@asynccontextmanager
async def processes(network: MemoryNetwork, count: int) -> AsyncIterator[list[Any]]:
    async with AsyncExitStack() as stack:
        found = []
        for j in range(count):
            transport = await stack.enter_async_context(network.transport(f"p{j}"))
            made = await stack.enter_async_context(DeviceProcess("cpu", Graphs(Limits())))
            await made.begin(
                transport, timeouts=Timeouts(), memory_bytes=1 << 30, accept=lambda owner, term: None, addresses=nowhere
            )
            found.append(made)
        yield found


async def test_a_job_is_trained_as_in_one_process() -> None:
    inside = await train(make_job(), 2, 4)
    outside = await train(make_job(), 2, 4, here=processes)
    assert outside.losses == inside.losses
    assert outside.state.keys() == inside.state.keys()
    assert all(torch.equal(tensor, inside.state[name]) for name, tensor in outside.state.items())
