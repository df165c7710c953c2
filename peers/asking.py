"""An owner asks for a plan: what it must find out first, and the answer.

The idea: what the coordinator knows is the mesh; what it cannot know is the job, so the owner tells.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import structlog

from meshcee.capture import Capture
from meshcee.hosts import threads_of
from meshcee.job import Job
from peers.agent import Agent
from peers.coordinator import Planned, PlanRequest, request_plan
from peers.job_costs import costs_of, profile
from peers.sharing import why_not_shared

__all__ = ["ask_plan", "question"]

log = structlog.get_logger()


async def ask_plan(agent: Agent, request: PlanRequest) -> Planned:
    """The coordinator's plan, whose peers are all known here."""
    planned = await request_plan(agent, request)
    await agent.wait_for_peers(planned.plan.peers)
    return planned


async def question(
    agent: Agent, job: Job, captured: Capture, stages: int | None, lent: tuple[str, ...] = ()
) -> PlanRequest:
    """What the coordinator must know: the job's costs, and how long its blocks take each idle device."""
    await agent.see_the_mesh(lent)
    costs = await asyncio.to_thread(costs_of, job, captured)
    costs = replace(costs, threads=costs.threads or threads_of(agent.lent()))
    if costs.groups and (why := await asyncio.to_thread(why_not_shared, job, captured)):
        log.warning("no stage will be shared by a group", why=why)
        costs = replace(costs, groups=False)
    return PlanRequest(costs, await profile(agent, job, captured, costs), stages, lent)
