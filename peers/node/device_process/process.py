"""The peer's side of its device's process: starts it, passes its streams on, answers it, and starts the next one when it ends.

The idea: whatever happens to the process is this device's local error. The owner of its job hears how the process has ended, and
the peer stays in the mesh. What the mesh was told of the device holds for the next process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import structlog
import torch

from meshcee.config import Timeouts
from meshcee.errors import MeshceeError, PlanError, ProtocolError, leaves
from meshcee.events import Event
from meshcee.fields import refuse_unprintable
from meshcee.figures import DeviceProfile
from meshcee.plan import Term
from peers.device import Graphs
from peers.device.worker.packets import Confinement, opened
from peers.mesh_view import MeshView
from peers.node.device_process.child import Child
from peers.node.device_process.messages import (
    MOST_CHECKS,
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
    Said,
    Speaks,
    State,
    first,
)
from peers.node.device_process.sayings import Hearing
from peers.transport import Frame, Stream, StreamClosed, Transport
from peers.transport.bridge import Passing
from peers.wire import Crossed as Hear
from peers.wire import messages

__all__ = ["DeviceProcess"]

log = structlog.get_logger()

# Purpose -> the payload bytes of a first frame: what each handler allows as its first act. That of a job depends on the limits.
SERVES = {"stage": 0, "inputs": 0, "copies": 2 << 20, "profile": 1 << 20}
OPENS = {"stage": 0, "copies": 0}  # who opens says at once what it takes, and only then asks
ASK_S = 0.5  # between two questions whether it is there
STILL_S = 1.5  # without an answer, in which it neither runs nor waits for a core: it is stopped, or waits for itself
MOST_TEXT = 2000
MOST_GRAPHS = 3  # of an offer
LONGEST_PAUSE_S = 60.0  # before a process is started again that has ended before it was ready


@dataclass(frozen=True)
class _Asked:
    """What the process may ask of its peer, and tell."""

    accept: Callable[[str, Term], None]
    addresses: Callable[[str], Awaitable[Sequence[str]]]
    begun: Callable[[], Hear]
    bandwidths: Callable[[], Mapping[str, float]]
    speaks: Callable[[bytes], bytes]


class OfDevice(Protocol):
    """What a peer's options say of its device."""

    @property
    def memory_bytes(self) -> int | None: ...

    @property
    def host(self) -> str: ...

    @property
    def threads_said(self) -> bool: ...

    @property
    def direct_sums(self) -> bool: ...


class DeviceProcess:
    """What an agent lends (`Lent`), in a process. Lifetime is `async with`, which starts it; `begin` says for whom it works."""

    def __init__(self, device: str, graphs: Graphs) -> None:
        self.is_leaving = False
        self.busy_changed = asyncio.Event()
        self.child: Child
        self._device, self._graphs = device, graphs
        self._begin: Begin
        self._asked: _Asked
        self._crossed: Hear = lambda rates, depths: None
        self._known: asyncio.Future[DeviceProfile] = asyncio.get_running_loop().create_future()
        self._group = asyncio.TaskGroup()
        self._running: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._checks = 0  # that wait
        self._hearing = Hearing()
        self._passing: Passing | None = None

    async def __aenter__(self) -> DeviceProcess:
        self.child = Child()
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is not None:
            self._running.cancel()
        self.child.kill()
        try:
            await self._group.__aexit__(kind, error, trace)
        finally:
            await self.child.end()

    async def lend(self, view: MeshView, said: OfDevice, asked: Mapping[str, Any]) -> DeviceProfile:
        """As `begin`, for the peer that sees the mesh like this; `asked` has what a peer that measures adds."""

        from peers.wire.audit import Delegate

        async def addresses(peer: str) -> Sequence[str]:
            if peer not in view.directory.peers:
                await view.wait_for_peers([peer])
            return view.directory.peers[peer].addresses

        return await self.begin(
            view.transport,
            timeouts=view.timeouts,
            accept=lambda owner, term: view.elector.accept(term),
            addresses=addresses,
            memory_bytes=said.memory_bytes,
            host=said.host,
            threads_said=said.threads_said,
            direct_sums=said.direct_sums,
            speaks=lambda before: Delegate.after(before, view.sign, view.clock()),
            **asked,
        )

    async def begin(
        self,
        transport: Transport,
        *,
        timeouts: Timeouts,
        accept: Callable[[str, Term], None],
        addresses: Callable[[str], Awaitable[Sequence[str]]],
        memory_bytes: int | None = None,
        host: str = "",
        threads_said: bool = False,
        direct_sums: bool = False,
        speaks: Callable[[bytes], bytes] = bytes,
        begun: Callable[[], Hear] = lambda: lambda rates, depths: None,
        bandwidths: Callable[[], Mapping[str, float]] = dict,
    ) -> DeviceProfile:
        """Serve this transport's streams from now on; what the device is. PlanError when its process is not there.

        accept      (owner, term) -> raises StaleTermError where the term is over
        addresses   where a peer of this mesh listens; JoinError for any other
        direct_sums it may use the network, for these
        speaks      the key that signs steps of audited jobs, after this one or b""; without one they are refused
        begun       a plan begins: what is to be told of each of its steps
        bandwidths  of the links from here, as published, the newest first
        """
        threads, limits = torch.get_num_threads(), self._graphs.limits
        self._begin = Begin(
            transport.peer_id,
            self._device,
            threads,
            memory_bytes,
            host,
            threads_said,
            None,
            direct_sums,
            b"",
            limits,
            timeouts,
        )
        self._asked = _Asked(accept, addresses, begun, bandwidths, speaks)
        self._running = self._group.create_task(self._run(transport))
        return await self._known

    async def _run(self, transport: Transport) -> None:
        pause_s = 0.0
        while True:
            how = await self._serve(transport, self.child)
            self._crossed = lambda rates, depths: None
            self._idle.set()
            self.busy_changed.set()
            if not self._known.done():
                said = f": {self.child.written}" if self.child.written else ""
                self._known.set_exception(PlanError(f"the process of this peer's device {how}{said}"))
                return
            log.error(Event.DEVICE_AWAY, how=how, written=self.child.written)
            pause_s = 0.0 if self.child.ready.is_set() else min(LONGEST_PAUSE_S, max(1.0, 2 * pause_s))
            await asyncio.sleep(pause_s)
            try:
                self.child = Child()
            except OSError as error:
                log.error("the process of this peer's device does not start", error=str(error))
                self.child.ready.clear()

    async def _serve(self, transport: Transport, child: Child) -> str:
        """Until it has ended: how it has."""
        passing = self._passing = Passing(
            transport,
            child.channel,
            serves={"job": 3 * self._begin.limits.graph_bytes, **SERVES},
            opens=OPENS,
            addresses=self._asked.addresses,
            limits=self._begin.limits,
            timeouts=self._begin.timeouts,
            farewell=partial(self._farewell, child),
        )
        key = self._asked.speaks(b"")  # who has taken the process before over has none of this one
        self._tell(replace(self._begin, known=self._known.result() if self._known.done() else None, speaks=key))
        if self.is_leaving:
            self._tell(Leave())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(child, key))
                await passing.run(partial(self._hear, child, group))
        except* StreamClosed:
            pass
        except* ProtocolError as errors:
            child.kill(f"broke the protocol ({leaves(errors)[0]})")
        except* Exception as errors:  # the peer outlasts its device, whatever this was
            child.kill(f"said what its peer fails on ({leaves(errors)[0]!r})")
        return await child.end()

    async def _watch(self, child: Child, key: bytes) -> None:
        """Ends it when it is silent; no error of its own ends anything."""
        timeouts, known = self._begin.timeouts, dict[str, float]()
        try:
            async with asyncio.timeout(timeouts.worker_s):
                await child.ready.wait()
        except TimeoutError:
            child.kill(f"was not ready within {timeouts.worker_s:.0f} s")
            return
        had_s = 0.0  # by when it answered last
        while (silent_s := child.silent_for * ASK_S) < timeouts.silent_s:
            if not child.silent_for:
                had_s = child.had_s()
            elif silent_s - (child.had_s() - had_s) >= STILL_S:
                break
            if (now := first(self._asked.bandwidths())) != known:
                known = now
                self._tell(Bandwidth(now))
            if (new := self._asked.speaks(key)) != key:
                key = new
                self._tell(Speaks(key))
            child.silent_for += 1
            self._tell(Ping())
            await asyncio.sleep(ASK_S)
        child.kill(f"did not answer for {silent_s:.1f} s")

    async def _farewell(self, child: Child, stream: Stream) -> None:
        """The owner of a job hears the cause before its consequences."""
        if stream.purpose != "job":
            stream.abort()
            return
        error = MeshceeError(f"the process of its device {await child.end()}")
        async with asyncio.timeout(self._begin.timeouts.shutdown_s):
            await stream.send(Frame(messages.FAILED, messages.error_header(error, of=None, step=None)))

    def _hear(self, child: Child, group: asyncio.TaskGroup, message: Any, handle: int) -> None:
        if isinstance(message, Check):
            self._take_check(child, group, message, handle)
            return
        if handle >= 0:
            os.close(handle)
            raise ProtocolError("a descriptor came with a message that needs none")
        match message:
            case Ready() if not child.ready.is_set():
                refuse_unprintable(message, "what a device's process says")
                _tell_confinement(message.confinement)
                if self._known.done():
                    log.info(Event.DEVICE_BACK)
                else:
                    self._known.set_result(message.device)
                child.ready.set()
                self.busy_changed.set()
            case Pong():
                child.silent_for = 0
            case State():
                (self._idle.clear if message.busy else self._idle.set)()
                self.busy_changed.set()
            case Accept():
                self._tell(self._accepted(message))
            case Begun():
                self._crossed = self._asked.begun()
            case Crossed():
                self._crossed(message.rates, message.depths)
            case Said():
                self._hearing.hear(message)

    def _accepted(self, asked: Accept) -> Answer:
        try:
            self._asked.accept(asked.owner, Term(*asked.term))
        except MeshceeError as error:
            return _wrong(asked.number, error)
        return Answer(asked.number)

    def _take_check(self, child: Child, group: asyncio.TaskGroup, asked: Check, memory: int) -> None:
        """Until its answer, or the end of who has asked."""

        def over(check: asyncio.Task[None]) -> None:
            self._checks -= 1
            os.close(memory)

        if memory < 0:
            raise ProtocolError("graphs are to be checked, and none came")
        if self._checks >= MOST_CHECKS or sum(asked.sizes) > MOST_GRAPHS * self._graphs.limits.graph_bytes:
            os.close(memory)
            raise ProtocolError("more graphs are to be checked than an offer has, or than wait at once")
        self._checks += 1
        group.create_task(self._check(child, asked, memory)).add_done_callback(over)

    async def _check(self, child: Child, asked: Check, memory: int) -> None:
        answer = Answer(asked.number)
        try:
            graphs = [bytes(part) for part in opened(memory, asked.sizes)]
            await self._graphs.read(graphs)
        except MeshceeError as error:
            answer = _wrong(asked.number, error)
        with contextlib.suppress(StreamClosed):
            child.channel.post(answer)

    def _tell(self, message: Any) -> None:
        """Nothing where the process has ended: that is heard elsewhere."""
        with contextlib.suppress(StreamClosed):
            self.child.channel.post(message)

    async def dial(self, purpose: str) -> Stream:
        """A stream from this very peer. StreamClosed while no process is there."""
        if self._passing is None:
            raise StreamClosed("this peer's device is not there at the moment")
        return await self._passing.dial(purpose)

    # -- what an agent asks of what it lends

    @property
    def is_busy(self) -> bool:
        """With a job, or with getting ready."""
        is_there = self.child.ready.is_set() and not self.child.channel.closed
        return not is_there or not self._idle.is_set()

    def leave(self) -> None:
        self.is_leaving = True
        if not self.child.channel.closed:
            self._idle.clear()  # until it says that nobody needs it, or has ended
        self._tell(Leave())
        self.busy_changed.set()

    async def drop(self) -> None:
        self._tell(Drop())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._begin.timeouts.shutdown_s):
                await self._idle.wait()

    async def wait_until_unneeded(self) -> None:
        await self._idle.wait()


def _wrong(number: int, error: MeshceeError) -> Answer:
    """With its class: a term that is over has the owner plan again, and any other error ends its run."""
    header = messages.error_header(error)
    return Answer(number, header["message"][:MOST_TEXT] or "it is refused", header["error"])


def _tell_confinement(found: Confinement) -> None:
    tell = log.warning if found.possible else log.info
    more = {"without": "; ".join(found.missing)} if found.missing else {}
    more |= {"which_can_still": "; ".join(found.possible)} if found.possible else {}
    tell(Event.DEVICE_CONFINED, confined_by=", ".join(found.got), **more)
