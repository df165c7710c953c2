"""Modules that assert. pytest writes the asserts of test files anew, so they stand here."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
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


def of_several(_: Any, h: torch.Tensor) -> torch.Tensor:
    assert all((row <= 1).all() for row in h.unbind(1))
    assert not any([(h > 1).any(), (h < -1).any()])
    return h


def of_sums(_: Any, h: torch.Tensor) -> torch.Tensor:
    assert abs(h.norm().item() - 1) < 100 and -h.sum().item() / h.shape[1] <= 1e9  # noqa: PT018
    assert torch.allclose(h, h + 0)
    with torch.no_grad():
        assert (h < 2).all()
    return h


def weights_stay_small(m: Any) -> float:
    assert m.last.weight.abs().max() < 0.4
    return 1.0


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


def suppresses(_: Any, h: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(ValueError):
        if h.mean() < 0:
            raise ValueError("negative")
        h = h * 2
    return h


def swallows_at_last(_: Any, h: torch.Tensor) -> torch.Tensor:
    try:
        assert h.mean() > 5
        h = h * 2
    finally:
        return h  # noqa: B012


def returns_from_its_handler(m: Any, h: torch.Tensor) -> torch.Tensor:
    try:
        assert h.mean() > 5
    except AssertionError:
        if m.debug:
            return h * 3
        raise
    return h


def asks_again(_: Any, h: torch.Tensor) -> torch.Tensor:
    for k in range(3):
        try:
            assert h.mean() > 5 - 5 * k
            break
        except AssertionError:
            if k < 2:
                h = h + 0.1
                continue
            raise
    return h


class _Quiet:
    v: torch.Tensor

    @property
    def w(self) -> torch.Tensor:
        if self.v.mean() < 5:
            raise AttributeError
        return self.v * 2


def has_a_default(_: Any, h: torch.Tensor) -> torch.Tensor:
    quiet = _Quiet()
    quiet.v = h
    found: torch.Tensor = getattr(quiet, "w", h)
    return found


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        return h * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        assert not grad.isnan().any()
        return grad * 2


def in_backward(_: Any, h: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = _Twice.apply(h)
    return found


def two_are_needed(_: Any, h: torch.Tensor) -> torch.Tensor:
    if (h > 1).any() and (h < -1).any():
        raise ValueError
    return h


def one_is_enough(_: Any, h: torch.Tensor) -> torch.Tensor:
    assert (h <= 1).all() or (h < 5).all()
    return h


def any_of_several(_: Any, h: torch.Tensor) -> torch.Tensor:
    assert any([(h > 1).any(), (h < 2).any()])
    return h


def one_of_several(_: Any, h: torch.Tensor) -> torch.Tensor:
    assert h.sign().abs().max().item() in (0, 1)
    return h


def goes_on(_: Any, h: torch.Tensor) -> torch.Tensor:
    if (h > 1).any():
        h = h / 2
    return h


def rounds(_: Any, h: torch.Tensor) -> torch.Tensor:
    assert round(h.max().item()) < 2
    return h


def is_named(_: Any, h: torch.Tensor) -> torch.Tensor:
    large = (h > 1).sum().item()
    if large > 0:
        raise ValueError(f"{large} of {h.numel()} are large")
    total = h.sum().item()
    if not math.isfinite(total) or math.isnan(h.mean().item()):
        print("stopping", total)
        sys.exit(1)
    assert total < 1e9, f"{total}"
    return h


def is_used_besides(_: Any, h: torch.Tensor) -> torch.Tensor:
    large = (h > 0).sum().item()
    if large > 100:
        raise ValueError(large)
    return h * large


def is_named_twice(_: Any, h: torch.Tensor) -> torch.Tensor:
    large = (h > 0).sum().item()
    large = large + 1
    assert large < 100
    return h
