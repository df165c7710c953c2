"""One epoch's stream to the supplier: what the owner says instead of feeding, and what it hears of it.

The idea: for each micro-batch there goes a list of indices, and rows for each member that takes inputs. That these have come,
members show by their answers, as always.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import structlog

from meshcee.config import Timeouts
from meshcee.errors import JoinError, MeshceeError, PeerLostError, UsageError
from meshcee.events import Event
from meshcee.fields import Count, NotNegative, ShortText
from meshcee.job import Job
from peers.owner.supplier.supplier import Supplier
from peers.transport import Frame, Stream, StreamClosed, Transport
from peers.wire import LOST_HERE, SILENT, Failures, Link, Outbox, Round, beat, messages, need, unless_silent

__all__ = ["Supply"]

log = structlog.get_logger()

FEW_FRAMES = 64
QUIET_S = 50.0  # after a supplier has said that it has been reading for long


class Fed(Protocol):
    """A step's answers, which say who has fed it."""

    round: Round
    fed_bytes: dict[str, int]
    feeder: str
    read_at: str


class Supply:
    """`begin` once all members are ready, `run` beside the epoch, `close` before members are left. `read` hears for which round the
    supplier has read, and for how many seconds; `tell` hears in a sentence that it has been reading for long."""

    def __init__(
        self,
        supplier: Supplier,
        job: Job,
        failures: Failures,
        read: Callable[[int, float], None],
        tell: Callable[[str], None],
        timeouts: Timeouts,
    ) -> None:
        self._supplier = supplier
        self._job = job
        self._failures = failures
        self._read, self._tell = read, tell
        self._source = ""  # the supplier's own file and function
        self._timeouts = timeouts
        self._places: dict[str, int] = {}  # of members that take inputs, in the list that the supplier has
        self._sample_bytes: dict[str, int] = {}  # of what each of them takes
        self._is_closing = False
        self._quiet_until_s = 0.0  # by the loop's clock
        self._stream: Stream | None = None
        self._outbox: Outbox

    async def begin(self, links: Sequence[Link], transport: Transport, size: int) -> None:
        """Name the set and the members. Raises why there is no data."""
        supplier, at = self._supplier, self._supplier.at
        takes = {link.peer_id: link.offer.raw_inputs(forward_only=False) for link in links}
        members = [(peer, names) for peer, names in takes.items() if names]
        self._places = {peer: k for k, (peer, _) in enumerate(members)}
        self._sample_bytes = {peer: sum(supplier.bytes[name] for name in names) for peer, names in members}
        header = links[0].offer.attach_header() | {
            "dataset": at.name,
            "samples": at.samples,
            "seed": self._job.seed,
            "size": size,
            "inputs": supplier.inputs,
            "members": members,
        }
        try:
            async with asyncio.timeout(self._timeouts.offer_s):
                stream = self._stream = await transport.open(supplier.peer, "data", supplier.addresses)
                stream.max_payload_bytes = 0
                await stream.send(Frame(messages.DATASET, header))
                reply = await unless_silent(partial(_reply, stream), stream, self._timeouts)
        except (JoinError, StreamClosed, TimeoutError) as error:
            raise self._lost(str(error) or "it does not answer") from error
        if reply.kind != messages.OPENED:
            raise self._failed(reply)
        self._source = need({"source": "", **reply.header}, "source", ShortText)
        self._outbox = Outbox(stream, limit_frames=FEW_FRAMES)

    async def ask(self, answers: Fed, micro: int, indices: Sequence[int], size: int, links: Sequence[Link]) -> None:
        """For a micro-batch of one pipeline, `micro` in its own count. What is sent for it counts as fed, by the supplier."""
        rows = [(link.peer_id, *link.place.rows(size)) for link in links if link.peer_id in self._places]
        to = [(self._places[peer], first, end) for peer, first, end in rows if first < end]
        answers.feeder, answers.read_at = self._supplier.name, f" at {self._supplier.name}{self._named}"
        for peer, first, end in rows:
            if peer != self._supplier.peer:  # what a supplier gives its own stage crosses no link
                answers.fed_bytes[peer] = answers.fed_bytes.get(peer, 0) + (end - first) * self._sample_bytes[peer]
        header = {"round": answers.round.number, "micro": micro, "step": answers.round.step, "to": to}
        await self._outbox.put(Frame(messages.READ, header, [np.asarray(indices, "<i8").tobytes()]))

    async def run(self) -> None:
        """Until `close`, or until the supplier fails, which ends the epoch."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._outbox.run())
                group.create_task(beat(self._outbox, self._timeouts, self._silent))
                group.create_task(self._hear())
        except* StreamClosed as closed:
            if not self._is_closing:
                self._failures.add(LOST_HERE, self._lost(str(closed.exceptions[0])))
        except* MeshceeError as errors:
            self._failures.add(LOST_HERE, self._lost(str(errors.exceptions[0])))

    def _silent(self) -> None:
        raise StreamClosed(SILENT)

    async def _hear(self) -> None:
        assert self._stream is not None
        while True:
            frame = await self._stream.recv()
            if frame.kind == messages.FAILED:
                error = self._failed(frame)
                by_another = frame.header.get("lost") is not None  # the member itself may say why
                self._failures.add(0 if isinstance(error, UsageError) else LOST_HERE + by_another, error)
                self._is_closing = True
            elif frame.kind == messages.AWAITED:
                self._awaited(need(frame.header, "step", Count), need(frame.header, "seconds", NotNegative))
            elif frame.kind == messages.GIVEN:
                self._read(need(frame.header, "round", int), need(frame.header, "seconds", NotNegative))

    @property
    def _named(self) -> str:
        return f" ({self._source})" if self._source.isprintable() and self._source else ""

    def _awaited(self, step: int, seconds: float) -> None:
        """The supplier says so after a few seconds, and then once a minute; one that says so more often is not heard."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._quiet_until_s:
            return
        self._quiet_until_s = now_s + QUIET_S
        peer, dataset = self._supplier.name, self._supplier.at.name
        about = {"peer": peer, "dataset": dataset, "source": self._source, "step": step, "seconds": seconds}
        log.info(Event.DATA_AWAITED, **about)
        self._tell(
            f"training waits for data: {peer} has been reading dataset {dataset!r}{self._named} for {seconds:.0f} s, for step "
            f"{step + 1}; see the log of that peer, or Ctrl-C twice ends the run"
        )

    async def close(self) -> None:
        self._is_closing = True
        if self._stream is not None:
            await self._stream.aclose()

    def abort(self) -> None:
        self._is_closing = True
        if self._stream is not None:
            self._stream.abort()

    def _failed(self, frame: Frame) -> MeshceeError:
        """What it says: of the user's own or its owner's code; of a member that it does not reach; of itself."""
        error, member = messages.error_from(frame.header), frame.header.get("lost")
        if isinstance(error, UsageError):
            return error
        if frame.header.get("left") is True:
            self._supplier.lose()
            return PeerLostError(f"{self._supplier.name}, which has the data: {error}")
        if isinstance(member, str):
            self._failures.blame(self._supplier.peer, [member])
            return PeerLostError(f"{self._supplier.name}, which has the data, says: {error}")
        if isinstance(error, PeerLostError):  # its process has ended: the next epoch has another
            return PeerLostError(f"{self._supplier.name}: {error}")
        return self._lost(str(error))

    def _lost(self, why: str) -> PeerLostError:
        self._supplier.lose()
        return PeerLostError(f"{self._supplier.name}, which has the data, was lost: {why}")


async def _reply(stream: Stream) -> Frame:
    while (frame := await stream.recv()).kind == messages.PONG:
        pass
    return frame
