"""The user's code may never return, and nobody can end a thread: so people are told, now and then, where it is.

The idea: whoever awaits a call of the user's code does so here; what is told names the sample and the line that it waits in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from meshcee.user_code import under_way

__all__ = ["EVERY_S", "Stalls"]

T = TypeVar("T")

EVERY_S = 60.0


class Stalls:
    """Of one run. `tell` hears of a call that takes longer than `EVERY_S`, once in that time, however many wait for it."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._quiet_until_s = 0.0  # by the loop's clock

    async def watch(self, future: asyncio.Future[T]) -> T:
        """What it gives; it is cancelled with whoever waits."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            while not (await asyncio.wait({future}, timeout=EVERY_S))[0]:
                if loop.time() >= self._quiet_until_s:
                    self._quiet_until_s = loop.time() + EVERY_S / 2
                    self._tell(
                        f"training waits for {under_way() or 'code of the job'}, which has not returned for "
                        f"{loop.time() - began_s:.0f} s; Ctrl-C twice ends the run"
                    )
            return future.result()
        finally:
            future.cancel()
