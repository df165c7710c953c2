"""A supplier at work: an owner says which samples a step has, and they go from here to the members that need them.

The idea: an owner opens a stream for each epoch, names the set and the members, and then sends indices. Each member has a stream of
its own from here, on which it takes inputs as it would from its owner. Who may open such a stream, its certificate says (`own`).
What it may read is one of the names that this peer's owner has given out.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Protocol

import numpy as np
import structlog
import torch
from msgspec import Meta

from meshcee.errors import JoinError, MeshceeError, NotPermittedError, PeerLostError, ProtocolError, UsageError
from meshcee.events import Event
from meshcee.fields import Count, Name, ShortText, read
from meshcee.stage import tensors
from peers.member import Member
from peers.member.service import Session
from peers.mesh_view import MeshView
from peers.node.datasets.dataset import Layout, Patience
from peers.node.datasets.packets import INDEX_BYTES
from peers.node.device_process import DeviceProcess
from peers.node.lent import Lent
from peers.transport import Frame, Stream, StreamClosed
from peers.wire import Outbox, live, messages, most_telling, while_alive

__all__ = ["Asked", "DataService", "Source", "Wanted"]

log = structlog.get_logger()

DTYPES = {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
MOST_WAITING = 64  # micro-batches that an owner may ask for ahead; it has no reason for so many


class Source(Protocol):
    """A set that is open, as `Dataset` is."""

    samples: int
    source: str  # its file and function, for people

    async def batch(self, seed: int, step: int, indices: list[int], layout: Layout) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True)
class Asked:
    """What an owner says first: the set, as it knows it; type and shape of each input of a sample; members, and what each takes."""

    dataset: Name
    samples: Count
    seed: int
    size: Annotated[int, Meta(ge=1, le=1 << 16)]  # samples of a micro-batch
    inputs: Annotated[tuple[tuple[Name, ShortText, tuple[Count, ...]], ...], Meta(min_length=1, max_length=256)]
    members: Annotated[tuple[tuple[ShortText, tuple[Name, ...]], ...], Meta(min_length=1, max_length=256)]

    @property
    def layout(self) -> Layout:
        if not {dtype for _, dtype, _ in self.inputs} <= DTYPES.keys():
            raise ProtocolError("an owner expects samples of a type that torch does not have")
        return {name: (DTYPES[dtype], shape) for name, dtype, shape in self.inputs}


@dataclass(frozen=True)
class Wanted:
    """A micro-batch of a round, as this step reads it; and for members, by their places in the list, rows of it: [first, end)."""

    round: Count
    micro: Count
    step: Count
    to: Annotated[tuple[tuple[Count, Count, Count], ...], Meta(max_length=256)]


class _OwnerDone(Exception):
    """The owner closed its stream: the epoch is over."""


class _Target:
    """A member of the epoch, over a stream; or this very peer, which opens no stream to itself."""

    def __init__(self, peer: str, names: tuple[str, ...], to: Outbox | Session) -> None:
        self.peer, self.names, self._to = peer, names, to

    @property
    def outbox(self) -> Outbox | None:
        return self._to if isinstance(self._to, Outbox) else None

    async def put(self, frame: Frame) -> None:
        if isinstance(self._to, Outbox):
            await self._to.put(frame)
        else:
            self._to.supply(self.peer, frame)


class DataService:
    """Serves the stream `data` of a peer of this name that has these sets; `lent` is what it lends now."""

    def __init__(
        self, agent: MeshView, name: str, datasets: Mapping[str, Source], lent: Callable[[], Lent | None]
    ) -> None:
        self._agent, self._name = agent, name
        self._datasets, self._lent = datasets, lent
        self._supplies: set[_Supply] = set()  # of epochs that run
        self._changed = asyncio.Condition()
        self._has_left = False
        agent.transport.serve("data", self._serve)

    @property
    def supplies(self) -> set[str]:
        """Names of the sets from which jobs are fed now."""
        return {supply.asked.dataset for supply in self._supplies}

    async def wait_until_unneeded(self) -> None:
        """Until no job has been fed from here for a moment, in which its next epoch may begin. Owners hear from our record that we
        want to leave: who finds another peer with the set goes over to that one."""
        if self._supplies:
            log.warning(Event.DATA_NEEDED, datasets=sorted(self.supplies), within_s=self._agent.timeouts.leave_s)
        async with self._changed:
            while self._supplies:
                await self._changed.wait_for(lambda: not self._supplies)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._agent.timeouts.announce_every_s):
                        await self._changed.wait_for(lambda: bool(self._supplies))

    async def drop(self) -> None:
        """Supply nobody any more, and say so to who still takes samples. Bounded in time."""
        self._has_left = True
        for supply in self._supplies:
            supply.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._agent.timeouts.shutdown_s), self._changed:
                await self._changed.wait_for(lambda: not self._supplies)

    async def _note(self, supply: _Supply, *, runs: bool) -> None:
        (self._supplies.add if runs else self._supplies.discard)(supply)
        async with self._changed:
            self._changed.notify_all()

    async def _serve(self, stream: Stream) -> None:
        stream.max_payload_bytes = 0
        async with asyncio.timeout(self._agent.timeouts.join_s):
            frame = await stream.recv()
        lent = self._lent()
        supply = _Supply(self._agent, self._name, stream, lent)
        if self._has_left:
            supply.leave()
        try:
            try:
                await while_alive(partial(supply.open, frame, self._datasets), stream, self._agent.timeouts)
            except (MeshceeError, StreamClosed) as error:
                log.warning("an owner gets no data", owner=stream.peer_id, error=str(error))
                with contextlib.suppress(StreamClosed):
                    about = {"lost": getattr(error, "__notes__", [None])[0], "left": self._has_left}
                    await stream.send(Frame(messages.REFUSED, messages.error_header(error, **about)))
                return
            log.info("data for a job", dataset=supply.asked.dataset, owner=stream.peer_id)
            await self._note(supply, runs=True)
            await supply.run()
        finally:
            supply.close()
            await self._note(supply, runs=False)


class _Supply:
    """One epoch's, for one owner."""

    def __init__(self, agent: MeshView, name: str, stream: Stream, lent: Lent | None) -> None:
        self._agent, self._name = agent, name
        self._stream = stream
        self._lent = lent
        self._owner = Outbox(stream)
        self._wanted = asyncio.Queue[tuple[Wanted, list[int]]](maxsize=MOST_WAITING)
        self._targets: list[_Target] = []
        self._leaves = asyncio.Event()
        self._patience = Patience(self._tell_awaited)
        self._step = 0  # for which samples are being read
        self.asked: Asked

    async def open(self, frame: Frame, datasets: Mapping[str, Source]) -> None:
        """Reach all members. Raises why the owner gets nothing."""
        if frame.kind != messages.DATASET:
            raise ProtocolError(f"expected a question for data, got a frame of kind {frame.kind!r}")
        asked = self.asked = read(frame.header, Asked, "a question for data")
        if self._leaves.is_set():
            raise PeerLostError("it was asked to leave the mesh, and leaves")
        if (found := datasets.get(asked.dataset)) is None:
            raise UsageError(
                f"peer {self._name} has no dataset {asked.dataset!r} any more: see `meshcee status --json`"
            )
        if found.samples != asked.samples:
            raise UsageError(
                f"dataset {asked.dataset!r} of peer {self._name} has {found.samples} samples, and At(...) says {asked.samples}"
            )
        sample_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in asked.layout.values())
        if asked.size * sample_bytes > (most := self._agent.limits.payload_bytes):
            raise UsageError(f"a micro-batch of {asked.size} samples has more than {most} bytes: take a smaller one")
        if any(peer == self._stream.peer_id for peer, _ in asked.members):
            raise NotPermittedError("samples of a dataset go to members of a job, and never to its owner")
        self._source, self._layout = found, asked.layout
        attach = {"epoch": list(messages.epoch_of(frame.header)), "run": messages.run_of(frame.header)}
        for peer, names in asked.members:
            if not set(names) <= self._layout.keys():
                raise ProtocolError("a member is to be sent inputs that samples do not have")
            await self._reach(peer, names, attach | {"owner": self._stream.peer_id})
        self._stream.max_payload_bytes = INDEX_BYTES * asked.size
        await self._stream.send(Frame(messages.OPENED, {"source": found.source}))

    async def _reach(self, peer: str, names: tuple[str, ...], attach: dict[str, Any]) -> None:
        agent = self._agent
        if peer == agent.peer_id and isinstance(self._lent, Member):
            self._targets.append(_Target(peer, names, self._lent.session_in(attach, peer)))
            return
        try:
            stream = await self._stream_to(peer)
            stream.max_payload_bytes = 0
            self._targets.append(_Target(peer, names, Outbox(stream)))
            async with asyncio.timeout(agent.timeouts.join_s):
                await stream.send(Frame(messages.ATTACH, attach))
                reply = await stream.recv()
        except (JoinError, StreamClosed, TimeoutError) as error:
            raise _lost(peer, str(error) or "it does not answer") from error
        if reply.kind != messages.ATTACH:
            raise _lost(peer, f"it answered with {reply.kind!r}")

    async def _stream_to(self, peer: str) -> Stream:
        agent = self._agent
        if peer != agent.peer_id:
            await agent.wait_for_peers([peer])
            return await agent.transport.open(peer, "inputs", agent.addresses_of([peer])[peer])
        if not isinstance(self._lent, DeviceProcess):
            raise JoinError("it lends no device")
        return await self._lent.dial("inputs")

    async def run(self) -> None:
        """Until the owner has enough, or something fails, which it is told."""
        timeouts = self._agent.timeouts
        try:
            async with asyncio.TaskGroup() as group:
                for work in (self._unless_gone(), self._hear(), self._work(), self._unless_left()):
                    group.create_task(work)
                for target in self._targets:
                    if (outbox := target.outbox) is not None:
                        for work in (outbox.run(), live(outbox, timeouts), _listen(outbox)):
                            group.create_task(_unless_lost(target.peer, work))
        except* _OwnerDone:
            pass
        except* Exception as failures:
            error = most_telling(failures)
            log.warning("an owner gets no more data", owner=self._stream.peer_id, error=str(error))
            about = {"lost": getattr(error, "__notes__", [None])[0], "left": self._leaves.is_set()}
            with contextlib.suppress(StreamClosed, TimeoutError):
                async with asyncio.timeout(timeouts.shutdown_s):
                    await self._stream.send(Frame(messages.FAILED, messages.error_header(error, **about)))

    def leave(self) -> None:
        """The peer goes: `run` ends, and the owner hears why."""
        self._leaves.set()

    async def _unless_left(self) -> None:
        await self._leaves.wait()
        raise PeerLostError("it was asked to leave the mesh, and has left")

    def close(self) -> None:
        for target in self._targets:
            if target.outbox is not None:
                target.outbox.stream.abort()

    async def _unless_gone(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._owner.run())
                group.create_task(live(self._owner, self._agent.timeouts))
        except* StreamClosed as closed:
            raise _OwnerDone from closed

    async def _hear(self) -> None:
        while True:
            try:
                frame = await self._stream.recv()
            except StreamClosed as closed:
                raise _OwnerDone from closed
            if frame.kind == messages.READ:
                wanted = read(frame.header, Wanted, "a question for samples")
                indices = np.frombuffer(frame.payloads[0] if frame.payloads else b"", "<i8").tolist()
                if len(indices) != self.asked.size or not all(0 <= i < self.asked.samples for i in indices):
                    raise ProtocolError("an owner asks for samples that the dataset does not have")
                if not all(k < len(self._targets) and first < end <= len(indices) for k, first, end in wanted.to):
                    raise ProtocolError("an owner sends samples to members that it has not named")
                await self._wanted.put((wanted, indices))
            elif frame.kind != messages.PING:
                raise ProtocolError(f"an owner sent a frame of kind {frame.kind!r}, which has no meaning here")

    def _tell_awaited(self, seconds: float) -> None:
        """In this peer's log, and to the owner."""
        about = {"step": self._step, "seconds": round(seconds, 1)}
        owner, dataset = self._stream.peer_id, self.asked.dataset
        log.warning(Event.DATA_AWAITED, owner=owner, dataset=dataset, source=self._source.source, **about)
        self._owner.post(Frame(messages.AWAITED, about))

    async def _work(self) -> None:
        while True:
            wanted, indices = await self._wanted.get()
            began_s = time.perf_counter()
            self._step = wanted.step
            inputs = await self._patience.wait(self._source.batch(self.asked.seed, wanted.step, indices, self._layout))
            took_s = time.perf_counter() - began_s
            for k, first, end in wanted.to:
                target = self._targets[k]
                meta, payloads = tensors.pack([inputs[name][first:end] for name in target.names])
                header = {"round": wanted.round, "micro": wanted.micro, "names": list(target.names), "tensors": meta}
                await target.put(Frame(messages.INPUT, header, payloads))
            await self._owner.put(Frame(messages.GIVEN, {"round": wanted.round, "seconds": took_s}))


def _lost(peer: str, why: str) -> PeerLostError:
    error = PeerLostError(f"peer {peer} takes no samples: {why}")
    error.add_note(peer)
    return error


async def _unless_lost(peer: str, work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except StreamClosed as closed:
        raise _lost(peer, str(closed)) from closed


async def _listen(outbox: Outbox) -> None:
    """A member has no more to say than that it lives, or what is wrong."""
    while (frame := await outbox.stream.recv()).kind == messages.PONG:
        pass
    if frame.kind != messages.FAILED:
        raise ProtocolError(f"a member sent a frame of kind {frame.kind!r} where inputs go")
    raise messages.error_from(frame.header)
