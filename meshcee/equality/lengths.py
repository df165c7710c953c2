"""Whether a pass over a micro-batch depends on the lengths of those before it.

The idea: a module may keep a length in Python, as the longest that it has met. A graph computes it anew in each pass. Passes over
one micro-batch again and again do not show that, so a short one and a long one take turns. Buffers are put back between two passes,
and what is Python's is not. What the model and the loss give out must then be the same numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from meshcee.equality.recorder import Call, Recorder, unlike
from meshcee.job import Job
from meshcee.sampling import Source, inputs_of

__all__ = ["Pass", "parted", "shortest_and_longest"]

_MOST_BATCHES = 8  # of the first steps, among which the two are


def shortest_and_longest(job: Job, source: Source, size: int) -> tuple[Any, Any] | None:
    """Two micro-batches of the first steps, of so many samples; None where all are as long."""
    places = ((step, first) for step in range(job.steps) for first in range(0, job.batch_size - size + 1, size))
    batches = [source.batch(step, first, first + size) for step, first in itertools.islice(places, _MOST_BATCHES)]
    by_length = sorted(batches, key=_length)
    return (by_length[0], by_length[-1]) if _length(by_length[0]) < _length(by_length[-1]) else None


def _length(batch: tuple[Any, Any]) -> int:
    return sum(tensor.numel() for tensor in inputs_of(batch).values())


@dataclass(frozen=True)
class Pass:
    """What was recorded of one, its loss, and fingerprints of what the model and the loss gave out."""

    recorder: Recorder
    loss: torch.Tensor
    left: tuple[Any, ...]


def parted(short: Any, long: Any, begin: Callable[[], None], run: Callable[[Any], Pass]) -> Call | None:
    """The first call whose numbers are others after passes over other lengths; None where what is given out is the same.

    `begin` puts all of the user's back.
    """
    begin()
    first, after_short, after_long, again = map(run, (short, long, short, short))
    begin()
    alone = run(long)
    for later, earlier in ((after_long, first), (again, first), (alone, after_short), (after_short, alone)):
        if later.left != earlier.left:
            return unlike(later.recorder, later.loss, earlier.recorder.numbers) or later.recorder.calls[-1]
    return None
