"""How much of the links and devices copies of the state may take: when the next is due, and when a link must rest.

The idea: training comes first, so copies get a share of the time, not a priority of bytes that a link would not know.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AHEAD", "SLOW_S", "Cadence"]

AHEAD = 4  # chunks asked for and not yet here, from each stage
SLOW_S = 0.1  # a chunk that takes longer came over a link that the training needs more: then one at a time, with rests


@dataclass
class Cadence:
    """When the next snapshot, or copy for buddies, is due: every `every` steps, or as often as costs at most a share of the time.

    A loss costs the steps since the last snapshot, so they are as frequent as they may be. `SHARE` bounds which part of the
    time links are used for them (a slow link rests between two chunks, a fast one between two snapshots), `MAKING` which
    part one is being read and brought to the disk. How long the steps before it take does not count.
    """

    every: int = 0
    SHARE = 0.05
    MAKING = 0.5
    LEAST_S = 1.0
    _began_s: float = float("-inf")
    _made_s: float = 0.0
    _read_s: float = 0.0
    _last_step: int = 0

    def start(self, next_step: int, now_s: float) -> None:
        """An epoch begins at this step: its state is known."""
        self._last_step, self._began_s = next_step, now_s

    def is_due(self, next_step: int, now_s: float) -> bool:
        if self.every:
            return next_step // self.every > self._last_step // self.every
        rest_s = max(self.LEAST_S, self._read_s / self.SHARE, self._made_s / self.MAKING)
        return now_s - self._began_s >= rest_s

    def begun(self, next_step: int, now_s: float) -> None:
        self._last_step, self._began_s = next_step, now_s

    def ended(self, *, read_s: float, made_s: float) -> None:
        """It is complete, `made_s` after the first stage had copied its state; reading one took at most `read_s`."""
        self._read_s, self._made_s = read_s, made_s
