"""What stands behind a plan: seconds and memory of every member, what crosses, what limits, and what would help.

The idea: the planner's own figures in the simulator. What would help is the same plan with one thing twice as fast, simulated
again. A search could find another plan (`meshcee plan --compare`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshcee.fields import plain, read
from meshcee.figures import Cluster
from meshcee.figures.workload import Workload
from meshcee.picture.values import Boundary, Help, PlanView, Seat
from meshcee.plan import Plan
from meshcee.show.words import boundaries, limit, stages, with_names
from meshcee.simulator import Timeline, simulate
from meshcee.simulator.engine import run

__all__ = ["Account", "account_of", "plan_view"]

WORTH = 1.005  # times as fast, from which on a help is one


@dataclass(frozen=True)
class Account:
    """A plan with its figures, what limits it as simulated, and what would help."""

    plan: PlanView
    limit: str
    helps: tuple[Help, ...] = ()

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = plain(self.__dict__)
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Account:
        """ProtocolError on anything else."""
        return read(data, cls, "what stands behind a plan", defaults=True)


def plan_view(plan: Plan, names: Mapping[str, str]) -> PlanView:
    """A plan without any figures but its own."""
    seats, edges = [], []
    for p, pipeline in enumerate(plan.pipelines):
        for j, stage in enumerate(pipeline.stages):
            for member in stage.members:
                name = _name(member.peer, names)
                seats.append(Seat(plan.label(p, j), p, j, member.peer, name, stage.first, stage.end, member.samples))
            if j + 1 < len(pipeline.stages):
                edges.append(Boundary(p, j, stage.codec_out, pipeline.stages[j + 1].codec_back))
    predicted = plan.predicted
    return PlanView(
        micro_batch=plan.micro_batch,
        micros=tuple(pipeline.num_micro for pipeline in plan.pipelines),
        seats=tuple(seats),
        boundaries=tuple(edges),
        left_out=tuple((_name(left.peer, names), with_names(left.why, names)) for left in plan.left_out),
        kernels=plan.kernels,
        step_s=predicted.step_s if predicted else None,
        samples_per_s=predicted.samples_per_s if predicted else None,
        bound_s=predicted.lower_bound_s if predicted else None,
    )


def _name(peer: str, names: Mapping[str, str]) -> str:
    return names.get(peer) or (peer if len(peer) < 40 else "…" + peer[-8:])


def account_of(plan: Plan, cluster: Cluster, workload: Workload, names: Mapping[str, str] | None = None) -> Account:
    """PlanError where the plan cannot be simulated there."""
    named = names or {}
    timeline = simulate(plan, cluster, workload, steps=3)
    period_s = timeline.period_s
    view = plan_view(plan, named)
    of = {fact.peer: fact for fact in stages(plan, cluster, workload, timeline)}
    seats = [
        Seat(
            s.label, s.pipeline, s.stage, s.peer, s.name, s.first, s.end, s.samples, f.f_s, f.b_s, f.w_s, f.utilisation,
            f.needed_bytes, f.memory_bytes,
        )
        for s in view.seats
        for f in (of[s.peer],)
    ]  # fmt: skip
    edges = []
    for edge in boundaries(plan, cluster, workload, period_s):
        pace_s = period_s / plan.pipelines[edge.pipeline].num_micro
        edges.append(
            Boundary(
                edge.pipeline, edge.after, edge.codec_out, edge.codec_back, edge.bytes_out, edge.bytes_back,
                edge.seconds_out, edge.seconds_back, min(edge.occupied_s / pace_s, 1.0) if pace_s else None,
            )
        )  # fmt: skip
    figures = {**view.__dict__, "seats": tuple(seats), "boundaries": tuple(edges)}
    figures["step_s"] = view.step_s or period_s
    figures["samples_per_s"] = view.samples_per_s or workload.global_batch / period_s
    said = with_names(limit(plan, cluster, workload, timeline), named)
    return Account(PlanView(**figures), said, _helps(timeline, named))


def _helps(timeline: Timeline, names: Mapping[str, str]) -> tuple[Help, ...]:
    """The busiest device and the busiest line, each twice as fast; the one that gains most is first."""
    instance, outcome = timeline.instance, timeline.outcome
    found = []
    node = max(range(len(instance.nodes)), key=outcome.busy_s.__getitem__)
    faster = copy.deepcopy(instance)
    one = faster.nodes[node]
    one.f_s, one.b_s, one.w_s = one.f_s / 2, one.b_s / 2, one.w_s / 2
    one.weights_s = [s / 2 for s in one.weights_s]
    found.append((f"{_name(one.peer, names)} twice as fast", faster))
    if any(outcome.line_s):
        line = max(range(len(instance.lines)), key=outcome.line_s.__getitem__)
        wider = copy.deepcopy(instance)
        for each in wider.nodes:
            for edge in (*each.forward, *each.back):
                edge.lines = tuple((k, s / 2 if k == line else s) for k, s in edge.lines)
        for ring in wider.rings:
            ring.hops = tuple(tuple((k, s / 2 if k == line else s) for k, s in hop) for hop in ring.hops)
        a, b = (_name(end.removeprefix("@"), names) for end in instance.lines[line])
        found.append((f"the line from {a} to {b} twice as fast", wider))
    now_s = timeline.period_s
    helps = [
        Help(text, step_s, now_s / step_s)
        for text, changed in found
        if (step_s := Timeline(changed, run(changed, 3)).period_s) > 0 and now_s / step_s >= WORTH
    ]
    return tuple(sorted(helps, key=lambda one: -one.gain))
