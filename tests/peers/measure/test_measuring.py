"""When a peer measures its links: how old a figure may become while it trains."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from dht.records import LinkRecord
from meshcee.config import Timeouts
from meshcee.figures.profile import LinkProfile
from peers.measure.measuring import Measuring
from peers.mesh_view import LINK_TTL_S, MeshView
from peers.transport.base import Transport
from peers.transport.memory import Impairment, MemoryNetwork
from tests.rig.virtual_time import virtual_time

MINUTE_S = 60.0


def now() -> float:
    return asyncio.get_running_loop().time()


class World:
    """Two peers that lend devices, as each of them sees it."""

    def __init__(self) -> None:
        self.told: list[dict[str, LinkProfile]] = []
        self.peers = {peer: SimpleNamespace(device=object(), addresses=(), name=peer) for peer in ("near", "far")}
        self.links: dict[str, LinkRecord] = {}

    async def publish(self, record: LinkRecord) -> None:
        self.told.append(dict(record.links))

    def measuring(self, transport: Transport) -> Measuring:
        view = SimpleNamespace(peer_id=transport.peer_id, transport=transport, directory=self, timeouts=Timeouts())
        view.clock = view.monotonic = now
        return Measuring(cast(MeshView, view))


@virtual_time
async def test_a_peer_that_trains_for_hours_has_no_link_of_which_nobody_believes_the_figure() -> None:
    """What no step crosses vanished after half an hour, and the other direction stood in."""
    here, trains = World(), cast(Any, SimpleNamespace(is_busy=True))
    network = MemoryNetwork(impairment=Impairment(latency_s=0.01, bandwidth_bytes_per_s=1e6))
    async with network.transport("near") as near, network.transport("far") as far, asyncio.TaskGroup() as group:
        here.measuring(far)  # answers
        tasks = [group.create_task(work) for work in here.measuring(near).measure_links(trains)]
        for _ in range(120):
            await asyncio.sleep(MINUTE_S)
            assert now() - here.told[-1]["far"].measured_at < LINK_TTL_S
        assert len(here.told) <= 2 * 7200 / LINK_TTL_S + 1, "it takes the link for little"
        for task in tasks:
            task.cancel()
