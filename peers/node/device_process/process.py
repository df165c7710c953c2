"""The peer's side of its device's process: starts it, passes its streams on, answers it, and starts the next one when it ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import structlog

from meshcee.errors import MeshceeError, PlanError
from meshcee.figures import DeviceProfile
from meshcee.plan import Term
from peers.device import Graphs
from peers.device.worker.packets import opened
from peers.node.device_process.messages import (
    FROM_DEVICE,
    Accept,
    Accepted,
    Bandwidth,
    Begin,
    Begun,
    Check,
    Crossed,
    Drop,
    Leave,
    Passed,
    Ready,
    State,
)
from peers.transport import StreamClosed, Transport
from peers.transport.bridge import TAKES, Channel, Passing, pair

__all__ = ["DeviceProcess"]

log = structlog.get_logger()

SERVES = ("job", "stage", "copies", "profile")
OPENS = ("stage", "copies")
START = """
import sys
root = sys.argv.pop(1)
if root not in sys.path:
    sys.path.insert(0, root)
from peers.node.device_process.program import main
main()
"""


class DeviceProcess:
    """What an agent lends (`Lent`), in a process. Lifetime is `async with`; `device` is known once it is entered."""

    def __init__(
        self,
        transport: Transport,
        begin: Begin,
        *,
        graphs: Graphs,
        accept: Callable[[str, Term], None],
        addresses: Callable[[str], Any],
        begun: Callable[[], Callable[[Mapping[str, float], Mapping[str, float]], None]],
    ) -> None:
        self._transport, self._begin, self._graphs = transport, begin, graphs
        self._accept, self._addresses, self._begun = accept, addresses, begun
        self._crossed: Callable[[Mapping[str, float], Mapping[str, float]], None] = lambda rates, depths: None
        self._ready: asyncio.Future[DeviceProfile] = asyncio.get_running_loop().create_future()
        self._group = asyncio.TaskGroup()
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_busy = self.is_leaving = False
        self.busy_changed = asyncio.Event()
        self.device: DeviceProfile

    async def __aenter__(self) -> DeviceProcess:
        near, far = pair()
        root = str(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))
        with far:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, root, str(os.getpid()), str(far.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[far.fileno()],
                start_new_session=True,
            )
        self._channel = Channel(near, (*FROM_DEVICE, *TAKES))
        self._passing = Passing(
            self._transport,
            self._channel,
            serves=SERVES,
            opens=OPENS,
            addresses=self._addresses,
            limits=self._begin.limits,
            timeouts=self._begin.timeouts,
        )
        self._channel.post(self._begin)
        await self._group.__aenter__()
        self._running = self._group.create_task(self._run())
        async with asyncio.timeout(self._begin.timeouts.worker_s):
            await asyncio.wait([self._ready, self._running], return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            raise PlanError("the process of this peer's device ended before it was ready")
        self.device = self._ready.result()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()
        self._running.cancel()
        await self._group.__aexit__(None, None, None)
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    async def _run(self) -> None:
        try:
            await self._passing.run(self._hear)
        except* StreamClosed as closed:
            log.warning("the process of this peer's device has ended", why=str(closed.exceptions[0]))
        finally:
            self._idle.set()

    def _hear(self, message: Any, handle: int) -> None:
        match message:
            case Ready() if not self._ready.done():
                self._ready.set_result(message.device)
            case State():
                self.is_busy = message.busy
                (self._idle.clear if message.busy else self._idle.set)()
                self.busy_changed.set()
            case Check():
                self._group.create_task(self._check(message, handle))
            case Accept():
                self._channel.post(Accepted(message.number, self._wrong_term(message)))
            case Begun():
                self._crossed = self._begun()
            case Crossed():
                self._crossed(message.rates, message.depths)

    def _wrong_term(self, asked: Accept) -> str:
        try:
            self._accept(asked.owner, Term(*asked.term))
        except MeshceeError as error:
            return str(error) or "it is refused"
        return ""

    async def _check(self, asked: Check, memory: int) -> None:
        wrong = ""
        try:
            graphs = [bytes(part) for part in opened(memory, asked.sizes)]
            await self._graphs.read(graphs)
        except MeshceeError as error:
            wrong = str(error) or "it is malformed"
        finally:
            if memory >= 0:
                os.close(memory)
        if not self._channel.closed:
            self._channel.post(Passed(asked.number, wrong[:2000]))

    # -- what an agent asks of what it lends

    def tell_bandwidths(self, figures: Mapping[str, float]) -> None:
        self._channel.post(Bandwidth(dict(figures)))

    def leave(self) -> None:
        self.is_leaving = True
        self._channel.post(Leave())
        self.busy_changed.set()

    async def drop(self) -> None:
        if not self._channel.closed:
            self._channel.post(Drop())
            async with asyncio.timeout(self._begin.timeouts.shutdown_s):
                await self._idle.wait()

    async def wait_until_idle(self) -> None:
        await self._idle.wait()
