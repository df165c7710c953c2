"""A gradient that is not finite is never committed unnoticed, also where the loss is a number and nobody clips."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from meshcee.capture.graph import Input, Value
from meshcee.errors import NonFiniteLossError
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.stage.runner import StageRunner
from meshcee.stage.weights import Weights
from peers.transport.memory import Impairment, MemoryNetwork
from tests.peers.member.test_training import Pairs, make_job
from tests.rig.mesh_fixture import train

BAD_FROM = 3  # the step from which on the gradient is NaN


class Root(nn.Module):
    """Adds nothing; its scale has a gradient of 1 as long as it is above a half, and of NaN from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([float(BAD_FROM)]))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        above = self.scale - 0.5
        return h + torch.sqrt(above.abs() + above) * 0 + (self.scale - self.scale.detach())


class Chain(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), *([Root()] if k == place else [])) for k in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = h + layer(h) * 0.01 if not isinstance(layer[-1], Root) else layer(h)
        return h


def loss_of(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return out.sum(1).mean() / 16  # whose gradient for the scale is 1


def job_of(place: int, clip_norm: float | None, steps: int = 6) -> Job:
    torch.manual_seed(0)
    return make_job(
        model=Chain(place),
        loss=loss_of,
        data=Pairs(96),
        optimizer=Optimizer("SGD", lr=0.0, groups={"*.scale": {"lr": 1.0}}),
        schedule=None,
        clip_norm=clip_norm,
        steps=steps,
    )


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("clip_norm", [None, 1e6])
@pytest.mark.parametrize("place", [0, 2, 5])
async def test_the_step_whose_gradient_is_not_finite_is_not_reported(place: int, clip_norm: float | None) -> None:
    told: list[str] = []
    what = "the norm of the gradients of" if clip_norm else rf"the gradient of 'layers.{place}.*scale' in"
    with pytest.raises(NonFiniteLossError, match=rf"{what} step {BAD_FROM + 1} .*though its loss is"):
        await train(job_of(place, clip_norm), 3, 6, after_step=(BAD_FROM, lambda: told.append("reported")))
    assert told == []


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 2, 5])
async def test_a_step_whose_norm_is_not_finite_is_applied_nowhere(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by those below the head either, which hear of it from the head and, later, from the owner."""
    applied: Counter[int] = Counter()
    apply = StageRunner.apply

    def noted(runner: StageRunner, *args: Any) -> None:
        applied[runner.step] += 1
        apply(runner, *args)

    monkeypatch.setattr(StageRunner, "apply", noted)
    network = MemoryNetwork()
    for member in ("p0", "p1", "p2"):
        network.impair(member, "owner", Impairment(latency_s=0.1))
    with pytest.raises(NonFiniteLossError, match="the norm of the gradients of"):
        await train(job_of(place, 1e6), 3, 6, network=network)
    assert applied == dict.fromkeys(range(BAD_FROM), 3)


def weights_of(dtype: torch.dtype) -> Weights:
    names, optimizer = ("a", "b"), Optimizer("SGD", lr=0.0)
    entries = {n: Input("parameter", Value(n, dtype, (4,), (0,)), trainable=True) for n in names}
    state = {n: torch.zeros(4, dtype=dtype) for n in names}
    return Weights(names, names, (), state, optimizer, torch.device("cpu"), entries)


def test_large_numbers_whose_sum_overflows_are_finite() -> None:
    weights = weights_of(torch.float32)
    for parameter in weights.trainable.values():
        parameter.grad = torch.full((4,), 3e38)
    assert weights.not_finite() is None
    weights.trainable["b"].grad[2] = -torch.inf  # type: ignore[index]
    assert weights.not_finite() == "b"


def test_a_complex_gradient_is_finite_if_both_of_its_parts_are() -> None:
    weights = weights_of(torch.complex64)
    for parameter in weights.trainable.values():
        parameter.grad = torch.full((4,), 1 + 1j)
    assert weights.not_finite() is None
    weights.trainable["b"].grad[2] = complex(1.0, torch.nan)  # type: ignore[index]
    assert weights.not_finite() == "b"
