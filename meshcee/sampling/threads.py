"""Whether threads that a data set begins draw from the process's generators, at times that no seed decides.

The idea: each thread that begins while a set is looked at has a profile function, which Python calls before every function of C. So
draws by `random` and torch are found. Functions of `numpy.random` call none, and are not.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Drawers", "watched"]

# Functions of torch, and methods of its tensors, that read its generator.
TORCH_DRAWS = frozenset(
    {
        "rand",
        "rand_like",
        "randn",
        "randn_like",
        "randint",
        "randint_like",
        "randperm",
        "normal",
        "bernoulli",
        "multinomial",
    }
    | {
        "poisson",
        "dropout",
        "uniform_",
        "normal_",
        "random_",
        "bernoulli_",
        "exponential_",
        "geometric_",
        "cauchy_",
        "log_normal_",
    }
)
_PYTHON = random.random.__self__  # type: ignore[attr-defined]


class Drawers:
    """`found` once a thread has drawn."""

    found = False

    def hear(self, frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and not self.found:
            owner = getattr(function, "__self__", None)
            of_torch = owner is None or isinstance(owner, torch.Tensor)  # its functions are nobody's methods
            self.found = owner is _PYTHON or (of_torch and function.__name__ in TORCH_DRAWS)


@contextmanager
def watched() -> Iterator[Drawers]:
    """Of threads that begin meanwhile, and as long as they live."""
    drawers, before = Drawers(), threading.getprofile()
    threading.setprofile(drawers.hear)
    try:
        yield drawers
    finally:
        threading.setprofile(before)
