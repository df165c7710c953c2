"""meshcee trains one model across scattered machines, exactly as one machine would have.

Names are loaded on first use: `meshcee.planner` must be importable on a machine without torch. Which torch is installed is looked
up all the same, so that a release that nobody has tried is told of at once.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import warnings
from typing import Any

__version__ = "0.1.0"

TORCH_FROM, TORCH_BELOW = (2, 11), (2, 14)  # as pyproject.toml has them: a test holds them together

_HOME = {
    "At": "meshcee.job",
    "Callback": "meshcee.callbacks",
    "EarlyStop": "meshcee.callbacks.rules",
    "Job": "meshcee.job",
    "KeepBest": "meshcee.callbacks.rules",
    "Optimizer": "meshcee.optim",
    "ReduceOnPlateau": "meshcee.callbacks.rules",
    "Schedule": "meshcee.optim.rates",
    "seeded": "meshcee.job",
    "MeshceeError": "meshcee.errors",
    "check": "meshcee.run",
    "join": "meshcee.run",
    "plain": "meshcee.eager",
    "train": "meshcee.run",
}

__all__ = [
    "At",
    "Callback",
    "EarlyStop",
    "Job",
    "KeepBest",
    "MeshceeError",
    "Optimizer",
    "ReduceOnPlateau",
    "Schedule",
    "__version__",
    "capture",
    "check",
    "join",
    "plain",
    "seeded",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if (
        not name.startswith("_") and importlib.util.find_spec(f"meshcee.{name}") is not None
    ):  # as the documents call them
        return importlib.import_module(f"meshcee.{name}")
    raise AttributeError(f"module 'meshcee' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def _tell_of_torch() -> None:
    """Warns where another installation has put a torch here that is outside of the supported range."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # plans are made without it, too
        return
    found = re.match(r"(\d{1,9})\.(\d{1,9})", torch)
    if found is None or not TORCH_FROM <= (int(found[1]), int(found[2])) < TORCH_BELOW:
        first, below = ("{}.{}".format(*numbers) for numbers in (TORCH_FROM, TORCH_BELOW))
        warnings.warn(
            f"torch {torch} is installed, and meshcee {__version__} supports {first} up to below {below}: "
            f"pip install 'torch>={first},<{below}'",
            stacklevel=3,
        )


_tell_of_torch()
