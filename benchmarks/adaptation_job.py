"""The job of `benchmarks/adaptation.py`: little state, little arithmetic, large boundaries, all blocks alike.

The idea: what limits it are paced devices and shaped links, so two cores emulate several peers and their network with ease,
and a change of plan moves next to nothing. ADAPT_STEPS says how many steps, ADAPT=0 turns the adapter off.

Shapes: N samples, T tokens, C width, V vocabulary. A boundary has 4 * T * C = 16 KiB a sample.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshcee

TOKENS, WIDTH, VOCABULARY, LAYERS = 64, 64, 64, 15
MICRO, MICROS = 8, 16
SAMPLES = 1024


class Layer(nn.Module):
    """(N, T, C) -> (N, T, C)"""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Walks:
    """Map-style: sample i is a walk over the vocabulary, and where it goes next at each place."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        steps = torch.randint(1, 4, (TOKENS + 1,), generator=torch.Generator().manual_seed(i))
        walk = steps.cumsum(0) % VOCABULARY
        return walk[:-1], walk[1:]


def build() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH), *(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, VOCABULARY)
        )


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


job = meshcee.Job(
    name="adaptation",
    model=build(),
    loss=loss,
    data=Walks(),
    optimizer=meshcee.Optimizer("AdamW", lr=1e-3),
    batch_size=MICRO * MICROS,
    micro_batch_size=MICRO,
    steps=int(os.environ.get("ADAPT_STEPS", "400")),
    adapt=os.environ.get("ADAPT", "1") != "0",
    codec="none",
)
