"""Plans that users give: peers found by name, refused in words where they do not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshcee.capture import capture
from meshcee.errors import PlanError, UsageError
from meshcee.figures import DeviceProfile
from meshcee.optim import Optimizer
from peers.node.early import JoinOptions
from peers.node.in_process import InProcess
from peers.owner.offering import check_members
from peers.planning.given import check_plan, placed
from tests.peers.groups.test_groups import mixing_job
from tests.peers.member.test_training import make_job
from tests.rig.mesh_fixture import beside, even_plan, grouped

NAMES = {"id-a": "p0", "id-b": "p1", "id-c": "p2"}
PLAN = grouped(even_plan(3, 2, 6, 6), ((4, 2), (6,)))


def test_peers_may_be_named_by_name_or_id() -> None:
    assert placed(PLAN, NAMES).peers == ("id-a", "id-b", "id-c")
    assert placed(placed(PLAN, NAMES), NAMES).peers == ("id-a", "id-b", "id-c")
    with pytest.raises(UsageError, match="'p2' is not in the mesh; `meshcee status` lists p0, p1"):
        placed(PLAN, {"id-a": "p0", "id-b": "p1"})
    with pytest.raises(UsageError, match="'p1' is the name of 2 peers"):
        placed(PLAN, {**NAMES, "id-d": "p1"})


def test_a_plan_must_fit_its_job() -> None:
    job = mixing_job("")
    captured = capture(job)
    check_plan(PLAN, job, captured)
    with pytest.raises(PlanError, match="has 4 blocks and the job's model 3"):
        check_plan(even_plan(4, 2, 6, 6), job, captured)
    with pytest.raises(PlanError, match="batch_size=12"):
        check_plan(PLAN, replace(job, batch_size=12), captured)
    with pytest.raises(PlanError, match="micro_batch_size 3"):
        check_plan(PLAN, replace(job, micro_batch_size=3), captured)


async def test_a_plan_that_members_have_no_memory_for_is_refused_unless_nothing_is_measured() -> None:
    job = make_job(batch_size=12)
    captured = capture(job)
    plan = even_plan(captured.train.num_blocks, 2, 12, 6)
    async with InProcess(JoinOptions(memory_bytes=1 << 30)) as here:
        for name in ("p0", "p1"):
            await here.start(name)
        mesh = await here.own("owner", None)
        assert (await mesh.plan(job, captured, given=plan)).plan.peers == placed(plan, mesh.agent.names()).peers
    async with InProcess(JoinOptions(memory_bytes=1 << 10)) as here:
        for name in ("p0", "p1"):
            await here.start(name)
        mesh = await here.own("owner", None)
        with pytest.raises(PlanError, match=r"p0 needs .* for this plan and has 1 KiB"):
            await mesh.plan(job, captured, given=plan)
        mesh.agent.measures = False
        await mesh.plan(job, captured, given=plan)


@pytest.mark.parametrize(("codec", "has"), [("lossless", "bf16"), ("none", "lossless"), ("bf16", "int8")])
@pytest.mark.parametrize("way", ["codec_out", "codec_back"])
def test_a_plan_rounds_no_more_than_its_job(codec: str, has: str, way: str) -> None:
    job = mixing_job("")
    captured = capture(job)
    (pipeline,) = PLAN.pipelines
    first, last = pipeline.stages
    stages = (replace(first, codec_out=has), last) if way == "codec_out" else (first, replace(last, codec_back=has))
    plan = replace(PLAN, pipelines=(replace(pipeline, stages=stages),))
    with pytest.raises(PlanError, match=f"codec {has} between p0 p1 and p2, the job's is '{codec}'"):
        check_plan(plan, replace(job, codec=codec), captured)
    check_plan(plan, replace(job, codec="auto"), captured)
    check_plan(PLAN, replace(job, codec=codec), captured)


def test_pipelines_that_share_blocks_lie_on_devices_of_one_class() -> None:
    """Before anything is offered, whoever has made the plan."""
    job = mixing_job("", batch_size=12)
    captured = capture(job)
    plan = beside(PLAN, (1, [(3, (6,))]), (1, [(3, (6,))]))
    device = DeviceProfile("cpu", "a processor", 1 << 33, 1e10, 2, "AMD AVX2")
    here, there = plan.peers
    check_members(job, captured, plan, {here: device, there: device}, {})
    unlike = {here: device, there: replace(device, capability="Intel AVX512")}
    with pytest.raises(PlanError, match=r"block 0 on ann .* and bob .*, unlike in model"):
        check_members(job, captured, plan, unlike, {here: "ann", there: "bob"})
    graphs = replace(job, optimizer=Optimizer("AdamW", lr=0.1, capturable=True))
    with pytest.raises(UsageError, match="CPUs refuse it"):
        check_members(graphs, captured, plan, {here: device, there: device}, {})


def test_several_pipelines_divide_the_batch() -> None:
    job = mixing_job("", batch_size=12)
    each = (1, [(1, (6,)), (3, (6,))])
    plan = beside(PLAN, each, each)
    check_plan(plan, job, capture(job))
    with pytest.raises(PlanError, match=r"2 micro-batches of 6 samples .* batch_size=6"):
        check_plan(plan, replace(job, batch_size=6), capture(job))
    job = make_job(batch_size=12)  # with batch norm
    captured = capture(job)
    each = (1, [(captured.train.num_blocks, (6,))])
    check_plan(beside(PLAN, each, each), job, captured)
