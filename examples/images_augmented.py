"""Handwritten digits, shifted and turned at random each time that they are read; the test images are as they are.

The idea: a data set may draw what it likes from `random`, `numpy.random` or torch. meshcee seeds these for each
(seed, step, sample), so every run reads the same images: on a mesh, with worker processes, in the plain loop, after a resume.

Shapes: N samples, one channel of 8 x 8 pixels, 10 digits.
"""

from __future__ import annotations

import math

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import meshcee

STEPS = 240
TEST_IMAGES = 360
DEGREES, PIXELS = 12.0, 1.0


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Images, each turned by some degrees and shifted by up to a pixel."""

    def __init__(self, images: Tensor, digits: Tensor) -> None:
        self.images, self.digits = images, digits

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        angle = math.radians(DEGREES) * (2 * torch.rand(()) - 1)
        shift = PIXELS / 4 * (2 * torch.rand(2) - 1)  # of half the width of an image
        turn = torch.stack([torch.cos(angle), -torch.sin(angle), torch.sin(angle), torch.cos(angle)]).view(2, 2)
        grid = F.affine_grid(torch.cat([turn, shift[:, None]], 1)[None], [1, 1, 8, 8], align_corners=False)
        return F.grid_sample(self.images[i][None], grid, align_corners=False)[0], self.digits[i]


def build(seed: int = 0) -> nn.Module:
    """Images (N, 1, 8, 8) -> logits (N, 10); the same weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first = (nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        second = (nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(64 * 2 * 2, 10))


def accuracy(logits: Tensor, target: Tensor) -> float:
    return (logits.argmax(dim=-1) == target).double().mean().item()


digits = load_digits()
images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
targets = torch.tensor(digits.target)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order[TEST_IMAGES:], order[:TEST_IMAGES]

job = meshcee.Job(
    name="images",
    model=build(),
    loss=F.cross_entropy,
    data=Augmented(images[train], targets[train]),
    optimizer=meshcee.Optimizer("AdamW", lr=3e-3),
    batch_size=64,
    micro_batch_size=16,
    steps=STEPS,
    eval_data=TensorDataset(images[test], targets[test]),
    eval_every=80,
    metrics={"accuracy": accuracy},
)


if __name__ == "__main__":
    result = meshcee.train(job)
    print(f"loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f} in {len(result.losses)} steps")
    _, last = result.metrics[-1]
    print(f"test accuracy {100 * last['accuracy']:.2f} %")
