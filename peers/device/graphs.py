"""Graphs of others become programs, or GraphError: here in the peer's own process, for peers in one process and for tests.

The idea: whoever is in this process reads the same graphs, to measure them, for every offer and once for each peer. So a graph is
checked once. A peer of a real mesh has `peers.device.worker.Workers` in the place of this class.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

from meshcee.capture import Program, decode_program, prepare
from meshcee.config import Limits

__all__ = ["Graphs"]

MOST_KEPT = 8  # graphs: of a job the one that trains and the one that evaluates


class Graphs:
    """`limits` bound what a graph may cost."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.guards: tuple[str, ...] | None = None  # of a process of its own

    async def get_ready(self) -> None:
        """For the first graph and the first step: nothing is imported once a run waits."""
        await asyncio.to_thread(prepare)

    async def read(self, graphs: Sequence[bytes]) -> list[Program]:
        """All of them, or GraphError. Takes seconds for a large model, and not on the event loop."""
        return await asyncio.to_thread(lambda: [_checked(bytes(graph), self.limits) for graph in graphs])


@functools.lru_cache(maxsize=MOST_KEPT)  # programs never change; what is refused is not kept
def _checked(graph: bytes, limits: Limits) -> Program:
    return decode_program(graph, limits)
