"""The first planner: contiguous blocks in proportion to measured speed, under each peer's memory, one stage a peer.

The idea: dynamic programming over (stages used, blocks placed) for the least time of the slowest stage. It knows
nothing of links; the search in this package does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from meshcee.errors import PlanError
from meshcee.plan import LeftOut, Member, Pipeline, Plan, Stage
from meshcee.planner.memory import activation_bytes, stage_bytes, state_bytes
from meshcee.profile import BlockCost, DeviceProfile

__all__ = ["proportional"]

MICRO_BATCHES = 8  # aimed at when the job leaves the micro-batch size open


def proportional(
    devices: Mapping[str, DeviceProfile],
    costs: Sequence[BlockCost],
    batch_size: int,
    micro_batch: int | None = None,
    max_stages: int | None = None,
) -> Plan:
    """A plan over all devices, fastest first, or over as many as there are blocks.

    Raises PlanError naming the missing bytes when no placement fits.
    """
    if not devices or not costs:
        raise PlanError("a plan needs at least one device and one block")
    micro = micro_batch or _micro_batch(batch_size)
    order = sorted(devices, key=lambda peer: (-devices[peer].speed_flops_per_s, peer))
    limit = min(len(costs), max_stages or len(costs))
    why = f"the job asked for {max_stages} stages" if limit == max_stages else f"the model has only {len(costs)} blocks"
    used = order[:limit]
    left_out = [LeftOut(peer, why) for peer in order[limit:]]
    bounds = _partition([devices[peer] for peer in used], costs, micro)
    if bounds is None:
        raise PlanError(_shortage(devices, used, costs, micro))
    stages = []
    for j, peer in enumerate(used):
        own = costs[bounds[j] : bounds[j + 1]]
        window = len(used) - j + 1
        room = devices[peer].memory_bytes - state_bytes(own)
        per_micro = activation_bytes(own, micro)
        live_cap = min(window + 2, room // per_micro if per_micro else window + 2)
        stages.append(
            Stage(bounds[j], bounds[j + 1], (Member(peer, micro),), window=min(window, live_cap), live_cap=live_cap)
        )
    return Plan(micro, (Pipeline(batch_size // micro, tuple(stages)),), left_out=tuple(left_out))


def _micro_batch(batch_size: int) -> int:
    """The divisor of the batch that gives about MICRO_BATCHES micro-batches."""
    fitting = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
    return min(fitting, key=lambda m: (abs(batch_size / m - MICRO_BATCHES), m))


def _partition(devices: Sequence[DeviceProfile], costs: Sequence[BlockCost], micro: int) -> list[int] | None:
    """Bounds of the stages with the least time of the slowest one; None when nothing fits."""
    work = [0.0, *accumulate(max(c.flops, 1.0) for c in costs)]
    held = [0, *accumulate(stage_bytes([c], micro, 1) for c in costs)]
    count = len(costs)
    best = [0.0] + [math.inf] * count  # best[b]: blocks [0, b) on the devices so far
    choices: list[list[int]] = []
    for device in devices:
        row, choice = [math.inf] * (count + 1), [0] * (count + 1)
        for b in range(1, count + 1):
            for a in range(b - 1, -1, -1):
                seconds = (work[b] - work[a]) / device.speed_flops_per_s
                if held[b] - held[a] > device.memory_bytes or seconds >= row[b]:
                    break  # longer stages only get slower and larger
                if (slowest := max(best[a], seconds)) < row[b]:
                    row[b], choice[b] = slowest, a
        best = row
        choices.append(choice)
    if math.isinf(best[count]):
        return None
    bounds = [count]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    return bounds[::-1]


def _shortage(devices: Mapping[str, DeviceProfile], used: Sequence[str], costs: Sequence[BlockCost], micro: int) -> str:
    """How many bytes are missing, and where."""
    needed = stage_bytes(costs, micro, 1)
    offered = sum(devices[peer].memory_bytes for peer in used)
    largest = max(costs, key=lambda c: stage_bytes([c], micro, 1))
    biggest = max(used, key=lambda peer: devices[peer].memory_bytes)
    one, room = stage_bytes([largest], micro, 1), devices[biggest].memory_bytes
    if one > room:
        return (
            f"block {largest.name!r} needs {one} bytes and the largest peer, {biggest}, offers {room}: "
            f"{one - room} bytes are missing there; join a larger peer or lower micro_batch_size"
        )
    if needed > offered:
        return (
            f"the job needs {needed} bytes and the {len(used)} peers offer {offered}: {needed - offered} bytes are "
            "missing; join more peers or lower micro_batch_size"
        )
    smallest = min(used, key=lambda peer: devices[peer].memory_bytes)
    short = min(stage_bytes([c], micro, 1) for c in costs) - devices[smallest].memory_bytes
    where = (
        f"{short} bytes are missing on {smallest}" if short > 0 else "no cut between blocks suits every peer's memory"
    )
    return f"the blocks cannot be spread so that each peer's stage fits: {where}; join a larger peer"
