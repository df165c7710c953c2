"""The job of `benchmarks/crowd.py`: sixteen small blocks, of which twelve peers get a stage each."""

from __future__ import annotations

import torch
from torch import nn

import meshcee

__all__ = ["job"]

WIDTH, BLOCKS = 64, 16

torch.manual_seed(0)
layers = [layer for _ in range(BLOCKS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
data = [(torch.randn(WIDTH), torch.randn(WIDTH)) for _ in range(64)]
job = meshcee.Job(
    name="crowd",
    model=nn.Sequential(*layers),
    loss=nn.functional.mse_loss,
    data=data,
    optimizer=meshcee.Optimizer("Adam", lr=1e-3),
    batch_size=16,
    micro_batch_size=2,
    steps=20,
)
