"""What a drawn model is made into: a module, a loss, samples, and the sizes of a step's micro-batches.

The idea: every family makes its own `Made`; what trains and compares them knows no library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["CLASSES", "UNEVEN", "Made", "NotBuilt", "class_loss", "first_tensor", "images", "near_loss", "own_loss"]

CLASSES = 5
UNEVEN = (3, 1, 2)  # samples in the micro-batches of a step: odd, one alone, even
SAMPLES = 12


class NotBuilt(Exception):
    """This harness does not know how to make the model, or how to feed it. Says nothing of meshcee."""


@dataclass
class Made:
    """A model that can be trained: `data[i]` is (x, y), the loss takes (output, y)."""

    model: nn.Module
    loss: Callable[[Any, Any], torch.Tensor]
    data: list[tuple[Any, Any]]
    sizes: tuple[int, ...] = UNEVEN
    notes: list[str] = field(default_factory=list)


def first_tensor(output: Any) -> torch.Tensor:
    """The first floating tensor in what a model returns."""
    if isinstance(output, torch.Tensor):
        return output
    for item in output.values() if hasattr(output, "values") else output:
        if isinstance(item, torch.Tensor) and item.is_floating_point():
            return item
        if isinstance(item, tuple | list):
            return first_tensor(item)
    raise NotBuilt("the output has no floating tensor")


def class_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(first_tensor(output), target)


def near_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Whatever the shape of the output: pulled towards the sample's number."""
    found = first_tensor(output)
    return F.mse_loss(found, target.reshape(-1, *[1] * (found.dim() - 1)).expand_as(found))


def own_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


def images(size: int, channels: int = 3) -> list[tuple[Any, Any]]:
    g = torch.Generator().manual_seed(2)
    return [(torch.randn(channels, size, size, generator=g), i % CLASSES) for i in range(SAMPLES)]
