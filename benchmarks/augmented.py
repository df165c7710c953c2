"""A dataset under noise, for chaos: every read of a sample draws from Python's, numpy's and torch's generators.

The idea: whatever a run loses, goes back to or resumes, its samples are those of the plain loop, or a loss differs.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["Augmented"]


class Augmented:
    """Another dataset of classes, one or a row of them a sample: some are replaced by chance, and a row is turned."""

    def __init__(self, data: Any, classes: int) -> None:
        self._data = data
        self._classes = classes

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, Any]:
        x, y = self._data[i]
        x = torch.atleast_1d(torch.as_tensor(x)).roll(int(np.random.randint(3)))
        x = torch.where(torch.rand(x.shape) < 0.2, random.randrange(self._classes), x)
        return x.squeeze(), y
