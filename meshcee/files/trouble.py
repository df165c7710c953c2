"""What people are told of a disk that refuses while everything else goes on.

The idea: said at once, then once a minute for as long as it lasts, and once when it is over; a line for every try would hide it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from meshcee.files import disk

__all__ = ["Trouble"]

log = structlog.get_logger()

EVERY_S = 60.0


class Trouble:
    """Of one process. `what` names that which cannot be written, in the words of a message."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.monotonic = monotonic
        self.refused: dict[str, float] = {}  # by what is refused now: when it was told

    def tell(self, what: str, error: OSError, needed_bytes: int = 0) -> None:
        now_s = self.monotonic()
        if now_s - self.refused.get(what, -EVERY_S) >= EVERY_S:
            self.refused[what] = now_s
            log.warning(f"{what} cannot be written, and will be tried again", disk=disk.refusal(error, needed_bytes))

    def over(self, what: str) -> None:
        if self.refused.pop(what, None) is not None:
            log.warning(f"{what} can be written again")
