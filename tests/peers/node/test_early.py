"""What a run is asked for in words is looked at before its model is captured, which may take minutes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshcee
from meshcee.errors import MeshceeError, UsageError


class Untouched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it was captured")


DATA = [(torch.zeros(2), torch.zeros(1))] * 4
JOB = meshcee.Job(Untouched(), nn.functional.mse_loss, DATA, meshcee.Optimizer("SGD", lr=0.1), batch_size=2, steps=1)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"join": "nonsense"}, "neither an invite token"),
        ({"join": "@nowhere"}, "@nowhere: the file cannot be read"),
        ({"join": "@line.txt"}, "'nonsense' is neither an invite token"),
        ({"resume": "nonsense", "local": 1, "keeps": True}, "no run matches 'nonsense'"),
        ({"resume": "nonsense", "local": 1}, "keeps=True"),
    ],
)
def test_a_wrong_word_is_told_before_the_capture(
    asked: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "line.txt").write_text("nonsense\n")
    with pytest.raises(MeshceeError, match=says):
        meshcee.train(JOB, **asked)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Muon", "AdamW8bit"])
def test_an_option_that_the_optimizer_has_not_is_told_with_those_that_it_has(name: str) -> None:
    with pytest.raises(UsageError, match=r"'learning_rate'; its options are lr, "):
        meshcee.train(replace(JOB, optimizer=meshcee.Optimizer(name, learning_rate=0.1)), local=1)
