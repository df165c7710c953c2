"""Modules that assert. pytest writes the asserts of test files anew, so they stand here."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.capture.exactness import WIDTH

Then = Callable[[Any, torch.Tensor], torch.Tensor]


class Asserts(nn.Module):
    """Does something with what lies between two layers, whose values are between -1 and 1."""

    def __init__(self, then: Then) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.then, self.debug = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), then, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.then(self, torch.tanh(self.first(x))))


def is_finite(m: Any, h: torch.Tensor) -> torch.Tensor:
    assert not torch.isnan(h).any(), f"NaN in {h}"
    if m.debug and not bool(torch.isfinite(h).all()):
        logging.getLogger(__name__).error("not finite")
        raise FloatingPointError
    return h


def in_range(_: Any, h: torch.Tensor) -> torch.Tensor:
    assert -1 <= h.min() <= 1 and h.max().item() <= 1.0  # noqa: PT018 - two questions in one line
    if (h > 1).any() or h.sum().item() == 1e9 or not torch.equal(h, h):
        raise ValueError("out of range")
    elif h.dim() == 2 and torch.isinf(h).any().item():
        raise ValueError("infinite")
    torch._assert((h <= 1).all(), "too large")
    return h


def reraises(_: Any, h: torch.Tensor) -> torch.Tensor:
    try:
        assert (h <= 1).all()
    except AssertionError:
        logging.getLogger(__name__).error("too large")
        raise
    return h


def swallows(_: Any, h: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(ZeroDivisionError):
        try:
            assert (h <= 1).all()
        except AssertionError:
            return h * 2
    return h


def two_are_needed(_: Any, h: torch.Tensor) -> torch.Tensor:
    if (h > 1).any() and (h < -1).any():
        raise ValueError
    return h


def one_is_enough(_: Any, h: torch.Tensor) -> torch.Tensor:
    assert (h <= 1).all() or (h < 5).all()
    return h


def goes_on(_: Any, h: torch.Tensor) -> torch.Tensor:
    if (h > 1).any():
        h = h / 2
    return h


def rounds(_: Any, h: torch.Tensor) -> torch.Tensor:
    assert round(h.max().item()) < 2
    return h
