"""Frames on the in-process network, seen before they are sent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from peers.transport.base import Frame
from peers.transport.memory import MemoryTransport
from peers.transport.stream import FramedStream

__all__ = ["watched_frames"]


@contextlib.contextmanager
def watched_frames(about_to_send: Callable[[str, str, str], None]) -> Iterator[None]:
    """Calls it with sender, receiver and kind before each frame that is sent on the in-process network."""
    make = MemoryTransport.make_stream

    def watching(transport: MemoryTransport, peer_id: str, *args: Any, **more: Any) -> FramedStream:
        stream = make(transport, peer_id, *args, **more)
        send = stream.send

        async def told(frame: Frame) -> None:
            about_to_send(transport.peer_id, peer_id, frame.kind)
            await send(frame)

        stream.send = told  # type: ignore[method-assign]
        return stream

    with mock.patch.object(MemoryTransport, "make_stream", watching):
        yield
