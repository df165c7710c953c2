"""The device's process: a transport that ends at the peer, one device, the member and the profiler that use it.

The idea: what touches a stage knows of others only through its transport, so all of it runs here as it does in the peer's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import uvloop

from meshcee.capture import Program, decode_program, prepare
from meshcee.config import Limits
from meshcee.errors import PeerLostError, ProtocolError, unwrap
from meshcee.files import settled
from meshcee.job import seeded
from meshcee.optim import PER_PARAMETER, Optimizer
from peers.device import Compute, Graphs, measure_device
from peers.device.worker.confine import die_with
from peers.device.worker.packets import Confinement, sealed
from peers.measure import lend_profiles
from peers.member import Member
from peers.node.device_process.confine import confine, confine_fully, refuse_rings
from peers.node.device_process.messages import (
    MOST_CHECKS,
    TO_DEVICE,
    Accept,
    Answer,
    Bandwidth,
    Begin,
    Begun,
    Check,
    Crossed,
    Drop,
    Leave,
    Ping,
    Pong,
    Ready,
    Speaks,
    State,
    first,
)
from peers.node.device_process.sayings import say_by
from peers.transport import StreamClosed
from peers.transport.bridge import GIVES, Bridged, Channel
from peers.wire import Offer, messages

__all__ = ["main"]

LAST_WORD_S = 0.2  # for a refusal to reach the peer


class _Questions:
    """Asked of the peer, answered by number."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = itertools.count()
        self._open: dict[int, tuple[asyncio.Future[None], Callable[[], None]]] = {}

    def ask(
        self, kind: type[Any], handle: int = -1, over: Callable[[], None] = lambda: None, **fields: Any
    ) -> asyncio.Future[None]:
        """Raises the error that the peer answers with, as if it had been raised here. `over` is called with the answer, also where
        nobody waits for that any more."""
        number = next(self._numbers)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._channel.post(kind(number=number, **fields), handle)
        self._open[number] = answer, over
        return answer

    def hear(self, answer: Answer) -> None:
        if (found := self._open.pop(answer.number, None)) is None:
            return
        waits, over = found
        over()
        if not waits.done():
            if answer.wrong:
                waits.set_exception(messages.error_from({"error": answer.kind, "message": answer.wrong}))
            else:
                waits.set_result(None)


class _Graphs(Graphs):
    """The peer has them checked."""

    def __init__(self, limits: Limits, questions: _Questions) -> None:
        super().__init__(limits)
        self._questions = questions
        self._turns = asyncio.Semaphore(MOST_CHECKS)

    async def read(self, graphs: Sequence[bytes]) -> list[Program]:
        await self._turns.acquire()
        try:  # a copy in memory; made by a thread, it would stay open where this is cancelled
            checked = self._questions.ask(Check, sealed(graphs), self._turns.release, sizes=tuple(map(len, graphs)))
        except BaseException:
            self._turns.release()
            raise
        await checked
        return await asyncio.to_thread(lambda: [decode_program(graph, self.limits, checked=True) for graph in graphs])


GiveUp = tuple[Callable[[Begin], Confinement], Callable[[Begin, Confinement, int], Confinement]]
NOTHING: GiveUp = (lambda begin: Confinement((), (), ()), lambda begin, before, memory_bytes: before)


async def serve(end: socket.socket, give_up: GiveUp = NOTHING) -> None:
    """Until the peer closes the channel. The first of `give_up` is called while there is one thread, the second before Ready."""
    channel = Channel(end, (*TO_DEVICE, *GIVES))
    try:
        begin, _ = await channel.receive()
        if not isinstance(begin, Begin):
            raise ProtocolError("the peer of this device does not say first for whom it works")
        say_by(partial(_post, channel))
        first_part, rest = give_up
        with settled():
            await _serve(channel, begin, partial(rest, begin, first_part(begin)))
    except* StreamClosed:
        pass
    finally:
        channel.close()


def _post(channel: Channel, message: Any) -> None:
    """Nothing where the peer is gone: then this process ends anyway."""
    with contextlib.suppress(StreamClosed):
        channel.post(message)


async def _serve(channel: Channel, begin: Begin, give_up: Callable[[int], Confinement]) -> None:
    torch.set_num_threads(begin.threads)
    questions, known = _Questions(channel), dict[str, float]()
    graphs = _Graphs(begin.limits, questions)

    async def accept(owner: str, offer: Offer) -> None:
        await questions.ask(Accept, owner=owner, term=tuple(offer.term))
        offer.check_consent("this peer", direct_sums=begin.direct_sums)

    def begun() -> Any:
        _post(channel, Begun())
        return crossed

    def crossed(rates: Mapping[str, float], depths: Mapping[str, float]) -> None:
        _post(channel, Crossed(first(rates), first(depths)))

    from peers.wire.audit import Delegate

    speaks = Delegate.read(begin.speaks) if begin.speaks else None

    def sign(data: bytes) -> bytes:
        assert speaks is not None
        return speaks.sign(data)  # by the newest

    async with Compute(begin.device, restarts=True) as compute:
        await graphs.get_ready()
        device = begin.known or await measure_device(
            compute, begin.memory_bytes, host=begin.host, threads_said=begin.threads_said
        )
        transport = Bridged(begin.peer, channel, limits=begin.limits, timeouts=begin.timeouts)
        await compute.run(_first_steps, compute.device)
        await _first_stream()
        confinement = await asyncio.to_thread(give_up, device.memory_bytes)
        async with transport, asyncio.TaskGroup() as group:
            member = Member(
                transport,
                compute,
                memory_bytes=device.memory_bytes,
                timeouts=begin.timeouts,
                graphs=graphs,
                accept=accept,
                sign=sign if begin.speaks else None,
                begun=begun,
                bandwidth=lambda peer: known.get(peer, math.inf),
            )
            lend_profiles(transport, compute, device, member, graphs, shared=bool(begin.host), timeouts=begin.timeouts)
            group.create_task(_tell_state(channel, member))
            group.create_task(_end_when_broken(compute, member, begin.timeouts.hung_s))
            channel.post(Ready(device, confinement))
            while True:
                message, handle = await channel.receive()
                match message:
                    case Answer():
                        questions.hear(message)
                    case Bandwidth():
                        known.clear()
                        known.update(message.bytes_per_s)
                    case Speaks():
                        speaks = Delegate.read(message.key)
                    case Ping():
                        channel.post(Pong())
                    case Leave():
                        member.leave()
                    case Drop():
                        group.create_task(member.drop())
                    case _:
                        transport.take(message, handle)


def _first_steps(device: torch.device) -> None:
    """Of every optimizer that a job may have: what torch imports or opens for a step, this process has then."""
    for name in sorted(PER_PARAMETER):
        weight = torch.nn.Parameter(torch.ones(64, 64, device=device))  # enough for moments in 8 bits
        optimizer = Optimizer(name, lr=0.1).build({"weight": weight})
        with seeded(0, 0, 0):
            torch.nn.functional.dropout(weight @ weight).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()


async def _first_stream() -> None:
    """With it libuv opens what it needs when there are too many files."""
    near, far = socket.socketpair()
    with far:
        stream, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=near)
        stream.close()


async def _tell_state(channel: Channel, member: Member) -> None:
    while True:
        await member.busy_changed.wait()
        member.busy_changed.clear()
        if member.is_leaving and not member.is_busy:
            await member.wait_until_unneeded()
        channel.post(State(member.is_busy))


async def _end_when_broken(compute: Compute, member: Member, most_s: float) -> None:
    """Once whoever works here has heard why, after `most_s` at the latest: its peer starts the next process."""
    why = await compute.calls.until_broken()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(most_s):
            await member.wait_until_idle()
    await asyncio.sleep(LAST_WORD_S)
    raise PeerLostError(why)


def main() -> None:
    """Arguments: the parent's process id, the descriptor of the channel."""
    parent, handle = map(int, sys.argv[1:3])
    die_with(parent)
    refuse_rings()
    prepare()  # later it could not make the folders that torch makes when it is imported
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main(handle))


async def _main(handle: int) -> None:
    try:
        await serve(socket.socket(fileno=handle), (confine, confine_fully))
    except BaseException as error:
        traceback.print_exc()
        print(unwrap(error), file=sys.stderr)  # the last line is told by the peer
        os._exit(1)  # no thread of torch's is waited for
    os._exit(0)


if __name__ == "__main__":
    main()
