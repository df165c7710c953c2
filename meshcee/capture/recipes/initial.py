"""Initial values from a checkpoint: which of its tensors is which of the model's, and nothing missing or left over.

The idea: a checkpoint is read as `load_state_dict` would, types and tied names included, but a tensor at a time, when
somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from meshcee.errors import UsageError
from meshcee.files.tensor_files import Checkpoint, Layout, OnDemand

__all__ = ["from_checkpoint"]


def from_checkpoint(
    checkpoint: Checkpoint, names: Mapping[str, str], layout: Layout, built: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """The state in which every tensor that `model.state_dict()` has comes from the checkpoint.

    `names` maps each name of the state_dict to its first name: of tied tensors the checkpoint may hold any. What is
    no part of a state_dict (buffers that are not persistent) stays as `built`. Raises one UsageError for all that
    does not fit.
    """
    sources = {first: name for name, first in names.items() if name in checkpoint.layout}
    missing = [first for first in dict.fromkeys(names.values()) if first not in sources]
    unexpected = sorted(checkpoint.layout.keys() - names.keys())
    shaped = [
        f"{name!r} is {tuple(checkpoint.layout[name][1])} there and {layout[first][1]} in the model"
        for name, first in names.items()
        if name in checkpoint.layout and checkpoint.layout[name][1] != layout[first][1]
    ]
    wrong = [*shaped[:3], *(["and more"] if len(shaped) > 3 else [])]
    if missing:
        wrong.append(f"it lacks {_some(missing)}")
    if unexpected:
        wrong.append(f"it has {_some(unexpected)}, which the model has not")
    if wrong:
        raise UsageError(
            f"the weights do not fit the model: {'; '.join(wrong)}. Give the checkpoint of this model, with the names of "
            "its state_dict"
        )

    def read(name: str) -> torch.Tensor:
        return checkpoint[sources[name]].to(layout[name][0]) if name in sources else built[name]

    return OnDemand(layout, read)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(map(repr, listed[:3])) + more
