"""The front of the planner: a cluster and a workload in, the best plan found out, with every device accounted for.

The idea: pure functions of values. What a file says and what a live mesh measured (planner/live.py) arrive here in the
same form; what the software that is to run the plan can do is a value too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, permutations
from math import inf, perm

from meshcee.errors import PlanError
from meshcee.plan import LeftOut, Plan, Predicted
from meshcee.planner.bounds import lower_bound_s
from meshcee.planner.chain import Chain, ChainStage, Codecs, Layout, layout_of, to_plan
from meshcee.planner.memory import shortages
from meshcee.planner.reasons import shortage, why_left_out
from meshcee.planner.runs import Runs
from meshcee.planner.search import Effort, Search
from meshcee.planner.steady import steadiest
from meshcee.profile import Cluster
from meshcee.simulator import period_s
from meshcee.workload import Workload

__all__ = ["Choice", "Runs", "plan_cluster", "plans"]

ROWS = 40  # orders of devices that a search for an exact number of stages begins with


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
    runs: Runs | None = None,
) -> Plan:
    """The best plan found. It is no slower than `start`, nor than the best single device that fits.

    Raises PlanError saying what is missing when nothing fits.
    """
    return plans(cluster, workload, codecs=codecs, start=start, effort=effort, runs=runs).best


def plans(
    cluster: Cluster,
    workload: Workload,
    *,
    codecs: Sequence[str] = ("bf16",),
    start: Plan | None = None,
    effort: Effort | None = None,
    runs: Runs | None = None,
    steady: bool = False,
) -> Choice:
    """As `plan_cluster`, with the runner-ups and the best single device; nothing that `runs` excludes.

    steady  figures are measured, not true: of plans that are nearly as fast as the best the steadiest (steady.py)
    """
    runs = runs or Runs()
    for device in cluster.devices.values():
        if device.kind not in workload.times:
            raise PlanError(f"device {device.name} is a {device.kind}, which is in no profile; profile it first")
    effort = effort or Effort()
    if runs.stages is not None:
        _check_count(runs.stages, cluster, workload)
    search = Search(cluster, workload, codecs, effort, runs)
    old = None if start is None or not runs.permits(layout_of(start)) else _reprice(start, cluster, workload)
    found = search.run([*([] if old is None else [layout_of(old[1])]), *_exactly(search, runs.stages)])
    priced = [(p, plan) for p, c in found if (plan := to_plan(c, cluster, workload)) is not None]
    priced = sorted((_as_run(p, plan, cluster, workload, runs) for p, plan in priced), key=lambda x: x[0])
    if old is not None:
        priced.append(old)
        priced.sort(key=lambda x: x[0])
    if not priced:
        missing = shortage(cluster, workload, search.classes)
        if runs.stages is None:
            raise missing
        raise PlanError(f"no plan of exactly {runs.stages} stages fits; ask for another number: {missing}")
    single = search.best_single()
    if steady and len(priced[0][1].peers) > 1:
        limit_s = min(inf if old is None else old[0], inf if single is None else single[1])
        chosen = steadiest(priced, cluster, workload, limit_s=limit_s, events=effort.events, micros=effort.micros)
        priced = [chosen, *(other for other in priced if other[1] != chosen[1])]
    period, best = priced[0]
    left = _left_out(search, best, period, runs)
    bound = lower_bound_s(cluster, workload)
    done = [replace(p, predicted=_predicted(s, workload, bound)) for s, p in priced]
    return Choice(replace(done[0], left_out=tuple(left)), done[1:], single)


def _check_count(stages: int, cluster: Cluster, workload: Workload) -> None:
    if stages > len(cluster.devices):
        raise PlanError(
            f"{stages} stages were asked for and there are {len(cluster.devices)} devices: join more peers, or ask for "
            "fewer stages"
        )
    if stages > workload.num_blocks:
        raise PlanError(
            f"{stages} stages were asked for and the model has {workload.num_blocks} blocks: ask for fewer stages"
        )


def _exactly(search: Search, stages: int | None) -> Iterator[Layout]:
    """Rows of so many devices, each with its best cut: all orders of few devices, else the fastest and a sample."""
    if stages is None:
        return
    names = sorted(search.cluster.devices, key=lambda p: search.proposals.seconds_alone(p))
    rows: list[tuple[str, ...]] = []
    if perm(len(names), stages) <= ROWS:
        rows = list(permutations(names, stages))
    else:
        chance = random.Random(0)
        rows = [tuple(names[:stages]), *islice(permutations(names[:stages]), 1, ROWS // 4)]
        rows += [tuple(chance.sample(names, stages)) for _ in range(ROWS - len(rows))]
    rows = list(dict.fromkeys(rows))
    for size in search.proposals.sizes():
        found = [c for row in rows if (c := search.rows.best(tuple((p,) for p in row), size, search.codecs[0]))]
        yield from ((chain,) for _, chain in found)
        if not found:  # a device may be so slow that the search looks at no such period
            yield from ((chain,) for row in rows[: ROWS // 4] if (chain := _balanced(search, row, size)) is not None)


def _balanced(search: Search, row: Sequence[str], size: int) -> Chain | None:
    """The cut with the least time of the slowest stage, by dynamic programming; None when sizes or memory do not fit."""
    work, count = search.workload, search.workload.num_blocks
    best, choices = [0.0] + [inf] * count, []
    for peer in row:
        device = search.cluster.devices[peer]
        times = work.times[device.kind]
        if not times.sizes[0] <= size <= times.largest:
            return None
        f, b, w = times.cumulated(size)
        total = f + b + w
        now, choice = [inf] * (count + 1), [0] * (count + 1)
        for end in range(1, count + 1):
            for first in range(end - 1, -1, -1):
                seconds = float(total[end] - total[first])
                if seconds >= now[end] or work.stage_bytes(first, end, size, 1) > device.memory_bytes:
                    break  # longer stages only get slower and larger
                if (slowest := max(best[first], seconds)) < now[end]:
                    now[end], choice[end] = slowest, first
        best = now
        choices.append(choice)
    if best[count] == inf:
        return None
    bounds = [count]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    bounds.reverse()
    stages = tuple(ChainStage(a, b, (p,)) for a, b, p in zip(bounds, bounds[1:], row))
    codecs = (Codecs(search.codecs[0], search.codecs[0]),) * (len(stages) - 1)
    return Chain(size, work.global_batch // size, stages, codecs)


def _as_run(period: float, plan: Plan, cluster: Cluster, workload: Workload, runs: Runs) -> tuple[float, Plan]:
    """Recomputation as it will be run: the last stage may not, and runs its W's at once instead; others may have to."""
    if runs.recompute_last and not runs.recompute:
        return period, plan
    changed = []
    for pipeline in plan.pipelines:
        *others, last = pipeline.stages
        if runs.recompute:
            others = [replace(s, recompute=True) for s in others]
        if last.recompute and not runs.recompute_last:
            last = replace(last, recompute=False, window=1, live_cap=1)
        changed.append(replace(pipeline, stages=(*others, last)))
    other = replace(plan, pipelines=tuple(changed))
    return (period, plan) if other == plan else (period_s(other, cluster, workload), other)


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


def _left_out(search: Search, plan: Plan, period: float, runs: Runs) -> list[LeftOut]:
    used = set(plan.peers)
    left = []
    for of in search.classes:
        rest = [p for p in of.peers if p not in used]
        if not rest:
            continue
        with_one = search.best_with(rest)
        why = why_left_out(of, with_one, period, layout_of(plan), search.cluster, search.workload)
        if with_one is None and runs.stages == len(plan.peers):
            why = f"{runs.stages} stages of one device each were asked for"
        left += [LeftOut(p, why) for p in rest]
    order = {p: i for i, p in enumerate(search.cluster.devices)}
    return sorted(left, key=lambda x: order[x.peer])
