"""The job that all systems train in `benchmarks/wan.py`: a GPT with a wide residual stream and narrow blocks.

The idea: boundaries (64 KiB a sample) and gradients (20 MB) of 1/64 of the bytes that OPT-350 has, as the lab's links have
1/64 of its networks' bandwidth, for so little arithmetic that two cores compute it for six devices many times faster than the
devices are paced. WAN_STEPS says how many steps.

Shapes: N samples, T tokens, C width, V vocabulary. A token is a hashed pair of characters, the target the one after.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshcee

CONTEXT, WIDTH, INNER, LAYERS, VOCABULARY, CHARACTERS = 32, 512, 88, 16, 1024, 128
BATCH = 36  # a multiple of 4 and 6: torch's interleaved schedule wants whole rounds
TEXT_BYTES = 300_000


class Pairs:
    """Map-style: sample i is the i-th run of CONTEXT pairs of characters, and the character after each pair."""

    def __init__(self) -> None:
        text = b""
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += path.read_bytes()
            if len(text) >= TEXT_BYTES:
                break
        codes = torch.frombuffer(bytearray(text[:TEXT_BYTES]), dtype=torch.uint8).long() % CHARACTERS
        self.pairs = (codes[:-2] * CHARACTERS + codes[1:-1]) * 2654435761 % 2**32 % VOCABULARY
        self.next = codes[2:]

    def __len__(self) -> int:
        return len(self.next) // CONTEXT

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        run = slice(i * CONTEXT, (i + 1) * CONTEXT)
        return self.pairs[run], self.next[run]


class Embed(nn.Module):
    """(N, T) -> (N, T, C)"""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)

    def forward(self, codes: Tensor) -> Tensor:
        x: Tensor = self.token(codes) + self.position.weight
        return x


class Block(nn.Module):
    """(N, T, C) -> (N, T, C): attention and a perceptron, both through INNER columns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * INNER)
        self.mix = nn.Linear(INNER, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unsqueeze(1).chunk(3, -1)
        x = x + self.mix(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class Head(nn.Module):
    """(N, T, C) -> (N, T, CHARACTERS)"""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, CHARACTERS)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(x))
        return logits


def build(seed: int = 0) -> nn.Sequential:
    """The same weights in every process: a list of layers, so that every system may cut between any two."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(Embed(), *(Block() for _ in range(LAYERS)), Head())


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


job = meshcee.Job(
    name="wan-gpt",
    model=build(),
    loss=loss,
    data=Pairs(),
    optimizer=meshcee.Optimizer("AdamW", lr=3e-4),
    batch_size=BATCH,
    micro_batch_size=int(os.environ.get("WAN_MICRO", "1")),
    steps=int(os.environ.get("WAN_STEPS", "6")),
    codec="lossless",
)
