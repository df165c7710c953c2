"""What storms train (benchmarks/virtual_chaos.py), and what comes of it in peace.

The idea: the model has whatever tells of a step that was lost or done twice, and is so small that a run takes two seconds.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.augmented import Augmented
from meshcee.capture import Capture, capture
from meshcee.eager import plain
from meshcee.files.home import Home
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.plan import Plan
from peers.owner.result import Result
from tests.rig.mesh_fixture import even_plan

__all__ = ["LONG", "MICRO", "STAGES", "STEPS", "Work", "captured_job", "expected", "job_of", "work_of"]

STEPS, MICRO, STAGES = 12, 4, 3
LONG = 22  # steps: some are fed ahead, so a plan that hands over ends several later


@dataclass(frozen=True)
class Work:
    """What a storm trains, and what comes of it in peace."""

    job: Job
    captured: Capture
    losses: list[float]
    differs: Callable[[Result, Home], str]  # in what a run does, besides losses; "" if in nothing
    another_plan: Callable[[Sequence[str], random.Random], Plan]  # over some of these peers
    how: Mapping[str, Any] = field(default_factory=dict)  # what the run is begun with, besides the job
    callbacks: Callable[[], Mapping[str, Any]] = (
        dict  # new ones, as each owner of the run has them: {"callbacks": [...]} or {}
    )
    breaks_at: int | None = None  # the step after which the user leaves it, and resumes it


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


def work_of(augmented: bool = False, steps: int = STEPS, job: Job | None = None) -> Work:
    """`job`: as job_of(augmented) makes it, but for what changes no number."""
    job, captured = job or job_of(augmented, steps), captured_job()
    losses, state = expected(augmented, job.steps)

    def differs(result: Result, home: Home) -> str:
        found = result.state_dict
        return "" if all(torch.equal(found[name], tensor) for name, tensor in state.items()) else "other weights"

    def another_plan(peers: Sequence[str], chance: random.Random) -> Plan:
        blocks = captured.train.num_blocks
        count = chance.randint(min(2, len(peers)), min(4, blocks, len(peers)))
        return even_plan(blocks, count, 8, MICRO, peers=chance.sample([*peers], count))

    return Work(job, captured, losses, differs, another_plan, {"stages": STAGES})
