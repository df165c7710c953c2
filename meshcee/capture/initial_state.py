"""The values of a model that a function builds: each is made when somebody asks for it, here or, by its recipe, elsewhere.

The idea: whoever only looks whether a state is one of these needs nothing of how tensors are made (`meshcee.capture.recipes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

__all__ = ["InitialState"]


class Recorder(Protocol):
    """What `meshcee.capture.recipes.construct` gives beside the module."""

    def value(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def recipe_of(self, tensor: torch.Tensor) -> tuple[Any, Any] | None: ...


class InitialState(Mapping[str, torch.Tensor]):
    """The values of a constructed model by name. Item access makes that tensor alone; nothing is kept."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], recorder: Recorder) -> None:
        self._tensors = dict(tensors)
        self._recorder = recorder

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._recorder.value(self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def recipe(self, name: str) -> bytes | None:
        """How another machine makes this tensor, encoded; None where its values must be sent."""
        found = self._recorder.recipe_of(self._tensors[name])
        return None if found is None else found[0].encode(found[1])
