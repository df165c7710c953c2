"""When a peer measures its links: how old a figure may become while it trains."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

from dht.records import LinkRecord
from meshcee.config import Timeouts
from meshcee.figures.profile import LinkProfile
from peers.measure.measuring import MOST_EVERY_S, Measuring
from peers.measure.sounding import sound
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
        self.passed_on = 0
        self.peers = {peer: SimpleNamespace(device=object(), addresses=(), name=peer) for peer in ("near", "far")}
        self.links: dict[str, LinkRecord] = {}

    async def publish(self, record: LinkRecord) -> None:
        self.renew(record)
        self.passed_on += 1

    def renew(self, record: LinkRecord) -> None:
        self.told.append(dict(record.links))

    def view(self, transport: Transport) -> MeshView:
        view = SimpleNamespace(peer_id=transport.peer_id, transport=transport, directory=self, timeouts=Timeouts())
        view.clock = view.monotonic = now
        view.addresses_of = lambda peers: dict.fromkeys(peers, ())
        return cast(MeshView, view)

    @contextlib.asynccontextmanager
    async def measured(self, *, busy: bool) -> AsyncIterator[tuple[MemoryNetwork, MeshView]]:
        """The near peer measures its link to the far one, which answers; the view of the far one."""
        network = MemoryNetwork(impairment=Impairment(latency_s=0.01, bandwidth_bytes_per_s=1e6))
        async with network.transport("near") as near, network.transport("far") as far, asyncio.TaskGroup() as group:
            there, own = self.view(far), cast(Any, SimpleNamespace(is_busy=busy))
            Measuring(there)
            tasks = [group.create_task(work) for work in Measuring(self.view(near)).measure_links(own)]
            yield network, there
            for task in tasks:
                task.cancel()


@virtual_time
async def test_a_peer_that_trains_for_hours_has_no_link_of_which_nobody_believes_the_figure() -> None:
    """What no step crosses vanished after half an hour, and the other direction stood in."""
    here = World()
    async with here.measured(busy=True):
        for _ in range(120):
            await asyncio.sleep(MINUTE_S)
            assert now() - here.told[-1]["far"].measured_at < LINK_TTL_S
        assert len(here.told) <= 2 * 7200 / LINK_TTL_S + 1, "it takes the link for little"


@virtual_time
async def test_a_link_that_is_as_it_was_is_no_news() -> None:
    """The next announcement carries its figure. Another figure is news, and so is any after a try that failed."""
    here = World()
    async with here.measured(busy=False) as (network, _):
        await asyncio.sleep(60 * MINUTE_S)
        assert here.passed_on == 1 < len(here.told), "measured again, and found alike"
        assert now() - here.told[-1]["far"].measured_at < MOST_EVERY_S + MINUTE_S
        for impairment in (
            Impairment(latency_s=0.01, bandwidth_bytes_per_s=3e5),
            Impairment(latency_s=0.02, bandwidth_bytes_per_s=3e5),
        ):
            before = here.passed_on
            network.impair("near", "far", impairment)
            network.impair("far", "near", impairment)
            await asyncio.sleep(MOST_EVERY_S + MINUTE_S)
            assert here.passed_on == before + 1
        before = here.passed_on
        network.cut("near", "far")
        await asyncio.sleep(MOST_EVERY_S + MINUTE_S)
        network.heal()
        await asyncio.sleep(MOST_EVERY_S + MINUTE_S)
        assert here.passed_on == before + 1, "others may believe that it is cut off"


@virtual_time
async def test_a_figure_that_an_owner_waits_for_is_news_though_it_is_as_it_was() -> None:
    here = World()
    async with here.measured(busy=True) as (_, there):
        await asyncio.sleep(MINUTE_S)
        before = here.passed_on
        await sound(there, [("near", "far")])
        await asyncio.sleep(MINUTE_S)
        assert here.passed_on == before + 1
