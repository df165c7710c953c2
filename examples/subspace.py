"""A transformer whose stages send eight numbers a character to one another, where the one of examples/gpt.py sends 128.

The idea: Subspace Networks (arXiv 2506.01260). What blocks add to the residual stream lies in a small fixed subspace, so the
stream is a few coordinates and a table of characters that every stage can look up for itself. Blocks compute at full width.
Nothing says where to cut: capture finds the thin places, and what crosses them is exact.

Shapes: N samples, T characters, C width, R coordinates, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshcee
from meshcee._demo_job import CONTEXT, VOCABULARY, Characters, loss, standard_library

STEPS = 150
WIDTH, RANK, HEADS, LAYERS = 128, 8, 4, 4


class Block(nn.Module):
    """Attention and a perceptron: each reads the full width, and writes coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, RANK)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, RANK)

    def forward(self, z: Tensor, fixed: Tensor, basis: Tensor) -> Tensor:
        n, t, _ = z.shape
        x = self.norm1(fixed + F.linear(z, basis))  # (N, T, C)
        q, k, v = self.qkv(x).view(n, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        z = z + self.mix(seen.transpose(1, 2).reshape(n, t, WIDTH))
        return z + self.down(F.gelu(self.up(self.norm2(fixed + F.linear(z, basis)))))


class SubspaceGPT(nn.Module):
    """Characters (N, T) -> logits (N, T, V)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("basis", torch.linalg.qr(torch.randn(WIDTH, RANK))[0])  # (C, R), orthonormal
        self.register_buffer(
            "table", 0.3 * torch.randn(len(VOCABULARY), WIDTH)
        )  # what a character is, outside of the subspace
        self.token = nn.Embedding(len(VOCABULARY), RANK)
        self.position = nn.Embedding(CONTEXT, RANK)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(VOCABULARY))

    def forward(self, codes: Tensor) -> Tensor:
        places = torch.arange(codes.shape[1], device=codes.device)
        z = self.token(codes) + self.position(places)  # (N, T, R): this is what travels
        for block in self.blocks:
            z = block(z, F.embedding(codes, self.table), self.basis)
        return self.head(self.norm(F.embedding(codes, self.table) + F.linear(z, self.basis)))


def build(seed: int = 0) -> nn.Module:
    """The same weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SubspaceGPT()


job = meshcee.Job(
    name="subspace",
    model=build(),
    loss=loss,
    data=Characters(standard_library()),
    optimizer=meshcee.Optimizer("AdamW", lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
    clip_norm=1.0,
    batch_size=16,
    micro_batch_size=4,
    steps=STEPS,
    codec="lossless",
)


if __name__ == "__main__":
    result = meshcee.train(job)
    print(f"loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f} in {len(result.losses)} steps")
