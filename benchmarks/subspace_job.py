"""The jobs of `benchmarks/subspace_lab.py`: the transformer of examples/gpt.py, or the one of examples/subspace.py with the width
SUBSPACE_RANK of its stream. Text, optimizer and seeds are the same."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import meshcee

__all__ = ["job", "made", "module_of"]

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def module_of(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(rank: int, steps: int) -> meshcee.Job:
    """With a stream of so many numbers; 0: the plain transformer."""
    plain: meshcee.Job = replace(module_of("gpt").job, steps=steps, threads=1, adapt=False)
    if not rank:
        return plain
    subspace = module_of("subspace")
    subspace.RANK = rank
    return replace(plain, model=subspace.build())


if "SUBSPACE_RANK" in os.environ:
    job = made(int(os.environ["SUBSPACE_RANK"]), int(os.environ["WAN_STEPS"]))
