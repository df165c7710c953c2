"""The front of the planner: a cluster and a workload in, the best plan found out, with every device accounted for.

The idea: pure functions of values. What a file says and what a live mesh measured arrive here in the same form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshcee.errors import PlanError
from meshcee.plan import LeftOut, Pipeline, Plan, Predicted
from meshcee.planner.bounds import lower_bound_s
from meshcee.planner.chain import Chain, ChainStage, Codecs, to_plan
from meshcee.planner.memory import STATE_FACTOR, shortages
from meshcee.planner.reasons import shortage, why_left_out
from meshcee.planner.regions import cluster_of
from meshcee.planner.search import Effort, Search
from meshcee.profile import BlockCost, Cluster, DeviceProfile, LinkProfile
from meshcee.simulator import period_s
from meshcee.workload import KindTimes, Workload

__all__ = ["Choice", "plan_cluster", "plan_job", "plans", "workload_of"]

BACKWARD = 1.0  # B and W each cost as many operations as F
UPDATE_FLOPS_PER_BYTE = 4.0  # of trainable parameters: about 16 operations a parameter


class Choice:
    """The plans found, best first, with their periods: the winner, and runner-ups kept for fast switching."""

    def __init__(self, best: Plan, runners_up: Sequence[Plan], single: tuple[str, float] | None) -> None:
        self.best = best
        self.runners_up = tuple(runners_up)
        self.single = single  # the best device alone, and its seconds per step


def plan_cluster(
    cluster: Cluster,
    workload: Workload,
    *,
    codecs: Sequence[str] = ("bf16",),
    start: Plan | None = None,
    effort: Effort | None = None,
) -> Plan:
    """The best plan found. It is no slower than `start`, nor than the best single device that fits.

    Raises PlanError saying what is missing when nothing fits.
    """
    return plans(cluster, workload, codecs=codecs, start=start, effort=effort).best


def plans(
    cluster: Cluster,
    workload: Workload,
    *,
    codecs: Sequence[str] = ("bf16",),
    start: Plan | None = None,
    effort: Effort | None = None,
    max_stages: int | None = None,
) -> Choice:
    """As `plan_cluster`, with the runner-ups and the best single device."""
    for device in cluster.devices.values():
        if device.kind not in workload.times:
            raise PlanError(f"device {device.name} is a {device.kind}, which is in no profile; profile it first")
    effort = effort or Effort()
    search = Search(cluster, workload, codecs, replace(effort, max_stages=max_stages or effort.max_stages))
    old = None if start is None else _reprice(start, cluster, workload)
    chain = None if old is None else _chain_of(old[1])
    found = search.run([] if chain is None else [chain])
    priced = [(p, plan) for p, c in found if (plan := to_plan(c, cluster, workload)) is not None]
    if old is not None:
        priced.append(old)
        priced.sort(key=lambda x: x[0])
    if not priced:
        raise shortage(cluster, workload, search.classes)
    period, best = priced[0]
    chain = found[0][1] if found else _chain_of(best)
    left = [] if chain is None else _left_out(search, chain, best, period)
    bound = lower_bound_s(cluster, workload)
    done = [replace(p, predicted=_predicted(s, workload, bound)) for s, p in priced]
    single = search.best_single()
    return Choice(replace(done[0], left_out=tuple(left)), done[1:], single)


def _predicted(period: float, workload: Workload, bound: float) -> Predicted:
    return Predicted(step_s=period, samples_per_s=workload.global_batch / period, lower_bound_s=min(bound, period))


def _reprice(plan: Plan, cluster: Cluster, workload: Workload) -> tuple[float, Plan] | None:
    """The old plan as it is, if it still fits."""
    try:
        if plan.global_batch != workload.global_batch or shortages(plan, cluster, workload):
            return None  # another job, or less memory than there was
        return period_s(plan, cluster, workload), replace(plan, left_out=())
    except PlanError:
        return None  # it names devices that have gone


def _chain_of(plan: Plan) -> Chain | None:
    """A plan of one pipeline as a point of the search."""
    if len(plan.pipelines) != 1:
        return None
    pipeline: Pipeline = plan.pipelines[0]
    stages = tuple(ChainStage(s.first, s.end, s.peers, s.recompute) for s in pipeline.stages)
    codecs = tuple(Codecs(a.codec_out, b.codec_back) for a, b in zip(pipeline.stages, pipeline.stages[1:]))
    return Chain(plan.micro_batch, pipeline.num_micro, stages, codecs)


def _left_out(search: Search, best: Chain, plan: Plan, period: float) -> list[LeftOut]:
    used = set(plan.peers)
    left = []
    for of in search.classes:
        rest = [p for p in of.peers if p not in used]
        if not rest:
            continue
        why = why_left_out(of, search.best_with(rest), period, best, search.cluster, search.workload)
        left += [LeftOut(p, why) for p in rest]
    order = {p: i for i, p in enumerate(search.cluster.devices)}
    return sorted(left, key=lambda x: order[x.peer])


def workload_of(
    devices: Mapping[str, DeviceProfile],
    kinds: Mapping[str, str],
    costs: Sequence[BlockCost],
    batch_size: int,
    micro_batch: int | None = None,
    *,
    times: Mapping[str, KindTimes] | None = None,
    element_bytes: int = 4,
) -> Workload:
    """A job on a live mesh: seconds from measured speeds, or `times` where blocks themselves were timed.

    devices  peer -> profile; kinds: peer -> kind, as in the cluster; times: kind -> measured
    """
    found: dict[str, KindTimes] = {}
    for peer, kind in kinds.items():
        if times and kind in times:
            found[kind] = times[kind]
            continue
        speed = devices[peer].speed_flops_per_s
        # a kind is as fast as its slowest member
        if kind in found and found[kind].optimizer[-1] >= _update_s(costs, speed):
            continue
        flops = [max(c.flops, 1.0) for c in costs]
        rows = [[n * x / speed for x in flops] for n in (1, max(2, batch_size))]
        back = [[BACKWARD * x for x in row] for row in rows]
        update = [UPDATE_FLOPS_PER_BYTE * c.trainable_bytes / speed for c in costs]
        found[kind] = KindTimes((1, max(2, batch_size)), rows, back, back, update)
    return Workload(
        names=tuple(c.name for c in costs),
        global_batch=batch_size,
        times=found,
        state_bytes=tuple(STATE_FACTOR * c.trainable_bytes + (c.parameter_bytes - c.trainable_bytes) for c in costs),
        gradient_bytes=tuple(c.trainable_bytes for c in costs),
        activation_bytes=tuple(c.activation_bytes for c in costs),
        boundary_bytes=(*(c.boundary_bytes for c in costs[:-1]), 0),
        boundary_back_bytes=(*(c.boundary_grad_bytes for c in costs[:-1]), 0),
        element_bytes=element_bytes,
        micro_batch=micro_batch,
        default_codec="none",
    )


def _update_s(costs: Sequence[BlockCost], speed: float) -> float:
    return sum(UPDATE_FLOPS_PER_BYTE * c.trainable_bytes / speed for c in costs)


def plan_job(
    devices: Mapping[str, DeviceProfile],
    links: Mapping[tuple[str, str], LinkProfile],
    costs: Sequence[BlockCost],
    batch_size: int,
    micro_batch: int | None = None,
    *,
    max_stages: int | None = None,
    codecs: Sequence[str] = ("none",),
    hints: Mapping[str, str] | None = None,
    times: Mapping[str, KindTimes] | None = None,
    start: Plan | None = None,
    effort: Effort | None = None,
    element_bytes: int = 4,
) -> Plan:
    """For a live mesh: from measured devices and links, and the costs of a job's blocks.

    links      ordered pairs; those that nobody measured are guessed from their regions
    times      peer -> seconds of the job's blocks on its device, where they were profiled
    """
    if not costs:
        raise PlanError("the job has no blocks; capture it first")
    tensor = max((c.boundary_bytes for c in costs[:-1]), default=0) * (micro_batch or 1)
    cluster = cluster_of(devices, links, max(tensor, 1), hints)
    kinds = {p: d.kind for p, d in cluster.devices.items()}
    by_kind = {kinds[p]: t for p, t in (times or {}).items() if p in kinds}
    workload = workload_of(devices, kinds, costs, batch_size, micro_batch, times=by_kind, element_bytes=element_bytes)
    return plans(cluster, workload, codecs=codecs, start=start, effort=effort, max_stages=max_stages).best
