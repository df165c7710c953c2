"""`meshcee plan JOB.py --join TOKEN` and `meshcee simulate JOB.py --join TOKEN`: what a live mesh would do with a job.

The idea: the plan is the coordinator's, as `meshcee train` would get it; what explains and simulates it is put together
here from the same figures. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from meshcee.capture import Capture, capture
from meshcee.errors import PlanError
from meshcee.figures import Cluster, JobCosts, Measured, class_of
from meshcee.figures.workload import Workload
from meshcee.files.home import Home
from meshcee.job import Job
from meshcee.plan import Plan
from meshcee.planner import COMPARED, Question, choose, question_of, situation
from peers.cli.session import configure_logging, load_job, run_async, waiting
from peers.cli.view import naming
from peers.node import JoinOptions, join
from peers.planning import question, request_plan

__all__ = ["LivePlan", "plan_live"]


@dataclass(frozen=True)
class LivePlan:
    """A plan for a live mesh, and everything behind it."""

    title: str
    plan: Plan
    notes: tuple[str, ...]
    cluster: Cluster
    workload: Workload
    names: Mapping[str, str]  # peer id -> name
    single: tuple[str, float] | None  # the best device alone, and its seconds a step
    measured: Measured
    costs: JobCosts
    stages: int | None

    def questions(self) -> dict[str, Question]:
        """By codec: first the question that the plan answers, then the same with other codecs."""
        return {
            codec: question_of(self.plan, self.measured, replace(self.costs, codec=codec), self.stages)
            for codec in (self.costs.codec, *COMPARED)
        }

    def kernels(self) -> dict[str, str]:
        """Of each device the kernel class."""
        return {peer: str(class_of(device, self.plan.threads)) for peer, device in self.measured.devices.items()}


def plan_live(job_file: Path, token: str, stages: int | None, *, as_json: bool) -> LivePlan:
    """Join, have the job's blocks timed, ask for a plan, leave."""
    configure_logging(as_json=as_json, level="warning")
    job = load_job(job_file)
    with waiting("the mesh times the job's blocks, and plans", as_json=as_json):
        # Captured before there is a loop, which would hold up Ctrl-C.
        return run_async(_plan(job, capture(job), token, stages))


async def _plan(job: Job, captured: Capture, token: str, stages: int | None) -> LivePlan:
    async with join(JoinOptions(token=token, name="planner"), Home()) as mesh, naming(mesh.agent.names):
        agent = mesh.agent
        request = await question(agent, job, captured, stages)
        planned = await request_plan(agent, request)
        await agent.wait_for_peers(planned.plan.peers)
        measured = replace(agent.measured(), times=request.times, feeds=request.feeds)
        names = agent.names()
    cluster, workload = situation(measured, request.job)
    try:
        alone = choose(measured, replace(request.job, groups=False), 1)[0].best
    except PlanError:
        single = None
    else:
        single = (alone.peers[0], alone.predicted.step_s) if alone.predicted is not None else None
    return LivePlan(
        job.name, planned.plan, planned.notes, cluster, workload, names, single, measured, request.job, stages
    )
