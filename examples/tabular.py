"""A table: benign or malignant, from 30 figures of each of 569 samples, with over 95 % of the test rows right.

The idea: rows are normalised by what the training rows say, Muon updates the matrices and AdamW the rest, and the average of the
weights is what is evaluated at the end. The table is part of scikit-learn, so nothing is downloaded.

Shapes: N samples, 30 columns.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshcee

STEPS = 120
TEST_ROWS = 113


def rows() -> tuple[TensorDataset, TensorDataset]:
    """Training and test rows, split by a fixed seed."""
    table = load_breast_cancer()
    x = torch.tensor(table.data, dtype=torch.float32)
    y = torch.tensor(table.target[:, None], dtype=torch.float32)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[TEST_ROWS:], order[:TEST_ROWS]
    mean, spread = x[train].mean(0), x[train].std(0)
    x = (x - mean) / spread
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


def build(seed: int = 0) -> nn.Module:
    """Rows (N, 30) -> logits (N, 1); the same weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        middle = (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))
        return nn.Sequential(nn.Linear(30, 64), nn.GELU(), *middle, nn.Linear(64, 1))


def accuracy(logits: Tensor, target: Tensor) -> float:
    return ((logits > 0) == (target > 0.5)).double().mean().item()


train_rows, test_rows = rows()

job = meshcee.Job(
    name="tabular",
    model=build(),
    loss=F.binary_cross_entropy_with_logits,
    data=train_rows,
    optimizer=meshcee.Optimizer("Muon", lr=0.02, groups={"*.bias": {"class": "AdamW", "lr": 3e-3}}),
    ema=0.95,
    batch_size=64,
    micro_batch_size=16,
    steps=STEPS,
    eval_data=test_rows,
    metrics={"accuracy": accuracy},
)


if __name__ == "__main__":
    result = meshcee.train(job)
    print(f"loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f} in {len(result.losses)} steps")
    model = build().eval()
    model.load_state_dict(result.ema)
    x, y = test_rows.tensors
    with torch.no_grad():
        print(f"test accuracy of the average {100 * accuracy(model(x), y):.2f} %")
