"""Planners to compare with, on the same clusters, under the same memory model; all priced by meshcee's simulator.

The idea: what differs between published planners is the cost that they minimise and the devices that they must use. Each is
written here as that: rows of equal groups, class by class, the exact best partition of the blocks for its cost, and the
row with the least cost wins. They are labelled "after X": the cost model is X's as its paper and public code describe it, the
search around it is ours and at least as thorough.

Schedules: 1F1B with S - j micro-batches in flight at stage j, as published, and with a long warm-up, ceil(R_j / T) + 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations

from meshcee.errors import PlanError
from meshcee.figures.profile import Cluster
from meshcee.figures.workload import Workload
from meshcee.plan import Member, Pipeline, Plan, Stage
from meshcee.planner.cut import DeviceClass, classes_of
from meshcee.planner.rules import shortages
from meshcee.simulator import simulate

Groups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Result:
    """Samples per second, None when it does not fit; and the mean share of time that the cluster's devices compute."""

    samples_per_s: float | None
    utilisation: float


def priced(
    plan: Plan | None, cluster: Cluster, workload: Workload, *, fused: bool = True, gpipe: bool = False
) -> Result:
    if plan is None or shortages(plan, cluster, workload):
        return Result(None, 0.0)
    timeline = simulate(fused_plan(plan) if fused else plan, cluster, workload, forward_first=gpipe)
    busy = sum(timeline.utilisation().values()) / len(cluster.devices)
    return Result(workload.global_batch / timeline.period_s, busy)


def fused_plan(plan: Plan) -> Plan:
    """Every stage runs B and W as one, so that no micro-batch awaits its W: 1F1B and GPipe."""
    pipelines = (
        replace(p, stages=tuple(replace(s, fused=True, live_cap=p.num_micro + 1) for s in p.stages))
        for p in plan.pipelines
    )
    return replace(plan, pipelines=tuple(pipelines))


# -- from a row and its cuts to a plan ---------------------------------------------------------------------------------


def pipeline_plan(
    row: Groups, bounds: Sequence[int], micro: int, cluster: Cluster, workload: Workload, schedule: str
) -> Plan:
    """schedule: 1f1b, long or gpipe."""
    count, num_micro = len(row), workload.global_batch // micro
    times = [_seconds(g, bounds[j], bounds[j + 1], micro, cluster, workload) for j, g in enumerate(row)]
    trips = [_trip(a, b, bounds[j + 1], micro, cluster, workload) for j, (a, b) in enumerate(pairwise(row))]
    stages, residence = [], 0.0
    for j in range(count - 1, -1, -1):
        residence += times[j] + (trips[j] if j < count - 1 else 0.0)
        window = {"1f1b": count - j, "gpipe": num_micro, "long": math.ceil(residence / max(times)) + 1}[schedule]
        if schedule == "long":
            window = min(window, _room(row[j], bounds[j], bounds[j + 1], micro, cluster, workload))
        window = max(1, min(window, num_micro))
        members = tuple(Member(p, micro // len(row[j])) for p in row[j])
        stages.append(Stage(bounds[j], bounds[j + 1], members, window, window, "bf16", "bf16"))
    return Plan(micro, (Pipeline(num_micro, tuple(reversed(stages))),))


def _seconds(group: Sequence[str], a: int, b: int, micro: int, cluster: Cluster, workload: Workload) -> float:
    kinds = {cluster.devices[p].kind for p in group}
    return max(workload.times[k].stage(a, b, micro // len(group)).total_s for k in kinds)


def _room(group: Sequence[str], a: int, b: int, micro: int, cluster: Cluster, workload: Workload) -> int:
    each = workload.live_bytes(a, b, micro // len(group))
    return min((cluster.devices[p].memory_bytes - workload.state_sum_bytes(a, b)) // each for p in group)


def _transfer(
    a: Sequence[str], b: Sequence[str], at: int, micro: int, cluster: Cluster, workload: Workload
) -> tuple[float, float]:
    """(latency, bytes over bandwidth) of one boundary in one direction."""
    path = cluster.path(a[0], b[0])
    if path is None:
        raise PlanError(f"nothing joins {a[0]} and {b[0]}")
    return path.latency_s, micro * workload.boundary_bytes[at - 1] / path.bandwidth_bytes_per_s


def _trip(a: Sequence[str], b: Sequence[str], at: int, micro: int, cluster: Cluster, workload: Workload) -> float:
    return 2 * sum(_transfer(a, b, at, micro, cluster, workload))


# -- plain baselines ---------------------------------------------------------------------------------------------------


def sizes(cluster: Cluster, workload: Workload, groups: Sequence[Sequence[str]]) -> list[int]:
    """Micro-batch sizes that every group can share equally and that were profiled."""
    found = []
    for m in range(1, workload.global_batch + 1):
        if workload.global_batch % m or any(m % len(g) for g in groups):
            continue
        kinds = [(workload.times[cluster.devices[p].kind], m // len(g)) for g in groups for p in g]
        if all(k.sizes[0] <= n <= k.largest for k, n in kinds):
            found.append(m)
    return found


def uniform(cluster: Cluster, workload: Workload, schedule: str, *, by_speed: bool) -> Result:
    """As many blocks on every device as on any other; the best micro-batch size."""
    names = list(cluster.devices)
    if by_speed:
        names.sort(key=lambda p: workload.times[cluster.devices[p].kind].stage(0, workload.num_blocks, 1).total_s)
    names = names[: workload.num_blocks]
    bounds = [round(j * workload.num_blocks / len(names)) for j in range(len(names) + 1)]
    row = tuple((p,) for p in names)
    results = [
        priced(pipeline_plan(row, bounds, m, cluster, workload, schedule), cluster, workload, gpipe=schedule == "gpipe")
        for m in sizes(cluster, workload, row)
    ]
    return max(results, key=lambda r: r.samples_per_s or 0.0, default=Result(None, 0.0))


def data_parallel(cluster: Cluster, workload: Workload, *, fitting: bool) -> Result:
    """The whole model on every device, equal shares of the batch, gradients reduced once a step."""
    names = []
    for p, device in cluster.devices.items():
        if not fitting or workload.stage_bytes(0, workload.num_blocks, 1, 1) <= device.memory_bytes:
            names.append(p)
    names = names[: workload.global_batch]
    if not names:
        return Result(None, 0.0)
    share, rest = divmod(workload.global_batch, len(names))
    pipelines = tuple(
        Pipeline(share + (i < rest), (Stage(0, workload.num_blocks, (Member(p, 1),), 1, 1, "bf16", "bf16"),))
        for i, p in enumerate(names)
    )
    return priced(Plan(1, pipelines), cluster, workload)


# -- planners after their papers ---------------------------------------------------------------------------------------

# (stage seconds, (latency, transfer) per boundary, reduction seconds, micro-batches) -> seconds of a step
Cost = Callable[[Sequence[float], Sequence[tuple[float, float]], float, int], float]


def metis(times: Sequence[float], hops: Sequence[tuple[float, float]], reduce_s: float, num_micro: int) -> float:
    """After Metis: fill and drain of the slowest stage; a boundary is counted once a step and has no latency."""
    return sum(times) + (num_micro - 1) * max(times) + sum(t for _, t in hops) + reduce_s


def sailor(times: Sequence[float], hops: Sequence[tuple[float, float]], reduce_s: float, num_micro: int) -> float:
    """After Sailor: what a stage sends is added to its time, so the slowest sum sets the pace."""
    sends = [*(latency + t for latency, t in hops), 0.0]
    return sum(times) + sum(sends) + (num_micro - 1) * max(a + b for a, b in zip(times, sends)) + reduce_s


def hapt(times: Sequence[float], hops: Sequence[tuple[float, float]], reduce_s: float, num_micro: int) -> float:
    """After HAPT: sum of (t + 2c) and the slowest stage for every further micro-batch."""
    return sum(times) + 2 * sum(a + b for a, b in hops) + (num_micro - 1) * max(times) + reduce_s


def asteroid(times: Sequence[float], hops: Sequence[tuple[float, float]], reduce_s: float, num_micro: int) -> float:
    """After Asteroid: computation and communication are steps of one kind; the dominant one sets the pace."""
    steps = [*times, *(2 * (a + b) for a, b in hops)]
    return sum(steps) + (num_micro - 1) * max(steps) + reduce_s


def planned(cluster: Cluster, workload: Workload, cost: Cost, *, all_devices: bool, schedule: str) -> Result:
    """The plan that this cost prefers, priced by the simulator."""
    best: tuple[float, Plan] | None = None
    for row in _rows(cluster, all_devices):
        if len(row) > workload.num_blocks:
            continue
        for micro in sizes(cluster, workload, row):
            for bounds in _cuts(row, micro, cluster, workload):
                try:
                    value = _value(row, bounds, micro, cluster, workload, cost)
                except PlanError:
                    continue
                if best is None or value < best[0]:
                    plan = pipeline_plan(row, bounds, micro, cluster, workload, schedule)
                    if not shortages(plan, cluster, workload):
                        best = (value, plan)
    return priced(best[1] if best else None, cluster, workload)


def _value(row: Groups, bounds: Sequence[int], micro: int, cluster: Cluster, workload: Workload, cost: Cost) -> float:
    times = [_seconds(g, bounds[j], bounds[j + 1], micro, cluster, workload) for j, g in enumerate(row)]
    hops = [_transfer(a, b, bounds[j + 1], micro, cluster, workload) for j, (a, b) in enumerate(pairwise(row))]
    reduce_s = 0.0
    for j, group in enumerate(row):
        if len(group) > 1 and (path := cluster.path(group[0], group[1])) is not None:
            size = sum(workload.gradient_bytes[bounds[j] : bounds[j + 1]])
            reduce_s = max(reduce_s, 2 * (len(group) - 1) / len(group) * size / path.bandwidth_bytes_per_s)
    return cost(times, hops, reduce_s, workload.global_batch // micro)


def _rows(cluster: Cluster, all_devices: bool) -> Iterator[Groups]:
    """Orders of the classes; every class in equal groups of 1, 2, 4, ... or all; whole classes may be left out."""
    classes = classes_of(cluster)
    orders: list[tuple[DeviceClass, ...]] = []
    for length in range(len(classes), 0, -1):
        if all_devices and length < len(classes):
            break
        if len(classes) <= 5:
            orders += permutations(classes, length)
        else:  # nearest neighbours from every start
            orders += [tuple(_nearest(cluster, classes, start)[:length]) for start in classes]
    for order in orders:
        for size in (1, 2, 4, 8, 16):
            row = []
            for of in order:
                own = min(size, len(of.peers))
                if len(of.peers) % own:
                    break
                row += [of.peers[k : k + own] for k in range(0, len(of.peers), own)]
            else:
                yield tuple(row)
            if size >= max(len(c.peers) for c in order):
                break


def _nearest(cluster: Cluster, classes: Sequence[DeviceClass], start: DeviceClass) -> list[DeviceClass]:
    def far(a: DeviceClass, b: DeviceClass) -> float:
        path = cluster.path(a.peers[0], b.peers[0])
        return math.inf if path is None else path.seconds(4e6)

    order, left = [start], [c for c in classes if c is not start]
    while left:
        order.append(min(left, key=lambda c: far(order[-1], c)))
        left.remove(order[-1])
    return order


def _cuts(row: Groups, micro: int, cluster: Cluster, workload: Workload) -> Iterator[list[int]]:
    """The partition with the least time of the slowest stage, with memory for S - j micro-batches."""
    blocks, count = workload.num_blocks, len(row)
    num_micro = workload.global_batch // micro
    best = [[math.inf] * (blocks + 1) for _ in range(count + 1)]
    choice = [[0] * (blocks + 1) for _ in range(count + 1)]
    best[count][blocks] = 0.0
    state, activation = workload.sums("state_bytes").tolist(), workload.sums("activation_bytes").tolist()
    for j in range(count - 1, -1, -1):
        live = min(count - j, num_micro) * (micro // len(row[j]))
        memory = min(cluster.devices[p].memory_bytes for p in row[j])
        kind = workload.times[cluster.devices[row[j][0]].kind]  # a group is of one class
        total = sum(kind.cumulated(micro // len(row[j]))).tolist()  # type: ignore[union-attr]
        after = best[j + 1]
        for a in range(j, blocks):
            for b in range(a + 1, blocks - (count - j - 1) + 1):
                seconds = total[b] - total[a]
                held = state[b] - state[a] + live * (activation[b] - activation[a])
                if seconds >= best[j][a] or held > memory:
                    break
                if (value := max(seconds, after[b])) < best[j][a]:
                    best[j][a], choice[j][a] = value, b
    if math.isinf(best[0][0]):
        return
    bounds = [0]
    for j in range(count):
        bounds.append(choice[j][bounds[-1]])
    yield bounds
