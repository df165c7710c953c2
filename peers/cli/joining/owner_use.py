"""Looks at the machine for `--yield-to-owner`: what others than this peer use of its processor and GPU, battery and network.

The idea: everything that runs, less what this process and its children run, between two looks. What cannot be seen is None, and
counts for nothing.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Sequence
from contextlib import suppress

import psutil

from peers.cli.joining.yielding import Seen

__all__ = ["Machine", "busy_core_seconds", "is_metered", "use_by_others"]

TOOL_S = 5.0
MOST_TOOL_BYTES = 256 << 10
METERED_EVERY_S = 30.0  # a machine changes its network rarely
# NetworkManager says whether what is used costs by its volume; a tool of systemd asks, and starts nothing for that.
NETWORK_MANAGER = "org.freedesktop.NetworkManager"
METERED = (
    "busctl", "--system", "--auto-start=no", "--timeout=2", "get-property",
    NETWORK_MANAGER, "/org/freedesktop/NetworkManager", NETWORK_MANAGER, "Metered",
)  # fmt: skip
YES, NO = ("1", "3"), ("2", "4")  # said by the user, guessed


class Machine:
    """This machine. `look` says what has been used since the look before."""

    def __init__(self, device: str) -> None:
        self._gpu = device.partition(":")[2] or "0" if device.startswith("cuda") else None
        self._before: tuple[float, float, float] | None = None  # seconds, busy core seconds of all, and of ours
        self._metered: tuple[float, bool | None] | None = None  # when it was asked, and what was said

    async def look(self) -> Seen:
        on_battery = await asyncio.to_thread(_on_battery)
        ours = await asyncio.to_thread(_family)
        now, here = time.monotonic(), time.localtime()
        gpu = await _gpu_of_others(self._gpu, ours) if self._gpu is not None else None
        return Seen(
            now,
            here.tm_hour * 60 + here.tm_min,
            self._cpu_of_others(now, sum(ours.values())),
            gpu,
            on_battery,
            await self._is_metered(now),
        )

    async def _is_metered(self, now_s: float) -> bool | None:
        if self._metered is None or now_s - self._metered[0] >= METERED_EVERY_S:
            self._metered = (now_s, is_metered(await _said(METERED)))
        return self._metered[1]

    def _cpu_of_others(self, now_s: float, ours_s: float) -> float | None:
        busy_s = busy_core_seconds()
        before, self._before = self._before, (now_s, busy_s, ours_s)
        if before is None or now_s <= before[0]:
            return None
        others_s = (busy_s - before[1]) - max(0.0, ours_s - before[2])
        return min(1.0, max(0.0, others_s / ((now_s - before[0]) * (psutil.cpu_count() or 1))))


def busy_core_seconds() -> float:
    """That all cores of this machine have computed since it began, for whomever."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0))


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


def _on_battery() -> bool | None:
    """None where the system knows of no battery; some have no place where it would say so."""
    with suppress(OSError, psutil.Error):
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
        if battery is not None and battery.power_plugged is not None:
            return not battery.power_plugged
    return None


async def _gpu_of_others(index: str, ours: Collection[int]) -> float | None:
    """By nvidia-smi, which comes with the driver."""
    return use_by_others(await _said(("nvidia-smi", "pmon", "-c", "1", "-s", "u", "-i", index)), ours)


async def _said(command: Sequence[str]) -> str:
    """What a tool of the system prints; "" where it is not there, or does not end in time."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )  # fmt: skip
    except OSError:
        return ""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(TOOL_S):
            told = await process.stdout.read(MOST_TOOL_BYTES)
            await process.wait()
    except TimeoutError:
        return ""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return told.decode(errors="replace")


def is_metered(told: str) -> bool | None:
    """Of what `busctl` prints of NetworkManager's property; None where that does not know."""
    kind, _, value = told.strip().partition(" ")
    return None if kind != "u" or value not in (*YES, *NO) else value in YES


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
