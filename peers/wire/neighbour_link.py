"""Streams to the other members of a plan, by peer id.

The idea: of two neighbours the earlier in plan order opens the stream, at its first round. Whoever has something to send
before that waits here for the stream to come up. How fast a link is, its receiver sees, and what queued before it, its
sender: so after each step the receiver tells.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from meshcee.errors import ProtocolError
from meshcee.plan import Epoch
from meshcee.stage import tensors
from peers.transport import Frame
from peers.wire import messages
from peers.wire.messages import need
from peers.wire.outbox import Outbox
from peers.wire.throttle import Throttle

if TYPE_CHECKING:
    from meshcee.stage import StageRunner

__all__ = ["Bandwidth", "Crossed", "Links", "Witness"]

# Told of a step: rates and depths, by the peer that a link leads to.
Crossed = Callable[[Mapping[str, float], Mapping[str, float]], None]
Bandwidth = Callable[[str], float]  # of the link to a peer, in bytes per second, as far as is known; or inf


class Witness(Protocol):
    """Who notes what a member's steps receive, compute and send, where its owner audits."""

    def begin(self, round: messages.Round) -> None: ...
    def sent(self, peer: str, frame: Frame | Awaitable[Frame]) -> Frame | Awaitable[Frame]: ...
    def received(self, peer: str, frame: Frame) -> None: ...
    def before(self, runner: StageRunner) -> None: ...
    def after(self, round: messages.Round, runner: StageRunner) -> None: ...
    def show(self, round: int) -> Frame: ...
    async def run(self, outbox: Outbox) -> None: ...


class Links:
    """Outboxes by peer. `epoch` is written on every frame with tensors; `crossed` is told of each step."""

    def __init__(
        self, epoch: Epoch, crossed: Crossed = lambda rates, depths: None, bandwidth: Bandwidth = lambda peer: math.inf
    ) -> None:
        self._epoch = list(epoch)
        self._outboxes: dict[str, Outbox] = {}
        self._added = asyncio.Event()
        self._crossed = crossed
        self._bandwidth = bandwidth
        self._throttles: dict[str, Throttle] = {}
        self.witness: Witness | None = None  # of an audited run
        self._told: dict[str, float] = {}  # by the peer that a link leads to: bytes per second, as it saw them come

    @property
    def outboxes(self) -> Mapping[str, Outbox]:
        return self._outboxes

    def add(self, peer: str, outbox: Outbox) -> None:
        self._outboxes[peer] = outbox
        self._throttles[peer] = Throttle(outbox.stream, partial(self._bandwidth, peer))
        self._added.set()

    def seen(self) -> dict[str, list[float | None]]:
        """Of each peer since the last call, where large frames have passed. Told are bytes per second to it and from
        it, and the most bytes that were on their way to it when more came.
        """
        found = {peer: [*box.stream.rates(), box.depth_bytes()] for peer, box in self._outboxes.items()}
        self._exchange(found)
        return {peer: figures for peer, figures in found.items() if figures != [None] * 3}

    def _exchange(self, seen: Mapping[str, Sequence[float | None]]) -> None:
        rates, depths = {}, {}
        for peer, (out, into, depth) in seen.items():
            if into:
                self._outboxes[peer].post(Frame(messages.RATE, {"rate": into}))
            if shown := [rate for rate in (out, self._told.pop(peer, None)) if rate]:
                rates[peer] = min(shown)
                if depth is not None:
                    depths[peer] = depth
        self._crossed(rates, depths)

    def hear(self, peer: str, header: Mapping[str, Any]) -> None:
        """How fast what we sent has come, as its receiver says. ProtocolError when nothing is as fast as that."""
        rate = need(header, "rate", float)
        if not 0 < rate < math.inf:
            raise ProtocolError(f"a link's rate is finite and positive, not {rate}")
        self._told[peer] = rate
        self._throttles[peer].hear(rate)

    async def put(self, peer: str, frame: Frame | Awaitable[Frame]) -> None:
        while peer not in self._outboxes:
            self._added.clear()
            await self._added.wait()
        await self._outboxes[peer].put(frame if self.witness is None else self.witness.sent(peer, frame))

    async def send(self, peer: str, kind: str, values: Sequence[Any], **header: Any) -> None:
        """A frame with tensors; the values are not copied, so nobody may write to them any more."""
        meta, payloads = tensors.pack(values)
        await self.put(peer, Frame(kind, {"epoch": self._epoch, "tensors": meta, **header}, payloads))
