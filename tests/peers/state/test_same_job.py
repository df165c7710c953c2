"""Whether a run may go on with a job: where a function, the loss or the schedule has changed, its numbers would be others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshcee.capture import capture
from meshcee.errors import UsageError
from meshcee.job import Job
from meshcee.optim import Optimizer, Schedule
from peers.state import check_same
from peers.state.checkpoint import description

ROOT = Path(__file__).resolve().parents[3]
ROWS = [(row, row.sum(0, keepdim=True)) for row in torch.randn(32, 8, generator=torch.Generator().manual_seed(0))]


def half(step: int) -> float:
    return 0.5**step


def job_of(act: nn.Module | None = None, dropout: float = 0.1, factor: float = 0.9, **options: Any) -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), act or nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))
    return Job(
        **{
            "model": model,
            "loss": F.mse_loss,
            "data": ROWS,
            "optimizer": Optimizer("SGD", lr=0.1),
            "schedule": Schedule("LambdaLR", lr_lambda=lambda step: factor**step),
            "batch_size": 8,
            "steps": 20,
            **options,
        }
    )


def checked(job: Job) -> None:
    first = job_of()
    check_same(job, capture(job), description(first, capture(first)), 4)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"act": nn.ReLU()}, "another computation"),
        ({"dropout": 0.5}, "another computation"),
        ({"loss": F.l1_loss}, "another computation"),
        ({"factor": 0.5}, "another schedule"),
        ({"schedule": Schedule("LambdaLR", lr_lambda=half)}, "schedule"),
    ],
)
def test_a_changed_function_is_found(changed: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=f"the run was made with {what}"):
        checked(job_of(**changed))


@pytest.mark.parametrize(
    "changed", [{}, {"steps": 40}, {"recompute": True}, {"checkpoint_every": 3}, {"eval_data": ROWS}]
)
def test_what_changes_no_number_of_a_step_may_change(changed: dict[str, Any]) -> None:
    checked(job_of(**changed))


def test_a_run_that_ended_early_may_get_more_steps() -> None:
    """It says nothing of rates in steps that it did not have."""
    short = job_of(steps=2)
    check_same(job_of(steps=20), capture(job_of()), description(short, capture(short)), 4)
    with pytest.raises(UsageError, match="another schedule"):
        check_same(job_of(steps=20, factor=0.5), capture(job_of()), description(short, capture(short)), 4)


def test_a_run_of_an_older_version_says_nothing_of_functions() -> None:
    job = job_of()
    older = {k: v for k, v in description(job, capture(job)).items() if k not in ("computation", "rates")}
    other = job_of(nn.ReLU())
    check_same(other, capture(other), older, 4)


def test_another_process_finds_the_same_computation() -> None:
    """Whatever order its sets have."""
    code = (
        "from tests.peers.state.test_same_job import *; j = job_of(); print(description(j, capture(j))['computation'])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "77")
    }
    assert len(found) == 1
