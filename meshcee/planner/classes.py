"""Devices that a planner cannot tell apart, and what a stage on a group costs, as tables over (first block, end).

The idea: the dynamic programs ask for thousands of stages; every answer that does not depend on the neighbours is in a
matrix that is computed once per group and shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshcee.profile import Cluster, Device
from meshcee.workload import Workload

__all__ = ["DeviceClass", "StageTable", "class_key", "classes_of", "ring_of"]

Floats = npt.NDArray[np.float64]

ENOUGH = 64  # live micro-batches that no reasonable plan exceeds


@dataclass(frozen=True)
class DeviceClass:
    """Same kind, region, memory, port and host, if others share that."""

    kind: str
    region: str
    memory_bytes: int
    port_bytes_per_s: float
    host: str
    peers: tuple[str, ...]


ClassKey = tuple[str, str, int, float, str]


def class_key(device: Device) -> ClassKey:
    return device.kind, device.region, device.memory_bytes, device.port_bytes_per_s, device.host


def classes_of(cluster: Cluster) -> list[DeviceClass]:
    """In the order in which their first devices were given, so that names do not matter.

    Devices with links of their own (measured pair by pair) are told apart by them: each is a class.
    """
    own = {name for edge in cluster.graph.edges for name in edge if edge[0][0] != "@" and edge[1][0] != "@"}
    found: dict[tuple[object, ...], list[str]] = {}
    for device in cluster.devices.values():
        key = (*class_key(device), device.name if device.name in own else "")
        found.setdefault(key, []).append(device.name)
    classes = []
    for peers in found.values():
        first = cluster.devices[peers[0]]
        classes.append(DeviceClass(*class_key(first), tuple(peers)))
    return classes


class StageTable:
    """Stages of one group whose members take these samples of every micro-batch.

    forward_backward  seconds of F and B of the slowest member, recomputation included
    once              seconds once a step, in which the stage does nothing else: optimizer, and a group's reduction
    busy              the least period with which the stage keeps up: F + B + W, its ports, a share of what is once a
                      step; infinite if it never fits
    live              micro-batches between F and W for which there is memory
    """

    def __init__(
        self,
        workload: Workload,
        members: Sequence[tuple[Device, int]],
        wire_share: float,
        *,
        count: int = 1,
        recompute: bool = False,
        ring: tuple[float, float] = (0.0, 0.0),
        num_micro: int = 1,
        known: dict[object, tuple[Floats, ...]] | None = None,
    ) -> None:
        """wire_share: bytes on the wire over bytes of the boundary tensor; count: devices that this stands for.

        ring   what a group's reduction takes once a step: seconds per byte of gradients, and seconds of latency
        known  tables of single devices, filled and used again
        """
        self.count, self.recompute = count, recompute
        known = {} if known is None else known
        found = []
        for device, samples in dict.fromkeys((class_key(d), n) for d, n in members):
            key = (device, samples, wire_share, recompute)
            if key not in known:
                known[key] = _alone(workload, device, samples, wire_share, recompute)
            found.append(known[key])
        # like members take equally long; of unlike ones the slowest counts
        self.forward_backward: Floats = _merged(np.maximum, [x[0] for x in found])
        self.live: Floats = _merged(np.minimum, [x[2] for x in found])
        self.once: Floats = _runs(workload.sums("gradient_bytes")) * ring[0] + ring[1]
        self.once = self.once + _merged(np.maximum, [x[3] for x in found])
        self.busy: Floats = np.where(
            self.live >= 1, _merged(np.maximum, [x[1] for x in found]) + self.once / num_micro, np.inf
        )
        # seconds of all blocks on this group, memory aside
        self.busy_alone = max(
            float(sum(x[-1] for x in workload.times[device.kind].cumulated(samples))) for device, samples in members
        )
        self.tight = bool(np.any((self.live < ENOUGH) & _valid(workload.num_blocks)))


def _alone(
    workload: Workload, device: ClassKey, samples: int, wire_share: float, recompute: bool
) -> tuple[Floats, ...]:
    """Of one device: F + B, the least period, live micro-batches and the optimizer's seconds, each [first, end]."""
    kind, _, memory_bytes, port_bytes_per_s, _ = device
    out, back = workload.cuts
    times = workload.times[kind]
    f, b, w = times.cumulated(samples)
    again = f if recompute else np.zeros_like(f)
    # a port sends activations on and gradients back, and receives as much
    port = np.maximum(out[None, :] + back[:, None], out[:, None] + back[None, :]) * samples * wire_share
    busy = np.maximum(_runs(f + b + w + again), port / port_bytes_per_s)
    each = _runs(workload.sums("activation_bytes")) * samples
    room = memory_bytes - _runs(workload.sums("state_bytes"))
    if recompute:
        room, each = room - each, np.broadcast_to(out[:, None] * samples, each.shape)
    live = np.where(each > 0, np.floor(room / np.maximum(each, 1e-9)), np.where(room >= 0, 1e9, 0.0))
    live = np.where(_valid(workload.num_blocks) & (live >= 1), live, 0.0)
    return _runs(f + b + again), busy, live, _runs(times.optimizer)


def _merged(how: np.ufunc, tables: Sequence[Floats]) -> Floats:
    merged: Floats = tables[0]
    for table in tables[1:]:
        merged = how(merged, table)
    return merged


def _valid(blocks: int) -> npt.NDArray[np.bool_]:
    """Where a stage has a block at all."""
    return np.triu(np.ones((blocks + 1, blocks + 1), dtype=bool), 1)


def ring_of(cluster: Cluster, workload: Workload, peers: Sequence[str]) -> tuple[float, float] | None:
    """Of a group's reduction: seconds per byte of gradients, and seconds of latency; None when a hop is missing."""
    count = len(peers)
    if count == 1:
        return 0.0, 0.0
    ring = sorted(peers, key=lambda p: cluster.devices[p].region)
    hops = [h for a, b in zip(ring, [*ring[1:], ring[0]]) if (h := cluster.path(a, b)) is not None]
    if len(hops) < count:
        return None
    slowest = min(h.bandwidth_bytes_per_s for h in hops)
    latency_s = max(h.latency_s for h in hops)
    share, rounds = workload.sum_costs(count)
    return share / slowest, rounds * latency_s


def _runs(cumulated: Floats) -> Floats:
    """[first, end] -> the sum over blocks first to end, from prefix sums."""
    return cumulated[None, :] - cumulated[:, None]
