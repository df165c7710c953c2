"""Where to cut the blocks for a given row of groups: dynamic programming from the last group to the first.

The idea: for a period T, a suffix of the pipeline is judged by one number, its residence R: how long a micro-batch stays
in it. A smaller R is better for everything in front. It shortens fill and drain, and by Little's law it needs fewer
micro-batches in memory. So the least R per first block is all that must be kept. It is found for all candidate periods at
once. The step takes about R + (M - 1) T.

Devices that the planner cannot tell apart are one class; what a stage on a group of them costs is a table over (first block, end).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from meshcee.figures import Cluster, Device
from meshcee.figures.workload import Workload

__all__ = [
    "DeviceClass",
    "Join",
    "StageTable",
    "class_key",
    "classes_of",
    "cut",
    "estimate_s",
    "ladder",
    "ring_of",
]

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
        recompute: bool = False,
        ring: tuple[float, float] = (0.0, 0.0),
        num_micro: int = 1,
        known: dict[object, tuple[Floats, ...]] | None = None,
    ) -> None:
        """wire_share: bytes on the wire over bytes of the boundary tensor.

        ring   what a group's reduction takes once a step: seconds per byte of gradients, and seconds of latency
        known  tables of single devices, filled and used again
        """
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
    room = memory_bytes - _runs(workload.sums("state_bytes")) - _largest(workload.workspace_bytes(samples))
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


def _largest(each: Floats) -> Floats:
    """[first, end] -> the largest of blocks first to end."""
    found = np.zeros((len(each) + 1, len(each) + 1))
    for first in range(len(each)):
        found[first, first + 1 :] = np.maximum.accumulate(each[first:])
    return found


Ints = npt.NDArray[np.int64]
Suffix = tuple[
    Floats, Ints, Ints
]  # the end of a row: least residence, where its first group ends, whether it recomputes


@dataclass(frozen=True)
class Join:
    """The boundary between two classes, per cut: seconds there and back, and seconds that a line is held."""

    round_trip_s: Floats
    occupied_s: Floats


Piece = tuple[StageTable, int, int]  # a stage: its table, first block, end


def estimate_s(
    parts: Sequence[Piece], hops: Sequence[tuple[float, float]], num_micro: int, held_s: float = 0.0
) -> float:
    """What a step takes.

    A stage is behind from the first F that reaches it to its last B: its residence, and a pace of F and B for every further
    micro-batch. Weight gradients fill part of the waits, never all of them: half way between the paces with W and without.
    Then comes what is done once a step. The stage that takes longest over all this sets the period, and no device or
    line can be busy for longer than it.

    hops    of each boundary: seconds there and back, seconds that a line is held
    held_s  of the busiest line that several boundaries share
    """
    residence = longest = period = whole = 0.0
    pace = held_s
    for j in range(len(parts) - 1, -1, -1):
        table, first, end = parts[j]
        if j < len(hops):
            residence += hops[j][0]
            pace = max(pace, hops[j][1])
        forward_backward, once = table.forward_backward.item(first, end), table.once.item(first, end)
        busy, live = table.busy.item(first, end), table.live.item(first, end)
        residence += forward_backward
        longest = max(longest, residence + once)
        pace, period = max(pace, forward_backward), max(period, busy)
        whole = max(whole, busy - once / num_micro)
        if live < num_micro:  # Little's law, where memory holds fewer than are on their way
            period, whole = max(period, residence / live), max(whole, residence / live)
    least = max(num_micro * max(period, held_s), longest + (num_micro - 1) * pace)
    return float(least + max(least, longest + (num_micro - 1) * max(pace, whole))) / 2


def ladder(low: float, high: float, count: int) -> Floats:
    """Candidate periods, and one so long that memory for a single micro-batch is enough."""
    return np.append(low * np.geomspace(1.0, max(high / low, 1.001), count - 1), 1e3 * high)


def cut(
    tables: Sequence[Sequence[StageTable]],
    joins: Sequence[Join],
    periods: Floats,
    num_micro: int,
    held_s: float = 0.0,
    known: dict[object, Suffix] | None = None,
    names: Sequence[object] = (),
) -> tuple[float, list[int], list[bool]] | None:
    """For a given row of groups, the best places to cut: (estimate, bounds, which stages recompute).

    tables  per group: without, and perhaps with recomputation. Every group gets a block.
    known   what was found for the ends of rows, filled and used again; `names` has one for every place in this row,
            which says all of what stands there and behind it
    """
    known = {} if known is None else known
    residence: Floats = np.full((len(periods), tables[0][0].busy.shape[0]), np.inf)
    residence[:, -1] = 0.0
    choices: list[tuple[Ints, Ints]] = []
    for j in range(len(tables) - 1, -1, -1):
        name = names[j] if j and names else None
        found = known.get(name) if name is not None else None
        if found is None:
            if j < len(joins):
                join = joins[j]
                late = residence + join.round_trip_s
                residence = np.where(join.occupied_s > periods[:, None], np.inf, late)
            # nothing in front hides what the first group does once a step
            found = _in_front(tables[j], residence, periods, once=not j, behind=len(tables) - 1 - j)
            if name is not None:
                known[name] = found
        residence = found[0]
        choices.append(found[1:])
    choices.reverse()
    best: tuple[float, list[int], list[bool]] | None = None
    seen = set()
    for t in np.flatnonzero(np.isfinite(residence[:, 0])).tolist():
        bounds, recomputed = [0], []
        for choice, again in choices:
            recomputed.append(bool(again[t, bounds[-1]]))
            bounds.append(int(choice[t, bounds[-1]]))
        if (form := (*bounds, *recomputed)) in seen:
            continue
        seen.add(form)
        parts = [(row[r], a, b) for row, r, (a, b) in zip(tables, recomputed, pairwise(bounds))]
        hops = [(float(join.round_trip_s[at]), float(join.occupied_s[at])) for join, at in zip(joins, bounds[1:])]
        estimate = estimate_s(parts, hops, num_micro, held_s)
        if best is None or estimate < best[0]:
            best = (estimate, bounds, recomputed)
    return best


def _in_front(tables: Sequence[StageTable], residence: Floats, periods: Floats, *, once: bool, behind: int) -> Suffix:
    """One more group in front: the least residence per (period, first block), where it ends, and whether it recomputes.

    behind   groups, each of which gets a block: so blocks from `count` on are not for this group
    """
    best: Suffix | None = None
    grid, count = periods[:, None, None], residence.shape[1] - behind
    for table in tables:
        whole = table.forward_backward[:count, :count] + residence[:, None, :count]
        fits = table.busy[:count, :count] <= grid
        short = whole > table.live[:count, :count] * grid
        whole = np.where(short | ~fits, np.inf, whole)
        if once:
            whole += table.once[:count, :count]
        end = whole.argmin(axis=2)
        least = np.take_along_axis(whole, end[:, :, None], 2)[:, :, 0]
        if best is None:
            best = least, end, np.zeros_like(end)
        else:
            again = least < best[0]
            best = np.where(again, least, best[0]), np.where(again, end, best[1]), again.astype(np.int64)
        if not (short & fits).any():  # nothing is short of memory: recomputation only costs time
            break
    assert best is not None
    found = (
        np.full_like(residence, np.inf),
        np.zeros(residence.shape, np.int64),
        np.zeros(residence.shape, np.int64),
    )
    for table_of_all, part in zip(found, best, strict=True):
        table_of_all[:, :count] = part
    return found
