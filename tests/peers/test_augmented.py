"""Datasets whose samples are not the same whenever they are read: augmented by chance, or by what nobody can seed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from meshcee.eager import plain
from peers.home import Home
from peers.owner import Report
from tests.peers import test_recovery as recovery
from tests.peers.mesh_fixture import train
from tests.peers.test_training import make_job


class Noisy:
    """Vectors under noise from all three generators."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, i: int) -> tuple[Any, int]:
        x = torch.randn(8) + random.gauss(i % 5, 1) + torch.from_numpy(np.random.normal(size=8)).float()
        return x, random.randrange(5)


def noisy_job(**changes: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 5)
    )
    return make_job(**{"model": model, "data": Noisy(), "micro_batch_size": 6, **changes})


async def test_augmented_samples_train_as_in_the_plain_loop() -> None:
    """The owner reads beside stages of its own process, which draw masks from the same generator."""
    job = noisy_job(steps=20, weight=lambda y: float((y > 0).sum() + 1), eval_data=Noisy(), eval_every=7)
    state = random.getstate()
    trained = await train(job, 3, 6)
    assert random.getstate() == state
    expected = plain(noisy_job(steps=20, weight=job.weight))
    assert trained.losses == expected.losses
    assert all(torch.equal(trained.state[name], tensor) for name, tensor in expected.state_dict.items())
    again = await train(job, 2, 6)
    assert [r.metrics for r in again.reports if r.metrics] == [r.metrics for r in trained.reports if r.metrics]


async def test_a_lost_member_does_not_change_what_is_drawn(tmp_path: Path) -> None:
    job = noisy_job(steps=20, checkpoint_every=3)
    told: list[Report] = []
    async with recovery.a_mesh(Home(tmp_path), 3) as (here, mesh):
        async for report in mesh.train(job, stages=3):
            told.append(report)
            if report.step == 9:
                here.crash(recovery.stage_of(here, mesh, 1))
    expected = plain(job)
    assert [r.step for r in told] == list(range(20))
    assert mesh.result.losses == expected.losses
    assert all(torch.equal(mesh.result.state_dict[name], tensor) for name, tensor in expected.state_dict.items())
