"""Devices of one host: what each gets of the cores and the memory that they share.

The idea: several peers may run on one machine, and none of them knows of the others. Whoever plans does: it divides what is
there, unless a user has said how much a peer may take. How many threads a CPU computes with changes its bits, so the number is
one for the whole run, chosen before its first plan. Who comes or goes later changes where stages lie, not the number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from meshcee.figures.profile import DeviceProfile

__all__ = ["as_run", "shares", "threads_of"]


def shares(devices: Mapping[str, DeviceProfile]) -> dict[str, int]:
    """Threads that each CPU would have for itself if all computed at once: at least one."""
    cpus = {p: d for p, d in devices.items() if d.kind == "cpu"}
    said = Counter[str]()  # threads that users have given away
    others = Counter[str]()  # peers that share what is left
    for device in cpus.values():
        if device.threads_said:
            said[device.host] += device.threads
        else:
            others[device.host] += 1
    found = {}
    for peer, device in cpus.items():
        if device.threads_said or not device.host:
            found[peer] = device.threads
        else:
            left = device.cores - said[device.host]
            found[peer] = max(1, min(device.most_threads, left // others[device.host]))
    return found


def threads_of(devices: Mapping[str, DeviceProfile]) -> int:
    """For a run on these: the number with which most threads compute in all; of equals the smallest. 0 where there is no CPU.

    A device that has fewer for itself is not counted.
    """
    found = list(shares(devices).values())
    totals = {count: count * sum(share >= count for share in found) for count in sorted(set(found))}
    return max(totals, key=lambda count: (totals[count], -count), default=0)


def as_run(devices: Mapping[str, DeviceProfile], threads: int) -> dict[str, DeviceProfile]:
    """The devices as they are in a run with so many threads (0: each its own), with their shares of their hosts' memory.

    What users have given to CPUs of a host is theirs. The others share what is left.
    CPUs of a host are one and the same: of what they measured the most counts, as whatever disturbs a measurement makes it less.
    """
    fastest: dict[str, float] = {}  # of one thread
    for peer, device in devices.items():
        if device.kind == "cpu":
            key = device.host or peer
            fastest[key] = max(fastest.get(key, 0.0), device.speed_flops_per_s / device.threads)
    said = Counter[str]()  # bytes that users have given away
    others = Counter[str]()  # peers that share what is left
    for device in devices.values():
        if device.kind == "cpu" and device.memory_said:
            said[device.host] += device.memory_bytes
        elif device.kind == "cpu":
            others[device.host] += 1
    found = {}
    for peer, device in devices.items():
        if device.kind == "cpu":
            computing = threads or device.threads
            memory = device.memory_bytes
            if device.host and not device.memory_said:
                memory = max(1, (memory - said[device.host]) // others[device.host])
            speed = fastest[device.host or peer] * computing
            device = replace(device, memory_bytes=memory, speed_flops_per_s=speed, threads=computing)
        found[peer] = device
    return found
