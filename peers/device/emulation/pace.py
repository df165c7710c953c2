"""Emulates the devices and links of a testbed on one machine: paced compute, shaped transports, no root.

The idea: relative speeds are kept, absolute ones cannot be. All devices of a shape together are paced to what a small
machine computes with ease, so that pacing and not the processor decides. Links are the testbed's own. A device may be
slower than it tells others: then only what it shows at work gives it away. A paced device may hang: see `paced`.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from meshcee.errors import UsageError
from meshcee.figures import LinkProfile
from meshcee.figures.scenario import Scenario, load_scenario, packaged
from peers.device.compute import Pace
from peers.device.emulation.shape import Shape

__all__ = ["HANG_FILE", "TOTAL_FLOPS_PER_S", "Emulated", "device_names", "emulate", "paced"]

TOTAL_FLOPS_PER_S = 6e9  # all devices of a shape together; two cores of 2020 compute about ten times as much

HANG_FILE = (
    "MESHCEE_HANG_FILE"  # a variable of the environment, for tests: the file that hangs this peer's paced device
)


@dataclass(frozen=True)
class _MayHang(Pace):
    """While the file exists, work takes as many times as long as it says; with an empty one no call to the device ends."""

    file: Path = Path()

    def seconds(self, flops: float) -> float:
        if not self.file.exists():
            return super().seconds(flops)
        return float(self.file.read_text() or math.inf) * super().seconds(flops)


def paced(speed_flops_per_s: float) -> Pace:
    """A device of this speed, on real links. It may hang, or be slowed down, where MESHCEE_HANG_FILE names a file."""
    file = os.environ.get(HANG_FILE)
    return _MayHang(speed_flops_per_s, file=Path(file)) if file else Pace(speed_flops_per_s)


@dataclass(frozen=True)
class Emulated:
    """What one peer of a shape is: how slow its device, and what its links do to whatever it sends."""

    pace: Pace
    shape: Shape


def _scenario(where: str) -> Scenario:
    """FILE:NAME of a testbed, or NAME of one that ships with meshcee."""
    file, _, name = where.rpartition(":")
    return load_scenario(Path(file) if file else packaged("testbeds.json"), name, packaged("gpu_profiles.json"))


def device_names(where: str) -> list[str]:
    """The devices of a shape, which are also the names of its peers."""
    return list(_scenario(where).cluster.devices)


def emulate(where: str, name: str, *, jitter_s: float = 0.0) -> Emulated:
    """The device `name` of a shape. Raises UsageError when there is none.

    A line shared by several devices is exact within one process only: each process shapes what it sends itself.
    """
    scenario = _scenario(where)
    cluster = scenario.cluster
    if name not in cluster.devices:
        raise UsageError(f"shape {where!r} has no device {name!r}; it has {', '.join(cluster.devices)}")

    def speed(device: str) -> float:
        """Of one transformer block at the smallest profiled micro-batch: F and both halves of its backward."""
        times = scenario.workload.times[cluster.devices[device].kind]
        size = times.sizes[0]
        return size / float(sum(table[2] - table[1] for table in times.cumulated(size)))

    total = sum(map(speed, cluster.devices))
    links: dict[tuple[str, str], LinkProfile] = {}
    for other in cluster.devices:
        for pair in ((name, other), (other, name)):
            path = cluster.path(*pair) if other != name else None
            if path is not None:
                links[pair] = LinkProfile(path.latency_s, path.bandwidth_bytes_per_s)
    ports = {name: cluster.devices[name].port_bytes_per_s}
    told = speed(name) / total * (scenario.emulated_flops_per_s or TOTAL_FLOPS_PER_S)
    pace = Pace(told * scenario.really.get(name, 1.0), claimed_flops_per_s=told)
    return Emulated(pace, Shape(links, ports=ports, jitter_s=jitter_s))
