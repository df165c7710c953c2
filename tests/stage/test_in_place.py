"""What is written in place where B and W are apart: gradients have the strides that the plain loop's have, and so its bits.

The idea: a product of three dimensions is a view of one of two, and autograd copies the gradient of a view that was written
(`res += x` in a U-Net's attention). The sum behind a bias goes by strides. A generated test draws operators that take weights, and
what writes into what they give.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.stage import deferred
from tests.capture.exactness import difference
from tests.mutation import changed

CHANNELS, SIDE = 32, 8


class Block(nn.Module):
    """Images to images; between, pixels are rows, in which something is written."""

    MAKES = (
        lambda m, x: m.linear(x),
        lambda m, x: x @ m.linear.weight,
        lambda m, x: torch.einsum("bnc,cd->bnd", x, m.linear.weight),
        lambda m, x: m.linear(x.flatten(0, 1)).view(x.shape),
        lambda m, x: m.linear(m.norm(x)),
        lambda m, x: m.norm(m.linear(x)),
        lambda m, x: m.pointwise(x.transpose(1, 2)).transpose(1, 2),
        lambda m, x: m.linear((x @ x.transpose(1, 2)).softmax(2) @ x),
        lambda m, x: m.linear(x[:, :, None]).squeeze(2),
    )
    WRITES = (
        lambda r, x: r.add_(x),
        lambda r, x: r.sub_(x, alpha=0.5),
        lambda r, x: r.mul_(2).add_(x),
        lambda r, x: r.view(r.shape[0], -1, 2, 4).add_(x.reshape(r.shape[0], -1, 2, 4)).view(r.shape),
        lambda r, x: r.transpose(1, 2).add_(x.transpose(1, 2)).transpose(1, 2),
        lambda r, x: r.addcmul_(x, x, value=0.1),
        lambda r, x: r.copy_(0.5 * r + x),
        lambda r, x: F.relu_(r.add_(x)),
        lambda r, x: r.masked_fill_(x > 1, 0.0).add_(x),
    )

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.make, self.write = rng.choice(self.MAKES), rng.choice(self.WRITES)
        self.conv, self.shortcut = nn.Conv2d(2 * CHANNELS, CHANNELS, 3, padding=1), nn.Conv2d(2 * CHANNELS, CHANNELS, 1)
        self.linear, self.norm = nn.Linear(CHANNELS, CHANNELS), nn.LayerNorm(CHANNELS)
        self.pointwise = nn.Conv1d(CHANNELS, CHANNELS, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(torch.sigmoid(x)) + self.shortcut(x)
        rows = x.flatten(2).permute(0, 2, 1)
        return self.write(self.make(self, rows), rows).permute(0, 2, 1).reshape(x.shape)


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.first, self.last = nn.Conv2d(3, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, 3, 1)
        self.blocks = nn.ModuleList(Block(rng) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = x = self.first(x)
        for block in self.blocks:
            x = block(torch.cat((x, skip), dim=1))
        return self.last(x)


OF_OTHERS = {
    "linear": lambda m, x: m.linear(x.contiguous()),
    "einsum": lambda m, x: torch.einsum("bnc,dc->bnd", x, m.linear.weight),
    "tensordot": lambda m, x: torch.tensordot(x, m.linear.weight, 1),
    "inner": lambda m, x: torch.inner(x, m.linear.weight),
    "bilinear": lambda m, x: F.bilinear(x, x, m.linear.weight[:, None].expand(-1, CHANNELS, -1).contiguous()),
    "norm": lambda m, x: F.instance_norm(x),
    "pool": lambda m, x: F.max_pool1d(x, 2),
    "mean pool": lambda m, x: F.avg_pool1d(x, 2),
    "adaptive pool": lambda m, x: F.adaptive_avg_pool1d(x, 4),
    "loss of each": lambda m, x: F.cross_entropy(x, x[:, :1].argmax(2).expand(-1, CHANNELS), reduction="none")[
        ..., None
    ],
    "repeated": lambda m, x: x.repeat_interleave(2, 1),
    "attention": lambda m, x: m.attention(x, x, x)[0],
}


class WritesPart(nn.Module):
    """Writes a part of what an operator gives that torch composes of others."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make, self.first, self.linear = make, nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.attention = nn.MultiheadAttention(CHANNELS, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.make(self, self.first(x))
        h[:, 0] = h[:, -1] * 0.5
        h[..., :1] += 1
        h.transpose(1, 2)[:, :1].mul_(2)
        return self.first.bias.sum() * h.sin()


@pytest.mark.parametrize("name", OF_OTHERS)
def test_parts_are_written_of_what_torch_composes(name: str) -> None:
    rows = torch.randn(8, CHANNELS, CHANNELS, generator=torch.Generator().manual_seed(0))
    job = Job(
        model=WritesPart(OF_OTHERS[name]),
        loss=lambda output, target: output.pow(2).mean(),
        data=[(x, 0) for x in rows],
        optimizer=Optimizer("SGD", lr=0.1),
        **{"batch_size": 4, "micro_batch_size": 2, "steps": 2, "codec": "none"},
    )
    assert difference(job) == ""


def job_of(seed: int, **options: Any) -> Job:
    images = torch.randn(8, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))
    how: dict[str, Any] = {"batch_size": 4, "micro_batch_size": 2, "steps": 1, "codec": "none"} | options
    return Job(Net(seed), F.mse_loss, [(x, x) for x in images], Optimizer("AdamW", lr=1e-3), **how)


@pytest.mark.cases(6)
@pytest.mark.parametrize("seed", range(60))
def test_drawn_writes_into_products_train_as_in_the_plain_loop(seed: int) -> None:
    assert difference(job_of(seed), seed=None if seed % 2 else seed) == ""


def test_it_hangs_on_the_view_that_is_put_where_eager_code_has_one() -> None:
    job = job_of(1)
    assert isinstance(job.model, Net)
    for block in job.model.blocks:
        block.make, block.write = Block.MAKES[7], Block.WRITES[0]
    assert difference(job) == ""
    with changed(deferred, "found |= {viewed.get(target, target) for target in _targets(node, node.writes)}", "pass"):
        assert "differs" in difference(job)


class Small(nn.Module):
    """What stands between two layers; a function of the test says what."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.other, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.table, self.cell, self.between = nn.Embedding(10, 8), nn.RNN(8, 8, batch_first=True), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self, self.first(x)))  # type: ignore[no-any-return]


def compares(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.other(x)
    h[:, 0] = 0
    return torch.where(h > 0, h, h * (h > 1))


def gates(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        gate = m.other(x)
        gate[:, 0] = 0
        gate += 1
    return x * gate


def attends(m: Any, x: torch.Tensor) -> torch.Tensor:
    scores = x @ m.other(x).transpose(1, 2)
    scores[:, :, 0] = -1e9
    return scores.softmax(-1) @ x


def shifts(m: Any, x: torch.Tensor) -> torch.Tensor:
    out, _ = m.cell(x)
    out[:, 1:].copy_(out[:, :-1].clone())
    return out  # type: ignore[no-any-return]


def doubles_without_a_gradient(m: Any, x: torch.Tensor) -> torch.Tensor:
    """What is looked up depends on weights alone, and what is written stays so."""
    h = m.table((x[..., 0] * 3).long().clamp(0, 9))
    with torch.no_grad():
        h.mul_(2)
    return h + x  # type: ignore[no-any-return]


@pytest.mark.parametrize("between", [compares, gates, attends, shifts, doubles_without_a_gradient])
def test_parts_are_written_in_ordinary_code(between: Any) -> None:
    rows = torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(0))
    how: dict[str, Any] = {"batch_size": 4, "micro_batch_size": 2, "steps": 2, "codec": "none"}
    job = Job(Small(between), F.mse_loss, [(x, x) for x in rows], Optimizer("AdamW", lr=0.1), **how)
    assert difference(job) == ""
