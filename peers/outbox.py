"""Frames on their way to one peer: a bounded queue and the one task that sends them.

The idea: whoever produces a frame goes on as soon as it is queued, so sending overlaps with compute; the queue is
bounded in frames and the stream in bytes, so a slow link stops the producer instead of filling memory. A frame that is
still being encoded is queued as a promise of it, and keeps its place.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable

from meshcee.errors import ProtocolError
from peers.spans import Spans, micro_of
from peers.transport.base import Frame, Stream

__all__ = ["Outbox"]

MOST_POSTED = 64


class Outbox:
    """`put` from any task, `run` in one task of the caller's TaskGroup, which StreamClosed ends."""

    def __init__(self, stream: Stream, limit_frames: int = 16, spans: Spans | None = None) -> None:
        self.stream = stream
        self._spans = spans  # told when each frame was sent
        self._frames: asyncio.Queue[tuple[Frame | Awaitable[Frame] | None, bool]] = asyncio.Queue()
        self._posted = 0
        self._room = asyncio.Semaphore(limit_frames)

    async def put(self, frame: Frame | Awaitable[Frame]) -> None:
        await self._room.acquire()
        self._frames.put_nowait((frame, True))

    def post(self, frame: Frame) -> None:
        """Queue without waiting, for a task that reads and must not be held up."""
        if self._posted >= MOST_POSTED:
            raise ProtocolError(
                f"more than {MOST_POSTED} answers to peer {self.stream.peer_id} wait: it asks and does not read"
            )
        self._posted += 1
        self._frames.put_nowait((frame, False))

    def sign(self, frame: Frame) -> None:
        """Queue a sign of life, unless something posted waits: on a link that is busy the bytes themselves are signs."""
        if not self._posted:
            self.post(frame)

    async def finish(self) -> None:
        """Let `run` return once everything queued so far is sent."""
        self._frames.put_nowait((None, False))

    async def run(self) -> None:
        while True:
            frame, counted = await self._frames.get()
            if frame is None:
                return
            if counted:
                self._room.release()
            else:
                self._posted -= 1
            ready = frame if isinstance(frame, Frame) else await frame
            start_s = time.perf_counter()
            await self.stream.send(ready)
            if self._spans is not None and counted:
                self._spans.add(f"send {ready.kind}", micro_of(ready.header), start_s, time.perf_counter())
