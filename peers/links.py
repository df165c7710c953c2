"""Streams to the other members of a plan, by peer id.

The idea: of two neighbours the earlier in plan order opens the stream, at its first walk; whoever has something to send
before that waits here for the stream to come up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from peers import tensors
from peers.outbox import Outbox
from peers.transport.base import Frame

__all__ = ["Links"]


class Links:
    """Outboxes by peer. `epoch` is written on every frame with tensors."""

    def __init__(self, epoch: tuple[int, int]) -> None:
        self._epoch = list(epoch)
        self._outboxes: dict[str, Outbox] = {}
        self._added = asyncio.Event()

    @property
    def outboxes(self) -> Mapping[str, Outbox]:
        return self._outboxes

    def add(self, peer: str, outbox: Outbox) -> None:
        self._outboxes[peer] = outbox
        self._added.set()

    def seen(self) -> dict[str, list[float | None]]:
        """Of each peer since the last call, where large frames have passed: bytes per second to it and from it, and the most
        bytes that were on their way to it when more came.
        """
        found = {peer: [*box.stream.rates(), box.depth_bytes()] for peer, box in self._outboxes.items()}
        return {peer: figures for peer, figures in found.items() if figures != [None] * 3}

    async def put(self, peer: str, frame: Frame | Awaitable[Frame]) -> None:
        while peer not in self._outboxes:
            self._added.clear()
            await self._added.wait()
        await self._outboxes[peer].put(frame)

    async def send(self, peer: str, kind: str, values: Sequence[Any], **header: Any) -> None:
        """A frame with tensors; the values are not copied, so nobody may write to them any more."""
        meta, payloads = tensors.pack(values)
        await self.put(peer, Frame(kind, {"epoch": self._epoch, "tensors": meta, **header}, payloads))
