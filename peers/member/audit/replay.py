"""A member's step computed again: the same stage, the same state, the same frames, through the same executor.

The idea: nothing of a step is written twice. The executor that members run is given what this member received, all at once,
and neighbours that swallow what it sends. Its proof is then the proof that the member should have given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import torch

from meshcee.audit import Proof
from meshcee.errors import ProtocolError, leaves
from meshcee.role import StageFlops
from peers.device import Compute
from peers.member.audit.witness import StepWitness
from peers.member.executor import Executor
from peers.member.inbox import End, Inbox
from peers.state import CopyStore, by_parameter
from peers.transport import Frame
from peers.wire import OWNER, Offer, Outbox, Round, messages

__all__ = ["Raw", "again"]

Raw = Mapping[int, Mapping[str, torch.Tensor]]  # by micro-batch: what the owner fed the stage

MANY = 1 << 30  # frames of a step may all be here at once


class _Sink:
    """The other end of a link, which hears everything and says nothing."""

    def __init__(self, peer_id: str) -> None:
        self.peer_id, self.purpose = peer_id, "audit"
        self.max_payload_bytes = self.sent_bytes = self.received_bytes = 0
        self.received_payload_bytes, self.closed = 0, False
        self.frames: list[Frame] = []
        self.ended = asyncio.Event()

    def rates(self) -> tuple[float | None, float | None]:
        return None, None

    def under_way(self) -> int | None:
        return None

    def throttle(self, bytes_per_s: float) -> None: ...

    async def send(self, frame: Frame) -> None:
        if frame.kind in (messages.LOSS, messages.END):
            self.frames.append(frame)
        if frame.kind == messages.END:
            self.ended.set()

    async def recv(self) -> Frame:
        await asyncio.Event().wait()
        raise AssertionError

    async def aclose(self) -> None: ...

    def abort(self) -> None: ...


class _NothingComes(asyncio.Event):
    """Whoever waits for more to arrive was not shown everything."""

    async def wait(self) -> bool:  # type: ignore[override]
        raise ProtocolError("frames of the step are missing from what it has shown")


async def again(
    compute: Compute,
    offer: Offer,
    state: Mapping[str, torch.Tensor],
    frames: Sequence[tuple[str, Frame]],
    raw: Raw,
    round: Round,
) -> tuple[Proof, dict[int, list[float]]]:
    """The proof of this step on the stage of `offer`, and the loss and its terms that its last stage tells by micro-batch.

    `state` holds weights by name, and what the optimizer keeps by "<parameter>/<key>". Raises ProtocolError where the
    frames make no step.
    """
    await compute.use_threads(offer.plan.threads)
    weights = {name: tensor for name, tensor in state.items() if name in offer.expected_state}
    optimizer = {name: tensor for name, tensor in state.items() if name not in weights}
    runner = await compute.run(offer.build, weights, compute.device)
    await compute.run(runner.load_optimizer_state, by_parameter(optimizer))
    inbox, owner, held = Inbox(limit=MANY, done=round.number - 1, changed=_NothingComes()), _Sink(OWNER), CopyStore()
    fed = Outbox(owner)
    executor = Executor(runner, offer.place, inbox, compute, fed, StageFlops(), held, *offer.boundaries)
    witness = executor.links.witness = StepWitness(offer, held, lambda data: b"", None)
    boxes = [fed, *(Outbox(_Sink(peer)) for peer in offer.place.neighbours)]
    for box in boxes[1:]:
        executor.links.add(box.stream.peer_id, box)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(box.run()) for box in boxes]
            witness.begin(round)
            for micro, inputs in raw.items():
                inbox.put_raw(round.number, micro, inputs)
            for peer, frame in frames:
                await executor.take(peer, frame)
            await inbox.rounds.put(round)
            await inbox.rounds.put(End())
            tasks.append(group.create_task(executor.run()))
            await owner.ended.wait()
            proof = await witness.proof()
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as failed:
        raise leaves(failed)[0] from failed
    return proof, {frame.header["micro"]: frame.header["told"] for frame in owner.frames if frame.kind == messages.LOSS}
