"""Pipelines side by side equal the plain loop bit for bit: gradients are added up in the order of the micro-batches.

The idea: the plain loop is the definition. Models whose gradients are odd in some way (shared, missing in some micro-batches,
channels last, in 16 bits, clipped) run in pipelines that are cut alike and differently, and nothing may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from meshcee.capture import capture
from meshcee.config import Limits
from meshcee.equality import why_not_shared
from meshcee.errors import PlanError
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.plan import Member, Pipeline, Plan, Stage
from meshcee.stage.plan_checks import check_kinds, why_one_pipeline
from tests.rig import zoo
from tests.rig.mesh_fixture import Trained, beside, train
from tests.rig.reference import reference

MICRO = 3
Row = tuple[int, Sequence[float]]  # micro-batches, and where the stages end, as parts of the model

ROWS: dict[str, Sequence[Row]] = {
    "alike": ((2, (0.5, 1)), (2, (0.5, 1))),
    "cut differently": ((1, (1,)), (3, (0.3, 1))),
    "three": ((2, (0.6, 1)), (1, (1,)), (3, (0.4, 1))),
}


class FineTuned(nn.Module):
    """Batch norms that keep the statistics they have, in a model that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(4)))
        self.head = nn.Linear(8, 5)
        self.train()

    def train(self, mode: bool = True) -> FineTuned:
        super().train(mode)
        for layer in self.layers:
            layer[1].eval()  # type: ignore[index]
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layers(x))
        return found


def fine_tuned(rows: Sequence[Row]) -> Job:
    torch.manual_seed(3)
    model = FineTuned()
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
    data = [(torch.randn(8), i % 5) for i in range(60)]
    batch_size = MICRO * sum(n for n, _ in rows)
    settings: dict[str, Any] = {"batch_size": batch_size, "micro_batch_size": MICRO, "steps": 3, "codec": "none"}
    return Job(
        model=model, loss=nn.functional.cross_entropy, data=data, optimizer=Optimizer("AdamW", lr=0.01), **settings
    )


async def beside_each_other(job: Job, rows: Sequence[Row]) -> Trained:
    def adapt(plan: Any) -> Any:
        count = plan.num_blocks
        built = [(micros, [(max(1, round(end * count)), (MICRO,)) for end in ends]) for micros, ends in rows]
        return beside(plan, *built)

    return await train(job, 1, MICRO, adapt=adapt)


def assert_equal(trained: Trained, job: Job) -> None:
    """Of every weight, buffer and loss each bit."""
    expected = reference(job)
    share = 1.0 if job.reduction == "sum" else MICRO / job.batch_size
    assert trained.losses == [sum(float(loss) * share for loss in step) for step in expected.losses]
    for name, tensor in trained.state.items():
        assert torch.equal(tensor, expected.state[name]), name


def job_of(name: str, rows: Sequence[Row], **options: Any) -> Job:
    return zoo.make(name, batch_size=MICRO * sum(n for n, _ in rows), micro_batch_size=MICRO, **{"steps": 3} | options)


@pytest.mark.cases(1)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("clip_norm", [None, 0.05])
async def test_a_gpt_with_dropout_and_a_tied_weight(rows: str, clip_norm: float | None) -> None:
    job = job_of("char_gpt", ROWS[rows], clip_norm=clip_norm)
    assert_equal(await beside_each_other(job, ROWS[rows]), job)


@pytest.mark.cases(1)
@pytest.mark.parametrize("rows", ROWS)
async def test_a_fine_tune_whose_batch_norms_are_frozen(rows: str) -> None:
    job = fine_tuned(ROWS[rows])
    assert why_one_pipeline(capture(job).train) == ""
    assert_equal(await beside_each_other(job, ROWS[rows]), job)


class Normed(nn.Module):
    """Batch norms in training: of one and two dimensions, one module called twice, an input whose memory has gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.again = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6, momentum=0.3)
        self.gaps = nn.BatchNorm2d(3, affine=False)
        self.flat = nn.BatchNorm1d(3 * 16)
        self.head = nn.Linear(3 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = self.again(torch.relu(self.again(self.second(x))))
        x = self.gaps(x[:, ::2])
        found: torch.Tensor = self.head(self.flat(x.flatten(1)))
        return found


def normed(rows: Sequence[Row], **settings: Any) -> Job:
    torch.manual_seed(4)
    data = [(torch.randn(3, 4, 4), i % 5) for i in range(60)]
    batch_size = MICRO * sum(n for n, _ in rows)
    settings = {"batch_size": batch_size, "micro_batch_size": MICRO, "steps": 3, "codec": "none", **settings}
    return Job(
        model=Normed(), loss=nn.functional.cross_entropy, data=data, optimizer=Optimizer("AdamW", lr=0.01), **settings
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("settings", [{}, {"precision": "bf16", "clip_norm": 0.05}, {"recompute": True}], ids=str)
async def test_batch_norms_fold_their_statistics_in_order(rows: str, settings: dict[str, Any]) -> None:
    job = normed(ROWS[rows], **settings)
    assert why_one_pipeline(capture(job).train) == ""
    trained = await beside_each_other(job, ROWS[rows])
    assert any(name.endswith("running_var") for name in trained.state)
    assert_equal(trained, job)


class Counted(nn.Module):
    """What it writes depends on what it has written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.mul_(0.9).add_(x.detach().mean(0))
        found: torch.Tensor = self.linear(x - self.seen)
        return found


class Noisy(nn.Module):
    """Its buffer is drawn anew by every F."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.normal_()
        found: torch.Tensor = self.linear(x)
        return found if self.training else found + self.seen.sum()


class Viewed(nn.Module):
    """A norm whose statistics' rounding is not known without its input."""

    def __init__(self, norm: nn.Module, *, transposed: bool = False) -> None:
        super().__init__()
        self.seen, self.linear, self.transposed = norm, nn.Linear(8, 5), transposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 2, 4)
        x = self.seen(x.transpose(1, 2)).transpose(1, 2) if self.transposed else self.seen(x)
        found: torch.Tensor = self.linear(x.flatten(1))
        return found


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "counted": Counted,
    "random": Noisy,
    "transposed": lambda: Viewed(nn.BatchNorm1d(4), transposed=True),
    "instances": lambda: Viewed(nn.InstanceNorm1d(2, affine=True, track_running_stats=True)),
}


@pytest.mark.parametrize("model", OTHERS.values(), ids=OTHERS)
def test_other_buffers_that_a_model_writes_keep_to_one_pipeline(model: Callable[[], nn.Module]) -> None:
    data = [(torch.randn(8), 1)] * 12
    settings: dict[str, Any] = {
        "batch_size": 6,
        "micro_batch_size": 3,
        "steps": 1,
        "optimizer": Optimizer("SGD", lr=0.1),
    }
    job = Job(model=model(), loss=nn.functional.cross_entropy, data=data, **settings)
    assert "its buffer 'seen" in why_one_pipeline(capture(job).train)


@pytest.mark.slow
async def test_more_statistics_than_a_frame_has_payloads() -> None:
    torch.manual_seed(0)
    many = Limits().payloads // 3 + 1
    model = nn.Sequential(nn.Linear(8, 2), *(nn.BatchNorm1d(2) for _ in range(many)), nn.Linear(2, 5))
    data = [(torch.randn(8), i % 5) for i in range(40)]
    settings: dict[str, Any] = {"batch_size": 8 * MICRO, "micro_batch_size": MICRO, "steps": 1, "codec": "none"}
    job = Job(model=model, loss=nn.functional.cross_entropy, data=data, optimizer=Optimizer("SGD", lr=0.1), **settings)
    assert why_one_pipeline(capture(job).train) == ""
    rows = ((4, (1,)), (4, (1,)))
    assert_equal(await beside_each_other(job, rows), job)


def test_gpus_fold_no_statistics_of_batches() -> None:
    captured = capture(normed(ROWS["alike"]))
    half = captured.train.num_blocks
    whole = Pipeline(2, (Stage(0, half, (Member("a", MICRO),), 1, 1),))
    plan = Plan(MICRO, (whole, replace(whole, stages=(replace(whole.stages[0], members=(Member("b", MICRO),)),))))
    check_kinds(captured, plan, {"a": "cpu", "b": "cpu"})
    with pytest.raises(PlanError, match="statistics of batches, on cuda devices"):
        check_kinds(captured, plan, {"a": "cuda", "b": "cuda"})


def test_devices_may_share_the_samples_of_a_fine_tune_whose_batch_norms_are_frozen() -> None:
    job = fine_tuned(ROWS["alike"])
    assert why_not_shared(job, capture(job)) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lora", {}),  # frozen weights
        ("moe", {}),  # an expert that nobody chose has no gradient in some micro-batches
        ("char_gpt", {"precision": "bf16", "clip_norm": 0.05}),
        ("unet", {}),
        ("lstm", {}),
        ("shared_layer", {}),
        ("llama", {"precision": "bf16"}),
        ("many", {}),
        ("fno", {}),
        ("t5", {}),
    ],
)
async def test_models_whose_gradients_are_odd(name: str, options: dict[str, Any]) -> None:
    job = job_of(name, ROWS["cut differently"], **options)
    assert_equal(await beside_each_other(job, ROWS["cut differently"]), job)
