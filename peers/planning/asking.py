"""An owner asks for a plan: what it must find out first, and the answer.

The idea: what the coordinator knows is the mesh; what it cannot know is the job, so the owner tells.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import structlog

from meshcee.capture import Capture
from meshcee.errors import ClockError, JoinError, MeshceeError
from meshcee.figures import AT_HAND, JobCosts, LinkProfile, threads_of
from meshcee.figures.kernels import KernelClass
from meshcee.job import At, Job
from meshcee.sampling import leaving_nothing
from meshcee.stage import check_count
from peers.mesh_view import MeshView
from peers.planning.coordinator import Planned, PlanRequest, request_plan
from peers.planning.job_costs import costs_of, look, profile
from peers.transport import StreamClosed

__all__ = ["ask_plan", "question"]

log = structlog.get_logger()

LEAST_FED_BYTES = 256 * 1024  # a step's inputs: fewer take no time to speak of where anybody would train
FEEDS_WITHIN_S, FIRST_WITHIN_S, FEED_WITHIN_S = 10.0, 2.0, 5.0  # all of them; of one the first answer, and the others


async def ask_plan(agent: MeshView, request: PlanRequest) -> Planned:
    """The coordinator's plan, whose peers are all known here: whoever leaves meanwhile is planned without."""
    while True:
        planned = await request_plan(agent, request)
        try:
            await agent.wait_for_peers(planned.plan.peers)
        except JoinError:
            gone = {*planned.plan.peers} - agent.directory.peers.keys()
            if gone <= {*request.without}:  # nothing is new: who plans does not hear of it
                raise
            request = replace(request, without=(*request.without, *sorted(gone)))
        else:
            return planned


async def question(
    agent: MeshView,
    job: Job,
    captured: Capture,
    stages: int | None,
    lent: tuple[str, ...] = (),
    begun: Iterable[KernelClass] = (),
    *,
    taken_over: bool = False,
) -> PlanRequest:
    """What the coordinator must know: the job's costs, and how long its blocks take each idle device.

    `begun` are the kernel classes of the devices that have computed the run so far. PlanError where there are fewer blocks than
    stages. JoinError where nobody coordinates, unless the run was taken over: its owner waits for peers behind this.
    """
    check_count(captured.train, stages)
    try:
        await agent.see_the_mesh(lent)
    except JoinError as error:
        if isinstance(error, ClockError) or not taken_over:
            raise
    if agent.measures:
        from meshcee.equality import in_whole_batches

        job = await asyncio.to_thread(leaving_nothing(job)(in_whole_batches), job, captured)
    costs = await asyncio.to_thread(costs_of, job, captured, agent.measures)
    costs = replace(costs.begun_on(begun), threads=costs.threads or threads_of(agent.lent()))
    if not agent.measures:
        return PlanRequest(costs, {}, stages, lent)
    if costs.groups:
        from meshcee.equality import why_not_shared

        if why := await asyncio.to_thread(leaving_nothing(job)(why_not_shared), job, captured):
            log.warning("no stage will be shared by a group", why=why)
            costs = replace(costs, groups=False)
    most, data_s = await asyncio.to_thread(leaving_nothing(job)(look), job, captured)
    costs = replace(costs, data_s=data_s / max(1, job.workers))
    feeds = await _feeds(agent, job, costs)  # before the job's graph goes to the devices, over the same links
    times = await profile(agent, job, captured, costs, most)
    return PlanRequest(costs, times, stages, lent, feeds=feeds, largest=most)


async def _feeds(agent: MeshView, job: Job, costs: JobCosts) -> dict[str, LinkProfile]:
    """Links to idle devices, this peer's or the supplier's, where a step's inputs are so many bytes that these may matter."""
    from peers.measure import LIGHT_S, probe_link

    found = {agent.peer_id: AT_HAND}
    if costs.batch_size * sum(size for size, _ in costs.feeds) < LEAST_FED_BYTES:
        return {}
    if isinstance(job.data, At):
        from peers.planning.supplied import supplied_over

        return await supplied_over(agent, job.data, FEEDS_WITHIN_S)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FEEDS_WITHIN_S):
            for peer in [p for p in agent.devices() if p != agent.peer_id]:  # one at a time: they share its port
                where = agent.transport, peer, agent.addresses_of([peer]).get(peer, ())
                with contextlib.suppress(MeshceeError, StreamClosed, TimeoutError):
                    async with asyncio.timeout(FIRST_WITHIN_S) as limit:  # who is silent takes no other's time
                        go_on = partial(limit.reschedule, asyncio.get_running_loop().time() + FEED_WITHIN_S)
                        probed = await probe_link(
                            *where, agent.clock(), clock=agent.monotonic, target_s=LIGHT_S, answered=go_on
                        )
                    found[peer] = probed.link
    return found
