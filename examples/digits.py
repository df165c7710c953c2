"""A small convolutional network that reads scikit-learn's handwritten digits, with over 97 % of the test images right.

The idea: batch normalisation, dropout and an accuracy on held-out images are nothing special to a mesh. The 1,797
images are part of scikit-learn, so nothing is downloaded.

Shapes: N samples, one channel of 8 x 8 pixels, 10 digits.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset, random_split

import meshcee

STEPS = 300
TEST_IMAGES = 360


def images() -> tuple[Dataset[tuple[Tensor, ...]], Dataset[tuple[Tensor, ...]]]:
    """Training and test images, split by a fixed seed; pixels from 0 to 1."""
    digits = load_digits()
    whole = TensorDataset(torch.tensor(digits.images[:, None] / 16, dtype=torch.float32), torch.tensor(digits.target))
    train, test = random_split(whole, [len(whole) - TEST_IMAGES, TEST_IMAGES], torch.Generator().manual_seed(0))
    return train, test


def layer(c_in: int, c_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(c_in, c_out, 3, padding=1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU())


def build(seed: int = 0) -> nn.Module:
    """Images (N, 1, 8, 8) -> logits (N, 10); the same weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            layer(1, 32),
            layer(32, 32),
            nn.MaxPool2d(2),
            layer(32, 64),
            layer(64, 64),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(64 * 2 * 2, 10),
        )


def accuracy(logits: Tensor, target: Tensor) -> float:
    return (logits.argmax(dim=-1) == target).double().mean().item()


train_images, test_images = images()

job = meshcee.Job(
    name="digits",
    model=build(),
    loss=F.cross_entropy,
    data=train_images,
    optimizer=meshcee.Optimizer("SGD", lr=0.05, momentum=0.9, weight_decay=2e-3),
    schedule=meshcee.Schedule("CosineAnnealingLR", T_max=STEPS),
    batch_size=64,
    micro_batch_size=16,
    steps=STEPS,
    eval_data=test_images,
    eval_every=60,
    metrics={"accuracy": accuracy},
)


if __name__ == "__main__":
    result = meshcee.train(job)
    print(f"loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f} in {len(result.losses)} steps")
    _, last = result.metrics[-1]
    print(f"test accuracy {100 * last['accuracy']:.2f} %")
