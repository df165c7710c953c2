"""What storms train (benchmarks/virtual_chaos.py), and what comes of it in peace.

The idea: the model has whatever tells of a step that was lost or done twice, and is so small that a run takes two seconds.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from benchmarks.augmented import Augmented
from meshcee.capture import Capture, capture
from meshcee.eager import plain
from meshcee.job import Job, Optimizer

__all__ = ["LONG", "MICRO", "STEPS", "captured_job", "expected", "job_of"]

STEPS, MICRO = 12, 4
LONG = 22  # steps: some are fed ahead, so a plan that hands over ends several later


class Net(nn.Module):
    """Dropout, batch statistics and a tied weight: whatever is lost or done twice changes a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)) for _ in range(3)
        )
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.head(h)


def job_of(augmented: bool = False, steps: int = STEPS) -> Job:
    torch.manual_seed(0)
    data = [(i % 11, (i + 1) % 11) for i in range(64)]
    return Job(
        model=Net(),
        loss=nn.functional.cross_entropy,
        data=Augmented(data, 11) if augmented else data,
        optimizer=Optimizer("AdamW", lr=1e-2),
        batch_size=8,
        micro_batch_size=MICRO,
        steps=steps,
        seed=3,
        clip_norm=1.0,
        checkpoint_every=3,
        codec="none",
        adapt=False,  # it looks at the seconds of real computing
    )


@functools.cache
def captured_job() -> Capture:
    return capture(job_of())


@functools.cache
def expected(augmented: bool = False, steps: int = STEPS) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses, _, model, _ = plain(job_of(augmented), steps, MICRO)
    return losses, model.state_dict()
