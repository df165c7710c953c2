"""A plan that the user gives instead of the coordinator: peers by name, checked against job and mesh.

The idea: a plan that a command printed can be kept, edited and run again. Names make it independent of the ids that peers
have today.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from meshcee.capture import Capture
from meshcee.errors import JoinError, PlanError, UsageError
from meshcee.figures import JobCosts, fitting, threads_of, with_classes
from meshcee.job import Job
from meshcee.plan import Plan
from meshcee.stage import check_pipelines
from peers.device import versions
from peers.mesh_view import MeshView
from peers.planning.coordinator import LEFT_TO_PLANNER, Planned, check_memory
from peers.planning.job_costs import costs_of

__all__ = ["check_plan", "given_plan", "placed"]


def placed(plan: Plan, names: Mapping[str, str]) -> Plan:
    """The plan with peer ids for names. Raises UsageError for a peer that is unknown or a name that two have."""
    ids: dict[str, str] = {}
    for wanted in plan.peers:
        found = [wanted] if wanted in names else [peer for peer, name in names.items() if name == wanted]
        if len(found) != 1:
            why = f"is the name of {len(found)} peers; use their ids" if found else "is not in the mesh"
            raise UsageError(
                f"the plan's peer {wanted!r} {why}; `meshcee status` lists {', '.join(sorted(names.values()))}"
            )
        ids[wanted] = found[0]
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(
                replace(stage, members=tuple(replace(m, peer=ids[m.peer]) for m in stage.members))
                for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)


def check_plan(plan: Plan, job: Job, captured: Capture) -> None:
    """Raises PlanError where plan and job do not fit. Of a job with the codec auto a plan may have any codecs."""
    if plan.num_blocks != captured.train.num_blocks:
        raise PlanError(
            f"the plan has {plan.num_blocks} blocks and the job's model {captured.train.num_blocks}; `meshcee capture` lists them"
        )
    check_pipelines(captured.train, plan)
    if plan.global_batch != job.batch_size:
        count = sum(pipeline.num_micro for pipeline in plan.pipelines)
        raise PlanError(
            f"the plan makes {count} micro-batches of {plan.micro_batch} samples and the job has "
            f"batch_size={job.batch_size}; their product must be the batch size"
        )
    if job.micro_batch_size not in (None, plan.micro_batch):
        raise PlanError(
            f"the plan's micro_batch is {plan.micro_batch}, the job's micro_batch_size {job.micro_batch_size}"
        )
    allowed = LEFT_TO_PLANNER.get(job.codec, {"none", job.codec})
    for here, there in (pair for pipeline in plan.pipelines for pair in pairwise(pipeline.stages)):
        if job.codec != "auto" and (wrong := {here.codec_out, there.codec_back} - allowed):
            between = " and ".join(" ".join(m.peer for m in stage.members) for stage in (here, there))
            raise PlanError(
                f"the plan has codec {', '.join(sorted(wrong))} between {between}, the job's is {job.codec!r}; auto takes any"
            )


async def given_plan(
    agent: MeshView, plan: Plan, job: Job, captured: Capture, costs: JobCosts | None = None
) -> Planned:
    """The plan as if the coordinator had made it, once all its peers are seen.

    costs  of the job, where they are known already
    Raises UsageError, JoinError or PlanError. Where nothing is measured, the memory of members is not looked at.
    """
    check_plan(plan, job, captured)
    wanted = set(plan.peers)
    try:
        async with asyncio.timeout(agent.timeouts.join_s):
            await agent.directory.wait_for(lambda: wanted <= {*agent.names(), *agent.names().values()})
            lease = await agent.coordinator()
    except TimeoutError as error:
        placed(plan, agent.names())  # names who is missing
        raise JoinError(f"no coordinator within {agent.timeouts.join_s:.0f} s; try again") from error
    plan = placed(plan, agent.names())
    for peer in plan.peers:
        if agent.directory.peers[peer].device is None:
            raise UsageError(f"the plan's peer {agent.names()[peer]!r} lends no device")
    members = {peer: agent.device_of(peer) for peer in plan.peers}
    threads = plan.threads or job.threads or threads_of(agent.lent())
    _, left = fitting(members, job.mix, threads, versions(), keeps=costs.keeps if costs is not None else "")
    if left:
        raise PlanError(f"the plan's peer {agent.names()[left[0].peer]!r} cannot take part: {left[0].why}")
    if agent.measures:
        if costs is None:
            costs = await asyncio.to_thread(costs_of, job, captured)
        await asyncio.to_thread(check_memory, plan, members, costs, agent.names())
    return Planned(with_classes(plan, members, threads), lease.term)
