"""How an offer reaches a member: the graph, then the weights or how to make them, then the member's answer.

The idea: weights go out tensor by tensor, so whoever offers never holds more than a frame for each member, and of the
large ones only one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from meshcee.capture import Capture
from meshcee.config import Limits
from meshcee.errors import CaptureError, PeerLostError, ProtocolError
from peers import messages
from peers.copies import Copied
from peers.kept import Kept, state_for
from peers.offer import Offer
from peers.state_frames import GROUP_BYTES, SLACK_BYTES, StateSender, names_of
from peers.transport.base import Frame, Stream, StreamClosed

__all__ = ["Offering"]


class Offering:
    """The offers of one epoch, over weights as captured or, to go on from it, of a checkpoint or of copies with peers."""

    def __init__(self, captured: Capture, kept: Kept, limits: Limits) -> None:
        self._captured = captured
        self._kept = kept
        self._limits = limits
        self._missed = kept.base.missed + 1 if isinstance(kept.base, Copied) else 0  # if a member does not find all
        self._making = asyncio.Lock()  # frames of weights

    def missed(self) -> PeerLostError:
        """A member has not found all of the copies that this epoch begins with. ProtocolError where it begins with none."""
        base = self._kept.base
        if not isinstance(base, Copied):
            raise ProtocolError("it asked again for what no peer was to give it")
        base.missed = self._missed
        return PeerLostError(f"no peer has all of the state after {base.next_step} steps any more")

    async def send(self, stream: Stream, offer: Offer) -> Frame:
        """Offer; returns READY, which has been held against what was sent, or REFUSED. Raises StreamClosed."""
        # Encoding and hashing take seconds for a large model: not on the event loop.
        base = self._kept.base
        sources = base.sources(offer.expected_state) if isinstance(base, Copied) else ()
        frame = await asyncio.to_thread(offer.frame, sources)
        if (size := max(map(len, frame.payloads))) > self._limits.graph_bytes:
            raise CaptureError(
                f"the captured graph has {size} bytes and peers accept {self._limits.graph_bytes}: keep large "
                "constant tensors in buffers of the model"
            )
        await stream.send(frame)
        acknowledged: dict[str, object] = {
            "plan": offer.plan.hash(),
            "epoch": list(offer.epoch),
            "term": list(offer.term),
        }
        begin = await asyncio.to_thread(state_for, offer, self._captured, base)
        stream.max_payload_bytes = SLACK_BYTES + sum(len(n) for part in begin.values() for n in part.names)  # for AGAIN
        senders = {kind: StateSender(part.values, part.digests) for kind, part in begin.items()}
        with contextlib.suppress(StreamClosed):  # a member that refuses closes: its reason is read below
            for kind, part in begin.items():
                held = offer.resumes and offer.peer_id in self._kept.holders  # then only what it lacks is sent
                await self._send_all(stream, senders[kind].frames(part.names, recipes=True, held=held))
                acknowledged[kind] = senders[kind].hash
        reply = await _answer(stream)
        if reply.kind == messages.AGAIN:
            asked = {kind: names_of(reply, i, set(part.names)) for i, (kind, part) in enumerate(begin.items())}
            if isinstance(base, Copied) and any(begin[kind].digests.keys() & names for kind, names in asked.items()):
                raise self.missed()
            for kind, names in asked.items():
                await self._send_all(stream, senders[kind].frames(names))
            stream.max_payload_bytes = 0
            reply = await _answer(stream)
        wrong = [what for what, own in acknowledged.items() if reply.header.get(what) != own]
        if reply.kind == messages.READY and wrong:
            raise ProtocolError(f"it is ready for another {', '.join(wrong)} than was offered")
        return reply

    async def _send_all(self, stream: Stream, frames: Iterator[Frame]) -> None:
        while True:
            async with self._making:
                frame = await asyncio.to_thread(next, frames, None)
                if frame is None:
                    return
                large = sum(map(len, frame.payloads)) > GROUP_BYTES
                if large:
                    await stream.send(frame)
            if not large:
                await stream.send(frame)


async def _answer(stream: Stream) -> Frame:
    """The next frame that is more than a sign of life."""
    while (frame := await stream.recv()).kind == messages.PONG:
        pass
    return frame
