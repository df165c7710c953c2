"""Looks at the machine for `--yield-to-owner`: what others than this peer use of its processor and GPU, and the battery.

The idea: everything that runs, less what this process and its children run, between two looks. What cannot be seen is None, and
counts for nothing.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection
from contextlib import suppress

import psutil

from peers.cli.joining.yielding import Seen

__all__ = ["Machine", "use_by_others"]

SMI_S = 5.0
MOST_SMI_BYTES = 256 << 10


class Machine:
    """This machine. `look` says what has been used since the look before."""

    def __init__(self, device: str) -> None:
        self._gpu = device.partition(":")[2] or "0" if device.startswith("cuda") else None
        self._before: tuple[float, float, float] | None = None  # seconds, busy core seconds of all, and of ours

    async def look(self) -> Seen:
        ours = await asyncio.to_thread(_family)
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
        now, here = time.monotonic(), time.localtime()
        gpu = await _gpu_of_others(self._gpu, ours) if self._gpu is not None else None
        return Seen(
            now,
            here.tm_hour * 60 + here.tm_min,
            self._cpu_of_others(now, sum(ours.values())),
            gpu,
            None if battery is None or battery.power_plugged is None else not battery.power_plugged,
        )

    def _cpu_of_others(self, now_s: float, ours_s: float) -> float | None:
        times = psutil.cpu_times()
        busy_s = times.user + times.nice + times.system + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
        before, self._before = self._before, (now_s, busy_s, ours_s)
        if before is None or now_s <= before[0]:
            return None
        others_s = (busy_s - before[1]) - max(0.0, ours_s - before[2])
        return min(1.0, max(0.0, others_s / ((now_s - before[0]) * (psutil.cpu_count() or 1))))


def _family() -> dict[int, float]:
    """Core seconds of this process and its living children, by process id; what has ended counts with its parent."""
    me = psutil.Process()
    found = {}
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            waited_s = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
            found[process.pid] = times.user + times.system + waited_s
    return found


async def _gpu_of_others(index: str, ours: Collection[int]) -> float | None:
    """By nvidia-smi, which comes with the driver."""
    try:
        process = await asyncio.create_subprocess_exec(
            "nvidia-smi", "pmon", "-c", "1", "-s", "u", "-i", index,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )  # fmt: skip
    except OSError:
        return None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(SMI_S):
            told = await process.stdout.read(MOST_SMI_BYTES)
            await process.wait()
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return use_by_others(told.decode(errors="replace"), ours)


def use_by_others(pmon: str, ours: Collection[int]) -> float | None:
    """Of what `nvidia-smi pmon` prints: the share of the GPU's time that processes beside these use; None where it says nothing."""
    head = next(
        (line.lstrip("# ").split() for line in pmon.splitlines() if line.startswith("#") and " pid " in line), None
    )
    if head is None or "sm" not in head:
        return None
    rows = [line.split() for line in pmon.splitlines() if line.strip() and not line.startswith("#")]
    shares = [
        float(row[head.index("sm")])
        for row in rows
        if len(row) > max(head.index("pid"), head.index("sm"))
        and row[head.index("pid")].isdecimal()
        and int(row[head.index("pid")]) not in ours
        and row[head.index("sm")].isdecimal()
    ]
    return min(1.0, sum(shares) / 100)
