"""Runs meshcee on one network of the lab, and hears from it when each step was done and what its loss was.

The idea: every system is a process per device in the lab's namespaces, paced alike; a step is done when the last of them says
so, on one clock. The first steps pay for connections, shapes and caches and are not counted. Starting takes longer than many a
row, so several rows run one after another in the same processes, each to its end before the next.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.lab import Lab
from benchmarks.lab.network import Network
from benchmarks.rivals import job as job_file
from meshcee.errors import MeshceeError
from meshcee.figures.scenario import Scenario
from peers.device.emulation.pace import HANG_FILE

__all__ = ["WARM", "Bed", "Meter", "Run", "Site", "System", "Told", "Weather", "in_turn", "run", "run_jobs"]

ROOT = Path(__file__).resolve().parents[2]
WARM = 2


@dataclass(frozen=True)
class Bed:
    """A network, and the devices on it as fast as they are emulated."""

    scenario: Scenario
    speeds_flops_per_s: dict[str, float]
    flops: list[float]  # of each layer's F, for one sample
    slower: float = 1.0  # slow motion: seconds of this machine to one of the emulated network, in which all figures are

    @property
    def hosts(self) -> list[str]:
        return list(self.speeds_flops_per_s)


@dataclass(frozen=True)
class System:
    """What is run: `label` names the row."""

    label: str
    name: str  # meshcee, hivemind, or what torch_worker knows
    hosts: tuple[str, ...]
    micro: int = 1
    flags: tuple[str, ...] = ()  # of `meshcee train`
    module: str = "meshcee"  # what runs that
    job: str = job_file.__file__
    environment: Mapping[str, str] = field(default_factory=dict)  # of `meshcee train`
    endless: bool = False  # the job has more steps than are run: end it after these


Weather = Callable[["Site", "Run"], Awaitable[None]]  # called after each step, with what the run has said so far
Told = Callable[[System, "Run | Exception"], None]  # called when a row is over
Started = TypeVar("Started")


@dataclass
class Run:
    """What one run said. `ends_s` and `losses` by step; `lines` is what the lab's lines carried after the warm-up."""

    expected: int  # reports of a step
    slower: float = 1.0
    warm: int = WARM  # steps that are not counted
    ends_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    shares: list[list[int]] = field(default_factory=list)  # by step: micro-batches of each pipeline
    plan: dict[str, Any] | None = None
    names: dict[str, str] = field(default_factory=dict)  # peer id -> host
    plans: list[tuple[int, dict[str, Any]]] = field(default_factory=list)  # (steps done before it, plan), all of them
    limit: str = ""  # what meshcee's own reports say holds it up
    trace_s: float | None = None  # when the trace was started
    lines: dict[str, float] = field(default_factory=dict)  # bytes
    dropped: float = 0.0  # by full queues, to the packets that passed a line
    cpu_s: float = 0.0  # of the router
    busy: float = 0.0  # the share of this machine's cores that was busy, whoever kept them so
    _parts: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def hear(self, event: dict[str, Any]) -> None:
        parts = self._parts.setdefault(event["step"], [])
        parts.append(event)
        if len(parts) == self.expected:
            samples = sum(p["samples"] for p in parts)
            self.ends_s.append(max(p["at_s"] for p in parts) / self.slower)
            self.losses.append(sum(p["loss"] * p["samples"] for p in parts if p["samples"]) / samples)


@dataclass(frozen=True)
class Site:
    """A lab that runs, and a folder for what its processes write."""

    bed: Bed
    lab: Lab
    folder: Path
    peers: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)  # of meshcee, by host

    def pace_file(self, host: str) -> Path:
        """What this file says slows the device of a peer down: see `peers/device/emulation/pace.py`."""
        return self.folder / f"{host}.pace"

    async def start(
        self, host: str, command: Sequence[str], log: str, *, listens: bool = False, **more: str
    ) -> asyncio.subprocess.Process:
        """A process that does as we are told, one thread of torch each. `listens`: to its standard input."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MESHCEE_", "WAN_"))}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **more}
        pipe = asyncio.subprocess.PIPE
        with (self.folder / f"{log}.log").open("wb") as file:
            return await self.lab.run(
                host,
                [sys.executable, "-m", *command],
                env=environment,
                stdin=pipe if listens else asyncio.subprocess.DEVNULL,
                stdout=pipe,
                stderr=file,
                limit=1 << 26,
            )

    def tails(self) -> str:
        """Where the logs are, and the last line of each."""
        logs = [(p.stem, p.read_text(errors="replace").strip().splitlines()) for p in sorted(self.folder.glob("*.log"))]
        return f"; logs are in {self.folder}" + "".join(f"; {name}: {lines[-1][:200]}" for name, lines in logs if lines)


@asynccontextmanager
async def site(bed: Bed, mtu: int) -> AsyncIterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="wan-"))
    async with Lab(Network.of(bed.scenario).slower(bed.slower), mtu=mtu) as lab:
        yield Site(bed, lab, folder)
    shutil.rmtree(folder)  # but for that of a row that failed: its logs say why


class Meter:
    """What the network carried, and how busy this machine was, while the counted steps of a run were made."""

    def __init__(self, lab: Lab, result: Run) -> None:
        self._lab, self._result = lab, result
        self._lines: dict[str, Any] = {}
        self._cpu_s = 0.0
        self._jiffies = (0, 0)

    async def begin(self) -> None:
        """The warm-up is over; a trace starts."""
        stats = await self._lab.stats()
        self._lines, self._cpu_s, self._jiffies = stats["lines"], stats["cpu_s"], _jiffies()
        if self._lab.network.changes:
            await self._lab.start_trace()
            self._result.trace_s = asyncio.get_running_loop().time() / self._result.slower

    async def end(self) -> None:
        """What follows meets the network as it was first."""
        stats, before, (total, idle) = await self._lab.stats(), self._lines, _jiffies()

        def since(what: str) -> dict[str, Any]:
            return {name: line[what] - before.get(name, {what: 0})[what] for name, line in stats["lines"].items()}

        self._result.lines, self._result.cpu_s = since("bytes"), stats["cpu_s"] - self._cpu_s
        self._result.dropped = sum(since("dropped").values()) / max(1, sum(since("packets").values()))
        if self._lab.network.changes:
            await self._lab.reset()
        passed = total - self._jiffies[0]
        self._result.busy = 1 - (idle - self._jiffies[1]) / passed if passed else 0.0


def _jiffies() -> tuple[int, int]:
    """Of all cores since the machine started: all, and those in which nothing ran but what gives way: what is niced does, where
    sessions do not share the machine in equal parts whatever their niceness (the kernel's autogroups)."""
    counts = [int(count) for count in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    autogroups = Path("/proc/sys/kernel/sched_autogroup_enabled")
    niced = 0 if autogroups.exists() and autogroups.read_text().strip() != "0" else counts[1]
    return sum(counts), counts[3] + counts[4] + niced


async def in_turn(
    bed: Bed,
    systems: Sequence[System],
    told: Told,
    limit_s: float,
    mtu: int,
    start: Callable[[Site], Awaitable[Started]],
    measure: Callable[[Site, Started, System], Awaitable[Run]],
) -> None:
    """Rows one after another in processes that are started once. The first that fails, or exceeds the limit, is the last."""
    system = systems[0]
    try:
        async with site(bed, mtu) as place:
            async with _within(limit_s, place):
                started = await start(place)
            for system in systems:
                async with _within(limit_s, place):
                    result = await measure(place, started, system)
                told(system, result)
    except (MeshceeError, ExceptionGroup) as error:
        told(system, error)


@asynccontextmanager
async def _within(limit_s: float, place: Site) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise MeshceeError(f"not done in {limit_s:.0f} s{place.tails()}") from error


# -- meshcee -----------------------------------------------------------------------------------------------------------


async def run(bed: Bed, system: System, steps: int, limit_s: float, mtu: int, *, weather: Weather | None = None) -> Run:
    """MeshceeError when it fails or takes longer than the limit."""
    found: list[Run | Exception] = []
    await run_jobs(bed, [(system, steps)], lambda _, result: found.append(result), limit_s, mtu, weather=weather)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


async def run_jobs(
    bed: Bed,
    jobs: Sequence[tuple[System, int]],
    told: Told,
    limit_s: float,
    mtu: int,
    *,
    weather: Weather | None = None,
) -> None:
    """Rows of meshcee and their steps: one job after another on the same peers, as on any mesh."""
    steps = {system.label: count for system, count in jobs}

    async def measure(place: Site, token: str, system: System) -> Run:
        return await _train(place, token, system, steps[system.label], weather)

    systems = [system for system, _ in jobs]
    await in_turn(bed, systems, told, limit_s, mtu, partial(_peers, hosts=systems[0].hosts), measure)


async def _peers(place: Site, hosts: Sequence[str]) -> str:
    token = await _peer(place, hosts[0], ())
    async with asyncio.TaskGroup() as group:
        for host in hosts[1:]:
            group.create_task(_peer(place, host, ("--join", token)))
    return token


async def _peer(place: Site, host: str, flags: Sequence[str]) -> str:
    command = ["meshcee", "peer", "--json", "--name", host, "--device", "cpu", "--threads", "1"]
    command += ["--listen", f"{place.lab.addresses[host]}:0"]
    command += ["--pace-gflops", str(place.bed.speeds_flops_per_s[host] / place.bed.slower / 1e9), *flags]
    environment = {"MESHCEE_HOME": str(place.folder / host), HANG_FILE: str(place.pace_file(host))}
    process = place.peers[host] = await place.start(host, command, host, **environment)
    assert process.stdout is not None
    async for line in process.stdout:
        event = json.loads(line)
        if "token" in event:
            return str(event["token"])
    raise MeshceeError(f"{host} did not start{place.tails()}")


async def _train(place: Site, token: str, system: System, steps: int, weather: Weather | None) -> Run:
    result = Run(1, place.bed.slower)
    meter, clock = Meter(place.lab, result), asyncio.get_running_loop().time
    process = await place.start(
        system.hosts[0],
        [system.module, "train", system.job, "--join", token, "--json", *system.flags],
        "owner",
        MESHCEE_HOME=str(place.folder / "owner"),
        **{"WAN_STEPS": str(steps), "WAN_MICRO": str(system.micro), **system.environment},
    )
    assert process.stdout is not None
    async for line in process.stdout:
        event = json.loads(line)
        if "report" in event:
            said, before = event["report"], len(result.ends_s)
            result.limit = str(said.get("limit", ""))
            result.hear({"step": said["step"], "at_s": clock(), "loss": said["loss"], "samples": 1})
            done = len(result.ends_s)
            if done == before:
                continue  # a step that was made again
            result.shares.append(said["shares"])
            if weather is not None:
                await weather(place, result)
            if done == result.warm:
                await meter.begin()
            if done == steps:  # what is collected afterwards is no part of a step
                await meter.end()
                if system.endless:
                    return result  # it ends with the lab
        elif "plan" in event:
            result.plan, result.names = event["plan"], event["names"]
            result.plans.append((len(result.ends_s), event["plan"]))
    if await process.wait():
        raise MeshceeError(f"meshcee train failed{place.tails()}")
    return result
