"""What the recovery and chaos benchmarks share: real peers, a real owner, and blows from a list.

The idea: everything is a process of its own that is started and struck from outside; what is measured is what a user sees,
the lines that `meshcee train --json` prints, with the time at which they came.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from peers.commands.children import Children
from peers.home import Home, Run

__all__ = ["Arena"]

JOB = """
from dataclasses import replace
from meshcee._demo_job import job as demo
job = replace(demo, name="demo", steps={steps}, eval_data=None, eval_every=0, metrics={{}})
"""
LONGEST_S = 120.0  # without a new step: a hang


class Arena:
    """Peers and one owner. Lifetime is `async with`."""

    def __init__(self, folder: Path, steps: int, stages: int) -> None:
        self.home = Home(folder / "home")
        self.children = Children(self.home.folder)
        self.events: list[tuple[float, dict[str, Any]]] = []  # (when, a line of the owner)
        self.names: dict[str, str] = {}
        self._stages = stages
        self._job = folder / "demo_job.py"
        self._job.write_text(JOB.format(steps=steps))
        self._owner: asyncio.subprocess.Process | None = None
        self._news = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._stopped: set[str] = set()
        self._pauses: list[asyncio.Task[None]] = []
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Arena:
        await self.children.__aenter__()
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        for pause in self._pauses:
            pause.cancel()
        for name in list(self._stopped):
            self.resume(name)
        if self._owner is not None and self._owner.returncode is None:
            self._owner.kill()
            await self._owner.wait()
        if self._reader is not None:
            self._reader.cancel()
        await self._group.__aexit__(*error)
        await self.children.__aexit__(*error)

    # -- the owner -----------------------------------------------------------------------------------------------------

    async def train(self, *flags: str) -> None:
        """Start `meshcee train`; its lines go to `events` until it ends."""
        if self._reader is not None:
            await self._reader
        command = ["train", str(self._job), "--join", self.children.token, "--json", "--stages", str(self._stages)]
        log = (self.home.folder / "owner.log").open("ab")
        self._owner = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "meshcee",
            *command,
            *flags,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, "MESHCEE_HOME": str(self.home.folder), "OMP_NUM_THREADS": "1"},
            limit=16 << 20,
        )
        log.close()
        self._reader = self._group.create_task(self._read(self._owner))

    async def _read(self, owner: asyncio.subprocess.Process) -> None:
        assert owner.stdout is not None
        while line := await owner.stdout.readline():
            event = json.loads(line)
            self.names.update(event.get("names", {}))
            self.events.append((time.monotonic(), event))
            self._news.set()
        await owner.wait()
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Raises TimeoutError when nothing new comes for LONGEST_S, RuntimeError when the owner ends first."""
        while not condition():
            if self._owner is None or self._owner.returncode is not None:
                tail = (self.home.folder / "owner.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the owner has ended: {tail}")
            self._news.clear()
            async with asyncio.timeout(LONGEST_S):
                await self._news.wait()

    async def ends(self) -> int:
        """The owner's exit code, once it has ended by itself."""
        assert self._owner is not None
        with contextlib.suppress(RuntimeError):
            await self.until(lambda: False)
        return self._owner.returncode or 0

    def kill_owner(self) -> None:
        assert self._owner is not None
        self._owner.kill()

    @property
    def steps(self) -> int:
        """Steps that the owner has told of."""
        return sum(1 for _, event in self.events if "report" in event)

    @property
    def run(self) -> Run:
        return self.home.run("last")

    # -- the peers -----------------------------------------------------------------------------------------------------

    @property
    def living(self) -> list[str]:
        return [n for n, p in self.children.processes.items() if p.returncode is None and n not in self._stopped]

    def members(self) -> list[str]:
        """Names of the plan's peers, stage by stage."""
        plan = next(event["plan"] for _, event in reversed(self.events) if "plan" in event)
        return [self.names[m["peer"]] for s in plan["pipelines"][0]["stages"] for m in s["members"]]

    async def kill(self, name: str) -> None:
        self.children.processes[name].kill()
        await self.children.processes[name].wait()

    def stop(self, name: str) -> None:
        self._stopped.add(name)
        self.children.processes[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self._stopped.discard(name)
        with contextlib.suppress(ProcessLookupError):
            self.children.processes[name].send_signal(signal.SIGCONT)

    async def join(self, name: str) -> None:
        await self.children.add(name, besides=self._stopped)

    def pause(self, name: str, seconds: float) -> None:
        """Stop it and let it go on after a while, beside whatever else happens."""

        async def go_on() -> None:
            await asyncio.sleep(seconds)
            self.resume(name)

        self.stop(name)
        self._pauses.append(self._group.create_task(go_on()))

    def kill_daemon(self, name: str | None) -> None:
        """The p2pd alone, of a peer, or of the owner (None)."""
        process = self._owner if name is None else self.children.processes[name]
        assert process is not None
        for child in psutil.Process(process.pid).children(recursive=True):
            if child.name() == "p2pd":
                child.kill()

    def recoveries(self) -> list[dict[str, Any]]:
        """What the owner's log says of each loss that it has got over."""
        lines = (self.home.folder / "owner.log").read_text(errors="replace").splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [entry for entry in found if entry.get("event") == "the run goes on"]

    def orphans(self) -> list[int]:
        """p2pd processes of peers that are gone."""
        left = []
        for process in psutil.process_iter(["name", "ppid"]):
            with contextlib.suppress(psutil.Error):
                if process.info["name"] == "p2pd" and process.environ().get("MESHCEE_HOME") == str(self.home.folder):
                    left.append(process.pid)
        return left
