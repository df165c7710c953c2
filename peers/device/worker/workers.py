"""A peer's side of its workers: one stands ready, checks one task, ends, and the next one is started.

The idea: whatever happens to a worker is one refusal: it says no, it ends, it takes too long. Workers are copies of one process
that has imported torch, so the next one is there in milliseconds. Bytes that have passed once pass again, so an epoch's new offer
of the same graphs asks for no worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import select
import signal
import socket
import subprocess
from collections.abc import Sequence
from types import TracebackType

import structlog

from meshcee.capture import Program, decode_program
from meshcee.config import Limits, Timeouts
from meshcee.errors import GraphError, PlanError, ProtocolError
from meshcee.fields import refuse_unprintable
from peers.device.graphs import Graphs
from peers.device.this_host import own_python
from peers.device.worker.child import MEMORY, NUMBER, forked
from peers.device.worker.packets import LENGTH, Confinement, Task, Verdict, length_of, message, sealed, understood

__all__ = ["Workers", "launch", "read_exactly"]

log = structlog.get_logger()

# Nothing else of the peer's environment: a token may stand there.
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "LANG", "LC_ALL", "TMPDIR")
SINGLE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1") | {
    "CUDA_VISIBLE_DEVICES": ""
}
CPU_S_PER_BYTE = 20e-6  # beside Limits.check_s: a large model's graph takes seconds on a slow machine
PATIENCE = 3  # times its CPU seconds is what a check may take while others use the cores
CHECKING = "peers.device.worker.checking"
MOST_PASSED = 64  # graphs
MOST_SAID_BYTES = 4096


def launch(
    module: str,
    far: socket.socket,
    *arguments: str,
    env: dict[str, str],
    stdout: int = subprocess.DEVNULL,
    stderr: int | None = subprocess.PIPE,
    cwd: str | None = None,
) -> subprocess.Popen[bytes]:
    """Runs `main` of this module of ours in a Python of its own, where nothing of the working folder is imported.

    `main` is told the number of this process and of `far`, and then `arguments`. `far` is its end of a channel, and is closed here,
    whatever comes of it.
    """
    with far:
        return subprocess.Popen(
            [*own_python(module), str(os.getpid()), str(far.fileno()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            env=env,
            pass_fds=[far.fileno()],
            start_new_session=True,  # Ctrl-C in a terminal is for the peer, which may go on for a while
        )


class _Forked:
    """A source of workers that is a copy of this process, with what is asked of a `Popen`."""

    stderr = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None and os.waitpid(self.pid, os.WNOHANG)[0]:
            self._status = 0
        return self._status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        if self._status is None:
            os.waitpid(self.pid, 0)
            self._status = 0


class Workers(Graphs):
    """Lifetime is `async with`. `work` names the module that checks: tests have another."""

    def __init__(self, limits: Limits, timeouts: Timeouts, work: str = CHECKING) -> None:
        super().__init__(limits)
        self.guards = ()
        self.confinement: Confinement | None = None  # of the newest
        self._timeouts = timeouts
        self._work = work
        self._turn = asyncio.Lock()  # one check at a time: what others can make this peer compute is bounded
        self._group = asyncio.TaskGroup()
        self._source: _Source | None = None
        self._spare: asyncio.Task[_Worker | None] | None = None
        self._is_over = False
        self._passed: dict[bytes, None] = {}

    async def __aenter__(self) -> Workers:
        await self._group.__aenter__()
        self._prepare()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        if self._spare is not None:
            self._spare.cancel()
        await self._group.__aexit__(kind, error, trace)
        if self._spare is not None and not self._spare.cancelled() and (worker := self._spare.result()) is not None:
            await worker.end()
        if self._source is not None:
            await self._source.end()

    async def get_ready(self) -> None:
        """Nothing is imported here: no operator is called in this process."""
        if self._spare is not None:
            await asyncio.wait([self._spare])

    async def read(self, graphs: Sequence[bytes]) -> list[Program]:
        if any(len(graph) > self.limits.graph_bytes for graph in graphs):
            raise GraphError(f"a graph is larger than the {self.limits.graph_bytes} bytes that are accepted")
        marks = await asyncio.to_thread(lambda: {hashlib.sha256(graph).digest(): graph for graph in graphs})
        async with self._turn:
            if unknown := [graph for mark, graph in marks.items() if mark not in self._passed]:
                await self._check(unknown)
        self._passed |= dict.fromkeys(marks)
        while len(self._passed) > MOST_PASSED:
            del self._passed[next(iter(self._passed))]
        # No operator is called here.
        return await asyncio.to_thread(lambda: [decode_program(graph, self.limits, checked=True) for graph in graphs])

    async def _check(self, graphs: list[bytes]) -> None:
        """GraphError when a worker does not say that they are good."""
        size = sum(map(len, graphs))
        cpu_s = math.ceil(self.limits.check_s + size * CPU_S_PER_BYTE)
        task = Task(tuple(map(len, graphs)), self.limits.graph_bytes, cpu_s)
        worker = await self._take()
        wrong = ""
        try:
            async with asyncio.timeout(PATIENCE * cpu_s):
                wrong = await worker.verdict(task, graphs)
        except TimeoutError:
            wrong = f"a graph of {size} bytes was not checked within {PATIENCE * cpu_s} s"
        except ProtocolError as error:
            wrong = f"a graph of {size} bytes could not be checked: {error}"
        except EOFError:
            how = await worker.end()
            wrong = f"a graph of {size} bytes ended the process that checked it ({how})"
            if how == "SIGXCPU":
                wrong = f"a graph of {size} bytes was not checked within {cpu_s} s of CPU time"
        finally:
            try:
                await worker.end()
            finally:
                self._prepare()
        if wrong:
            raise GraphError(wrong)

    async def _take(self) -> _Worker:
        spare, self._spare = self._spare, None
        worker = await spare if spare is not None else None
        if worker is not None:
            if worker.lives:
                return worker
            await worker.end()
        return await self._started()

    def _prepare(self) -> None:
        if not self._is_over:
            self._spare = self._group.create_task(self._started_if_possible())

    async def _started_if_possible(self) -> _Worker | None:
        try:
            return await self._started()
        except PlanError as error:
            log.warning(str(error))
            return None

    async def _started(self) -> _Worker:
        """PlanError when there is none: then this peer takes no graph."""
        source = self._source
        if source is None or not source.lives:
            if source is not None:
                await source.end()
            try:
                source = self._source = _Source(self._work, self.limits.check_bytes)
            except OSError as error:
                raise PlanError(f"this peer cannot start a process that checks graphs: {error}") from error
        worker: _Worker | None = None
        try:
            async with asyncio.timeout(self._timeouts.worker_s):
                worker = await source.worker()
                self._hear(await worker.confined())
                source.is_ready()
        except (OSError, EOFError, ProtocolError) as error:  # TimeoutError is an OSError
            why = str(error) or f"it was not ready within {self._timeouts.worker_s:.0f} s"
            raise PlanError(f"this peer's process that checks graphs did not start: {source.said() or why}") from error
        finally:
            if worker is None:
                await source.end()
                self._source = None
            elif not worker.is_ready:
                await worker.end()
        return worker

    def _hear(self, confinement: Confinement) -> None:
        if confinement == self.confinement:
            return
        self.confinement, self.guards = confinement, confinement.got
        tell = log.warning if confinement.possible else log.info
        more = {"without": "; ".join(confinement.missing)} if confinement.missing else {}
        more |= {"which_can_still": "; ".join(confinement.possible)} if confinement.possible else {}
        tell("graphs of others are checked in a process of its own", confined_by=", ".join(confinement.got), **more)


class _Source:
    """The process that workers are copies of, one at a time. It ends with `end`, or with this process."""

    def __init__(self, work: str, memory_bytes: int) -> None:
        self._asked = MEMORY.pack(memory_bytes)
        self._unheard = 0  # workers whose end it tells of, or will
        self._process: subprocess.Popen[bytes] | _Forked
        if work == CHECKING and forked:
            pid, self._control = forked.pop()
            self._process = _Forked(pid)
        else:
            env = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ} | SINGLE
            self._control, theirs = socket.socketpair()
            try:
                self._process = launch("peers.device.worker.child", theirs, work, env=env, cwd="/")
            except BaseException:
                self._control.close()
                raise
        self._control.setblocking(False)

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    async def worker(self) -> _Worker:
        """A new one. EOFError or OSError when there is none."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            while self._unheard:  # whoever waited for that was cancelled
                await self.ended()
            socket.send_fds(self._control, [self._asked], [theirs.fileno()])
            (pid,) = NUMBER.unpack(await read_exactly(self._control, NUMBER.size))
            self._unheard += 1
            return _Worker(self, pid, ours)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    async def ended(self) -> int:
        """How the worker has ended that was made last, as `Popen.returncode` says it."""
        try:
            (code,) = NUMBER.unpack(await read_exactly(self._control, NUMBER.size))
        except EOFError:
            self._unheard = 0
            return -signal.SIGKILL
        self._unheard -= 1
        return int(code)

    def is_ready(self) -> None:
        """A worker came to be: what is written from now on may be of somebody else's making."""
        if self._process.stderr is not None:
            self._process.stderr.close()

    def said(self) -> str:
        """The last line of what it has written before a worker was ready."""
        stream = self._process.stderr
        if stream is None or stream.closed:
            return ""
        os.set_blocking(stream.fileno(), False)
        lines = (stream.read(1 << 20) or b"")[-MOST_SAID_BYTES:].decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    async def end(self) -> None:
        self._control.close()
        self._process.kill()  # its worker dies with it
        try:
            await asyncio.to_thread(self._process.wait)
        finally:
            if self._process.stderr is not None:
                self._process.stderr.close()


class _Worker:
    """A copy of the source, for one task. It ends with `end`, or with the source."""

    def __init__(self, source: _Source, pid: int, channel: socket.socket) -> None:
        self.is_ready = False
        self._source, self.pid, self._channel = source, pid, channel
        self._how: str | None = None  # it has ended
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:
            self._handle = -1  # it has ended

    @property
    def lives(self) -> bool:
        if self._handle < 0:
            return False
        ended = select.poll()  # a peer with many streams has descriptors beyond what `select.select` can ask for
        ended.register(self._handle, select.POLLIN)
        return not ended.poll(0)

    async def confined(self) -> Confinement:
        """Once it is ready: EOFError or ProtocolError when it is not."""
        confinement = understood(await self._message(), Confinement)
        for text in (*confinement.got, *confinement.missing, *confinement.possible):
            refuse_unprintable(text, "a worker's message")
        self.is_ready = True
        return confinement

    async def verdict(self, task: Task, graphs: Sequence[bytes]) -> str:
        """EOFError when it has ended instead, ProtocolError when what it says makes no sense."""
        memory = sealed(graphs)
        try:
            socket.send_fds(self._channel, [message(task)], [memory])  # small, and the first: there is room
        except OSError as error:
            raise EOFError from error
        finally:
            os.close(memory)
        wrong = understood(await self._message(), Verdict).wrong
        refuse_unprintable(wrong, "what a worker says of a graph")
        return wrong

    async def end(self) -> str:
        """How it has ended: a signal's name, or its exit status."""
        if self._how is None:
            self._channel.close()
            if self._handle >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._handle, signal.SIGKILL)  # no more than a word where it has ended
                os.close(self._handle)
                self._handle = -1
            code = await self._source.ended()
            self._how = signal.Signals(-code).name if code < 0 else f"status {code}"
        return self._how

    async def _message(self) -> bytes:
        return await read_exactly(self._channel, length_of(await read_exactly(self._channel, LENGTH.size)))


async def read_exactly(channel: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        try:
            more = await asyncio.get_running_loop().sock_recv(channel, count - len(found))
        except OSError as error:
            raise EOFError("it ended") from error
        if not more:
            raise EOFError("it ended")
        found += more
    return found
