"""Habits of docs/habits.md that no room shows by itself: a loop as people write it by hand, and a search for a learning rate."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import meshcee
from meshcee.callbacks import Callback
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.optim.rates import Schedule
from meshcee.sampling import indices_of, read
from tests.peers.member.test_training import make_job
from tests.rig.mesh_fixture import train

MICRO = 6


def net() -> nn.Sequential:
    """Its first layer came trained, and stays as it is; the next one learns slowly."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5))
    model[0].requires_grad_(False)
    return model


def data() -> list[Any]:
    torch.manual_seed(2)
    return [(torch.randn(8), k % 5) for k in range(96)]


def by_hand(job: Job, accumulated: int) -> nn.Sequential:
    """Two groups of parameters, accumulated gradients, clipping: plain torch over the samples and draws of the job."""
    model = net()
    groups: list[dict[str, Any]] = [{"params": model[3].parameters(), "lr": 1e-4}, {"params": model[5].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for step in range(job.steps):
        samples = read(job.data, indices_of(job, step), job.seed, step)
        for micro in range(accumulated):
            x, y = zip(*samples[micro * MICRO : (micro + 1) * MICRO])
            with meshcee.seeded(job.seed, step, micro):
                loss: Any = nn.functional.cross_entropy(model(torch.stack(x)), torch.tensor(y)) / accumulated
            loss.backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


async def test_frozen_layers_and_a_rate_for_each_layer_train_as_in_a_loop_by_hand() -> None:
    optimizer = Optimizer("AdamW", lr=1e-2, groups={"3.*": {"lr": 1e-4}})
    job = make_job(model=net(), data=data(), optimizer=optimizer, schedule=None, batch_size=4 * MICRO)
    found, expected, before = await train(job, 3, MICRO), by_hand(job, 4).state_dict(), net().state_dict()
    assert {name for name, tensor in found.state.items() if torch.equal(tensor, before[name])} == {"0.weight", "0.bias"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.state.items())


def test_a_callback_finds_a_rate_by_trying_ever_higher_ones() -> None:
    """It ends the run where the loss leaves its lowest value behind."""

    class Finder(Callback):
        waits = "steps"

        def __init__(self) -> None:
            self.tried: list[tuple[float, float]] = []

        def on_step(self, run: Any, report: Any) -> None:
            self.tried.append((report.lr, report.loss))
            if report.loss > 2 * min(loss for _, loss in self.tried):
                run.stop()

    finder = Finder()
    job = make_job(
        model=net(),
        data=data(),
        optimizer=Optimizer("SGD", lr=0.01),
        schedule=Schedule("ExponentialLR", gamma=1.3),
        clip_norm=None,
        micro_batch_size=MICRO,
        steps=80,
    )
    result = meshcee.train(job, local=1, callbacks=[finder])
    rates, losses = zip(*finder.tried)
    assert rates == pytest.approx([0.01 * 1.3**k for k in range(len(rates))])
    assert list(losses) == result.losses
    assert losses[-1] > 2 * min(losses)
    assert 0.01 < min(finder.tried, key=lambda one: one[1])[0] < rates[-1]


class Guarded(nn.Module):
    """Of a lock, an open file and a generator there are no copies."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.notes = net(), [torch.ones(2)]
        self.lock, self.numbers = threading.Lock(), (i for i in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.lock:
            found: torch.Tensor = self.inner(x)
        return found


def test_the_trained_copy_shares_what_has_no_copy() -> None:
    model = Guarded()
    job = Job(
        model=model,
        loss=nn.functional.cross_entropy,
        data=data(),
        optimizer=Optimizer("SGD", lr=0.1),
        batch_size=8,
        steps=2,
    )
    copied: Any = meshcee.plain(job).module
    assert copied.lock is model.lock
    assert copied.notes is not model.notes
    assert not torch.equal(copied.inner[5].weight, model.inner[5].weight)
    before = net().state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.inner.state_dict().items())


class Target(NamedTuple):
    kind: int
    shift: float


def test_a_target_may_be_a_named_tuple() -> None:
    def loss(output: torch.Tensor, y: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(output + y.shift[:, None], y.kind)

    rows = [(x, Target(kind, 0.5)) for x, kind in data()]
    options: dict[str, Any] = {"batch_size": 8, "micro_batch_size": 4, "steps": 2}
    assert meshcee.check(Job(model=net(), loss=loss, data=rows, optimizer=Optimizer("SGD", lr=0.1), **options)).equal
