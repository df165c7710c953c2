"""Terms of the loss: what each step tells of beside it is what the plain loop adds up, bit for bit, wherever it is computed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshcee.capture import capture
from meshcee.eager import plain
from meshcee.errors import CaptureError, ProtocolError
from meshcee.files.home import Home
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.plan import Member, Pipeline, Plan, Stage
from peers.member.executor import Executor
from tests.mutation import changed
from tests.peers.owner.test_recovery import a_mesh, stage_of
from tests.rig.mesh_fixture import train

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here

BATCH, MICRO = 12, 3


class Autoencoder(nn.Module):
    """Draws its code; what it tells of comes from all over the model."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.log_variance = nn.Linear(6, 12), nn.Linear(12, 3), nn.Linear(12, 3)
        self.decoder = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 6))
        self.beta = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.encoder(x).relu()
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(code), mean, log_variance, hidden, self.beta


def loss(output: tuple[torch.Tensor, ...], target: torch.Tensor) -> dict[str, torch.Tensor]:
    decoded, mean, log_variance, hidden, beta = output
    kl = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).mean()
    rebuilt = nn.functional.mse_loss(decoded, target)
    early = {
        "active": (hidden > 0).sum(),
        "norm": hidden.detach().norm(),
        "beta": beta,
    }  # of the first stage, or a weight
    return {"rebuilt": rebuilt, "loss": rebuilt + beta * kl, "kl": kl.detach(), **early}


def job_of(**changes: Any) -> Job:
    torch.manual_seed(0)
    rows = torch.randn(48, 6)
    settings = {
        "model": Autoencoder(),
        "loss": loss,
        "data": [(row, row) for row in rows],
        "optimizer": Optimizer("AdamW", lr=1e-2),
        "batch_size": BATCH,
        "micro_batch_size": MICRO,
        "steps": 4,
        "codec": "none",
    }
    return Job(**{**settings, **changes})


def two_pipelines(blocks: int) -> Plan:
    """Cut differently, three and one micro-batches of each step."""

    def stage(first: int, end: int, peer: str) -> Stage:
        return Stage(first, end, (Member(peer, MICRO),), window=2, live_cap=4)

    return Plan(
        MICRO,
        (
            Pipeline(3, (stage(0, 1, "p0"), stage(1, blocks, "p1"))),
            Pipeline(1, (stage(0, 2, "p2"), stage(2, blocks, "p3"))),
        ),
    )


def weight(target: torch.Tensor) -> float:
    return float((target > 0).sum() + 1)


@pytest.mark.parametrize(
    ("stages", "changes"),
    [
        (1, {}),
        (3, {"weight": weight, "clip_norm": 0.5}),
        (2, {"precision": "bf16", "reduction": "sum"}),
        (2, {"recompute": True}),
    ],
)
async def test_terms_are_those_of_the_plain_loop(stages: int, changes: Mapping[str, Any]) -> None:
    job = job_of(**changes)
    trained, expected = await train(job, stages, MICRO), plain(job)
    assert trained.losses == expected.losses
    assert list(expected.terms) == ["rebuilt", "kl", "active", "norm", "beta"]
    for name, values in expected.terms.items():
        assert [report.terms[name] for report in trained.reports] == values, name
    assert len(set(expected.terms["beta"])) == job.steps, "a weight moves"
    without = await train(job_of(loss=lambda output, y: loss(output, y)["loss"], **changes), stages, MICRO)
    assert without.losses == trained.losses
    assert all(torch.equal(tensor, trained.state[name]) for name, tensor in without.state.items()), (
        "terms train nothing"
    )


async def test_pipelines_side_by_side_tell_of_the_same_terms() -> None:
    job = job_of()
    trained = await train(job, 4, MICRO, adapt=lambda plan: two_pipelines(plan.pipelines[0].stages[-1].end))
    expected = plain(job)
    assert trained.losses == expected.losses
    assert {name: [r.terms[name] for r in trained.reports] for name in expected.terms} == expected.terms


async def test_a_run_that_loses_a_peer_and_goes_on_tells_of_every_step_once(tmp_path: Path) -> None:
    """The result, the run's folder and a table have them, also where another process takes the run up."""
    job, home = job_of(steps=40, checkpoint_every=2), Home(tmp_path)
    captured, expected = await asyncio.to_thread(capture, job), plain(job)
    async with a_mesh(home, 3) as (here, mesh):
        async for report in mesh.train(job, captured=captured, stages=3):
            if report.step == 3:
                here.crash(stage_of(here, mesh, 1))
            if report.step == 7:
                mesh.stop()
        first = mesh.result
    assert first.run is not None
    assert first.terms == {name: values[: len(first.losses)] for name, values in expected.terms.items()}
    file = tmp_path / "run.csv"
    async with a_mesh(home, 2) as (_, mesh):
        async for _ in mesh.train(job, captured=captured, stages=2, resume=first.run, callbacks=[f"csv:{file}"]):
            pass
        assert mesh.result.terms == expected.terms
    lines = [json.loads(line) for line in home.run(first.run).report_file.read_text().splitlines()]
    assert {line["step"]: line["terms"]["kl"] for line in lines} == dict(enumerate(expected.terms["kl"]))
    head, *rows = [line.split(",") for line in file.read_text().splitlines()]
    assert [float(row[head.index("train/kl")]) for row in rows] == expected.terms["kl"]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (lambda o, y: {"loss": o.sum(), "each": o}, "a tensor of shape .* as 'each'"),
        (lambda o, y: {"loss": o.sum(), "half": 0.5}, "a float as 'half'.*not .item"),
        (lambda o, y: {"loss": o.sum(), "log": {"a": o.sum()}}, "a dict as 'log'"),
        (lambda o, y: {"loss": o.sum(), 3: o.sum()}, "a term named 3"),
        (lambda o, y: {"loss": o.sum()} | {f"t{k}": o.sum() for k in range(65)}, "65 terms.*64"),
        (lambda o, y: {"ce": o.sum(), "kl": o.mean()}, "a dict of 'ce', 'kl'.*\"kl\": kl"),
        (lambda o, y: {"loss": o, "kl": o.mean()}, "one number"),
        (lambda o, y: {"loss": o.sum(), "k": o.sum() * 1j}, "a complex number as 'k'"),
    ],
)
def test_what_is_no_term_is_refused(told: Callable[..., Any], words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        capture(job_of(model=nn.Linear(6, 6), loss=told))


async def test_a_member_that_tells_of_other_terms_is_not_believed() -> None:
    with changed(Executor, '"told": told}', '"told": told[:-1]}'), pytest.raises(ProtocolError, match="other terms"):
        await train(job_of(), 2, MICRO)
