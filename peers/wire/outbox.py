"""Frames on their way to one peer: a bounded queue and the one task that sends them.

The idea: whoever produces a frame goes on as soon as it is queued, so sending overlaps with compute. The queue is
bounded in frames and the stream in bytes, so a slow link stops the producer instead of filling memory. A frame that is
still being encoded is queued as a promise of it, and keeps its place.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable

from meshcee.errors import ProtocolError
from meshcee.figures import LEAST_BYTES
from peers.transport import Frame, Stream
from peers.wire.spans import Spans, micro_of

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
        self._queued_bytes = 0  # of payloads, that being sent included; none that is still being encoded
        self._depth_bytes: int | None = None

    def depth_bytes(self) -> int | None:
        """What was still on its way when something large was put behind it, at its most since the last call: 0 on an idle link.

        None where nothing large was put, or nobody knows.
        """
        found, self._depth_bytes = self._depth_bytes, None
        return found

    def _measure(self) -> None:
        below = self.stream.under_way()
        if below is not None or self._queued_bytes:
            self._depth_bytes = max(self._depth_bytes or 0, self._queued_bytes + (below or 0))

    async def put(self, frame: Frame | Awaitable[Frame]) -> None:
        size = frame.payload_bytes if isinstance(frame, Frame) else LEAST_BYTES
        if size >= LEAST_BYTES:
            self._measure()
        await self._room.acquire()
        if isinstance(frame, Frame):
            self._queued_bytes += size
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
            if ready is not frame:
                self._queued_bytes += ready.payload_bytes
            start_s = time.perf_counter()
            await self.stream.send(ready)
            if counted:
                self._queued_bytes -= ready.payload_bytes
            if self._spans is not None and counted:
                self._spans.add(f"send {ready.kind}", micro_of(ready.header), start_s, time.perf_counter())
