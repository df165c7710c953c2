"""Peers that a command starts: they are told apart by name, and none outlives the command."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import psutil

from meshcee.errors import MeshceeError, NotNowError
from meshcee.files import loads
from peers.device import cores

if TYPE_CHECKING:
    from peers.cli.children.copies import Copies, Copy

    Child: TypeAlias = asyncio.subprocess.Process | Copy

__all__ = ["Children", "die_with_parent"]

# A child that says nothing is given up after START_S in which it has not computed, and after LOOKS times that.
# One that starts loads torch, so it takes COMPUTES of a core at the least.
START_S, LOOKS, COMPUTES = 60.0, 10, 1 / 60
END_S = 8.0
PR_SET_PDEATHSIG = 1
MESHCEE = (sys.executable, "-m", "meshcee")


def die_with_parent() -> None:
    """In a child of ours, first thing: SIGTERM when the process named by MESHCEE_PARENT dies (Linux only)."""
    parent = os.environ.pop("MESHCEE_PARENT", None)
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before we could ask
        sys.exit(130)


class Children:
    """Peer processes. Lifetime is `async with`; leaving ends them all within END_S."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.processes: dict[str, Child] = {}
        self.token = ""
        self._tokens: dict[str, str] = {}
        self._copies: Copies | None = None

    async def __aenter__(self) -> Children:
        self.home.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._end_peers()
        finally:
            if self._copies is not None:
                await self._copies.end()

    async def _end_peers(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:  # asked twice, it does not wait for its job to go on without it
                process.send_signal(signal.SIGINT)
                process.terminate()
        try:
            async with asyncio.timeout(END_S):
                for process in self.processes.values():
                    await process.wait()
        except TimeoutError:
            for process in self.processes.values():
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    async def start_peers(
        self, count: int, *, threads: int, names: list[str] | None = None, emulation: tuple[str, ...] = ()
    ) -> str:
        """Start one peer, then the others joining it, each with its own identity; returns the token to join with."""
        names = names or [f"peer-{i}" for i in range(count)]
        self.token = await self._start(names[0], threads, None, emulation)
        turns = asyncio.Semaphore(max(2, cores()))  # those that start at once take cores from one another

        async def start(name: str) -> None:
            async with turns:
                await self._start(name, threads, self.token, emulation)

        async with asyncio.TaskGroup() as group:
            for name in names[1:]:
                group.create_task(start(name))
        return self.token

    async def add(self, name: str, *, threads: int = 1, avoiding: Collection[str] = ()) -> None:
        """One more, joining through one that lives, and is none of these."""
        living = [
            n
            for n, process in self.processes.items()
            if process.returncode is None and n in self._tokens and n not in avoiding
        ]
        self.token = self._tokens[living[-1]]
        await self._start(name, threads, self.token, ())

    def listen(self, name: str) -> str:
        """Where this peer listens: on this machine only."""
        return "127.0.0.1:0"

    async def spawn(self, name: str, command: Sequence[str], *, env: Mapping[str, str], stderr: int) -> Child:
        """Its process, which says on its stdout what it has to say. On Linux a peer of ours is a copy."""
        if sys.platform == "linux" and tuple(command[: len(MESHCEE)]) == MESHCEE:
            if self._copies is None:
                from peers.cli.children.copies import Copies  # no other system has all that this needs

                self._copies = Copies(env)
            return await self._copies.copy(name, command[len(MESHCEE) :], env=env, stderr=stderr)
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *command, stdout=pipe, stderr=stderr, env=env, start_new_session=True
        )

    async def _start(self, name: str, threads: int, token: str | None, emulation: tuple[str, ...]) -> str:
        command = [*MESHCEE, "peer", "--json", "--name", name, "--listen", self.listen(name)]
        command += ["--threads", str(threads), "--device", "cpu"]
        if emulation:
            command += [*emulation, "--shape-device", name]
        # It is no peer of the user's: it has none of the user's options, and joins only what it is told to.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MESHCEE_") or k == "MESHCEE_LOG"}
        environment |= {"MESHCEE_HOME": str(self.home), "MESHCEE_CONFIG": os.devnull, "OMP_NUM_THREADS": str(threads)}
        environment["MESHCEE_PARENT"] = str(os.getpid())
        environment["MESHCEE_DEVICE_PROCESS"] = "0"  # its owner and its user are one: nobody need be kept from its keys
        if token:  # not as an argument, which every process of this machine may read
            environment["MESHCEE_JOIN"] = token
        with (self.home / f"{name}.log").open("ab") as log:
            process = await self.spawn(name, command, env=environment, stderr=log.fileno())
        self.processes[name] = process
        kind, wrong = MeshceeError, "ended while starting"
        try:
            while line := await _line(process):
                event: dict[str, Any] = loads(line)
                if "token" in event:
                    self._tokens[name] = str(event["token"])
                    return self._tokens[name]
        except TimeoutError:
            kind, wrong = (
                NotNowError,
                f"does not start on this machine ({START_S:.0f} s without work); end what else runs here",
            )
        lines = Path(log.name).read_text(errors="replace").splitlines()[-15:]
        raise kind(f"{name} {wrong}:\n" + "\n".join(lines))

    async def run(self, arguments: list[str]) -> None:
        """Run another meshcee command to its end, its output going where ours goes; its failure is ours."""
        # In a session of its own, or it would hear one Ctrl-C twice: from the terminal and from us.
        process = await asyncio.create_subprocess_exec(*MESHCEE, *arguments, start_new_session=True)
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            process.send_signal(signal.SIGINT)
            try:
                await process.wait()
            except asyncio.CancelledError:
                process.send_signal(signal.SIGINT)
                raise
            raise
        if code:
            sys.exit(code)


async def _line(process: Child) -> bytes:
    """Its next one. TimeoutError where it has none in START_S, and has not computed in that time either."""
    assert process.stdout is not None
    before_s = 0.0
    for _ in range(LOOKS):
        try:
            async with asyncio.timeout(START_S):
                return await process.stdout.readline()
        except TimeoutError:
            with suppress(psutil.Error):  # it has ended, which its output tells
                times = psutil.Process(process.pid).cpu_times()
                if (spent_s := times.user + times.system) - before_s < COMPUTES * START_S:
                    raise
                before_s = spent_s
    raise TimeoutError
