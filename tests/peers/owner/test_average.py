"""The average of the weights is torch's own, bit for bit, whatever befalls the run; and so are moments of every shape.

Evaluations are of it where the job says so.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from meshcee.capture import capture
from meshcee.eager import plain, plain_steps
from meshcee.errors import UsageError
from meshcee.files.home import Home
from meshcee.job import Job
from meshcee.optim import Optimizer, adamw8bit
from meshcee.stage import optimizer_layout
from peers.cli.runs import export
from peers.owner.epoch import Report
from peers.owner.result import Result
from peers.state.checkpoint import check_same, description
from tests.peers.member.test_training import Pairs, make_job
from tests.peers.owner.test_recovery import a_mesh, stage_of

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here

STEPS, MICRO = 16, 6


def job_of(optimizer: Optimizer, **changes: object) -> Job:
    settings = {"steps": STEPS, "micro_batch_size": MICRO, "checkpoint_every": 3, "schedule": None, "ema": 0.9}
    return make_job(**{**settings, "optimizer": optimizer, **changes})


def by_shape(job: Job, kind: str) -> Optimizer:
    """Muon for matrices, another class for all that is none."""
    names = [name for name, p in job.model.named_parameters() if p.dim() != 2]  # type: ignore[union-attr]
    return Optimizer("Muon", lr=2e-2, groups={"|".join(names): {"class": kind, "lr": 1e-2}})


async def trained(job: Job, home: Home, crash_after: int, heard: list[Report] | None = None) -> Result:
    """On three peers in virtual time, the second of which dies."""
    captured = await asyncio.to_thread(capture, job)
    async with a_mesh(home, 3) as (here, mesh):

        def hear(report: Report) -> None:
            if report.step == crash_after:
                here.crash(stage_of(here, mesh, 1))

        async for report in mesh.train(job, captured=captured, stages=3):
            hear(report)
            if heard is not None:
                heard.append(report)
        return mesh.result


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "precision"), [("AdamW", "fp32"), ("Adafactor", "bf16")])
async def test_the_average_outlives_a_member_and_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, precision: str
) -> None:
    """With dropout, batch norm, a tied weight and clipping, and two classes of optimizers."""
    job = job_of(by_shape(make_job(), kind), precision=precision)
    expected = plain(job, STEPS, MICRO)
    home = Home(tmp_path)
    result = await trained(job, home, crash_after=7)
    assert result.plan is not None
    assert len(result.plan.pipelines[0].stages) == 2  # what one of them kept lives on elsewhere
    assert result.losses == expected.losses
    for name, tensor in expected.state_dict.items():
        assert torch.equal(result.state_dict[name], tensor), name
        assert torch.equal(result.ema[name], expected.ema[name]), name
    assert not torch.equal(result.ema["layers.0.0.weight"], result.state_dict["layers.0.0.weight"])
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path))
    export("last", None, tmp_path / "ema.safetensors", ema=True, as_json=True)
    exported = safetensors.torch.load_file(tmp_path / "ema.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.ema.items())


@pytest.mark.slow
async def test_moments_in_8_bits_outlive_a_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw8bit, "SMALLEST", 16)  # numbers: these models have few
    job = job_of(Optimizer("AdamW8bit", lr=1e-2))
    expected = plain(job, STEPS, MICRO)
    result = await trained(job, Home(tmp_path), crash_after=7)
    assert result.plan is not None
    assert len(result.plan.pipelines[0].stages) == 2
    assert result.losses == expected.losses
    for name, tensor in expected.state_dict.items():
        assert torch.equal(result.state_dict[name], tensor), name
        assert torch.equal(result.ema[name], expected.ema[name]), name


@pytest.mark.slow
async def test_evaluations_are_of_the_average_where_the_job_says_so(tmp_path: Path) -> None:
    """Also behind a change of plan, whose averages come late; and training is as without."""
    held_out = Pairs(23)
    changes: dict[str, object] = {"eval_data": held_out, "eval_every": 4, "eval_ema": True}
    job = job_of(Optimizer("AdamW", lr=1e-2), **changes)
    heard: list[Report] = []
    result = await trained(job, Home(tmp_path), crash_after=6, heard=heard)
    x, y = (torch.tensor(column) for column in zip(*(held_out[i] for i in range(len(held_out)))))
    expected: dict[int, list[float]] = {}
    losses = []
    for done in plain_steps(job):
        losses.append(done.loss)
        if (done.step + 1) % 4 == 0:
            model = copy.deepcopy(done.module).eval()
            for state in (done.state_dict, done.ema):
                model.load_state_dict(state)
                with torch.no_grad():
                    parts = [job.loss(model(a), b).item() * len(a) for a, b in zip(x.split(MICRO), y.split(MICRO))]
                expected.setdefault(done.step, []).append(sum(parts) / len(x))
    assert result.losses == losses
    found = {report.step: report.metrics["loss"] for report in heard if report.metrics}
    assert found.keys() == expected.keys() == {3, 7, 11, 15}
    for step, (weights, average) in expected.items():
        assert found[step] == average
        assert found[step] != pytest.approx(weights, rel=1e-4)
    with pytest.raises(UsageError, match=r"ema=0\.999"):
        job_of(Optimizer("SGD", lr=0.1), ema=None, eval_ema=True)


def test_a_run_goes_on_whatever_its_evaluations_are_of() -> None:
    """They change no step."""
    job = job_of(Optimizer("SGD", lr=0.1), eval_data=Pairs(5))
    captured = capture(job)
    check_same(replace(job, eval_ema=True), captured, description(job, captured), MICRO)
    with pytest.raises(UsageError, match="was made with optimizer"):
        check_same(replace(job, ema=None), captured, description(job, captured), MICRO)


@pytest.mark.slow
async def test_without_one_there_is_nothing_to_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(Optimizer("SGD", lr=0.1), ema=None, steps=3)
    result = await trained(job, Home(tmp_path), crash_after=99)
    assert result.ema == plain(job, 3, MICRO).ema == {}
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="--ema"):
        export("last", None, tmp_path / "ema.safetensors", ema=True, as_json=True)


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "Muon"])
def test_members_expect_just_what_an_optimizer_keeps(name: str) -> None:
    shapes = {"m": (3, 5), "row": (1, 4), "column": (4, 1)} | ({} if name == "Muon" else {"v": (7,), "c": (2, 3, 1, 5)})
    optimizer = Optimizer(name, lr=0.1).averaging(0.9)
    named = {n: torch.nn.Parameter(torch.ones(shape)) for n, shape in shapes.items()}
    built = optimizer.build(named)
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    built.step()
    real = {f"{n}/{k}": (t.dtype, tuple(t.shape)) for n, p in named.items() for k, t in built.state[p].items()}
    real |= {f"{n}/ema": (torch.float32, shape) for n, shape in shapes.items()}
    assert optimizer_layout(optimizer, {n: (torch.float32, shape) for n, shape in shapes.items()}) == real
