"""A loss that is no mean over samples: without a size of micro-batches each step has the whole batch, as a plain loop has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from structlog.testing import capture_logs
from torch import nn

import meshcee
from meshcee.capture import capture
from meshcee.equality import in_whole_batches, trial
from meshcee.events import Event
from meshcee.job import Job
from meshcee.optim import Optimizer
from tests.mutation import breaks, changed

WIDTH, BATCH = 6, 16
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
CLASSES = nn.CrossEntropyLoss(weight=torch.arange(1.0, WIDTH + 1))


def negatives(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scores = F.normalize(out, dim=1) @ F.normalize(y, dim=1).T
    return F.cross_entropy(scores / 0.1, torch.arange(len(scores)))


def ignoring(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, torch.where(y[:, 0] > 0, y.argmax(1), -100))


OF_THE_BATCH: dict[str, Loss] = {
    "in-batch negatives": negatives,
    "a sum": lambda out, y: F.mse_loss(out, y, reduction="sum"),
    "weights of classes": lambda out, y: CLASSES(out, y.argmax(1)),
    "ignored targets": ignoring,
    "a deviation": lambda out, y: (out - y).square().mean() + out.std(0).mean(),
}
OF_SAMPLES: dict[str, Loss] = {
    "mean squares": F.mse_loss,
    "cross-entropy": lambda out, y: F.cross_entropy(out, y.argmax(1)),
    "of rows": lambda out, y: (out - y).abs().amax(1).mean(),
}


def net(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), *more, nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, WIDTH))


def job_of(loss: Loss, model: nn.Module | None = None, **options: Any) -> Job:
    g = torch.Generator().manual_seed(1)
    data = [(torch.randn(WIDTH, generator=g), torch.randn(WIDTH, generator=g)) for _ in range(2 * BATCH)]
    own: dict[str, Any] = {"batch_size": BATCH, "steps": 2, "data": data, "optimizer": Optimizer("SGD", lr=0.1)}
    return Job(model=model or net(), loss=loss, **own | options)


@pytest.mark.parametrize("name", OF_THE_BATCH)
@pytest.mark.parametrize("drops", [False, True], ids=["plain", "dropout"])
def test_a_loss_of_the_whole_batch_is_seen(name: str, drops: bool) -> None:
    job = job_of(OF_THE_BATCH[name], net(nn.Dropout(0.2)) if drops else None)
    captured = capture(job)

    def story() -> None:
        with capture_logs() as logs:
            sized = in_whole_batches(job, captured)
        assert sized.micro_batch_size == BATCH
        assert [line["event"] for line in logs if line["event"] in list(Event)] == [Event.WHOLE_BATCHES]

    story()
    with changed(trial, "if _agree(loss, whole, within):", "if True:"):
        assert breaks(story)


@pytest.mark.parametrize("name", OF_SAMPLES)
@pytest.mark.parametrize("drops", [False, True], ids=["plain", "dropout"])
def test_a_mean_over_samples_is_left_to_the_plan(name: str, drops: bool) -> None:
    job = job_of(OF_SAMPLES[name], net(nn.Dropout(0.2)) if drops else None)
    assert in_whole_batches(job, capture(job)) is job


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("a sum", {"reduction": "sum"}),
        ("ignored targets", {"weight": lambda y: float((y[:, 0] > 0).sum())}),
        ("weights of classes", {"weight": lambda y: float((y.argmax(1) + 1).sum())}),
        ("in-batch negatives", {"verify": False}),
        ("in-batch negatives", {"micro_batch_size": 8}),
    ],
)
def test_who_says_what_is_meant_has_that(loss: str, options: dict[str, Any]) -> None:
    job = job_of(OF_THE_BATCH[loss], **options)
    with capture_logs() as logs:
        assert in_whole_batches(job, capture(job)) is job
    assert [line for line in logs if line["event"] in (Event.WHOLE_BATCHES, Event.ADDS_UP)] == []


def test_a_sum_in_micro_batches_is_told_of() -> None:
    job = job_of(OF_THE_BATCH["a sum"], micro_batch_size=8)
    with capture_logs() as logs:
        assert in_whole_batches(job, capture(job)) is job
    assert [line["event"] for line in logs if line["event"] in list(Event)] == [Event.ADDS_UP]


@pytest.mark.parametrize("name", ["in-batch negatives", "weights of classes"])
def test_a_run_without_a_size_equals_a_loop_over_whole_batches(name: str) -> None:
    job = job_of(OF_THE_BATCH[name], threads=1)
    assert isinstance(job.model, nn.Module)

    result = meshcee.train(replace(job, model=net()), local=2)
    model, losses = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(job.steps):
        chosen = meshcee.sampling.draw(job.seed, len(job.data), BATCH, step)
        x, y = torch.utils.data.default_collate([job.data[i] for i in chosen])
        optimizer.zero_grad()
        loss = job.loss(model(x), y)
        assert isinstance(loss, torch.Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert result.losses == losses
    assert all(torch.equal(result.state_dict[n], t) for n, t in model.state_dict().items())
