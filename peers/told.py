"""The losses that were told of, by step.

The idea: a step that is computed again is held against them for as long as the run lasts, so each costs eight bytes.
"""

from __future__ import annotations

import math
from array import array

__all__ = ["Told"]


class Told:
    """A mapping from steps to finite losses that only grows."""

    def __init__(self) -> None:
        self._losses = array("d")  # NaN where nothing was told

    def __contains__(self, step: int) -> bool:
        return step < len(self._losses) and not math.isnan(self._losses[step])

    def __getitem__(self, step: int) -> float:
        """NaN for a step that was not told of."""
        return self._losses[step] if step < len(self._losses) else math.nan

    def __setitem__(self, step: int, loss: float) -> None:
        self._losses.extend([math.nan] * (step + 1 - len(self._losses)))
        self._losses[step] = loss
