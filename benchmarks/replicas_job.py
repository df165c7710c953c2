"""The jobs of `benchmarks/replicas.py`, one for each value of REPLICAS_CASE, with little arithmetic: two cores emulate all devices.

The idea: each is a kind of model for which one pipeline is not enough. `thin line`: large boundaries and few parameters. `batch
norm`: the same, with statistics of batches.
`lopsided`: four blocks whose costs are 3:1:1:1. `large batch`: a GPT whose parameters are many bytes beside its boundaries.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshcee

__all__ = ["CASES", "job"]

SAMPLES, STEPS = 4096, 400  # as most jobs are longer than what is watched of them


class Conv(nn.Module):
    """(N, C, H, W) -> the same; group norm keeps no statistics, and batch norm does."""

    def __init__(self, channels: int, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), norm

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class Wide(nn.Module):
    """(N, T, C) -> the same, through so many hidden values."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Attention(nn.Module):
    """(N, T, C) -> the same: causal attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = (part.view(n, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).split(c, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, c)
        x = x + self.out(mixed)
        return x + self.feed(x)


class Made:
    """Map-style: sample i is drawn from a generator with this seed."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.make(torch.Generator().manual_seed(i))
        return found


def _thin_line(norm: Callable[[], nn.Module]) -> dict[str, Any]:
    def image(g: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(3, 32, 32, generator=g), torch.randint(10, (), generator=g)

    layers = [nn.Conv2d(3, 16, 3, padding=1), *(Conv(16, norm()) for _ in range(8))]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return {"model": model, "loss": F.cross_entropy, "data": Made(image), "batch_size": 96, "micro_batch_size": 4}


def _lopsided() -> dict[str, Any]:
    def points(g: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(64, 64, generator=g), torch.randn(64, 64, generator=g)

    model = nn.Sequential(Wide(64, 192), Wide(64, 64), Wide(64, 64), Wide(64, 64))
    more = {"batch_size": 192, "micro_batch_size": 8, "cuts": ("1", "2", "3")}
    return {"model": model, "loss": F.mse_loss, "data": Made(points)} | more


def _large_batch() -> dict[str, Any]:
    def text(g: torch.Generator) -> tuple[Tensor, Tensor]:
        walk = torch.randint(1, 4, (65,), generator=g).cumsum(0) % 64
        return walk[:-1], walk[1:]

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    model = nn.Sequential(nn.Embedding(64, 128), *(Attention(128, 4) for _ in range(4)), nn.Linear(128, 64))
    return {"model": model, "loss": loss, "data": Made(text), "batch_size": 96, "micro_batch_size": 4}


CASES = {
    "thin line": partial(_thin_line, partial(nn.GroupNorm, 4, 16)),
    "batch norm": partial(_thin_line, partial(nn.BatchNorm2d, 16)),
    "lopsided": _lopsided,
    "large batch": _large_batch,
}


def made(case: str) -> meshcee.Job:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options = CASES[case]()
    return meshcee.Job(
        name="replicas", optimizer=meshcee.Optimizer("AdamW", lr=1e-3), steps=STEPS, codec="none", **options
    )


job = made(os.environ.get("REPLICAS_CASE", "thin line"))
