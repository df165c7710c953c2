"""A run that goes on without a part of its reports: callbacks' rates are in them and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshcee
from meshcee.errors import CheckpointError
from meshcee.files.home import Home


class Lowers(meshcee.Callback):
    """The rate from step 4 on; after six steps it may end the run."""

    waits = "steps"

    def __init__(self, *, stops: bool = False) -> None:
        self.stops = stops

    def on_step(self, run: Any, report: Any) -> None:
        if report.step == 2:
            run.set_lr(1e-4, step=4)
        if self.stops and report.step == 6:
            run.stop()


def job_of() -> meshcee.Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    data = [(row, row.sum(0, keepdim=True)) for row in torch.randn(64, 4)]
    optimizer = meshcee.Optimizer("SGD", lr=0.1)
    sizes = {"batch_size": 8, "micro_batch_size": 8, "steps": 12, "checkpoint_every": 3}  # else the first plan chooses
    return meshcee.Job(model=model, loss=F.mse_loss, data=data, optimizer=optimizer, **sizes)


def whole(lines: list[str]) -> list[str]:
    return lines


def torn(lines: list[str]) -> list[str]:
    return [*lines[:2], "\0" + lines[2][1:], *lines[3:]]


def begun(lines: list[str]) -> list[str]:
    return lines[:2]


def gone(lines: list[str]) -> list[str]:
    return []


@pytest.mark.parametrize("damage", [whole, torn, begun, gone])
def test_a_checkpoint_needs_the_reports_of_its_steps(
    damage: Callable[[list[str]], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run would go on at the rates of the schedule, and say nothing."""
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path))
    expected = meshcee.train(job_of(), local=1, callbacks=[Lowers()], keeps=True).losses
    meshcee.train(job_of(), local=1, callbacks=[Lowers(stops=True)], keeps=True)
    reports = Home(tmp_path).run("last").report_file
    reports.write_text("".join(damage(reports.read_text().splitlines(keepends=True))))
    if damage is whole:
        assert list(meshcee.train(job_of(), local=1, resume="last", keeps=True).losses) == list(expected)
        return
    missing = {torn: 3, begun: 3, gone: 1}[damage]
    with pytest.raises(
        CheckpointError, match=rf"no line of step {missing}, which the checkpoint counts.*checkpoint export"
    ):
        meshcee.train(job_of(), local=1, resume="last", keeps=True)
