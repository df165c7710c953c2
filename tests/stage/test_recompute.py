"""Stages that run F again before B: the same numbers, fewer tensors held, asked for by the job or by the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from meshcee.plan import Plan
from meshcee.stage.runner import StageRunner
from tests.peers.member.test_training import make_job
from tests.rig.mesh_fixture import train
from tests.rig.reference import reference


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[int, bool]:
    """Stage -> whether its runner was told to recompute."""
    seen: dict[int, bool] = {}

    class Recorder(StageRunner):
        def __init__(self, *args: Any, **options: Any) -> None:
            seen[options["index"]] = options["recompute"]
            super().__init__(*args, **options)

    monkeypatch.setattr("peers.wire.offer.StageRunner", Recorder)
    return seen


@pytest.mark.cases(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
async def test_a_job_that_recomputes_trains_the_same_numbers(asked: dict[int, bool], precision: str) -> None:
    """With dropout, batch norm, a tied weight and clipping: F runs twice, and must see the same masks and buffers."""
    job = make_job(recompute=True, micro_batch_size=6, precision=precision)
    trained = await train(job, 3, 6)
    assert asked == {0: True, 1: True, 2: False}  # on the last stage B follows F at once
    expected = reference(job)
    assert trained.losses == [sum(float(loss) * (6 / 24) for loss in step) for step in expected.losses]
    for name, tensor in trained.state.items():
        assert torch.equal(tensor, expected.state[name]), name


@pytest.mark.slow
async def test_the_plan_may_ask_one_stage_to_recompute(asked: dict[int, bool]) -> None:
    def second_recomputes(plan: Plan) -> Plan:
        pipeline = plan.pipelines[0]
        stages = tuple(replace(stage, recompute=j == 1) for j, stage in enumerate(pipeline.stages))
        return replace(plan, pipelines=(replace(pipeline, stages=stages),))

    job = make_job(micro_batch_size=6)
    trained = await train(job, 3, 6, adapt=second_recomputes)
    assert asked == {0: False, 1: True, 2: False}
    expected = reference(job)
    for name, tensor in trained.state.items():
        assert torch.equal(tensor, expected.state[name]), name
