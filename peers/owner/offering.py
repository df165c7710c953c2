"""How an offer reaches a member: the graph, then the weights or how to make them, then the member's answer.

The idea: weights go out tensor by tensor and to all members side by side, so the slowest link holds nobody up. Whoever offers
makes one frame at a time, and none while those on their way hold much memory. An offer may take as long as it gets on: as
bytes leave, or as the member says that it has more of it than before. `check_members` says first whether they can have the plan.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterator, Mapping
from functools import partial

import structlog

from meshcee.capture import Capture
from meshcee.capture.initial_state import InitialState
from meshcee.config import Limits, Timeouts
from meshcee.errors import CaptureError, ProtocolError
from meshcee.events import Event
from meshcee.figures import DeviceProfile
from meshcee.figures.kernels import check_alike
from meshcee.files.tensor_files import nbytes_of
from meshcee.job import Job
from meshcee.plan import Plan
from meshcee.stage import check_kinds
from peers.state import Beginning, CopySet, Supplies, state_for
from peers.transport import Frame, Stream, StreamClosed
from peers.wire import SLACK_BYTES, NotFoundError, Offer, StateSender, messages, names_of, while_alive

__all__ = ["Offering", "check_members"]

log = structlog.get_logger()

HELD_BYTES = 1 << 30  # of frames on their way, before another one is made
ASKED_BYTES = 1 << 16  # of a frozen tensor: below, sending takes no longer than asking whether a member has it


class Offering:
    """The offers of one epoch, over weights as captured or, to go on from it, of a checkpoint or of copies with peers."""

    def __init__(self, captured: Capture, kept: Supplies, limits: Limits, timeouts: Timeouts) -> None:
        self._captured = captured
        self._kept = kept
        self._limits = limits
        self._timeouts = timeouts
        self._missed = kept.base.missed + 1 if isinstance(kept.base, CopySet) else 0  # if a member does not find all
        self._making = asyncio.Lock()  # frames of weights
        self._held_bytes = 0
        self._freed = asyncio.Event()
        self._sending: set[Stream] = set()  # on which a frame of weights is on its way
        self._awaited: set[Stream] = set()  # whose member has to do something now
        self._told: dict[Stream, object] = {}  # what a member said last of how far it is

    def missed(self, peer: str, names: Collection[str] = ()) -> NotFoundError:
        """A member has not found all of the copies that this epoch begins with, of these weights or of what the optimizer keeps.

        ProtocolError where the epoch begins with none.
        """
        base = self._kept.base
        if not isinstance(base, CopySet):
            raise ProtocolError("it asked again for what no peer was to give it")
        base.missed = self._missed
        log.info(Event.COPIES_OUT_OF_REACH, next_step=base.next_step, far=base.far, epochs=base.missed, peer=peer)
        return NotFoundError(
            f"not all of the state after {base.next_step} steps has reached {peer}: a link to who holds it may have failed",
            (peer, *base.sources(names)),
        )

    async def send(self, stream: Stream, offer: Offer) -> Frame:
        """Offer; returns READY, which has been held against what was sent, or REFUSED. Raises StreamClosed."""
        # Encoding and hashing take seconds for a large model: not on the event loop.
        base = self._kept.base
        sources = base.sources(offer.expected_state) if isinstance(base, CopySet) else ()
        frame = await asyncio.to_thread(offer.frame, sources)
        if (size := max(map(len, frame.payloads))) > self._limits.graph_bytes:
            raise CaptureError(
                f"the captured graph has {size} bytes and peers accept {self._limits.graph_bytes}: keep large "
                "constant tensors in buffers of the model"
            )
        await self._send(stream, frame)
        return await while_alive(partial(self._send_state, stream, offer), stream, self._timeouts)

    def moved(self, stream: Stream) -> object:
        """Another value than before where an offer gets on, or waits for ourselves."""
        if stream in self._sending:
            return stream.sent_bytes
        return self._told.get(stream) if stream in self._awaited else object()

    async def _send_state(self, stream: Stream, offer: Offer) -> Frame:
        acknowledged: dict[str, object] = {
            "plan": offer.plan.hash(),
            "epoch": list(offer.epoch),
            "term": list(offer.term),
        }
        base = self._kept.base
        begin = await asyncio.to_thread(state_for, offer, self._captured, base)
        stream.max_payload_bytes = SLACK_BYTES + sum(len(n) for part in begin.values() for n in part.names)  # for AGAIN
        senders = {kind: StateSender(part.values, part.digests) for kind, part in begin.items()}
        with contextlib.suppress(StreamClosed):  # a member that refuses closes: its reason is read below
            for kind, part in begin.items():
                held = self._may_have(offer, part)  # of which only what it lacks is sent
                await self._send_all(stream, senders[kind].frames(part.names, recipes=True, held=held))
                acknowledged[kind] = senders[kind].hash
        reply = await self._answer(stream)
        if reply.kind == messages.AGAIN:
            asked = {kind: names_of(reply, i, set(part.names)) for i, (kind, part) in enumerate(begin.items())}
            if isinstance(base, CopySet) and any(begin[kind].digests.keys() & names for kind, names in asked.items()):
                raise self.missed(offer.peer_id, set[str]().union(*asked.values()))
            for kind, names in asked.items():
                await self._send_all(stream, senders[kind].frames(names))
            stream.max_payload_bytes = 0
            reply = await self._answer(stream)
        wrong = [what for what, own in acknowledged.items() if reply.header.get(what) != own]
        if reply.kind == messages.READY and wrong:
            raise ProtocolError(f"it is ready for another {', '.join(wrong)} than was offered")
        return reply

    def _may_have(self, offer: Offer, part: Beginning) -> Collection[str]:
        """The names that a member may hold. Of another epoch or try all; of another job of ours what training leaves as it is.
        What a recipe makes costs no bytes anyway."""
        if offer.peer_id in self._kept.holders and not isinstance(part.values, InitialState):
            return frozenset(part.names)
        if isinstance(self._kept.base, CopySet):
            return ()
        frozen = offer.frozen_state
        return {name for name in part.names if name in frozen and nbytes_of({name: frozen[name]}) >= ASKED_BYTES}

    async def _send_all(self, stream: Stream, frames: Iterator[Frame]) -> None:
        while True:
            async with self._making:
                while self._held_bytes >= HELD_BYTES:
                    self._freed.clear()
                    await self._freed.wait()
                frame = await asyncio.to_thread(next, frames, None)
                if frame is None:
                    return
                self._held_bytes += frame.payload_bytes
            try:
                await self._send(stream, frame)
            finally:
                self._held_bytes -= frame.payload_bytes
                self._freed.set()
            del frame

    async def _send(self, stream: Stream, frame: Frame) -> None:
        self._sending.add(stream)
        try:
            await stream.send(frame)
        finally:
            self._sending.discard(stream)

    async def _answer(self, stream: Stream) -> Frame:
        """The next frame that is more than a sign of life."""
        self._awaited.add(stream)
        try:
            while (frame := await stream.recv()).kind == messages.PONG:
                self._told[stream] = frame.header.get("moved")
            return frame
        finally:
            self._awaited.discard(stream)


def check_members(
    job: Job, captured: Capture, plan: Plan, devices: Mapping[str, DeviceProfile], names: Mapping[str, str]
) -> None:
    """Raises PlanError or UsageError where the members of a plan cannot have it together."""
    if job.audit:
        from peers.owner.audit import check_judges

        check_judges(plan, devices, names)
    for peer in plan.peers:
        job.optimizer.check_device(devices[peer].kind)
    check_kinds(captured, plan, {peer: device.kind for peer, device in devices.items()})
    check_alike(plan, devices, names)
