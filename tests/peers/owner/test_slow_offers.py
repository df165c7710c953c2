"""Offers over slow links, on virtual time: a 7B model over 8 peers at 50 Mbit/s each, all of it 4,000 times smaller."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshcee.capture import Capture, capture
from meshcee.config import Limits, Timeouts
from meshcee.errors import MeshceeError
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.plan import Plan
from peers.device.compute import Compute
from peers.device.graphs import Graphs
from peers.member.service import Member
from peers.owner.epoch import Owner, Report
from peers.owner.feed import Feed
from peers.state.checkpoint import CheckpointStore
from peers.state.keeping import Supplies
from peers.state.policy import Cadence
from peers.transport.memory import Impairment, MemoryNetwork
from peers.wire.offer import Offer
from peers.wire.pulse import while_moving
from tests.rig.mesh_fixture import agreed, even_plan
from tests.rig.virtual_time import quiet, run, virtual_time

PEERS, WIDTH = 8, 468
STAGE_BYTES = 4 * WIDTH * WIDTH  # 0.88 MB, for 3.5 GB of fp32 weights
BYTES_PER_S = 6.25e6 / 4000
WEIGHTS_S = STAGE_BYTES / BYTES_PER_S  # nine minutes
SLOW = Impairment(latency_s=0.03, bandwidth_bytes_per_s=BYTES_PER_S)
TIMES, LIMITS = Timeouts(), Limits(chunk_bytes=1 << 12)


@pytest.fixture(autouse=True)
def small_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The in-process network delivers what is written at once as a whole, however long that takes."""
    monkeypatch.setattr("peers.transport.stream._JOINED_BYTES", LIMITS.chunk_bytes)


@functools.cache
def job_of(steps: int) -> Job:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(PEERS)]
    return Job(
        model=nn.Sequential(*layers),
        loss=nn.functional.mse_loss,
        data=[(torch.full((WIDTH,), i / 7), torch.zeros(WIDTH)) for i in range(8)],
        optimizer=Optimizer("AdamW", lr=1e-2),
        batch_size=2,
        micro_batch_size=1,
        steps=steps,
        seed=3,
    )


@functools.cache
def captured_job() -> Capture:
    return capture(job_of(1))


class World:
    def __init__(self, network: MemoryNetwork, owner: Any, folder: Path) -> None:
        self.network, self.owner, self.folder = network, owner, folder
        self.epochs = 0
        self.ready_after_s: float | None = None
        self.plan: Plan = even_plan(captured_job().train.num_blocks, PEERS, 2, 1, peers=[f"p{j}" for j in range(PEERS)])

    async def epoch(self, steps: int, holders: frozenset[str] = frozenset()) -> list[float]:
        self.epochs += 1
        losses: list[float] = []
        store = CheckpointStore.of(self.folder, job_of(steps), captured_job(), 1)
        newest = store.complete()[:1]
        start = newest[0].next_step if newest else 0

        async def hear(report: Report) -> None:
            losses.append(report.loss)

        owner = Owner(
            job_of(steps),
            captured_job(),
            self.plan,
            (1, "p0"),
            (1, self.epochs),
            self.owner,
            addresses={},
            names={},
            timeouts=TIMES,
            limits=LIMITS,
            kept=Supplies(newest[0] if newest else None, store, Cadence(1), start, holders),
        )
        began_s = asyncio.get_running_loop().time()
        try:
            await owner.train(Feed(job_of(steps), captured_job(), 1, start), hear)
        finally:
            self.ready_after_s = None if owner.ready_s is None else owner.ready_s - began_s
        return losses


@asynccontextmanager
async def world(folder: Path, network: MemoryNetwork) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        for j in range(PEERS):
            transport = await stack.enter_async_context(network.transport(f"p{j}", limits=LIMITS))
            compute = await stack.enter_async_context(Compute())
            Member(transport, compute, memory_bytes=1 << 30, timeouts=TIMES, graphs=Graphs(LIMITS), accept=agreed)
        owner = await stack.enter_async_context(network.transport("owner", limits=LIMITS))
        yield World(network, owner, folder)


@pytest.mark.slow
def test_what_takes_long_begins_and_what_began_can_be_resumed(tmp_path: Path) -> None:
    """All members are sent what they need side by side, as fast as links carry: later with moments, three times as much."""

    async def story() -> tuple[list[float], float | None, float | None]:
        async with world(tmp_path / "slow", MemoryNetwork(impairment=SLOW)) as here:
            first = await here.epoch(1)
            began_s = here.ready_after_s
            return [*first, *await here.epoch(2)], began_s, here.ready_after_s

    async def quickly() -> list[float]:
        async with world(tmp_path / "quick", MemoryNetwork()) as here:
            return await here.epoch(2)

    with quiet():
        losses, began_s, resumed_s = run(story())
        assert losses == run(quickly())
    assert began_s is not None
    assert resumed_s is not None
    assert WEIGHTS_S < began_s < 1.2 * WEIGHTS_S
    assert 2 * WEIGHTS_S < resumed_s < 3.5 * WEIGHTS_S
    assert began_s > TIMES.offer_s


@pytest.mark.slow
def test_what_has_come_of_an_offer_is_not_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One member fails when it has everything; the others are ready, or about to be."""
    build, failed = Offer.build, list[str]()

    def once(offer: Offer, *args: Any) -> Any:
        if offer.peer_id == "p5" and not failed:
            failed.append(offer.peer_id)
            raise RuntimeError("out of memory")
        return build(offer, *args)

    monkeypatch.setattr(Offer, "build", once)

    async def story() -> tuple[list[float], float | None]:
        async with world(tmp_path / "slow", MemoryNetwork(impairment=SLOW)) as here:
            with pytest.raises(MeshceeError, match="out of memory"):
                await here.epoch(1)
            assert here.ready_after_s is None
            return await here.epoch(1, frozenset(here.plan.peers)), here.ready_after_s

    async def quickly() -> list[float]:
        async with world(tmp_path / "quick", MemoryNetwork()) as here:
            return await here.epoch(1)

    with quiet():
        losses, ready_after_s = run(story())
        assert losses == run(quickly())
    assert failed
    assert ready_after_s is not None
    assert ready_after_s < WEIGHTS_S / 5


@virtual_time
async def test_work_may_take_as_long_as_it_gets_on() -> None:
    moved = 0

    async def work() -> str:
        nonlocal moved
        for _ in range(10):
            await asyncio.sleep(0.8 * TIMES.offer_s)
            moved += 1
        return "done"

    assert await while_moving(work, lambda: moved, TIMES.offer_s, TIMES) == "done"
    began_s = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        await while_moving(asyncio.Event().wait, lambda: moved, TIMES.offer_s, TIMES)
    assert asyncio.get_running_loop().time() - began_s == pytest.approx(TIMES.offer_s, abs=TIMES.beat_s)
