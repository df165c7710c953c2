"""Runs what people would use instead of meshcee, row after row, and hears when each step was done.

The idea: a row whose steps are long needs few of them, since they vary by a hundredth. The first step is never counted; if it
is short, the second is not either; then as many are made as fill COUNTED_S, or a trace's window, and at least two.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.rivals.launch import Bed, Meter, Run, Site, System, Told, in_turn
from benchmarks.rivals.worker import Order
from meshcee.errors import MeshceeError

__all__ = ["counted_steps", "run_rivals"]

LONG_S = 6.0  # of a step: its caches and connections are no part worth mentioning of the next one
COUNTED_S = 12.0
MOST = 6  # steps that are counted, where no trace is to be watched

Process = asyncio.subprocess.Process


def counted_steps(step_s: float, window_s: float) -> int:
    """How many steps are counted, judged by one that has been seen. `window_s` is 0 where the network does not change."""
    most = math.ceil(window_s / step_s) if window_s else MOST
    return max(2, min(most, math.ceil(max(COUNTED_S, window_s) / step_s)))


async def run_rivals(
    bed: Bed, systems: Sequence[System], told: Told, limit_s: float, mtu: int, *, window_s: float = 0.0
) -> None:
    """All of hivemind, or all of torch: one process for each device that any of them uses."""
    module = "collaborative" if systems[0].name == "hivemind" else "torch_worker"
    hosts = [host for host in bed.hosts if any(host in system.hosts for system in systems)]
    start = partial(_start, module=f"benchmarks.rivals.{module}", hosts=hosts)
    await in_turn(bed, systems, told, limit_s, mtu, start, partial(_measure, window_s=window_s))


async def _start(place: Site, module: str, hosts: Sequence[str]) -> Mapping[str, Process]:
    return {host: await place.start(host, [module], host, listens=True) for host in hosts}


async def _measure(place: Site, started: Mapping[str, Process], system: System, window_s: float) -> Run:
    processes = [started[host] for host in system.hosts]
    result = Run(len(processes), place.bed.slower)
    meter = Meter(place.lab, result)
    orders = _orders(place, system)
    seed = ""
    for process, order in zip(processes, orders, strict=True):
        await _say(process, {"order": {**asdict(order), "seed": seed}})
        if system.name == "hivemind" and not seed:
            seed = (await _hear(place, process, "seed"))["seed"]
    await _all(place, processes, "ready")
    step_s = await _go(place, processes, result, 1)
    if step_s < LONG_S:
        step_s = await _go(place, processes, result, 1)
    result.warm = len(result.ends_s)
    await meter.begin()
    await _go(place, processes, result, counted_steps(step_s, window_s))
    await meter.end()
    for process in processes:
        await _say(process, {"end": True})
    await _all(place, processes, "over")
    return result


def _orders(place: Site, system: System) -> list[Order]:
    bed, hosts, port = place.bed, system.hosts, random.randrange(20000, 30000)
    return [
        Order(
            system=system.name,
            rank=rank,
            addresses=[place.lab.addresses[host] for host in hosts],
            speeds_flops_per_s=[bed.speeds_flops_per_s[host] / bed.slower for host in hosts],
            flops=bed.flops,
            micro=system.micro,
            port=port,
        )
        for rank in range(len(hosts))
    ]


async def _go(place: Site, processes: Sequence[Process], result: Run, steps: int) -> float:
    """So many steps more; seconds of one of them."""
    start_s = asyncio.get_running_loop().time()
    for process in processes:
        await _say(process, {"go": steps})
    for event in await _all(place, processes, "step", steps):
        result.hear(event)
    return (result.ends_s[-1] - start_s / result.slower) / steps


async def _say(process: Process, request: Mapping[str, Any]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # that it has ended is seen where it is heard
        process.stdin.write(json.dumps(request).encode() + b"\n")
        await process.stdin.drain()


async def _all(place: Site, processes: Sequence[Process], key: str, count: int = 1) -> list[dict[str, Any]]:
    """So many events with this key from each of them; in the order of each."""

    async def hear(process: Process) -> list[dict[str, Any]]:
        return [await _hear(place, process, key) for _ in range(count)]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(hear(process)) for process in processes]
    return [event for task in tasks for event in task.result()]


async def _hear(place: Site, process: Process, key: str) -> dict[str, Any]:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        event = json.loads(line) if line.startswith(b"{") else {}
        if key in event:
            return event
    raise MeshceeError(f"a worker has ended{place.tails()}")
