"""What an agent asks of the device that it lends, wherever that computes.

The idea: a `Member` in the peer's process and a `DeviceProcess` are one to it: both take jobs by themselves, and say when they do.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

__all__ = ["Lent"]


class Lent(Protocol):
    """Serves the streams of jobs, one job at a time."""

    is_leaving: bool
    busy_changed: asyncio.Event

    @property
    def is_busy(self) -> bool: ...

    def leave(self) -> None:
        """Take no further offer, and ask the owner of the running job, if any, to go on without this peer."""
        ...

    async def drop(self) -> None:
        """End the running job here, if any: to its owner, this peer is lost. Bounded in time."""
        ...

    async def wait_until_unneeded(self) -> None:
        """Until no job is here, and whatever went on without this peer has read what it needs of it."""
        ...
