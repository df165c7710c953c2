"""A plan made ready to simulate: every member a node with its seconds, every message an edge with its lines.

The idea: all look-ups (times, paths, codecs, overlaps of samples) happen once, here; the event loop sees numbers only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise, permutations

from meshcee.errors import PlanError
from meshcee.figures import Cluster
from meshcee.figures.workload import HOST_MESSAGE_S, SUM_BUCKET_BYTES, Workload
from meshcee.plan import Pipeline, Plan, Stage

__all__ = ["Edge", "Instance", "Node", "Ring", "build"]


@dataclass
class Edge:
    """A message of every micro-batch: samples that `source` has and `target` needs."""

    source: int
    target: int
    size: float  # bytes on the wire
    latency_s: float  # of the path, encoding and decoding included
    lines: tuple[tuple[int, float], ...]  # (line, seconds that it is held)


@dataclass
class Node:
    """A member of a stage."""

    peer: str
    pipeline: int
    stage: int
    num_micro: int
    f_s: float
    b_s: float
    w_s: float
    optimizer_s: float
    window: int
    live_cap: int
    first: int
    end: int
    is_last: bool
    inputs: int = 0  # messages that make an input complete; 0 at the first stage
    gradients: int = 0  # 0 at the last stage
    forward: list[Edge] = field(default_factory=list)
    back: list[Edge] = field(default_factory=list)
    weights_s: list[float] = field(default_factory=list)  # W of each block, last block first
    commits: list[tuple[int, float]] = field(default_factory=list)  # whom the commit goes on to, and how long it takes
    above: tuple[int, float] | None = None  # whom its vote goes to, and how long it takes; None at the head
    below: int = 0  # votes that it waits for
    host: int = -1  # whose cores it shares with other nodes; -1: it has its own
    load: float = 0.0  # the share of them that it takes while it computes


@dataclass
class Ring:
    """The holders of a block, who reduce its gradients; or of several in one piece: `block` is the last to finish its W."""

    block: int
    nodes: tuple[int, ...]
    hops: tuple[tuple[tuple[int, float], ...], ...]  # per hop the lines and the seconds that each is held
    latency_s: float  # of all rounds
    # Of a chain of pipelines: seconds from each node to the next. The hops then lead back, from the last node on, each with its
    # latency.
    up_s: tuple[float, ...] = ()
    back_s: tuple[float, ...] = ()


@dataclass
class Instance:
    """What the event loop needs, and nothing else."""

    nodes: list[Node]
    heads: list[int]
    head_latency_s: dict[tuple[int, int], float]
    rings: list[Ring]
    lines: list[tuple[str, str]]
    bandwidths: list[float]
    forward_first: bool
    votes: bool = False  # the commit waits for word from every node
    hosts: int = 0  # that several nodes share
    feed_s: float = 0.0  # of a step, that the owner reads or sends


def build(plan: Plan, cluster: Cluster, workload: Workload, *, forward_first: bool = False) -> Instance:
    """Raises PlanError when the plan names an unknown device or codec, an unlinked pair or a size that was not profiled."""
    workload.check_blocks(plan.num_blocks)
    build = _Builder(plan, cluster, workload, forward_first)
    for p, pipeline in enumerate(plan.pipelines):
        build.pipeline(p, pipeline)
    return build.finish()


class _Builder:
    def __init__(self, plan: Plan, cluster: Cluster, workload: Workload, forward_first: bool) -> None:
        if len(plan.pipelines) > 1 and workload.group_sum == "process group":
            workload = replace(workload, group_sum="streams")  # as the executor does it
        self.plan, self.cluster, self.workload = plan, cluster, workload
        self.forward_first = forward_first
        self.votes = workload.clips or (plan.sums_gradients and workload.group_sum != "ring")
        self.nodes: list[Node] = []
        self.heads: list[int] = []
        self.line_of: dict[tuple[str, str], int] = {}
        members = Counter(cluster.devices[p].host for p in plan.peers if p in cluster.devices)
        self.host_of = {host: k for k, host in enumerate(h for h, n in members.items() if h and n > 1)}

    def line(self, edge: tuple[str, str]) -> int:
        return self.line_of.setdefault(edge, len(self.line_of))

    def node(self, p: int, j: int, pipeline: Pipeline, stage: Stage, peer: str, samples: int) -> Node:
        device = self.cluster.devices.get(peer)
        if device is None:
            raise PlanError(f"the plan uses {peer}, which is no device of the cluster; plan it again")
        kind = self.workload.times.get(device.kind)
        if kind is None:
            raise PlanError(f"there are no times for {device.kind} ({peer}); profile it first")
        if not kind.sizes[0] <= samples <= kind.largest:
            raise PlanError(
                f"{peer} has {samples} samples a micro-batch, profiled are {kind.sizes[0]} to {kind.largest}"
            )
        times = kind.stage(stage.first, stage.end, samples, stage.recompute)
        w = kind.cumulated(samples)[2]
        blocks = range(stage.end - 1, stage.first - 1, -1)
        is_last = j == len(pipeline.stages) - 1
        fused = self._runs_fused(j, stage)
        visits = is_last + fused  # to the device's thread, that are saved
        return Node(
            peer, p, j, pipeline.num_micro,
            f_s=times.f_s,
            b_s=max(0.0, times.b_s + (times.w_s if fused else 0.0) - visits * kind.call_s[1]),
            w_s=0.0 if fused else times.w_s,
            optimizer_s=times.optimizer_s,
            window=stage.window, live_cap=stage.live_cap,
            first=stage.first, end=stage.end,
            is_last=is_last,
            weights_s=[0.0 if fused else float(w[k + 1] - w[k]) for k in blocks],
            host=self.host_of.get(device.host, -1), load=device.load,
        )  # fmt: skip

    def _runs_fused(self, j: int, stage: Stage) -> bool:
        """As the executor does: where nobody waits for B, and where an earlier stage waits for W."""
        work = self.workload
        tied = any(a < stage.first <= b < stage.end for a, b, _ in work.tied)
        return stage.fused or (j == 0 and work.fused_first) or tied

    def edge(self, source: int, target: int, size: float, codec: str, extra: int = 0) -> Edge:
        a, b = self.nodes[source].peer, self.nodes[target].peer
        path = self.cluster.path(a, b)
        if path is None:
            raise PlanError(f"nothing joins {a} and {b}, which the plan makes neighbours; add a link or plan again")
        wire = self.workload.wire_bytes(size, codec) + extra
        lines = tuple((self.line(e), wire / self.cluster.bandwidth(e)) for e in path.lines)
        return Edge(source, target, wire, path.latency_s + self.workload.codec_s(size, codec), lines)

    def pipeline(self, p: int, pipeline: Pipeline) -> None:
        start = len(self.nodes)
        before: list[tuple[int, int, int]] = []  # (node, first sample, end) of the previous stage
        last: Stage | None = None
        for j, stage in enumerate(pipeline.stages):
            now, at = [], 0
            for member in stage.members:
                now.append((len(self.nodes), at, at + member.samples))
                at += member.samples
                self.nodes.append(self.node(p, j, pipeline, stage, member.peer, member.samples))
            if self.votes:
                self._lead([n for n, _, _ in now], before[0][0] if before else next(iter(self.heads), None))
            if last is None:
                self.heads += [n for n, _, _ in now] if not self.votes else [] if self.heads else [now[0][0]]
            else:
                forward = self.workload.boundary_bytes[last.end - 1]
                back = self.workload.boundary_back_bytes[last.end - 1]
                for a, a0, a1 in before:
                    for b, b0, b1 in now:
                        self._join(a, b, min(a1, b1) - max(a0, b0), forward, back, last.codec_out, stage.codec_back)
            before, last = now, stage
        for first, end, size in self.workload.tied:
            self._tie(start, first, end, size)

    def _lead(self, group: list[int], above: int | None) -> None:
        """Votes go up through the first member of each stage, the heads of further pipelines to the first one's; the commit
        comes down that way.
        """
        pairs = [(group[0], n) for n in group[1:]] + ([] if above is None else [(above, group[0])])
        for a, b in pairs:
            down, up = self.edge(a, b, 0.0, "none"), self.edge(b, a, 0.0, "none")
            self.nodes[b].above = (a, up.latency_s)
            self.nodes[a].below += 1
            self.nodes[a].commits.append((b, down.latency_s))

    def _tie(self, start: int, first: int, last: int, size: int) -> None:
        """A parameter on two stages: the earlier one's B (with its W) needs the later one's gradient."""
        earlier = [n for n in range(start, len(self.nodes)) if self.nodes[n].first <= first < self.nodes[n].end]
        later = [n for n in range(start, len(self.nodes)) if self.nodes[n].first <= last < self.nodes[n].end]
        for b in later if earlier != later else ():
            for a in earlier:
                self.nodes[b].back.append(self.edge(b, a, size, "none", self.workload.message_bytes[1]))
                self.nodes[a].gradients += 1

    def _join(self, a: int, b: int, samples: int, forward: int, back: int, out: str, returned: str) -> None:
        path = self.cluster.path(self.nodes[a].peer, self.nodes[b].peer)
        if path is not None and not self.votes:
            self.nodes[a].commits.append((b, path.latency_s))
        if samples > 0:
            extra_out, extra_back = self.workload.message_bytes
            self.nodes[a].forward.append(self.edge(a, b, samples * forward, out, extra_out))
            self.nodes[b].inputs += 1
            self.nodes[b].back.append(self.edge(b, a, samples * back, returned, extra_back))
            self.nodes[a].gradients += 1

    def sums(self) -> list[Ring]:
        """As the executor does it: in one piece what the same members hold, once all of them have run their last W."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for block in range(self.plan.num_blocks):
            holders = tuple(n for n, node in enumerate(self.nodes) if node.first <= block < node.end)
            groups.setdefault(holders, []).append(block)
        found = []
        for group, blocks in groups.items():
            count, size = len(group), sum(self.workload.gradient_bytes[block] for block in blocks)
            if count < 2 or not size:
                continue
            if not self.plan.shares_samples:
                found.append(self._chain(blocks[0], group, size))
                continue
            share, rounds = self.workload.sum_costs(count)
            streams = self.workload.group_sum == "streams"
            pairs = [*permutations(group, 2)] if streams else [*zip(group, group[1:] + group[:1])]
            edges = [self.edge(a, b, share * size * count / len(pairs), "none") for a, b in pairs]
            latency_s = rounds * max(e.latency_s for e in edges)
            found.append(Ring(blocks[0], group, tuple(e.lines for e in edges), latency_s))
        return found

    def _chain(self, block: int, holders: tuple[int, ...], size: int) -> Ring:
        """To the last pipeline and back, in buckets: a node passes on what has come while the next bucket comes. So the first
        hop counts with all bytes, and each later one, the way back included, with the last bucket alone.
        """
        bucket = min(size, SUM_BUCKET_BYTES)
        up = [self.edge(a, b, bucket if i else size, "none") for i, (a, b) in enumerate(pairwise(holders))]
        back = [self.edge(b, a, bucket, "none") for b, a in pairwise(holders[::-1])]
        up_s = tuple(e.latency_s + max((held for _, held in e.lines), default=0.0) for e in up)
        return Ring(block, holders, tuple(e.lines for e in back), 0.0, up_s, tuple(e.latency_s for e in back))

    def rings(self) -> list[Ring]:
        if self.workload.group_sum != "ring":
            return self.sums()
        holders: dict[int, list[int]] = {}
        for n, node in enumerate(self.nodes):
            for block in range(node.first, node.end):
                holders.setdefault(block, []).append(n)
        found = []
        known: dict[tuple[int, ...], list[Edge]] = {}  # of one byte
        for block, nodes in sorted(holders.items()):
            if len(nodes) < 2 or not self.workload.gradient_bytes[block]:
                continue
            # neighbours in the ring are of one region where that is possible
            ring = tuple(sorted(nodes, key=lambda n: (self.cluster.devices[self.nodes[n].peer].region, n)))
            if ring not in known:
                known[ring] = [self.edge(a, b, 1.0, "none") for a, b in zip(ring, ring[1:] + ring[:1])]
            share, rounds = self.workload.sum_costs(len(ring))
            size = share * self.workload.gradient_bytes[block]
            hops = tuple(tuple((line, held * size) for line, held in h.lines) for h in known[ring])
            latency = rounds * max(h.latency_s for h in known[ring])
            found.append(Ring(block, ring, hops, latency))
        return found

    def busy_hosts(self) -> None:
        """Messages take cores as well: where members of one host leave none idle, their kernels wait meanwhile."""
        loads: defaultdict[int, float] = defaultdict(float)
        for node in self.nodes:
            loads[node.host] += node.load
        for node in self.nodes:
            if node.host >= 0:
                each_s = HOST_MESSAGE_S * min(1.0, loads[node.host])
                node.f_s += each_s * ((node.inputs or 1) + (len(node.forward) or 1))
                node.b_s += each_s * (node.gradients + len(node.back))

    def finish(self) -> Instance:
        self.busy_hosts()
        latency: dict[tuple[int, int], float] = {}
        for a in self.heads:
            for b in self.heads:
                path = self.cluster.path(self.nodes[a].peer, self.nodes[b].peer) if a != b else None
                latency[a, b] = path.latency_s if path is not None else 0.0
        rings = self.rings()
        lines = list(self.line_of)
        return Instance(
            self.nodes, self.heads, latency, rings, lines, [self.cluster.bandwidth(e) for e in lines],
            self.forward_first, self.votes, len(self.host_of), self.feed_s(),
        )  # fmt: skip

    def feed_s(self) -> float:
        """What reading a step's samples takes the owner, or its busiest line: its port, as fast as its fastest link, or a link."""
        work, links = self.workload, self.cluster.feeds
        found = [work.data_s * self.plan.global_batch]
        port_bytes, port = 0.0, max((link.bandwidth_bytes_per_s for link in links.values()), default=0.0)
        for pipeline in self.plan.pipelines:
            for stage in pipeline.stages:
                for member in stage.members:
                    if (link := links.get(member.peer)) is not None:
                        size = pipeline.num_micro * member.samples * work.fed_bytes(stage.first, stage.end)
                        port_bytes += size
                        found.append(size / link.bandwidth_bytes_per_s)
        return max(*found, port_bytes / port if port else 0.0)
