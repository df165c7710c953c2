"""What the recovery and chaos benchmarks share: real peers, a real owner, and blows from a list.

The idea: everything is a process of its own that is started and struck from outside; what is measured is what a user sees,
the lines that `meshcee train --json` prints, with the time at which they came. Where there is a WAN lab, each process has a host
of its own in it, and links can be struck too; where it may mount, each owner has a disk of its own, which can refuse.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.astray import set_clock
from benchmarks.disks import SmallDisk
from benchmarks.lab import Lab
from benchmarks.wires import Wires
from meshcee.files.home import Home, Run
from peers.cli.children import Children
from peers.device.emulation.pace import HANG_FILE

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
LONGEST_S = 240.0  # without a new step: a hang; a device that hangs in an epoch's first step is given two minutes
END_S = 5.0  # that a p2pd may outlive its peer
MOST_LINE = 16 << 20  # bytes that an owner says at once
OWNER, HEIR = "owner", "heir"
LEAVE = "members leave: the job goes on without them"  # what the owner's log says of members that end politely
TAKES_OVER = "is gone: this machine goes on with it"  # says who stands by
HELPERS = "from peers."  # what a peer's helper processes run; they know nothing of a home
DRAFTS = ".step-*"  # folders of checkpoints that are being written


PACE_GFLOPS = 1000.0  # of devices that may hang: more than they have


def _computes(process: psutil.Process) -> bool:
    return any("device_process" in word for word in process.cmdline())


class ArenaChildren(Children):
    """Each on the lab's host of its name, if there is a lab; peers' devices may hang, if they are `paced`, and wall clocks leap, if
    they are `astray`.
    """

    def __init__(self, home: Path, lab: Lab | None, paced: bool, astray: bool) -> None:
        super().__init__(home)
        self._lab, self._paced, self._astray = lab, paced, astray

    def hang_file(self, name: str) -> Path:
        return self.home / f"{name}.hangs"

    def clock_file(self, name: str) -> Path:
        return self.home / f"{name}.clock"

    def listen(self, name: str) -> str:
        return super().listen(name) if self._lab is None else f"{self._lab.addresses[name]}:0"

    async def spawn(self, name: str, command: Sequence[str], *, env: Mapping[str, str], stderr: int) -> Any:
        env = {key: value for key, value in env.items() if key != "MESHCEE_DEVICE_PROCESS"}  # as strangers' peers
        if self._paced and name not in (OWNER, HEIR):
            command = [*command, "--pace-gflops", str(PACE_GFLOPS)]
            env = {**env, HANG_FILE: str(self.hang_file(name))}
        if self._astray:
            set_clock(self.clock_file(name), 0.0)
            python, module, _, *arguments = command
            command = [python, module, "benchmarks.astray", str(self.clock_file(name)), *arguments]
        if self._lab is None:
            return await super().spawn(name, command, env=env, stderr=stderr)
        pipe = asyncio.subprocess.PIPE
        return await self._lab.run(
            name, command, env=env, stdout=pipe, stderr=stderr, start_new_session=True, limit=MOST_LINE
        )


@dataclass
class Owner:
    """Of the run, or who stands by to become that: a process with a home of its own."""

    name: str
    home: Home
    log: Path
    disk: SmallDisk | None = None
    process: asyncio.subprocess.Process | None = None
    reader: asyncio.Task[None] | None = None
    told: list[dict[str, Any]] = field(default_factory=list)  # its reports
    first_s: float | None = None  # when the first of them came

    @property
    def is_over(self) -> bool:
        return self.process is None or self.process.returncode is not None


class Arena:
    """Peers and one owner, on loopback or in a lab with a host for each by name. Lifetime is `async with`.

    With `disks`, runs lie on a disk of the owner's own. `paced` devices may hang, clocks that are `astray` leap.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        stages: int,
        lab: Lab | None = None,
        *,
        augmented: bool = False,
        disks: bool = False,
        paced: bool = False,
        astray: bool = False,
    ) -> None:
        self.augmented = augmented
        self.home = Home(folder / "home")
        self.children = ArenaChildren(self.home.folder, lab, paced, astray)
        self.wires = Wires(lab) if lab is not None else None
        self.events: list[tuple[float, dict[str, Any]]] = []  # (when, a line of an owner)
        self.names: dict[str, str] = {}
        homes = {OWNER: self.home, HEIR: Home(folder / HEIR)}
        self.owners = {name: Owner(name, home, self.home.folder / f"{name}.log") for name, home in homes.items()}
        self._disks = disks
        self._stages, self._last = stages, steps
        self._job = folder / "demo_job.py"
        self._job.write_text(JOB.format(steps=steps) + AUGMENTED * augmented)
        self._news = asyncio.Event()
        self._stopped: set[str] = set()
        self._hung: set[str] = set()
        self._leaving: set[str] = set()
        self._poor: set[str] = set()  # without memory, or slow to answer: nobody joins through them
        self._asleep: list[psutil.Process] = []
        self._lab = lab
        self._apart: set[str] = set()
        self._ends: list[asyncio.Task[None]] = []  # of what lasts for a while
        self._group = asyncio.TaskGroup()
        self._mounts = contextlib.ExitStack()
        self._lost_s: float | None = None  # when the first owner was killed, or suspended beside who stands by
        self._is_dead = False  # the first owner

    async def __aenter__(self) -> Arena:
        if self._disks:
            for owner in self.owners.values():
                owner.disk = self._mounts.enter_context(SmallDisk(owner.home.folder / "runs"))
        await self.children.__aenter__()
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        for end in self._ends:
            end.cancel()
        for name in list(self._stopped):
            self.resume(name)
        for owner in self.owners.values():
            if owner.process is not None and not owner.is_over:
                owner.process.kill()
                await owner.process.wait()
            self._send(signal.SIGCONT)  # what an owner has started ends with it, once it is awake
            if owner.reader is not None:
                owner.reader.cancel()
        await self._group.__aexit__(*error)
        await self.children.__aexit__(*error)
        self._mounts.close()

    # -- the owner -----------------------------------------------------------------------------------------------------

    @property
    def owner(self) -> Owner:
        """Who stands by is it once the first one was killed, or has slept for so long that the other went on."""
        return self.owners[HEIR if self._is_dead or self.is_taken_over else OWNER]

    @property
    def is_taken_over(self) -> bool:
        return bool(self._takeovers())

    async def train(self, *flags: str) -> None:
        """Start `meshcee train`; its lines go to `events` until it ends."""
        await self._start(self.owner, "--stages", str(self._stages), *flags)

    async def stand_by(self) -> None:
        """Start a second owner in waiting, with a home of its own, as on another machine."""
        await self._start(self.owners[HEIR], "--stages", str(self._stages), "--standby")

    async def _start(self, owner: Owner, *flags: str) -> None:
        if owner.reader is not None:
            await owner.reader
        command = [sys.executable, "-m", "meshcee", "train", str(self._job), "--join", self.children.token, "--json"]
        environment = {"MESHCEE_HOME": str(owner.home.folder), "OMP_NUM_THREADS": "1", "MESHCEE_LOG": "debug"}
        with owner.log.open("ab") as log:
            owner.process = await self.children.spawn(
                owner.name,
                [*command, *flags],
                stderr=log.fileno(),
                env={**os.environ, **environment},
            )
        owner.reader = self._group.create_task(self._read(owner, owner.process))

    async def _read(self, owner: Owner, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while (line := await process.stdout.readline()).endswith(b"\n"):  # one that is killed may leave half a line
            event = json.loads(line)
            self.names.update(event.get("names", {}))
            self.events.append((time.monotonic(), event))
            if "report" in event:
                owner.told.append(event["report"])
                owner.first_s = owner.first_s or time.monotonic()
            self._news.set()
        await process.wait()
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Raises TimeoutError when nothing new comes for LONGEST_S, RuntimeError when the owner ends first."""
        while not condition():
            if self.owner.is_over:
                tail = self.owner.log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the owner has ended: {tail}")
            self._news.clear()
            async with asyncio.timeout(LONGEST_S):
                await self._news.wait()

    async def ends(self) -> int:
        """The owner's exit code, once it has ended by itself; that of who stood by in vain, if it is another one than 0."""
        with contextlib.suppress(RuntimeError):
            await self.until(lambda: False)
        heir = self.owners[HEIR]
        if heir.process is not None:
            async with asyncio.timeout(LONGEST_S):
                await heir.process.wait()
        first = self.owners[OWNER]
        if self.owner is heir and first.process is not None:  # one that woke up as nobody's owner ends, in whatever way
            async with asyncio.timeout(LONGEST_S):
                await first.process.wait()
        codes = [owner.process.returncode for owner in (self.owner, heir) if owner.process is not None]
        return next((code for code in codes if code), 0)

    def kill_owner(self) -> None:
        assert self.owner.process is not None
        self.owner.process.kill()

    @property
    def can_lose_the_owner(self) -> bool:
        """A standby knows of the run by now."""
        heir = self.owners[HEIR]
        return self.owner is not heir and not heir.is_over and any(run.reports() for run in heir.home.runs())

    def lose_owner(self) -> None:
        """By kill -9, for good: who stands by is the owner from now on."""
        self.kill_owner()
        self._send(signal.SIGCONT)
        self._lost_s, self._is_dead = time.monotonic(), True

    def suspend_owner(self, seconds: float) -> None:
        """All of its processes stand still for a while, as when a laptop is closed."""
        if self.owner is self.owners[OWNER]:
            self._lost_s = time.monotonic()
        assert self.owner.process is not None
        with contextlib.suppress(psutil.Error):  # it has just ended
            process = psutil.Process(self.owner.process.pid)
            self._asleep += [process, *process.children(recursive=True)]
        self._send(signal.SIGSTOP)

        async def wake() -> None:
            self._send(signal.SIGCONT)
            self._asleep.clear()

        self._later(seconds, wake)

    def _send(self, what: signal.Signals) -> None:
        """To the processes of an owner that sleeps."""
        for process in self._asleep:
            with contextlib.suppress(psutil.Error):
                process.send_signal(what)

    @property
    def taken_over_s(self) -> float | None:
        """From the owner's death or sleep to the first report of the next one; None where there was none."""
        first_s, lost_s = self.owners[HEIR].first_s, self._lost_s
        return None if first_s is None or lost_s is None else first_s - lost_s

    @property
    def refuses(self) -> bool:
        """The owner's disk does."""
        return self.owner.disk is not None and bool(self.owner.disk.refuses)

    @property
    def can_refuse(self) -> bool:
        """Before its first step an owner does not begin on a disk that refuses."""
        return self.owner.disk is not None and not self.refuses and bool(self.owner.told)

    def refuse(self, kind: str, seconds: float) -> None:
        """The owner's disk does, for a while."""
        disk = self.owner.disk
        assert disk is not None
        disk.refuse(kind)

        async def accept() -> None:
            disk.accept()

        self._later(seconds, accept)

    @property
    def steps(self) -> int:
        """Steps that the owners have told of."""
        return max((owner.told[-1]["step"] + 1 for owner in self.owners.values() if owner.told), default=0)

    @property
    def run(self) -> Run:
        """Of the last owner."""
        return self.owner.home.run("last")

    # -- the peers -----------------------------------------------------------------------------------------------------

    @property
    def living(self) -> list[str]:
        """Peers that run and mean to stay, can compute, and are on the owner's side of the network."""
        away = self._stopped | self._apart | self._hung | self._leaving
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
        await self.children.add(name, avoiding=self._stopped | self._apart | self._leaving | self._poor)

    def pause(self, name: str, seconds: float) -> None:
        """Stop it and let it go on after a while."""

        async def go_on() -> None:
            self.resume(name)

        self.stop(name)
        self._later(seconds, go_on)

    def hang(self, name: str) -> None:
        """Its device, for good; the peer itself answers."""
        self._hung.add(name)
        self.children.hang_file(name).touch()

    def leave(self, name: str) -> None:
        """Politely: its work is handed over, then it ends."""
        self._leaving.add(name)
        self.children.processes[name].terminate()

    def fill(self, name: str, seconds: float) -> None:
        """Neither it nor its device's process gets more memory than it has now, for a while; the kernel refuses."""
        filled: list[tuple[psutil.Process, int]] = []
        with contextlib.suppress(psutil.Error):  # it has just ended
            peer = psutil.Process(self.children.processes[name].pid)
            for process in (peer, *(child for child in peer.children() if _computes(child))):
                _, most = process.rlimit(psutil.RLIMIT_AS)
                process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms, most))
                filled.append((process, most))
        if not filled:
            return
        self._poor.add(name)

        async def empty() -> None:
            self._poor.discard(name)
            for process, most in filled:
                with contextlib.suppress(psutil.Error):
                    process.rlimit(psutil.RLIMIT_AS, (most, most))

        self._later(seconds, empty)

    def step_clock(self, name: str, off_s: float, seconds: float) -> None:
        """Its wall clock is so far off for a while, as on a machine that somebody sets, and sets right again."""
        file = self.children.clock_file(name)

        async def right() -> None:
            set_clock(file, 0.0)

        set_clock(file, off_s)
        self._later(seconds, right)

    def _later(self, seconds: float, end: Callable[[], Awaitable[None]]) -> None:
        """Beside whatever else happens."""

        async def wait() -> None:
            await asyncio.sleep(seconds)
            await end()

        self._ends.append(self._group.create_task(wait()))

    def kill_daemon(self, name: str | None) -> None:
        """The p2pd alone, of a peer, or of the owner (None), who has none once all steps are done."""
        process = self.owner.process if name is None else self.children.processes[name]
        assert process is not None
        daemons = [c for c in psutil.Process(process.pid).children(recursive=True) if c.name() == "p2pd"]
        assert daemons or process.returncode is not None or self.steps >= self._last
        for daemon in daemons:
            daemon.kill()

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

    async def trickle(self, name: str, rate: float, seconds: float) -> None:
        """What it sends leaves at so many bytes/s; what others send arrives as ever."""
        assert self.wires is not None
        others = [other for _, other in self._around({name})]
        wires = self.wires
        self._poor.add(name)
        await wires.trickle(name, others, rate)

        async def end() -> None:
            self._poor.discard(name)
            await wires.trickle(name, others, None)

        self._later(seconds, end)

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

    # -- moments

    @property
    def is_planned(self) -> bool:
        """A first plan has been found, and is offered next."""
        return any("plan" in event for _, event in self.events)

    @property
    def saves(self) -> bool:
        """The owner writes a checkpoint now."""
        return any(any(run.checkpoints.glob(DRAFTS)) for run in self.owner.home.runs())

    @property
    def hand_overs(self) -> int:
        """How often an owner has said that members leave."""
        return self.owner.log.read_text(errors="replace").count(LEAVE)

    async def meanwhile(self, condition: Callable[[], bool], seconds: float) -> None:
        """Of what no line tells: looks often, for so long at most, while the owner lives."""
        end_s = time.monotonic() + seconds
        while not condition() and time.monotonic() < end_s and not self.owner.is_over:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)

    # -- what is left

    def log(self, *owners: str) -> list[dict[str, Any]]:
        """Of these owners, or all of them one after the other; from debug upwards."""
        logs = [self.owners[name].log for name in owners or self.owners]
        lines = [line for log in logs if log.exists() for line in log.read_text(errors="replace").splitlines()]
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def recoveries(self) -> list[dict[str, Any]]:
        """What owners say of each loss that they have got over."""
        return [entry for entry in self.log() if entry["event"] == "the run goes on"]

    def recovered_s(self) -> list[tuple[float, float]]:
        """Of each loss that was got over, an owner's too: when it was noticed, by the wall clock, and how long the next new step
        took.
        """
        found = [(entry["timestamp"], entry["seconds"]["new step"]) for entry in self.recoveries()]
        losses = [(datetime.fromisoformat(at).timestamp() - took_s, took_s) for at, took_s in found]
        ahead_s, first_s = time.time() - time.monotonic(), self.owners[HEIR].first_s or math.inf
        return losses + [(at_s + ahead_s, first_s - at_s) for at_s in self._takeovers() if first_s < math.inf]

    def _takeovers(self) -> list[float]:
        """When who stands by has noticed that the owner is gone."""
        return [when_s for when_s, event in self.events if event.get("note", "").endswith(TAKES_OVER)]

    def noticed_s(self, after_s: float) -> float | None:
        """When an owner first noticed behind this time, both by the wall clock, that a member is lost or wants to leave, or who
        stands by that the owner is gone.
        """
        ahead_s = time.time() - time.monotonic()
        found = [at_s for at_s, _ in self.recovered_s()]
        found += [at_s + ahead_s for at_s in self._takeovers()]
        left = [entry["timestamp"] for entry in self.log() if entry["event"] == LEAVE]
        found += [datetime.fromisoformat(at).timestamp() for at in left]
        return min((at_s for at_s in found if at_s >= after_s), default=None)

    def orphans(self) -> list[int]:
        """Processes of ours that outlive the peers and the owner; looks for END_S."""
        deadline_s = time.monotonic() + END_S
        while (left := self._ours()) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        return left

    def _ours(self) -> list[int]:
        found, homes = [], {str(owner.home.folder) for owner in self.owners.values()}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                alone = process.ppid() == 1 and any(HELPERS in word for word in process.cmdline())
                if alone or process.environ().get("MESHCEE_HOME") in homes:
                    found.append(process.pid)
        return found
