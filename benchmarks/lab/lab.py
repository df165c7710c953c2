"""`async with Lab(network) as lab: await lab.run("peer", [...])`: commands on an emulated wide-area network.

The idea: whatever can be started as a process can be measured on the very same network, ours and other people's systems.
Inside there is real TCP over a device `lab0`, and no way out. Nothing is left behind: the router kills what runs inside
when the lab ends or is killed, the kernel removes namespaces and devices with the router, and should both have been
killed, the next lab ends what carries their mark. Labs do not share anything, so several run side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.lab import enter
from benchmarks.lab.namespaces import DEVICE, inside, start_ticks, why_not
from benchmarks.lab.network import Link, Network
from meshcee.errors import MeshceeError, NotPermittedError, UsageError
from meshcee.figures.scenario import Scenario

__all__ = ["DEVICE", "MARK", "Lab"]

MARK = "MESHCEE_LAB"  # in the environment of all that runs inside: whose it is
ROOT = Path(__file__).resolve().parents[2]
START_S = 20.0
END_S = 5.0
_numbers = itertools.count()


class Lab:
    """A network with a namespace for each host. Lifetime is `async with`; leaving ends all that runs inside.

    `addresses` are the hosts' addresses by name. The trace's clock stands until `start_trace`.
    Raises NotPermittedError where there is no root or no TUN device.
    """

    def __init__(self, network: Network | Scenario, *, mtu: int = 9000, seed: int = 0) -> None:
        self.network = Network.of(network) if isinstance(network, Scenario) else network
        self.addresses = {host.name: self.network.address(i) for i, host in enumerate(self.network.hosts)}
        self.congestion_control = ""  # of TCP inside: the machine's own, e.g. cubic or bbr
        self._mtu, self._seed = mtu, seed
        self._mark = f"{os.getpid()}:{start_ticks(os.getpid())}:{next(_numbers)}"  # names this lab for ever
        self._router: asyncio.subprocess.Process | None = None
        self._asking = asyncio.Lock()
        self._namespaces: dict[str, str] = {}
        self._inside: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> Self:
        if reason := await asyncio.to_thread(why_not):
            raise NotPermittedError(f"the WAN lab cannot run here: {reason}")
        await asyncio.to_thread(sweep)
        self._router = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.lab.router"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            order = {"network": self.network.to_json(), "mtu": self._mtu, "seed": self._seed}
            async with asyncio.timeout(START_S):
                ready = await self._ask(order)
        except BaseException:
            await self._end()
            raise
        self.congestion_control = ready["congestion_control"]
        files = [f"/proc/{ready['pid']}/fd/{file}" for file in ready["namespaces"]]
        self._namespaces = dict(zip(self.addresses, files, strict=True))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def _end(self) -> None:
        """Ask what runs inside to end, then let the router kill the rest."""
        process, self._router = self._router, None
        assert process is not None
        assert process.stdin is not None
        try:
            if self._namespaces and process.returncode is None:
                await asyncio.to_thread(self._terminate)
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            sweep(self._mark)
            with contextlib.suppress(TimeoutError):  # or their pipes outlive the loop
                async with asyncio.timeout(END_S):
                    for each in self._inside:
                        await each.wait()

    def _terminate(self) -> None:
        """SIGTERM to all that runs inside, and a while to follow it."""
        files = [os.open(path, os.O_RDONLY) for path in self._namespaces.values()]
        try:
            for pid in inside(files):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            deadline_s = time.monotonic() + END_S
            while inside(files) and time.monotonic() < deadline_s:
                time.sleep(0.02)
        finally:
            for file in files:
                os.close(file)

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._router
        if process is None or process.returncode is not None:
            raise UsageError("the lab is not running: use it inside `async with Lab(...)`")
        assert process.stdin is not None
        assert process.stdout is not None
        async with self._asking:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        if not line:
            raise MeshceeError("the lab's router has ended; what it said is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def run(self, host: str, command: Sequence[str], **options: Any) -> asyncio.subprocess.Process:
        """Start a command inside, as `asyncio.create_subprocess_exec` does with these options; `env` gets our mark."""
        if host not in self._namespaces:
            raise UsageError(f"the lab has no host {host!r}; it has {', '.join(self.addresses)}")
        environment = {**options.pop("env", os.environ), MARK: self._mark}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", enter.__file__, self._namespaces[host], str(os.getpid())),
            *command,
            env=environment,
            **options,
        )
        self._inside.append(process)
        return process

    async def start_trace(self) -> None:
        """The network's changes count from now; again, and they start over."""
        await self._ask({"do": "trace"})

    async def reset(self) -> None:
        """The network as it was first; the trace's clock stands."""
        await self._ask({"do": "reset"})

    async def set(self, link: Link) -> None:
        """Change a link, for what has not yet been queued."""
        await self._ask({"do": "set", "link": link.__dict__})

    async def stats(self) -> dict[str, Any]:
        """`lines`: bytes and packets by line since the start; `cpu_s`: what the router itself has used."""
        return await self._ask({"do": "stats"})


def sweep(ending: str = "") -> None:
    """Kill what dead labs have left, and what carries the mark of the lab that is ending."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:
            continue  # it has just ended
        for variable in environment.split(b"\0"):
            name, _, owner = variable.decode(errors="replace").partition("=")
            if name == MARK and (owner == ending or not _alive(owner)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(entry), signal.SIGKILL)


def _alive(mark: str) -> bool:
    pid, ticks, _ = mark.split(":")
    return start_ticks(int(pid)) == ticks
