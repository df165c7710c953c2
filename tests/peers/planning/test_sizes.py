"""Which micro-batch sizes are measured, and so which ones a plan may choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshcee.capture import capture
from meshcee.job import Job
from meshcee.optim import Optimizer
from peers.planning.job_costs import costs_of, least_samples, sizes_of


def job_of(model: nn.Module, shape: tuple[int, ...], **changes: Any) -> Job:
    settings: dict[str, Any] = {
        "model": model,
        "loss": lambda output, y: (output.flatten(1).mean(1) - y).square().mean(),
        "data": [(torch.randn(shape), 0.0)] * 16,
        "optimizer": Optimizer("SGD", lr=0.01),
        "batch_size": 8,
        "steps": 2,
    }
    return Job(**{**settings, **changes})


@pytest.mark.parametrize(
    ("model", "shape", "least"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (4,), 2),
        (nn.Sequential(nn.Conv2d(2, 4, 4), nn.BatchNorm2d(4)), (2, 4, 4), 2),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)), (2, 4, 4), 1),
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), (4,), 1),
    ],
)
def test_a_batch_norm_sees_two_values_of_each_channel(model: nn.Module, shape: tuple[int, ...], least: int) -> None:
    """torch refuses to train on one. A plan that had chosen micro-batches of one sample ended the run before its first step."""
    job = job_of(model, shape)
    captured = capture(job)
    costs = costs_of(job, captured)
    assert least_samples(captured.train) == least
    sizes = sizes_of(job, costs, 1 << 30, least)
    assert sizes == tuple(m for m in (1, 2, 4, 8) if m >= least)
    one = torch.randn(1, *shape)
    if least == 1:
        model(one)
    else:
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            model(one)
    for size in sizes:
        model(torch.randn(size, *shape))


def test_a_batch_of_one_sample_has_one_size() -> None:
    job = job_of(nn.Linear(4, 4), (4,), batch_size=1)
    assert sizes_of(job, costs_of(job, capture(job)), 1 << 30, 2) == (1,)
