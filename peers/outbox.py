"""Frames on their way to one peer: a bounded queue and the one task that sends them.

The idea: whoever produces a frame goes on as soon as it is queued, so sending overlaps with compute; the queue is
bounded in frames and the stream in bytes, so a slow link stops the producer instead of filling memory. A frame that is
still being encoded is queued as a promise of it, and keeps its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from peers.transport.base import Frame, Stream

__all__ = ["Outbox"]


class Outbox:
    """`put` from any task, `run` in one task of the caller's TaskGroup, which StreamClosed ends."""

    def __init__(self, stream: Stream, limit_frames: int = 16) -> None:
        self.stream = stream
        self._frames: asyncio.Queue[Frame | Awaitable[Frame] | None] = asyncio.Queue(maxsize=limit_frames)

    async def put(self, frame: Frame | Awaitable[Frame]) -> None:
        await self._frames.put(frame)

    async def finish(self) -> None:
        """Let `run` return once everything queued so far is sent."""
        await self._frames.put(None)

    async def run(self) -> None:
        while (frame := await self._frames.get()) is not None:
            await self.stream.send(frame if isinstance(frame, Frame) else await frame)
