"""meshcee trains one model across scattered machines, exactly as one machine would have.

Names are loaded on first use: `meshcee.planner` must be importable on a machine without torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Callback": "meshcee.callbacks",
    "EarlyStop": "meshcee.callbacks.rules",
    "Job": "meshcee.job",
    "KeepBest": "meshcee.callbacks.rules",
    "Optimizer": "meshcee.job",
    "ReduceOnPlateau": "meshcee.callbacks.rules",
    "Schedule": "meshcee.job",
    "seeded": "meshcee.job",
    "MeshceeError": "meshcee.errors",
    "check": "meshcee.run",
    "join": "meshcee.run",
    "plain": "meshcee.eager",
    "train": "meshcee.run",
}

__all__ = [
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
    if name == "capture":  # a package that can be called
        return importlib.import_module("meshcee.capture")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'meshcee' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
