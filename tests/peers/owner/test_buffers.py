"""Buffers of a job in bf16 come out as the plain loop has them, wherever they come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import meshcee
from meshcee.errors import UsageError
from meshcee.job import Job
from meshcee.optim import Optimizer
from peers.cli.runs import export

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here


class Scaled(nn.Module):
    """A layer with a table that is no integer in bf16, and one that nothing reads."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.rand(8, 8))
        self.register_buffer("unread", torch.rand(3, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("hidden", torch.rand(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) @ self.table + self.get_buffer("hidden")
        return out


class InFull(Scaled):
    """The same under a name of its own."""


def job_of(kept: tuple[str, ...], **changes: Any) -> Job:
    torch.manual_seed(2)
    model = nn.Sequential(Scaled(), nn.BatchNorm1d(8), InFull(), nn.ReLU(), nn.Linear(8, 4))
    model[0].linear.requires_grad_(False)
    data = [(torch.randn(8), torch.tensor(i % 4)) for i in range(24)]
    settings: dict[str, Any] = {"batch_size": 12, "micro_batch_size": 6, "steps": 4, "codec": "none", "ema": 0.9}
    settings |= {"precision": "bf16", "keep_fp32": kept, "eval_data": data, "threads": 1}
    optimizer = Optimizer("SGD", lr=0.05, momentum=0.9)
    return Job(model=model, loss=nn.functional.cross_entropy, data=data, optimizer=optimizer, **settings | changes)


def assert_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("kept", [(), ("InFull",)])
async def test_a_bf16_run_hands_back_what_the_plain_loop_has(
    kept: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path))
    job = job_of(kept)
    expected = meshcee.plain(job)
    assert expected.state_dict["0.table"].dtype == torch.bfloat16
    assert expected.state_dict["2.table"].dtype == (torch.float32 if kept else torch.bfloat16)
    async with meshcee.join(local=2) as mesh:  # without a folder
        assert [report.loss async for report in mesh.train(job, stages=2)] == expected.losses
        assert_same(mesh.result.state_dict, expected.state_dict)
        assert_same(mesh.result.ema, expected.ema)
        state = mesh.result.state_dict
        by_result = await mesh.evaluate(job, state=state, stages=2)
    async with meshcee.join(local=2, keeps=True) as mesh:
        async for report in mesh.train(replace(job, steps=2, checkpoint_every=1), stages=2):
            if not report.step:
                early = await mesh.state()
    assert_same({n: t for n, t in early.items() if "table" in n}, {n: t for n, t in state.items() if "table" in n})
    assert {n: t.dtype for n, t in early.items()} == {n: t.dtype for n, t in expected.state_dict.items()}
    async with meshcee.join(local=2, keeps=True) as mesh:
        resumed = [report.loss async for report in mesh.train(job, stages=2, resume="last")]
        assert resumed == expected.losses[2:]
        assert_same(mesh.result.state_dict, expected.state_dict)
        again = await mesh.evaluate(job, state=mesh.result.state_dict, stages=2)
        in_full = await mesh.evaluate(job, state=state | {"0.table": job.model.state_dict()["0.table"]}, stages=2)  # type: ignore[union-attr]
        assert again == by_result == in_full
        with pytest.raises(UsageError, match=r"'0\.table' is torch.float16"):
            await mesh.evaluate(job, state=state | {"0.table": state["0.table"].half()}, stages=2)
    for name, wanted in (("last", expected.state_dict), ("average", expected.ema)):
        export("last", None, tmp_path / f"{name}.safetensors", ema=name == "average", as_json=True)
        assert_same(safetensors.torch.load_file(tmp_path / f"{name}.safetensors"), wanted)


@pytest.mark.parametrize(("micro", "told"), [(None, True), (4, False)])
def test_a_plan_that_chooses_what_batch_norm_sees_says_so(micro: int | None, told: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    data = [(torch.randn(8), torch.zeros(1)) for _ in range(16)]
    job = Job(
        model=model,
        loss=nn.functional.mse_loss,
        data=data,
        optimizer=Optimizer("SGD", lr=0.1),
        batch_size=8,
        micro_batch_size=micro,
        steps=1,
    )
    notes = meshcee.train(job, local=1).notes
    assert any("batch statistics" in note and "say micro_batch_size" in note for note in notes) == told
