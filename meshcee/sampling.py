"""Which samples a step sees.

The idea: a pure function of (seed, length, batch size, step), so that any step can be drawn again at any time, by the
owner after a restart and by a plain loop that checks it.
"""

from __future__ import annotations

import functools

import torch

__all__ = ["draw"]


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, length: int, data_epoch: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + data_epoch) % (1 << 63))
    return tuple(torch.randperm(length, generator=generator).tolist())


def draw(seed: int, length: int, batch_size: int, step: int) -> list[int]:
    """Indices of the step's samples: a new permutation each data epoch, the incomplete last batch dropped."""
    per_epoch = length // batch_size
    data_epoch, position = divmod(step, per_epoch)
    order = _permutation(seed, length, data_epoch)
    return list(order[position * batch_size : (position + 1) * batch_size])
