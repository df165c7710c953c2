"""A plan in words and figures: what everybody does, what limits it, what was left out and why.

The idea: every figure that the planner used can be read, per stage, per boundary and for the whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from meshcee.figures import Cluster
from meshcee.figures.workload import Workload
from meshcee.plan import Pipeline, Plan, Stage
from meshcee.planner import needs
from meshcee.simulator import Timeline, simulate

__all__ = ["BoundaryFacts", "StageFacts", "boundaries", "explain", "limit", "stages", "with_names"]


def with_names(text: str, names: Mapping[str, str]) -> str:
    """The text with names for ids, in one pass: a name may contain another peer's id."""
    ids = "|".join(map(re.escape, names))
    return re.sub(rf"(?<!\w)({ids})(?!\w)", lambda found: names[found[0]], text) if ids else text


@dataclass(frozen=True)
class StageFacts:
    """One member of a stage."""

    pipeline: int
    stage: int
    blocks: tuple[int, int]
    peer: str
    samples: int
    needed_bytes: int
    memory_bytes: int
    f_s: float
    b_s: float
    w_s: float
    window: int
    live_cap: int
    recompute: bool
    utilisation: float


@dataclass(frozen=True)
class BoundaryFacts:
    """One boundary of a pipeline, for the slowest pair of members."""

    pipeline: int
    after: int  # stage
    bytes_out: float
    bytes_back: float
    codec_out: str
    codec_back: str
    seconds_out: float
    seconds_back: float
    occupied_s: float  # of the busier line, by one micro-batch of this boundary
    slack_s: float  # of a micro-batch's period, in which that line could do more


def _timeline(plan: Plan, cluster: Cluster, workload: Workload) -> Timeline:
    return simulate(plan, cluster, workload, steps=3)


def stages(plan: Plan, cluster: Cluster, workload: Workload, timeline: Timeline | None = None) -> list[StageFacts]:
    used = (timeline or _timeline(plan, cluster, workload)).utilisation()
    needed = needs(plan, cluster, workload)
    found = []
    for p, pipeline in enumerate(plan.pipelines):
        for j, stage in enumerate(pipeline.stages):
            for member in stage.members:
                device = cluster.devices[member.peer]
                times = workload.times[device.kind].stage(stage.first, stage.end, member.samples, stage.recompute)
                found.append(
                    StageFacts(
                        p, j, (stage.first, stage.end), member.peer, member.samples, needed[member.peer],
                        device.memory_bytes, times.f_s, times.b_s, times.w_s, stage.window, stage.live_cap,
                        stage.recompute, used.get(member.peer, 0.0),
                    )
                )  # fmt: skip
    return found


def boundaries(plan: Plan, cluster: Cluster, workload: Workload, period_s: float) -> list[BoundaryFacts]:
    found = []
    for p, pipeline in enumerate(plan.pipelines):
        pace = period_s / pipeline.num_micro
        for j, (a, b) in enumerate(pairwise(pipeline.stages)):
            found.append(_boundary(p, j, a, b, plan, cluster, workload, pace))
    return found


def _boundary(
    p: int, j: int, a: Stage, b: Stage, plan: Plan, cluster: Cluster, workload: Workload, pace: float
) -> BoundaryFacts:
    out, back = (
        workload.wire_bytes(plan.micro_batch * column[a.end - 1], codec)
        for column, codec in ((workload.boundary_bytes, a.codec_out), (workload.boundary_back_bytes, b.codec_back))
    )
    seconds_out = seconds_back = occupied = 0.0
    at_a = 0
    for ma in a.members:
        at_b = 0
        for mb in b.members:
            share = (min(at_a + ma.samples, at_b + mb.samples) - max(at_a, at_b)) / plan.micro_batch
            at_b += mb.samples
            go, come = cluster.path(ma.peer, mb.peer), cluster.path(mb.peer, ma.peer)
            if share <= 0 or go is None or come is None:
                continue
            seconds_out = max(seconds_out, go.seconds(share * out))
            seconds_back = max(seconds_back, come.seconds(share * back))
            occupied = max(occupied, share * out / go.bandwidth_bytes_per_s, share * back / come.bandwidth_bytes_per_s)
        at_a += ma.samples
    return BoundaryFacts(
        p, j, out, back, a.codec_out, b.codec_back, seconds_out, seconds_back, occupied, pace - occupied
    )


def limit(plan: Plan, cluster: Cluster, workload: Workload, timeline: Timeline) -> str:
    """The owner where its samples set the pace, else the busiest device or line, in words."""
    total = timeline.outcome.applied_s[-1] * timeline.slowed
    busy = [(s / total, n.peer) for n, s in zip(timeline.instance.nodes, timeline.outcome.busy_s)]
    held = [
        (s / total, " -> ".join(x.removeprefix("@") for x in line))
        for line, s in zip(timeline.instance.lines, timeline.outcome.line_s)
    ]
    device, link = max(busy), max(held, default=(0.0, ""))
    if timeline.waits_for_owner:
        owner = f"the owner reads or sends a step's samples for {timeline.instance.feed_s:.4g} s"
        return f"{owner}; the busiest device, {device[1]}, computes {device[0]:.0%} of that time"
    if device[0] >= link[0]:
        what = f"{device[1]} computes {device[0]:.0%} of the time"
        return what + ("" if not link[1] else f"; the busiest line, {link[1]}, is held {link[0]:.0%} of it")
    return f"the line {link[1]} is held {link[0]:.0%} of the time; the busiest device, {device[1]}, computes {device[0]:.0%}"


def explain(plan: Plan, cluster: Cluster, workload: Workload, single: tuple[str, float] | None = None) -> str:
    """Everything, as text."""
    timeline = _timeline(plan, cluster, workload)
    period = timeline.period_s
    lines = [
        f"{workload.global_batch} samples a step in micro-batches of {plan.micro_batch}: {period:.4g} s a step, "
        f"{workload.global_batch / period:.4g} samples/s"
    ]
    if plan.predicted is not None:
        bound = plan.predicted.lower_bound_s
        lines.append(f"lower bound {bound:.4g} s (all devices busy, links free): {bound / period:.0%} of it is reached")
    lines.append(f"limit: {limit(plan, cluster, workload, timeline)}")
    if single is not None:
        lines.append(
            f"best single device: {single[0]}, {single[1]:.4g} s a step; the plan is {single[1] / period:.2f} times as fast"
        )
    facts = stages(plan, cluster, workload, timeline)
    edges = boundaries(plan, cluster, workload, period)
    for p, pipeline in enumerate(plan.pipelines):
        lines += _pipeline_lines(p, pipeline, facts, edges, workload)
    for left in plan.left_out:
        lines.append(f"left out: {left.peer}: {left.why}")
    lines += [f"note: {note}" for note in cluster.notes]
    return "\n".join(lines)


def _pipeline_lines(
    p: int, pipeline: Pipeline, facts: list[StageFacts], edges: list[BoundaryFacts], workload: Workload
) -> list[str]:
    lines = [f"pipeline {p}: {pipeline.num_micro} micro-batches a step"]
    for j, stage in enumerate(pipeline.stages):
        again = ", recomputes" if stage.recompute else ""
        lines.append(
            f"  stage {j}: blocks {stage.first} to {stage.end - 1}, window {stage.window}, live cap {stage.live_cap}{again}"
        )
        for f in facts:
            if (f.pipeline, f.stage) == (p, j):
                lines.append(
                    f"    {f.peer}: {f.samples} samples, F {f.f_s:.4g} s, B {f.b_s:.4g} s, W {f.w_s:.4g} s, "
                    f"memory {f.needed_bytes / 2**30:.1f} of {f.memory_bytes / 2**30:.1f} GiB, busy {f.utilisation:.0%}"
                )
        if len(stage.members) > 1:
            sent = workload.sum_costs(len(stage.members))[0] * sum(workload.gradient_bytes[stage.first : stage.end])
            lines.append(f"    once a step each sends {sent / 1e6:.3g} MB of gradients to the others")
        for e in edges:
            if (e.pipeline, e.after) == (p, j):
                lines.append(
                    f"    -> {e.bytes_out / 1e6:.3g} MB {e.codec_out} in {e.seconds_out:.4g} s, "
                    f"<- {e.bytes_back / 1e6:.3g} MB {e.codec_back} in {e.seconds_back:.4g} s, "
                    f"line held {e.occupied_s:.4g} s a micro-batch, slack {e.slack_s:.4g} s"
                )
    return lines
