"""Graphs of others become programs, or GraphError, once for all peers in this process. A real peer has `worker.Workers` instead."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

from meshcee.capture import Program, decode_program, prepare
from meshcee.config import Limits

__all__ = ["Graphs"]

_checked = functools.lru_cache(maxsize=8)(decode_program)  # programs never change; what is refused is not kept


class Graphs:
    """`limits` bound what a graph may cost."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.guards: tuple[str, ...] | None = None  # of a process of its own

    async def get_ready(self) -> None:
        """For the first graph: nothing is imported once a run waits."""
        await asyncio.to_thread(prepare)

    async def read(self, graphs: Sequence[bytes]) -> list[Program]:
        """All of them, or GraphError. Takes seconds for a large model, and not on the event loop."""
        return await asyncio.to_thread(lambda: [_checked(bytes(graph), self.limits) for graph in graphs])
