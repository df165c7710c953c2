"""Models and losses that hold for one number of samples are trained with micro-batches of that number; all else stays general.

The idea: tutorials write `torch.zeros(layers, 32, hidden)`, contrastive losses leave out a diagonal of samples, YOLO's goes over
the samples in Python. Where the job says how many samples a micro-batch has, a graph for that number is exact.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshcee
from meshcee.capture import capture
from meshcee.capture.costs import costs_of
from meshcee.errors import CaptureError, MeshceeError, UsageError
from meshcee.job import Job
from tests.capture.exactness import WIDTH, difference, job_of
from tests.mutation import breaks, changed

MICRO = 4
Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Two layers and a norm; a function of the test says how they are called."""

    def __init__(self, forward: Forward = lambda net, x: net.second(torch.tanh(net.first(x)))) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.cell = nn.BatchNorm1d(WIDTH), nn.GRU(WIDTH, WIDTH)
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)


def recurrent(net: Any, x: torch.Tensor) -> torch.Tensor:
    out, _ = net.cell(net.first(x)[None], torch.zeros(1, MICRO, WIDTH))
    return net.second(out[0])  # type: ignore[no-any-return]


def ghost_norm(net: Any, x: torch.Tensor) -> torch.Tensor:
    """As TabNet and timm's SplitBatchNorm have it."""
    parts = net.first(x).chunk(math.ceil(x.shape[0] / 2))
    return net.second(torch.cat([net.norm(part) for part in parts]))  # type: ignore[no-any-return]


def looped(net: Any, x: torch.Tensor) -> torch.Tensor:
    rows = [net.second(torch.tanh(net.first(x[k]))) for k in range(x.shape[0])]
    return torch.stack(rows)


def divided(net: Any, x: torch.Tensor) -> torch.Tensor:
    """The group statistics of StyleGAN's discriminator."""
    group = min(x.shape[0], 2)
    spread = x.reshape(group, -1, WIDTH).var(0, unbiased=False).add(1e-8).sqrt().mean()
    return net.second(net.first(x) + spread)  # type: ignore[no-any-return]


MODELS = {f.__name__: f for f in (recurrent, ghost_norm, looped, divided)}


def contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    z, n = F.normalize(output), output.shape[0]
    others = (z @ z.T)[~torch.eye(n, dtype=torch.bool)].view(n, n - 1)
    return F.cross_entropy(others / 0.2, torch.arange(n) // 2)


def labelled(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output @ target.T, torch.arange(MICRO))


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    each = [F.mse_loss(output[k], target[k]) / (k + 1) for k in range(len(output))]
    return sum(each[1:], each[0]) * math.log(len(output))


LOSSES = {f.__name__: f for f in (contrastive, labelled, summed)}


def seeded(model: Callable[[], nn.Module], loss: Callable[..., torch.Tensor] = F.mse_loss, **options: Any) -> Job:
    torch.manual_seed(1)
    return job_of(model(), loss, **({"batch_size": 2 * MICRO, "micro_batch_size": MICRO} | options))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_for_one_number_of_samples_trains(name: str) -> None:
    assert difference(seeded(lambda: Net(MODELS[name]))) == ""


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_for_one_number_of_samples_trains(name: str) -> None:
    assert difference(seeded(Net, LOSSES[name])) == ""


def test_a_model_for_any_number_has_a_graph_for_any_number() -> None:
    assert capture(seeded(Net)).train.samples == 0
    assert capture(seeded(Net, labelled)).train.samples == MICRO


def test_what_a_sample_costs_does_not_depend_on_the_graph() -> None:
    """Blocks of the same model, in a graph for one number and in one for any."""
    one, other = (capture(seeded(Net, loss)).costs for loss in (labelled, F.mse_loss))
    for a, b in zip(one[:-1], other[:-1]):  # the last one has the loss
        assert dataclasses.astuple(a) == dataclasses.astuple(b)


def test_the_costs_are_watched() -> None:
    with changed(costs_of, "program.samples or 1", "1"):
        assert breaks(test_what_a_sample_costs_does_not_depend_on_the_graph)


# -- no number, or another


@pytest.mark.parametrize("loss", [contrastive, summed])
def test_without_a_number_in_the_job_the_error_asks_for_one(loss: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"; or say how many samples .* Job\(micro_batch_size=8\)"):
        capture(seeded(Net, loss, micro_batch_size=None))


def test_another_number_in_the_job_than_in_the_model_is_said() -> None:
    with pytest.raises(
        UsageError, match=r"test_one_number\.py:\d+.*with micro-batches of 2 samples; .* micro_batch_size"
    ):
        capture(seeded(lambda: Net(recurrent), micro_batch_size=2))


def test_what_no_number_helps_says_what_it_said() -> None:
    def branches(net: Any, x: torch.Tensor) -> torch.Tensor:
        return net.first(x) if x.sum() > 0 else net.second(x)  # type: ignore[no-any-return]

    with pytest.raises(CaptureError) as refused:
        capture(seeded(lambda: Net(branches), micro_batch_size=None))
    assert "say how many samples" not in str(refused.value)


# -- evaluation


async def test_an_evaluation_has_its_own_graph() -> None:
    """The norm in eval mode is that of any number; the loop is not."""
    rows = [(torch.randn(WIDTH), torch.randn(WIDTH)) for _ in range(3 * MICRO)]
    job = seeded(lambda: Net(looped))
    async with meshcee.join(local=2) as mesh:
        predicted = await mesh.predict(job, rows)
        with pytest.raises(UsageError, match="eval_data has 1 more than a multiple"):
            await mesh.predict(job, rows[3:])
        captured = capture(dataclasses.replace(job, eval_data=rows))
        with pytest.raises(MeshceeError, match="a micro-batch of 1, and the model"):
            await mesh.evaluate(job, rows[3:], captured=captured)
    assert isinstance(job.model, nn.Module)
    with torch.no_grad():
        x = torch.stack([x for x, _ in rows])
        assert torch.equal(predicted, torch.cat([job.model.eval()(part) for part in x.split(MICRO)]))


async def test_a_prediction_asks_for_no_loss() -> None:
    """Of a contrastive loss, which holds for one number, the model does not know."""
    rows = [(torch.randn(WIDTH), torch.randn(WIDTH)) for _ in range(MICRO + 1)]
    job = seeded(Net, contrastive)
    async with meshcee.join(local=2) as mesh:
        predicted = await mesh.predict(job, rows)
        with pytest.raises(UsageError, match="eval_data has 1 more than a multiple"):
            await mesh.evaluate(job, rows)
    assert isinstance(job.model, nn.Module)
    with torch.no_grad():
        x = torch.stack([x for x, _ in rows])
        assert torch.equal(predicted, torch.cat([job.model.eval()(part) for part in x.split(MICRO)]))


def test_a_norm_that_splits_in_train_mode_alone_is_evaluated_with_any_number() -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return ghost_norm(net, x) if net.training else net.second(net.norm(net.first(x)))

    found = capture(seeded(lambda: Net(forward), eval_data=[(torch.randn(WIDTH), torch.randn(WIDTH))] * 3))
    assert found.evaluate is not None
    assert (found.train.samples, found.evaluate.samples) == (MICRO, 0)


# -- on the mesh


def test_it_trains_on_the_mesh_and_is_not_split_by_samples() -> None:
    job = seeded(lambda: Net(ghost_norm), labelled, steps=3, groups=True)
    want = meshcee.plain(job)
    found = meshcee.train(job, local=3)
    assert found.losses == want.losses
    assert all(torch.equal(found.state_dict[name], tensor) for name, tensor in want.state_dict.items())
    assert all(len(stage.members) == 1 for pipeline in found.plan.pipelines for stage in pipeline.stages)


# -- drawn models


class Drawn(nn.Module):
    """Calls its layers in ways that a seed draws, of which some hold for one number of samples."""

    WAYS = (
        lambda m, h: torch.cat([m.net(part) for part in h.split(2)]),
        lambda m, h: torch.stack([m.net(row) for row in h]),
        lambda m, h: m.net(h) * (1 + 1 / len(h)),
        lambda m, h: m.net(h) + h[torch.randperm(h.shape[0])],
        lambda m, h: m.net(h).view(MICRO, 2, -1).flip(1).reshape(MICRO, -1),
        lambda m, h: h + m.net(h)[: h.shape[0] // 2].repeat(2, 1),
        lambda m, h: m.net(h) * math.sqrt(h.shape[0]),
        lambda m, h: m.net(h).roll(h.shape[0] // 2, 0) + F.dropout(h, 0.2),
        lambda m, h: m.net(h) + (h @ h.T)[torch.triu(torch.ones(len(h), len(h)), 1) > 0].sum() * 0.01,
        lambda m, h: m.norm(m.net(h)) if len(h) > 3 else m.net(h),
        lambda m, h: m.net(h) * torch.tensor([1.0, 0.5] * (len(h) // 2))[:, None],
        lambda m, h: torch.tanh(m.net(h)),
    )

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        rng = random.Random(seed)
        self.ways = [rng.choice(self.WAYS) for _ in range(rng.randint(1, 4))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for way in self.ways:
            x = torch.tanh(way(self, x))
        return x


@pytest.mark.cases(8)
@pytest.mark.parametrize("seed", range(60))
def test_drawn_models_train(seed: int) -> None:
    assert difference(seeded(lambda: Drawn(seed)), orders=("fused",)) == ""
