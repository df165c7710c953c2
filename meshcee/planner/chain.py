"""A candidate: rows of stages with their devices. Sample shares and windows follow from it.

The idea: the search moves blocks and devices only. How many samples each member takes, and how many micro-batches may be
in flight under its memory, is computed the same way for every candidate. A chain is one pipeline, a layout all that run
side by side.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshcee.figures import Cluster
from meshcee.figures.workload import Workload
from meshcee.plan import Member, Pipeline, Plan, Stage
from meshcee.schedule import residence_s

__all__ = ["Chain", "ChainStage", "Codecs", "Layout", "layout_of", "peers_of", "shares", "to_plan"]


@dataclass(frozen=True)
class ChainStage:
    """Blocks [first, end) on these peers."""

    first: int
    end: int
    peers: tuple[str, ...]
    recompute: bool = False


@dataclass(frozen=True)
class Codecs:
    """Of the boundary after a stage: activations out, gradients back."""

    out: str
    back: str


@dataclass(frozen=True)
class Chain:
    """One pipeline; `codecs` has one entry per boundary."""

    micro_batch: int
    num_micro: int
    stages: tuple[ChainStage, ...]
    codecs: tuple[Codecs, ...]
    slack: tuple[float, int] = (1.3, 2)  # window = ceil(factor * R / T') + so many
    extra: tuple[int, ...] = ()  # per stage, on top of that

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(p for s in self.stages for p in s.peers)


Layout = tuple[Chain, ...]  # pipelines side by side, of one micro-batch size


def shares(cluster: Cluster, workload: Workload, stage: ChainStage, micro_batch: int) -> tuple[int, ...] | None:
    """Samples of each member: whole numbers that make the slowest member as fast as possible; None when nothing fits.

    Greedy: each sample goes where it is done first. Optimal when seconds grow with samples, as they do.
    """
    if len(stage.peers) == 1:
        kind = workload.times[cluster.devices[stage.peers[0]].kind]
        return (micro_batch,) if kind.sizes[0] <= micro_batch <= kind.largest else None
    kinds = [workload.times[cluster.devices[p].kind] for p in stage.peers]
    taken = [k.sizes[0] for k in kinds]
    if sum(taken) > micro_batch:
        return None
    options = [
        (k.stage(stage.first, stage.end, n + 1).total_s, i)
        for i, (k, n) in enumerate(zip(kinds, taken))
        if n < k.largest
    ]
    heapq.heapify(options)
    for _ in range(micro_batch - sum(taken)):
        if not options:
            return None
        _, i = heapq.heappop(options)
        taken[i] += 1
        if taken[i] < kinds[i].largest:
            heapq.heappush(options, (kinds[i].stage(stage.first, stage.end, taken[i] + 1).total_s, i))
    return tuple(taken)


def most_live(
    cluster: Cluster, workload: Workload, stage: ChainStage, samples: Sequence[int], terms: int = 0, pipelines: int = 1
) -> int:
    """Micro-batches between F and W for which every member has memory; 0 when not even one fits.

    terms      micro-batches whose gradients it keeps apart
    pipelines  side by side, whose gradients are summed with its own
    """
    least = 1 << 30
    sums = workload.sum_bytes(stage.first, stage.end, len(stage.peers) * pipelines)
    sums += workload.term_bytes(stage.first, stage.end, terms)
    for peer, n in zip(stage.peers, samples):
        held = workload.stage_bytes(stage.first, stage.end, n, 0, stage.recompute) + sums
        room = cluster.devices[peer].memory_bytes - held
        each = workload.live_bytes(stage.first, stage.end, n, stage.recompute)
        least = min(least, (0 if room < 0 else 1 << 30) if each == 0 else max(0, room // each))
    return least


def peers_of(layout: Layout) -> tuple[str, ...]:
    return tuple(p for chain in layout for p in chain.peers)


def layout_of(plan: Plan) -> Layout:
    """A plan as a point of the search; its windows are not kept."""
    chains = []
    for pipeline in plan.pipelines:
        stages = tuple(ChainStage(s.first, s.end, s.peers, s.recompute) for s in pipeline.stages)
        codecs = tuple(Codecs(a.codec_out, b.codec_back) for a, b in pairwise(pipeline.stages))
        chains.append(Chain(plan.micro_batch, pipeline.num_micro, stages, codecs))
    return tuple(chains)


def to_plan(layout: Layout, cluster: Cluster, workload: Workload) -> Plan | None:
    """The plan of a layout; None when it does not fit into memory, sizes or links."""
    pipelines = []
    shared = any(len(stage.peers) > 1 for chain in layout for stage in chain.stages)
    for k, chain in enumerate(layout):
        stages = to_stages(chain, cluster, workload, chain.num_micro if k and not shared else 0, len(layout))
        if stages is None:
            return None
        pipelines.append(Pipeline(chain.num_micro, stages))
    return Plan(layout[0].micro_batch, tuple(pipelines))


def to_stages(
    chain: Chain, cluster: Cluster, workload: Workload, terms: int = 0, pipelines: int = 1
) -> tuple[Stage, ...] | None:
    """Of one pipeline among so many. `terms`: micro-batches whose gradients its members keep apart."""
    members: list[tuple[int, ...]] = []
    lives: list[int] = []
    forward_backward, totals = [], []
    for stage in chain.stages:
        taken = shares(cluster, workload, stage, chain.micro_batch)
        if taken is None:
            return None
        live = most_live(cluster, workload, stage, taken, terms, pipelines)
        if live < 1:
            return None
        times = [
            workload.times[cluster.devices[p].kind].stage(stage.first, stage.end, n, stage.recompute)
            for p, n in zip(stage.peers, taken)
        ]
        members.append(taken)
        lives.append(live)
        forward_backward.append(max(t.f_s + t.b_s for t in times))
        totals.append(max(t.total_s for t in times))
    boundaries, occupied = _boundaries(chain, cluster, workload, members)
    if boundaries is None:
        return None
    # F's and B's may run ahead of the W's, so it is their pace that windows must keep up
    pace = max(*forward_backward, *occupied, 1e-9)
    factor, more = chain.slack
    stages = []
    for j, residence in enumerate(residence_s(forward_backward, boundaries)):
        stage, most = chain.stages[j], min(lives[j], chain.num_micro)
        wanted = math.ceil(factor * residence / pace - 1e-9) + more + (chain.extra[j] if chain.extra else 0)
        window = max(1, min(wanted, most))
        stages.append(
            Stage(
                stage.first,
                stage.end,
                tuple(Member(p, n) for p, n in zip(stage.peers, members[j])),
                window=window,
                live_cap=most,  # weight gradients put off fill the time between two steps
                codec_out=chain.codecs[j].out if j < len(chain.codecs) else workload.default_codec,
                codec_back=chain.codecs[j - 1].back if j else workload.default_codec,
                recompute=stage.recompute,
            )
        )
    return tuple(stages)


def _boundaries(
    chain: Chain, cluster: Cluster, workload: Workload, members: Sequence[Sequence[int]]
) -> tuple[list[float] | None, list[float]]:
    """Seconds there and back of each boundary, and how long each line is held by one micro-batch."""
    held: dict[tuple[str, str], float] = {}
    boundaries = []
    for j, (a, b) in enumerate(zip(chain.stages, chain.stages[1:])):
        out, back = workload.boundary_bytes[a.end - 1], workload.boundary_back_bytes[a.end - 1]
        there = again = 0.0
        at_a = 0
        for pa, na in zip(a.peers, members[j]):
            at_b = 0
            for pb, nb in zip(b.peers, members[j + 1]):
                overlap = min(at_a + na, at_b + nb) - max(at_a, at_b)
                at_b += nb
                if overlap <= 0:
                    continue
                go, come = cluster.path(pa, pb), cluster.path(pb, pa)
                if go is None or come is None:
                    return None, []
                codecs = chain.codecs[j]
                wire_out = workload.wire_bytes(overlap * out, codecs.out)
                wire_back = workload.wire_bytes(overlap * back, codecs.back)
                there = max(there, go.seconds(wire_out) + workload.codec_s(overlap * out, codecs.out))
                again = max(again, come.seconds(wire_back) + workload.codec_s(overlap * back, codecs.back))
                for path, wire in ((go, wire_out), (come, wire_back)):
                    for line in path.lines:
                        held[line] = held.get(line, 0.0) + wire / cluster.bandwidth(line)
            at_a += na
        boundaries.append(there + again)
    return boundaries, [*held.values(), 0.0]
