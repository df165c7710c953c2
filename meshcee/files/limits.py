"""How much of this machine a process may have: memory, and time of its cores. A container has less than the machine.

The idea: a control group limits all that is inside of it, so of the groups around a process the narrowest counts. Linux shows their
limits as files, in two versions of one interface. Where there are no such files, the machine itself is the limit.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["core_quota", "free_bytes", "group_files", "narrowest", "own_group"]

GROUPS, AROUND = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
QUOTAS = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
MEMORY = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def free_bytes() -> int:
    """Memory that this process may still take: what the machine has left, or less within a limit."""
    free, _ = narrowest()
    available = int(psutil.virtual_memory().available)
    return available if free is None else min(available, free)


def narrowest() -> tuple[int | None, int | None]:
    """Of the limit of memory that leaves least: the bytes that it leaves, and the limit. None and None without a limit.

    Pages of files that the kernel can drop are left. The limit of the address space (`ulimit -v`) is one more.
    """
    total, rooms = psutil.virtual_memory().total, list[tuple[int, int]]()
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        rooms.append((max(0, most - psutil.Process().memory_info().vms), most))
    for group in _groups("memory"):
        for file, used in MEMORY:
            limit, now = _number(group / file), _number(group / used)
            if limit is not None and now is not None and limit < total:
                rooms.append((max(0, limit - now + _droppable(group)), limit))
    return min(rooms, default=(None, None))


def core_quota() -> float | None:
    """Core seconds that the groups give to each second, which may be fewer than the cores. None where no group says."""
    return min((quota for _, quota in _quotas()), default=None)


def own_group() -> str:
    """Names the group in which this process has its own share of cores and of memory; "" where it has not both."""
    narrow = min(_quotas(), key=lambda one: one[1], default=None)
    if narrow is None or narrowest()[1] is None:
        return ""
    found = narrow[0].stat()
    return f"{found.st_dev}:{found.st_ino}"


def group_files() -> list[str]:
    """The files that are read here, for who gives up the others."""
    names = {"cpu": QUOTAS, "memory": (*(name for pair in MEMORY for name in pair), "memory.stat")}
    found = (group / name for kind, files in names.items() for group in _groups(kind) for name in files)
    return [str(path) for path in dict.fromkeys(found) if path.exists()]


def _groups(kind: str) -> Iterator[Path]:
    """The control groups around this process, the innermost first, of both versions of the interface."""
    with suppress(OSError, ValueError):
        for line in AROUND.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            roots = [GROUPS] if not controllers else [GROUPS / c for c in controllers.split(",") if c == kind]
            for root in roots:
                place = root / path.lstrip("/")
                yield from (p for p in (place, *place.parents) if p.is_relative_to(root))


def _quotas() -> Iterator[tuple[Path, float]]:
    for group in _groups("cpu"):
        most, _, period = _text(group / QUOTAS[0]).partition(" ")
        if most.isdecimal() and period.isdecimal():
            yield group, int(most) / int(period)
        old, each = _number(group / QUOTAS[1]), _number(group / QUOTAS[2])  # -1 is no quota
        if old and each:
            yield group, old / each


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _droppable(group: Path) -> int:
    with suppress(ValueError):
        rows = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines())
        return int(rows.get("total_inactive_file", rows.get("inactive_file", "0")))
    return 0
