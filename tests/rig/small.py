"""Clusters and workloads with round figures, so that timelines can be worked out by hand."""

import math
from collections.abc import Mapping, Sequence

from meshcee.figures.profile import Cluster, Device, LinkProfile
from meshcee.figures.workload import KindTimes, Workload
from meshcee.plan import Member, Pipeline, Plan, Stage


def cluster(
    regions: Mapping[str, Sequence[str]],
    *,
    port: float = math.inf,
    inside_s: float = 0.0,
    bandwidth: float = 1.0,
    latency_s: float = 0.0,
    memory: int = 10**9,
    kinds: Mapping[str, str] | None = None,
) -> Cluster:
    """Every pair of regions has the same link."""
    devices = [Device(p, (kinds or {}).get(p, "k"), r, memory, port) for r, peers in regions.items() for p in peers]
    link = LinkProfile(latency_s, bandwidth)
    between = {(a, b): link for a in regions for b in regions if a != b}
    return Cluster(devices, inside_latency_s=dict.fromkeys(regions, inside_s), between=between)


def workload(
    blocks: int = 1,
    batch: int = 1,
    *,
    f: float = 1.0,
    b: float = 1.0,
    w: float = 1.0,
    optimizer: float = 0.0,
    boundary: int = 1,
    gradient: int = 0,
    state: int = 0,
    activation: int = 0,
    kinds: Mapping[str, float] | None = None,
    largest: int = 8,
) -> Workload:
    """`kinds`: kind -> how many times as long everything takes there. Seconds grow with samples."""
    times = {}
    for kind, slow in (kinds or {"k": 1.0}).items():
        rows = [[[n * slow * s] * blocks for n in (1, largest)] for s in (f, b, w)]
        times[kind] = KindTimes((1, largest), *rows, [slow * optimizer] * blocks)
    return Workload(
        names=tuple(f"block {i}" for i in range(blocks)),
        global_batch=batch,
        times=times,
        state_bytes=(state,) * blocks,
        gradient_bytes=(gradient,) * blocks,
        activation_bytes=(activation,) * blocks,
        boundary_bytes=(boundary,) * (blocks - 1) + (0,),
        boundary_back_bytes=(boundary,) * (blocks - 1) + (0,),
        default_codec="none",
    )


def pipeline(
    *stages: tuple[int, int, Mapping[str, int] | str], micros: int, window: int = 99, cap: int = 99, samples: int = 1
) -> Pipeline:
    """Stages as (first, end, peer) or (first, end, {peer: samples})."""
    built = []
    for first, end, who in stages:
        members = {who: samples} if isinstance(who, str) else dict(who)
        built.append(Stage(first, end, tuple(Member(p, n) for p, n in members.items()), window=window, live_cap=cap))
    return Pipeline(micros, tuple(built))


def plan(*pipelines: Pipeline, micro_batch: int = 1) -> Plan:
    return Plan(micro_batch, pipelines)
