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
    """Same kind, region, memory and port."""

    kind: str
    region: str
    memory_bytes: int
    port_bytes_per_s: float
    peers: tuple[str, ...]


def class_key(device: Device) -> tuple[str, str, int, float]:
    return device.kind, device.region, device.memory_bytes, device.port_bytes_per_s


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
    ) -> None:
        """wire_share: bytes on the wire over bytes of the boundary tensor; count: devices that this stands for.

        ring  what a group's reduction takes once a step: seconds per byte of gradients, and seconds of latency
        """
        self.count, self.recompute = count, recompute
        blocks = workload.num_blocks
        first, end = np.arange(blocks + 1)[:, None], np.arange(blocks + 1)[None, :]
        valid = end > first
        out = np.concatenate([[0.0], np.asarray(workload.boundary_bytes, dtype=np.float64)])
        back = np.concatenate([[0.0], np.asarray(workload.boundary_back_bytes, dtype=np.float64)])
        state, activation = workload.sums("state_bytes"), workload.sums("activation_bytes")
        shape = (blocks + 1, blocks + 1)
        self.forward_backward: Floats = np.zeros(shape)
        self.busy: Floats = np.zeros(shape)
        self.live: Floats = np.full(shape, 1e9)
        self.once: Floats = _runs(workload.sums("gradient_bytes")) * ring[0] + ring[1]
        members = list({(class_key(d), n): (d, n) for d, n in members}.values())  # like members take equally long
        for device, samples in members:
            f, b, w = workload.times[device.kind].cumulated(samples)
            forward_backward, total = _runs(f + b), _runs(f + b + w)
            if recompute:
                forward_backward, total = forward_backward + _runs(f), total + _runs(f)
            # a port sends activations on and gradients back, and receives as much
            port = np.maximum(out[None, :] + back[:, None], out[:, None] + back[None, :]) * samples * wire_share
            self.forward_backward = np.maximum(self.forward_backward, forward_backward)
            self.busy = np.maximum(self.busy, np.maximum(total, port / device.port_bytes_per_s))
            each = _runs(activation) * samples
            room = device.memory_bytes - _runs(state)
            if recompute:
                room, each = room - each, np.broadcast_to(out[:, None] * samples, shape)
            live = np.where(each > 0, np.floor(room / np.maximum(each, 1e-9)), np.where(room >= 0, 1e9, 0.0))
            self.live = np.minimum(self.live, live)
        self.once = self.once + np.max([_runs(workload.times[d.kind].optimizer) for d, _ in members], axis=0)
        self.busy = self.busy + self.once / num_micro
        self.live = np.where(valid & (self.live >= 1), self.live, 0.0)
        self.busy = np.where(self.live >= 1, self.busy, np.inf)
        # seconds of all blocks on this group, memory aside
        self.busy_alone = max(
            float(sum(x[-1] for x in workload.times[device.kind].cumulated(samples))) for device, samples in members
        )
        self.tight = bool(np.any(self.live[valid] < ENOUGH))


def ring_of(cluster: Cluster, peers: Sequence[str]) -> tuple[float, float] | None:
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
    return 2 * (count - 1) / count / slowest, 2 * (count - 1) * latency_s


def _runs(cumulated: Floats) -> Floats:
    """[first, end] -> the sum over blocks first to end, from prefix sums."""
    return cumulated[None, :] - cumulated[:, None]
