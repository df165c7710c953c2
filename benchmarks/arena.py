"""What the recovery and chaos benchmarks share: real peers, a real owner, and blows from a list.

The idea: everything is a process of its own that is started and struck from outside; what is measured is what a user sees,
the lines that `meshcee train --json` prints, with the time at which they came. Where there is a WAN lab, each process has a host
of its own in it, and links can be struck too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.lab import Lab
from benchmarks.wires import Wires
from meshcee.files.home import Home, Run
from peers.cli.local import Children

__all__ = ["Arena"]

JOB = """
from dataclasses import replace
from meshcee._demo_job import job as demo
job = replace(demo, name="demo", steps={steps}, eval_data=None, eval_every=0, metrics={{}})
"""
AUGMENTED = """
from benchmarks.augmented import Augmented
from meshcee._demo_job import VOCABULARY
job = replace(job, data=Augmented(job.data, len(VOCABULARY)))
"""
LONGEST_S = 120.0  # without a new step: a hang
END_S = 5.0  # that a p2pd may outlive its peer
OWNER, HEIR = "owner", "heir"
LEAVE = "members leave: the job goes on without them"  # what the owner's log says of members that end politely


class LabChildren(Children):
    """Each on the lab's host of its name."""

    def __init__(self, home: Path, lab: Lab) -> None:
        super().__init__(home)
        self._lab = lab

    def listen(self, name: str) -> str:
        return f"{self._lab.addresses[name]}:0"

    async def spawn(self, name: str, command: Sequence[str], **options: Any) -> asyncio.subprocess.Process:
        return await self._lab.run(name, command, **options)


class Arena:
    """Peers and one owner, on loopback or in a lab with a host for each by name. Lifetime is `async with`."""

    def __init__(
        self, folder: Path, steps: int, stages: int, lab: Lab | None = None, *, augmented: bool = False
    ) -> None:
        self.augmented = augmented
        self.home = Home(folder / "home")
        self.children = Children(self.home.folder) if lab is None else LabChildren(self.home.folder, lab)
        self.wires = Wires(lab) if lab is not None else None
        self.events: list[tuple[float, dict[str, Any]]] = []  # (when, a line of the owner)
        self.names: dict[str, str] = {}
        self._stages = stages
        self._job = folder / "demo_job.py"
        self._job.write_text(JOB.format(steps=steps) + AUGMENTED * augmented)
        self._owner: asyncio.subprocess.Process | None = None
        self._news = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._stopped: set[str] = set()
        self._lab = lab
        self._apart: set[str] = set()
        self._ends: list[asyncio.Task[None]] = []  # of what lasts for a while
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Arena:
        await self.children.__aenter__()
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        for end in self._ends:
            end.cancel()
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
        command = [sys.executable, "-m", "meshcee", "train", str(self._job), "--join", self.children.token, "--json"]
        log = (self.home.folder / "owner.log").open("ab")
        environment = {"MESHCEE_HOME": str(self.home.folder), "OMP_NUM_THREADS": "1", "MESHCEE_LOG": "debug"}
        self._owner = await self.children.spawn(
            OWNER,
            [*command, "--stages", str(self._stages), *flags],
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, **environment},
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
        """Peers that run and are on the owner's side of the network."""
        away = self._stopped | self._apart
        return [n for n, p in self.children.processes.items() if p.returncode is None and n not in away]

    def members(self) -> list[str]:
        """Names of the plan's peers, stage by stage."""
        plan = next(event["plan"] for _, event in reversed(self.events) if "plan" in event)
        return [self.names[m["peer"]] for s in plan["pipelines"][0]["stages"] for m in s["members"]]

    def coordinator(self) -> str | None:
        """In which the owner believes; None while it believes in nobody."""
        term = next((entry["term"] for entry in reversed(self.log()) if entry["event"] == "coordinator"), None)
        return self.names.get(term[1]) if term is not None else None

    def copies(self) -> list[list[str]]:
        """Who holds the newest copies of each stage; empty before there are any."""
        stages = next((entry["holders"] for entry in reversed(self.log()) if entry["event"] == "copies"), [])
        return [[self.names[peer] for peer in holders] for holders in stages]

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
        await self.children.add(name, besides=self._stopped | self._apart)

    def pause(self, name: str, seconds: float) -> None:
        """Stop it and let it go on after a while."""

        async def go_on() -> None:
            self.resume(name)

        self.stop(name)
        self._later(seconds, go_on)

    def _later(self, seconds: float, end: Callable[[], Awaitable[None]]) -> None:
        """Beside whatever else happens."""

        async def wait() -> None:
            await asyncio.sleep(seconds)
            await end()

        self._ends.append(self._group.create_task(wait()))

    def kill_daemon(self, name: str | None) -> None:
        """The p2pd alone, of a peer, or of the owner (None)."""
        process = self._owner if name is None else self.children.processes[name]
        assert process is not None
        for child in psutil.Process(process.pid).children(recursive=True):
            if child.name() == "p2pd":
                child.kill()

    # -- links, in a lab

    async def cut(self, one: str, other: str, seconds: float) -> None:
        assert self.wires is not None
        await self.wires.cut([(one, other)])
        self._later(seconds, partial(self.wires.cut, [(one, other)], -1))

    async def halve(self, name: str, seconds: float) -> None:
        """All links of a host."""
        assert self.wires is not None
        pairs = self._around({name})
        await self.wires.halve(pairs)
        self._later(seconds, partial(self.wires.halve, pairs, -1))

    async def part(self, names: Collection[str], seconds: float) -> None:
        """These from everybody else, the owner and who is yet to come included."""
        wires, pairs, apart = self.wires, self._around(names), frozenset(names)
        assert wires is not None

        async def meet() -> None:
            await wires.cut(pairs, -1)
            self._apart -= apart

        self._apart |= apart
        await wires.cut(pairs)
        self._later(seconds, meet)

    def _around(self, names: Collection[str]) -> list[tuple[str, str]]:
        """The links between these hosts and all others."""
        assert self._lab is not None
        return [(name, other) for name in names for other in self._lab.addresses.keys() - set(names)]

    # -- what is left

    def log(self) -> list[dict[str, Any]]:
        """The owner's, from debug upwards."""
        lines = (self.home.folder / "owner.log").read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def recoveries(self) -> list[dict[str, Any]]:
        """What it says of each loss that it has got over."""
        return [entry for entry in self.log() if entry["event"] == "the run goes on"]

    def noticed_s(self, after_s: float) -> float | None:
        """When the owner first noticed behind this time, both by the wall clock, that a member is lost or wants to leave."""
        for entry in self.log():
            at_s = datetime.fromisoformat(entry["timestamp"]).timestamp()
            if entry["event"] == "the run goes on":
                at_s -= entry["seconds"]["new step"]
            if entry["event"] in ("the run goes on", LEAVE) and at_s >= after_s:
                return at_s
        return None

    def orphans(self) -> list[int]:
        """Processes of ours that outlive the peers and the owner; looks for END_S."""
        deadline_s = time.monotonic() + END_S
        while (left := self._ours()) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        return left

    def _ours(self) -> list[int]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("MESHCEE_HOME") == str(self.home.folder):
                    found.append(process.pid)
        return found
