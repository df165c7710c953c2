"""An owner and members in one loop over the in-process network: no DHT, no election, the plan given by the test."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from meshcee.capture import Capture, capture
from meshcee.config import Limits, Timeouts
from meshcee.job import Job
from meshcee.plan import Member as PlanMember
from meshcee.plan import Pipeline, Plan, Stage
from peers.device.compute import Compute
from peers.device.graphs import Graphs
from peers.member.service import Member
from peers.owner.epoch import Owner, Report
from peers.owner.feed import Feed
from peers.state.keeping import Supplies
from peers.transport.memory import MemoryNetwork
from peers.wire.neighbour_link import Crossed
from peers.wire.offer import Offer


def even_plan(
    num_blocks: int,
    stages: int,
    batch: int,
    micro: int,
    *,
    live_cap: int | None = None,
    peers: Sequence[str] = ("p0", "p1", "p2", "p3", "p4"),
) -> Plan:
    """Blocks spread evenly; stage j on peer j; windows as for one-forward-one-backward."""
    bounds = [round(num_blocks * j / stages) for j in range(stages + 1)]
    return Plan(
        micro,
        (
            Pipeline(
                batch // micro,
                tuple(
                    Stage(
                        bounds[j],
                        bounds[j + 1],
                        (PlanMember(peers[j], micro),),
                        window=stages - j + 1,
                        live_cap=live_cap or stages - j + 3,
                    )
                    for j in range(stages)
                ),
            ),
        ),
    )


def grouped(plan: Plan, shares: Sequence[Sequence[int]]) -> Plan:
    """The same blocks on groups: `shares[j]` are the samples of each member of stage j; peers "p0", "p1", ... in order."""
    names = (f"p{i}" for i in itertools.count())
    pipeline = plan.pipelines[0]
    stages = tuple(
        replace(stage, members=tuple(PlanMember(next(names), n) for n in samples))
        for stage, samples in zip(pipeline.stages, shares, strict=True)
    )
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))


def beside(plan: Plan, *rows: tuple[int, Sequence[tuple[int, Sequence[int]]]]) -> Plan:
    """Pipelines of (micro-batches, stages as (end block, shares of each member)); peers "p0", "p1", ... in order."""
    names = (f"p{i}" for i in itertools.count())
    pipelines = []
    for num_micro, stages in rows:
        firsts = [0, *(end for end, _ in stages)]
        built = (
            Stage(
                first,
                end,
                tuple(PlanMember(next(names), n) for n in samples),
                window=len(stages) - j + 1,
                live_cap=len(stages) - j + 3,
            )
            for j, (first, (end, samples)) in enumerate(zip(firsts, stages))
        )
        pipelines.append(Pipeline(num_micro, tuple(built)))
    return replace(plan, pipelines=tuple(pipelines))


async def agreed(owner: str, offer: Offer) -> None:
    """Whoever comes, its term holds."""


@dataclass
class Trained:
    """What one run left."""

    plan: Plan
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        return [r.loss for r in self.reports]


@asynccontextmanager
async def members(
    network: MemoryNetwork,
    count: int,
    limits: Limits,
    device: str = "cpu",
    memory_bytes: int = 1 << 30,
    crossed: Callable[[str], Crossed] = lambda peer: lambda rates, depths: None,
    graphs: Graphs | None = None,
) -> AsyncIterator[list[Member]]:
    async with AsyncExitStack() as stack:
        found = []
        for j in range(count):
            transport = await stack.enter_async_context(network.transport(f"p{j}"))
            compute = await stack.enter_async_context(Compute(device))
            found.append(
                Member(
                    transport,
                    compute,
                    memory_bytes=memory_bytes,
                    timeouts=Timeouts(),
                    graphs=graphs or Graphs(limits),
                    accept=agreed,
                    begun=functools.partial(crossed, f"p{j}"),
                )
            )
        yield found


async def train(
    job: Job,
    stages: int,
    micro: int,
    *,
    network: MemoryNetwork | None = None,
    live_cap: int | None = None,
    after_step: tuple[int, Callable[[], Awaitable[None] | None]] | None = None,
    adapt: Callable[[Plan], Plan] = lambda plan: plan,
    device: str = "cpu",
    captured: Capture | None = None,
    keep: Callable[[Plan], Supplies] = lambda plan: Supplies(),
    memory_bytes: int = 1 << 30,
    crossed: Callable[[str], Crossed] = lambda peer: lambda rates, depths: None,
    here: Callable[[MemoryNetwork, int], AbstractAsyncContextManager[list[Any]]] | None = None,
) -> Trained:
    """Capture, offer to `stages` members, train to the end; `after_step` is (step, what to do or to wait for once it is reported);
    `crossed` gives each peer whom its session tells of steps."""
    network = network or MemoryNetwork()
    limits = Limits()
    captured = captured or await asyncio.to_thread(capture, job)
    plan = adapt(even_plan(captured.train.num_blocks, stages, job.batch_size, micro, live_cap=live_cap))
    trained = Trained(plan)

    async def hear(report: Report) -> None:
        trained.reports.append(report)
        if after_step is not None and report.step == after_step[0] and (waits := after_step[1]()) is not None:
            await waits

    count = len(plan.peers)
    lent = here(network, count) if here is not None else members(network, count, limits, device, memory_bytes, crossed)
    async with lent as found, network.transport("owner") as transport:
        trained.members = found
        owner = Owner(
            job,
            captured,
            plan,
            (1, "p0"),
            (1, 1),
            transport,
            addresses={},
            names={},
            timeouts=Timeouts(),
            limits=limits,
            kept=keep(plan),
        )
        trained.state = await owner.train(Feed(job, captured, micro), hear)
    return trained
