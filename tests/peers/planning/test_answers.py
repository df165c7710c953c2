"""A coordinator's answer, held against what was asked: no plan of a planner's is refused, and any that is not the job's is."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from meshcee.errors import PlanError, ProtocolError
from meshcee.figures import JobCosts, LinkProfile, Versions
from meshcee.figures.kernels import KernelClass
from meshcee.plan import Plan
from peers.planning import PlanRequest
from tests.planner.test_live import BLOCKS, JOB, measured, plan
from tests.planner.test_regions import DEVICES, FAR, LINKS, NEAR
from tests.rig.mesh_fixture import beside, even_plan, grouped

THIN = {pair: link if link is NEAR else LinkProfile(FAR.latency_s, 2e6) for pair, link in LINKS.items()}


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        ({"codec": "lossless"}, 5),
        ({"codec": "auto", "threads": 1}, 5),
        ({"codec": "int8", "micro_batch": 2}, 2),
        ({"pipelines": True, "mix": "none"}, None),
        ({"groups": True, "recompute": True, "mix": "versions"}, 2),
    ],
    ids=["lossless", "auto", "int8", "side by side", "groups"],
)
def test_what_a_planner_answers_is_what_was_asked(changes: dict[str, Any], stages: int | None) -> None:
    job = replace(JOB, **changes)
    for links in (LINKS, THIN) if stages == 5 else (LINKS,):
        PlanRequest(job, stages=stages).check(plan(measured(links=links), job, stages), DEVICES)


ASKED = JobCosts(JOB.blocks, 16, 2, codec="lossless", versions=Versions("0.1", "2.13.0", "3.11"))
PLAN = even_plan(BLOCKS, 2, 16, 2)
KNOWN = {f"p{i}": DEVICES["a"] for i in range(4)} | {
    "old": replace(DEVICES["a"], versions=Versions("0.1", "2.9.0", "3.11"))
}
on = partial(even_plan, BLOCKS, 2, 16, 2)


def coded(codec: str) -> Plan:
    pipeline = PLAN.pipelines[0]
    first, *others = pipeline.stages
    return replace(PLAN, pipelines=(replace(pipeline, stages=(replace(first, codec_out=codec), *others)),))


@pytest.mark.parametrize(
    ("answered", "why"),
    [
        (coded("int8"), "int8, none for lossless"),
        (coded("bf16-lossless"), "bf16-lossless, none for lossless"),
        (even_plan(BLOCKS - 1, 2, 16, 2), "7 blocks, not 8"),
        (even_plan(BLOCKS, 2, 32, 2), "32 samples a step, not 16"),
        (even_plan(BLOCKS, 2, 16, 4), "micro-batches are of 4 samples"),
        (even_plan(BLOCKS, 3, 16, 2), "not 2 stages in each pipeline"),
        (beside(PLAN, (4, [(4, (2,)), (8, (2,))]), (4, [(5, (2,)), (8, (2,))])), "the job's model is for one"),
        (grouped(PLAN, ((1, 1), (2,))), "groups, which the job does not allow"),
        (replace(PLAN, threads=3), "3 threads, not 0"),
        (on(peers=("p0", "gone")), "were just missed"),
        (on(peers=("p0", "old")), "peer old, and it runs"),
    ],
)
def test_a_plan_that_is_not_what_was_asked_for_is_refused(answered: Plan, why: str) -> None:
    request = PlanRequest(ASKED, stages=2, without=("gone",))
    request.check(PLAN, KNOWN)
    request.check(coded("lossless"), KNOWN)
    request.check(on(peers=("p0", "nobody here yet")), KNOWN)
    with pytest.raises(PlanError, match=why):
        request.check(answered, KNOWN)


def test_a_plan_that_members_have_no_memory_for_is_refused() -> None:
    request, small = PlanRequest(ASKED, stages=2), replace(DEVICES["a"], memory_bytes=10**6)
    with pytest.raises(PlanError, match=r"p1 needs .* for this plan and has 976.6 KiB"):
        request.check(PLAN, {**KNOWN, "p1": small})
    request.check(PLAN, {"p3": small})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"blocks": JOB.blocks * 65}, "512 blocks at most, and the job has 520"),
        ({"batch_size": 1 << 17, "micro_batch": 1}, "65536 micro-batches a step at most, and the job has 131072"),
        (
            {"groups": True, "batch_size": 1 << 24, "micro_batch": 1 << 24},
            "4096 samples a micro-batch for groups at most",
        ),
        ({"groups": True, "batch_size": 1 << 13, "micro_batch": None}, "for groups at most, and the job has 8192"),
        ({"groups": True, "batch_size": 1 << 13, "micro_batch": 1 << 12}, None),
        ({"batch_size": 1 << 24, "micro_batch": 1 << 24}, None),
        ({"blocks": JOB.blocks * 64}, None),
        ({"batch_size": 1 << 17, "micro_batch": 2}, None),
        ({"batch_size": 1 << 24, "micro_batch": None}, None),
    ],
)
def test_a_coordinator_plans_no_job_that_would_keep_it_busy_for_hours(
    changes: dict[str, Any], says: str | None
) -> None:
    frame = PlanRequest(replace(ASKED, **changes)).frame()
    with pytest.raises(ProtocolError, match=says) if says else nullcontext():
        PlanRequest.from_frame(frame)


def test_a_plan_on_another_class_than_the_runs_is_refused() -> None:
    began = KernelClass("cpu", "another", "", 0)
    request = PlanRequest(replace(ASKED, mix="none").begun_on([began]))
    assert PlanRequest.from_frame(request.frame()).job.keeps == "cpu another"
    with pytest.raises(PlanError, match="the run has begun on cpu another"):
        request.check(PLAN, KNOWN)


def test_a_codec_of_the_job_is_for_all_boundaries() -> None:
    PlanRequest(replace(ASKED, codec="int8")).check(coded("int8"), KNOWN)
    with pytest.raises(PlanError, match="lossless, none for int8"):
        PlanRequest(replace(ASKED, codec="int8")).check(coded("lossless"), KNOWN)
    with pytest.raises(PlanError, match="int4, none for auto"):
        PlanRequest(replace(ASKED, codec="auto")).check(coded("int4"), KNOWN)
