"""A collate that takes no single sample, as one that pairs samples, trains with the micro-batches that the job says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshcee
from meshcee.errors import UsageError
from meshcee.job import Job
from meshcee.optim import Optimizer


def mixed(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """As timm's Mixup does: half of each pair is the other one."""
    assert len(rows) % 2 == 0, "Batch size should be even when using this"
    x, y = torch.stack([x for x, _ in rows]), F.one_hot(torch.tensor([y for _, y in rows]), 5).float()
    share = torch.rand(())
    return share * x + (1 - share) * x.flip(0), share * y + (1 - share) * y.flip(0)


def job_of(**changes: Any) -> Job:
    torch.manual_seed(0)
    settings = {
        "model": nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5)),
        "loss": F.cross_entropy,
        "data": [(row, k % 5) for k, row in enumerate(torch.randn(40, 8))],
        "collate": mixed,
        "optimizer": Optimizer("AdamW", lr=0.01),
        "batch_size": 8,
        "micro_batch_size": 4,
        "steps": 4,
    }
    return Job(**{**settings, **changes})


def test_it_trains_as_in_the_plain_loop() -> None:
    found, expected = meshcee.train(job_of(), local=2), meshcee.plain(job_of())
    assert found.losses == expected.losses
    assert all(torch.equal(found.state_dict[name], tensor) for name, tensor in expected.state_dict.items())


def named_by_count(rows: list[Any]) -> Any:
    x, y = torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows])
    return ({"input": x} if len(rows) > 1 else {"other": x}), y


class Keyword(nn.Linear):
    def forward(self, input: torch.Tensor | None = None, other: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(input if input is not None else other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"micro_batch_size": None}, "(?s)Batch size should be even.*micro_batch_size=N"),
        ({"micro_batch_size": 1}, "Batch size should be even"),
        ({"collate": named_by_count, "model": Keyword(8, 5)}, "x.other.* of one sample, and x.input of 3"),
    ],
)
def test_what_no_mesh_can_split_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        meshcee.capture(job_of(**changes))
