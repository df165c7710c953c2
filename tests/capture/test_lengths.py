"""Samples of several lengths: what computes with these in Python is told what to write."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshcee.capture import capture
from meshcee.errors import CaptureError
from meshcee.job import Job
from meshcee.optim import Optimizer


def job_of(model: nn.Module, **given: Any) -> Job:
    options = {
        "loss": F.mse_loss,
        "optimizer": Optimizer("SGD", lr=0.1),
        "batch_size": 4,
        "micro_batch_size": 2,
        "steps": 1,
    }
    return Job(model=model, **options | given)


HERE = r"test_lengths\.py:\d+"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_module_over_lengths_is_told_to_have_one(kind: type[nn.Module]) -> None:
    class Tags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = kind(4, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.inner(x)[0].sum(1)
            return found

    def padded(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        xs, ys = zip(*rows, strict=True)
        return nn.utils.rnn.pad_sequence(xs, batch_first=True), torch.stack(ys)

    data = [(torch.randn(3 + i % 4, 4), torch.randn(4)) for i in range(8)]
    job = job_of(Tags(), data=data, collate=padded)
    with pytest.raises(
        CaptureError, match=rf"{HERE} .*an LSTM, GRU or RNN .* one length.*pad all samples to one length"
    ):
        capture(job)


@pytest.mark.parametrize(
    ("compute", "told"),
    [
        (lambda h: h * math.log(h.shape[1]), r"Python computes with the length of samples, .*torch\.full\(\(\), n\)"),
        (
            lambda h: torch.stack([h[:, t] for t in range(h.shape[1])], 1),
            r"Python computes with the length .*one length",
        ),
        (lambda h: h + torch.linspace(0, 1, h.shape[1])[:, None], r"write torch\.arange\(n\) / \(n - 1\)"),
        (lambda h: h[:, : math.ceil(h.shape[1] / 2)], r"Python computes ceil\(\) of a size at .*as -\(-n // 2\)"),
    ],
)
def test_python_that_computes_with_lengths_is_told_what_to_write(compute: Any, told: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return compute(self.a(x))

    def padded(rows: Any) -> Any:
        most = max(len(x) for x, _ in rows)
        return tuple(torch.stack([F.pad(row[k], (0, 0, 0, most - len(row[k]))) for row in rows]) for k in (0, 1))

    data = [(torch.randn(3 + i % 3, 4), torch.randn(3 + i % 3, 4)) for i in range(24)]
    job = job_of(Net(), data=data, collate=padded, loss=lambda out, y: (out.sum() - y.sum()) ** 2)
    with pytest.raises(CaptureError, match=told):
        capture(job)
