"""Why a device is left out, and why no plan exists: every refusal has a reason in words.

The idea: a reason is a figure. What was tried with the device, and what it would have cost.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshcee.errors import PlanError
from meshcee.planner.chain import Layout, peers_of
from meshcee.planner.classes import DeviceClass
from meshcee.profile import Cluster
from meshcee.workload import Workload

__all__ = ["shortage", "why_left_out"]


def why_left_out(
    of: DeviceClass,
    with_one: tuple[float, Layout] | None,
    period_s: float,
    best: Layout,
    cluster: Cluster,
    workload: Workload,
) -> str:
    """`with_one`: the best plan found that does use a device of this class."""
    peer = of.peers[0]
    samples = workload.times[of.kind].sizes[0]
    least = min(workload.stage_bytes(k, k + 1, samples, 1) for k in range(workload.num_blocks))
    if least > of.memory_bytes:
        return f"its {of.memory_bytes} bytes hold no block: the smallest needs {least}, {least - of.memory_bytes} more"
    near = [p for p in peers_of(best) if p != peer]
    joined = [path for p in near if (path := cluster.path(peer, p)) is not None]
    if near and not joined:
        return "no link joins it to the devices of the plan"
    if near and with_one is None:
        codec = next((c.out for chain in best for c in chain.codecs), "none")
        size = workload.wire_bytes(max(workload.boundary_bytes) * best[0].micro_batch, codec)
        fastest = min(size / p.bandwidth_bytes_per_s for p in joined)
        pace = period_s / sum(chain.num_micro for chain in best)
        if fastest > pace:
            return (
                f"a boundary of one micro-batch takes {fastest:.3g} s on its fastest link, "
                f"longer than the {pace:.3g} s that the plan takes for a micro-batch"
            )
        held = f"{sum(len(chain.stages) for chain in best)} stages already hold the {workload.num_blocks} blocks"
        return f"no place for it made a plan that fits and is faster; {held}"
    if with_one is None:
        return "no plan with it was faster than the best device alone"
    slower = with_one[0] / period_s - 1
    more = f"{slower:.1%} more" if slower > 0 else "about as much"
    return f"the best plan found with one of its kind takes {with_one[0]:.4g} s a step, {more}"


def shortage(cluster: Cluster, workload: Workload, classes: Sequence[DeviceClass]) -> PlanError:
    """How many bytes are missing, and where."""
    needed = workload.held_bytes(0, workload.num_blocks) + sum(workload.activation_bytes)
    offered = sum(d.memory_bytes for d in cluster.devices.values())
    largest = max(cluster.devices.values(), key=lambda d: d.memory_bytes)
    worst = max(range(workload.num_blocks), key=lambda k: workload.stage_bytes(k, k + 1, 1, 1))
    one = workload.stage_bytes(worst, worst + 1, 1, 1)
    if one > largest.memory_bytes:
        return PlanError(
            f"block {workload.names[worst]!r} needs {one} bytes and the largest device, {largest.name}, has "
            f"{largest.memory_bytes}: {one - largest.memory_bytes} bytes are missing there; add a larger device"
        )
    if needed > offered:
        return PlanError(
            f"the job needs {needed} bytes at one sample a micro-batch and the {len(cluster.devices)} devices have "
            f"{offered}: {needed - offered} bytes are missing; add devices"
        )
    low = min(min(workload.times[c.kind].sizes) for c in classes)
    high = max(workload.times[c.kind].largest for c in classes)
    if workload.micro_batch is not None and not low <= workload.micro_batch <= high:
        return PlanError(f"micro-batches of {workload.micro_batch} samples were not profiled; take {low} to {high}")
    smallest = min(cluster.devices.values(), key=lambda d: d.memory_bytes)
    gap = min(workload.stage_bytes(k, k + 1, 1, 1) for k in range(workload.num_blocks)) - smallest.memory_bytes
    where = (
        f"{gap} bytes are missing on {smallest.name}" if gap > 0 else "no cut between blocks suits the memory and links"
    )
    return PlanError(f"the blocks cannot be spread over these devices: {where}; add memory, devices or links")
