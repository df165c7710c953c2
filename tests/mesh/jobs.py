"""The jobs of the real-process parity tests: small, with everything that makes exactness hard."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshcee import Job, Optimizer, Schedule
from meshcee._demo_job import GPT, Characters, loss, standard_library

STEPS = 20


class Images:
    """Random pictures, drawn once; the label is a fixed linear function of the picture."""

    def __init__(self, count: int) -> None:
        draw = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 1, 8, 8, generator=draw)
        self.y = (self.x.flatten(1) @ torch.randn(64, 4, generator=draw)).argmax(1)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


class Noisy(Images):
    """Under noise that Python, numpy and torch draw anew for every read."""

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(i)
        x = x.flip(2) if random.random() < 0.5 else x
        return x + 0.1 * torch.randn(x.shape) + float(np.random.normal(0, 0.1)), y


class CNN(nn.Module):
    """Convolutions with batch norm, dropout and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1))
            for _ in range(5)
        )
        self.head = nn.Linear(8 * 64, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for layer in self.body:
            h = h + layer(h)
        return self.head(h.flatten(1))


def make_job(case: str) -> Job:
    """ "gpt", "cnn" or "noisy" (a CNN whose samples are augmented), "-adamw" or "-sgd"; the same weights in every process."""
    model, optimizer = case.split("-")
    torch.manual_seed(0)
    if model == "gpt":
        job = Job(
            model=GPT(width=32, heads=2, layers=4, dropout=0.1),
            loss=loss,
            data=Characters(standard_library(60_000)),
            optimizer=Optimizer("AdamW", lr=3e-3),
            batch_size=8,
            steps=STEPS,
        )
    else:
        job = Job(
            model=CNN(),
            loss=F.cross_entropy,
            data=Noisy(200) if model == "noisy" else Images(200),
            optimizer=Optimizer("AdamW", lr=3e-3),
            batch_size=16,
            steps=STEPS,
        )
    return replace(
        job,
        name=case,
        micro_batch_size=job.batch_size // 4,
        codec="none",
        seed=7,
        clip_norm=0.5,
        optimizer=Optimizer("AdamW", lr=3e-3, groups={"*.bias": {"weight_decay": 0.0}})
        if optimizer == "adamw"
        else Optimizer("SGD", lr=0.05, momentum=0.9),
        schedule=Schedule("CosineAnnealingLR", T_max=STEPS),
    )
