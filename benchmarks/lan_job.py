"""The job of `benchmarks/lan.py`: a GPT of eight blocks, 14.6 M parameters, eight micro-batches of four samples.

Shapes: N samples, T tokens, C width, V vocabulary. LAN_STEPS says how many steps.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshcee

__all__ = ["FLOPS", "MICRO", "MICRO_BATCHES", "build", "job", "loss"]

TOKENS, WIDTH, HEADS, LAYERS, VOCABULARY = 128, 384, 6, 8, 512
MICRO, MICRO_BATCHES = 4, 8
_BLOCK = 2 * TOKENS * 12 * WIDTH**2 + 4 * TOKENS**2 * WIDTH
FLOPS = [0.0, *([float(_BLOCK)] * LAYERS), 2.0 * TOKENS * WIDTH * VOCABULARY]  # of each layer's F, for one sample


class Embed(nn.Module):
    """(N, T) -> (N, T, C)"""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(TOKENS, WIDTH)

    def forward(self, codes: Tensor) -> Tensor:
        x: Tensor = self.token(codes) + self.position.weight
        return x


class Block(nn.Module):
    """(N, T, C) -> (N, T, C)"""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(n, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).reshape(n, t, WIDTH))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class Head(nn.Module):
    """(N, T, C) -> (N, T, V)"""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(x))
        return logits


def build() -> nn.Sequential:
    """The same weights in every process: a list of layers, so that a rival may cut between any two."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(Embed(), *(Block() for _ in range(LAYERS)), Head())


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _rows() -> list[tuple[Tensor, Tensor]]:
    codes = torch.randint(VOCABULARY, (256, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    return [(row[:-1], row[1:]) for row in codes]


job = meshcee.Job(
    name="lan-gpt",
    model=build(),
    loss=loss,
    data=_rows(),
    optimizer=meshcee.Optimizer("AdamW", lr=3e-4),
    batch_size=MICRO * MICRO_BATCHES,
    micro_batch_size=MICRO,
    steps=int(os.environ.get("LAN_STEPS", "12")),
)
