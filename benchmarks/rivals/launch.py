"""Runs one system on one network of the lab, and hears from it when each step was done and what its loss was.

The idea: every system is a process per device in the lab's namespaces, paced alike; a step is done when the last of them says
so, on one clock. The first WARM steps pay for connections, shapes and caches and are not counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.lab import Lab
from benchmarks.lab.network import Network
from benchmarks.rivals import job as job_file
from benchmarks.rivals.worker import Order
from meshcee.errors import MeshceeError
from meshcee.scenario import Scenario

__all__ = ["WARM", "Bed", "Run", "System", "Weather", "run"]

ROOT = Path(__file__).resolve().parents[2]
WARM = 2
MODULES = {"gpipe": "pipeline", "1f1b": "pipeline", "zb": "pipeline", "ddp": "data_parallel", "single": "data_parallel"}
MODULES["hivemind"] = "collaborative"


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
    name: str  # meshcee, or a key of MODULES
    hosts: tuple[str, ...]
    micro: int = 1
    flags: tuple[str, ...] = ()  # of `meshcee train`
    module: str = "meshcee"  # what runs that
    job: str = job_file.__file__
    environment: Mapping[str, str] = field(default_factory=dict)  # of `meshcee train`
    endless: bool = False  # the job has more steps than are run: end it after these


Weather = Callable[[Lab, int], Awaitable[None]]  # called with the number of steps that are done


@dataclass
class Run:
    """What one run said. `ends_s` and `losses` by step; `lines` is what the lab's lines carried after the warm-up."""

    expected: int  # reports of a step
    slower: float = 1.0
    ends_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    plan: dict[str, Any] | None = None
    names: dict[str, str] = field(default_factory=dict)  # peer id -> host
    plans: list[tuple[int, dict[str, Any]]] = field(default_factory=list)  # (steps done before it, plan), all of them
    limit: str = ""  # what meshcee's own reports say holds it up
    trace_s: float | None = None  # when the trace was started
    lines: dict[str, float] = field(default_factory=dict)  # bytes
    cpu_s: float = 0.0  # of the router
    _parts: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def hear(self, event: dict[str, Any]) -> None:
        parts = self._parts.setdefault(event["step"], [])
        parts.append(event)
        if len(parts) == self.expected:
            samples = sum(p["samples"] for p in parts)
            self.ends_s.append(max(p["at_s"] for p in parts) / self.slower)
            self.losses.append(sum(p["loss"] * p["samples"] for p in parts if p["samples"]) / samples)


async def run(bed: Bed, system: System, steps: int, limit_s: float, mtu: int, *, weather: Weather | None = None) -> Run:
    """MeshceeError when it fails or takes longer than the limit."""
    result = Run(1 if system.name == "meshcee" else len(system.hosts), bed.slower)
    network = Network.of(bed.scenario).slower(bed.slower)
    with tempfile.TemporaryDirectory(prefix="wan-") as folder:
        try:
            async with asyncio.timeout(limit_s), Lab(network, mtu=mtu) as lab:
                session = _Session(bed, system, steps, lab, Path(folder), result, weather)
                await (session.meshcee() if system.name == "meshcee" else session.rivals())
        except TimeoutError as error:
            done = len(result.ends_s)
            raise MeshceeError(f"{done} of {steps} steps in {limit_s:.0f} s{_tails(Path(folder))}") from error
    return result


def _tails(folder: Path) -> str:
    """The last line that each process has written to its log."""
    said = [(p.stem, p.read_text(errors="replace").strip().splitlines()) for p in sorted(folder.glob("*.log"))]
    return "".join(f"; {name}: {lines[-1][:200]}" for name, lines in said if lines)


class _Session:
    def __init__(
        self, bed: Bed, system: System, steps: int, lab: Lab, folder: Path, result: Run, weather: Weather | None
    ) -> None:
        self.bed, self.system, self.steps, self.lab, self.folder, self.result = bed, system, steps, lab, folder, result
        self._weather = weather
        self._before: dict[str, Any] = {}
        self._seed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def _start(self, host: str, command: Sequence[str], log: str, **more: str) -> asyncio.subprocess.Process:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MESHCEE_", "WAN_"))}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **more}
        with (self.folder / f"{log}.log").open("wb") as file:
            return await self.lab.run(
                host, command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=file, limit=1 << 26
            )

    async def _hear(self, event: dict[str, Any]) -> None:
        before = len(self.result.ends_s)
        self.result.hear(event)
        if self._weather is not None and before < len(self.result.ends_s):
            await self._weather(self.lab, len(self.result.ends_s))
        if before < WARM <= len(self.result.ends_s):
            self._before = await self.lab.stats()
            if self.lab.network.changes:
                await self.lab.start_trace()
                self.result.trace_s = asyncio.get_running_loop().time() / self.bed.slower
        if before < self.steps <= len(self.result.ends_s):  # what is collected afterwards is no part of a step
            after, first = await self.lab.stats(), self._before["lines"]
            self.result.lines = {n: v["bytes"] - first.get(n, {"bytes": 0})["bytes"] for n, v in after["lines"].items()}
            self.result.cpu_s = after["cpu_s"] - self._before["cpu_s"]

    # -- baselines

    async def rivals(self) -> None:
        hosts = self.system.hosts
        port = random.randrange(20000, 30000)
        async with asyncio.TaskGroup() as group:
            for rank, host in enumerate(hosts):
                order = Order(
                    system=self.system.name,
                    rank=rank,
                    addresses=[self.lab.addresses[h] for h in hosts],
                    speeds_flops_per_s=[self.bed.speeds_flops_per_s[h] / self.bed.slower for h in hosts],
                    flops=self.bed.flops,
                    steps=self.steps,
                    micro=self.system.micro,
                    port=port,
                )
                if rank and order.system == "hivemind":
                    order = replace(order, seed=await self._seed)
                group.create_task(self._rival(host, order))

    async def _rival(self, host: str, order: Order) -> None:
        module = f"benchmarks.rivals.{MODULES[self.system.name]}"
        process = await self._start(host, [sys.executable, "-m", module, json.dumps(asdict(order))], host)
        assert process.stdout is not None
        async for line in process.stdout:
            event = json.loads(line) if line.startswith(b"{") else {}
            if "seed" in event:
                self._seed.set_result(event["seed"])
            elif "step" in event:
                await self._hear(event)
        if await process.wait():
            raise MeshceeError(f"{self.system.label} failed{_tails(self.folder)}")

    # -- meshcee

    async def meshcee(self) -> None:
        hosts = self.system.hosts
        token = await self._peer(hosts[0], ())
        async with asyncio.TaskGroup() as group:
            for host in hosts[1:]:
                group.create_task(self._peer(host, ("--join", token)))
        command = [sys.executable, "-m", self.system.module, "train", self.system.job, "--join", token, "--json"]
        process = await self._start(
            hosts[0],
            [*command, *self.system.flags],
            "owner",
            MESHCEE_HOME=str(self.folder / "owner"),
            **{"WAN_STEPS": str(self.steps), "WAN_MICRO": str(self.system.micro), **self.system.environment},
        )
        assert process.stdout is not None
        clock = asyncio.get_running_loop().time
        async for line in process.stdout:
            event = json.loads(line)
            if "report" in event:
                said = event["report"]
                self.result.limit = str(said.get("limit", ""))
                await self._hear({"step": said["step"], "at_s": clock(), "loss": said["loss"], "samples": 1})
            elif "plan" in event:
                self.result.plan, self.result.names = event["plan"], event["names"]
                self.result.plans.append((len(self.result.ends_s), event["plan"]))
            if self.system.endless and len(self.result.ends_s) >= self.steps:
                return  # it ends with the lab
        if await process.wait():
            raise MeshceeError(f"meshcee train failed{_tails(self.folder)}")

    async def _peer(self, host: str, flags: Sequence[str]) -> str:
        command = [
            sys.executable,
            "-m",
            "meshcee",
            "peer",
            "--json",
            "--name",
            host,
            "--device",
            "cpu",
            "--threads",
            "1",
        ]
        command += ["--listen", f"{self.lab.addresses[host]}:0"]
        command += ["--pace-gflops", str(self.bed.speeds_flops_per_s[host] / self.bed.slower / 1e9), *flags]
        process = await self._start(host, command, host, MESHCEE_HOME=str(self.folder / host))
        assert process.stdout is not None
        async for line in process.stdout:
            event = json.loads(line)
            if "token" in event:
                return str(event["token"])
        raise MeshceeError(f"{host} did not start{_tails(self.folder)}")
