"""What steps show of the links that begin at a peer: when it is news, how far that travels, and what an owner makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.rehearsal import POOR, flaps, fresh, rehearse, step_s
from dht.gossip import EVERY_S, FANOUT, MORE_TURNS
from dht.records import LinkRecord
from meshcee.adapt.senses import FAST, LASTING_STEPS, Senses, as_shown
from meshcee.errors import ProtocolError
from meshcee.figures.observed import Observed
from meshcee.figures.profile import LinkProfile
from peers.measure.link_report import OLD_S, REST_S, LinkReport
from peers.mesh_view import LINK_TTL_S
from peers.wire.neighbour_link import Crossed, Links
from tests.dht.test_gossip import Mesh
from tests.rig.virtual_time import virtual_time

WELL, SAGGED = 1e6, 2.5e5  # bytes per second
QUEUED, IDLE = 1e5, 0.0  # bytes
STEP_S = 0.1


def now() -> float:
    return asyncio.get_running_loop().time()


class Peer:
    """One of many, whose link to `other` was probed and is known everywhere."""

    def __init__(self, mesh: Mesh, count: int) -> None:
        self.mesh = mesh
        self.me, self.other, *_ = [mesh.add() for _ in range(count)]
        self.directory = mesh.directories[self.me]
        self.own = LinkReport(self.me, self.directory, clock=now, monotonic=now)
        self.told = 0
        self._crossed: Crossed = self.own.begin()

    @property
    def link(self) -> LinkProfile:
        return self.own.known[self.other]

    async def begin(self, link: LinkProfile) -> None:
        await self.own.probed(self.other, link)
        await self.known()
        await asyncio.sleep(10)  # until nobody tells of it any more
        self._crossed = self.own.begin()

    async def known(self) -> float:
        """Seconds until everybody knows what this peer does."""
        links = tuple(self.own.known.items())
        self.directory.links[self.me] = LinkRecord(self.me, 0.0, links)  # who wrote it need not be told
        return await self.mesh.until_all_know(links, self.me)

    async def step(self, rate: float, depth: float = QUEUED) -> None:
        before = self.link
        self._crossed({self.other: rate}, {self.other: depth})
        self.told += self.link != before
        await asyncio.sleep(STEP_S)


@contextlib.asynccontextmanager
async def peer_of(count: int, link: LinkProfile | None = None) -> AsyncIterator[Peer]:
    mesh = Mesh()
    found = Peer(mesh, count)
    async with mesh.runs(), asyncio.TaskGroup() as group:
        telling = group.create_task(found.own.run())
        await found.begin(link or LinkProfile(0.01, WELL, now()))
        yield found
        telling.cancel()


@virtual_time
async def test_a_link_that_sags_beside_steps_is_known_everywhere_within_seconds() -> None:
    async with peer_of(40) as peer:
        for rate in (SAGGED, WELL):
            began = now()
            while peer.link.bandwidth_bytes_per_s != rate:
                await peer.step(rate)
            assert now() - began <= REST_S + (LASTING_STEPS + 2) * STEP_S
            assert peer.link.measured_at >= began
            took_s = await peer.known()
            assert took_s <= (math.ceil(math.log2(40)) + MORE_TURNS) * (EVERY_S + 0.05)
        assert peer.told == 2


@virtual_time
async def test_noise_and_links_that_nothing_queues_for_are_no_news() -> None:
    noise = random.Random(0)
    async with peer_of(4) as peer:
        delivered = peer.mesh.delivered
        for _ in range(200):
            await peer.step(noise.uniform(0.85, 1.15) * WELL)
        for _ in range(3 * LASTING_STEPS):
            await peer.step(SAGGED, IDLE)
        assert (peer.told, peer.mesh.delivered) == (0, delivered)


@pytest.mark.parametrize("every", [3, 6, 40])
@virtual_time
async def test_a_link_that_flaps_makes_little_noise_and_its_last_state_is_known(every: int) -> None:
    async with peer_of(8) as peer:
        began, delivered = now(), peer.mesh.delivered
        for factor in flaps(every, 600):
            await peer.step(factor * WELL)
        most = math.ceil((now() - began) / REST_S) + 1
        assert 1 <= peer.told <= most
        assert peer.mesh.delivered - delivered <= most * 8 * FANOUT * (math.ceil(math.log2(8 + 1)) + MORE_TURNS)
        for _ in range(math.ceil(REST_S / STEP_S) + LASTING_STEPS):
            await peer.step(WELL)
        assert peer.link.bandwidth_bytes_per_s == WELL
        await peer.known()


@virtual_time
async def test_the_newest_figure_counts_whether_probed_or_seen_in_steps() -> None:
    async with peer_of(2) as peer:
        for _ in range(2 * LASTING_STEPS):
            await peer.step(SAGGED)
        assert peer.link.bandwidth_bytes_per_s == SAGGED
        await asyncio.sleep(REST_S)
        await peer.own.probed(peer.other, LinkProfile(0.01, 2 * WELL, now()))
        await peer.step(SAGGED)
        assert peer.link.bandwidth_bytes_per_s == 2 * WELL, "one step is not enough to say otherwise"
        for _ in range(LASTING_STEPS):
            await peer.step(SAGGED)
        assert peer.link.bandwidth_bytes_per_s == SAGGED


@virtual_time
async def test_a_figure_that_steps_bear_out_does_not_grow_old() -> None:
    """Peers that train do not probe, and what is older than half an hour is not believed."""
    assert 2 * OLD_S < LINK_TTL_S
    async with peer_of(2) as peer:
        probed = peer.link
        for _ in range(4 * math.ceil(OLD_S / (REST_S + STEP_S))):
            await peer.step(0.9 * WELL)
            await asyncio.sleep(REST_S)
            assert now() - peer.link.measured_at <= OLD_S + REST_S + STEP_S
        assert peer.told == 4
        assert replace(peer.link, measured_at=probed.measured_at) == probed
        await peer.known()


@virtual_time
async def test_a_link_faster_than_the_machine_has_its_probed_bandwidth_again() -> None:
    async with peer_of(2, LinkProfile(0.01, 4 * FAST)) as peer:
        for rate, known in ((SAGGED, SAGGED), (2 * FAST, 4 * FAST)):
            for _ in range(math.ceil(REST_S / STEP_S) + LASTING_STEPS):
                await peer.step(rate)
            assert peer.link.bandwidth_bytes_per_s == known


def test_an_owner_does_not_take_a_record_that_lags_for_what_a_fast_link_has() -> None:
    """The record is still that of the sag when the owner's own senses know that it is over."""
    pair = ("a", "b")
    record = as_shown(LinkProfile(0.01, 4 * FAST), SAGGED)
    senses = Senses.of({pair: record})
    assert senses.doubtful == {pair}, "it was better once"
    for _ in range(2 * LASTING_STEPS):
        senses.hear(Observed({}, {pair: 2 * FAST}))
    assert as_shown(record, senses.rates[pair]).bandwidth_bytes_per_s == 4 * FAST


@virtual_time
async def test_names_that_nobody_has_probed_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's process that was taken over may tell of whomever it likes."""
    heard: list[Observed] = []
    monkeypatch.setattr(Senses, "hear", lambda senses, observed: heard.append(observed))
    async with peer_of(2) as peer:
        tells = peer.own.begin()
        for i in range(10_000):
            tells({peer.other: WELL, f"name {i}": WELL}, {f"name {i}": QUEUED})
    assert len(heard) == 10_000
    assert {pair for observed in heard for pair in observed.rates} == {(peer.me, peer.other)}


@pytest.mark.parametrize("rate", [0, -1.0, math.inf, math.nan, "fast", None])
def test_a_rate_that_a_neighbour_tells_is_checked(rate: Any) -> None:
    with pytest.raises(ProtocolError):
        Links((1, 1)).hear("p1", {"rate": rate})


@pytest.mark.parametrize(
    "factors", [[1.0] * 15 + [POOR] * 55 + [1.0] * 40, flaps(12, 100)], ids=["drops and recovers", "flaps"]
)
async def test_an_owner_that_sees_it_too_does_not_adapt_twice(factors: list[float]) -> None:
    told, untold = await rehearse(factors), await rehearse(factors, gossips=False)
    assert told.told > 0 == untold.told
    assert told.changes == untold.changes
    assert told.searches == untold.searches


async def test_a_job_that_begins_while_a_link_sags_hears_that_it_is_well_again() -> None:
    """An earlier job's steps had shown it, and the plan of this one does without the link."""
    played = await rehearse([POOR] * 20 + [1.0] * 15, once=1.0)
    assert played.sounded > 0
    assert len(played.changes) == 1
    assert step_s(fresh(1.0), 1.0) / step_s(played.plans[-1], 1.0) >= 0.95
