"""Random small clusters, and the best plan on them by trying everything.

The idea: the oracle shares the simulator and the memory model with the planner, and nothing else: it enumerates rows of
disjoint groups, every cut, every micro-batch size and a fan of windows. What cannot beat the best so far by its plain
work is not simulated. The first oracle has equal shares and one pipeline, for up to five devices; the second every
sharing of the samples and up to two pipelines, for three.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshcee.figures.profile import Cluster, Device, LinkProfile
from meshcee.figures.workload import KindTimes, Workload
from meshcee.plan import Member, Pipeline, Plan, Stage
from meshcee.planner.rules import shortages
from meshcee.simulator import bound_s, build
from meshcee.simulator.engine import run

Row = tuple[tuple[str, ...], ...]

WINDOWS = (0.7, 1.0, 1.4, 2.0, math.inf)  # of the micro-batches that fill the pipeline
BLOCKS = 8


def random_case(seed: int, *, devices: int = 5, batch: int = 16) -> tuple[Cluster, Workload]:
    """Up to `devices` devices in up to three regions, eight blocks; memory is tight in one case of three."""
    rng = random.Random(seed)
    regions = [f"r{i}" for i in range(rng.randint(1, 3))]
    kinds = {f"k{i}": 10 ** rng.uniform(-2.3, -1.3) for i in range(rng.randint(1, 3))}  # seconds of a block's F
    state, activation = 100 * 2**20, 64 * 2**20
    whole = BLOCKS * (state + 4 * activation)
    tight = rng.random() < 1 / 3
    found = []
    for i in range(rng.randint(2, devices)):
        room = int(whole * (rng.uniform(0.3, 0.8) if tight else rng.uniform(1, 4)))
        port = 10 ** rng.uniform(8, 9.5)
        found.append(Device(f"d{i}", rng.choice(sorted(kinds)), rng.choice(regions), room, port))
    between = {}
    for a, b in itertools.combinations(regions, 2):
        link = LinkProfile(10 ** rng.uniform(-3, -1), 10 ** rng.uniform(7, 9))
        between[a, b] = between[b, a] = link
    boundary = int(10 ** rng.uniform(5, 6.7))
    times = {}
    for kind, seconds in kinds.items():
        rows = [
            [
                n * seconds * (1 + 0.3 * (n == 1)) * (0.3 if k == 0 else 1.2 if k == BLOCKS - 1 else 1)
                for k in range(BLOCKS)
            ]
            for n in (1, 2, 4)
        ]
        double = [[1.1 * x for x in row] for row in rows]
        times[kind] = KindTimes((1, 2, 4), rows, double, double, [seconds / 10] * BLOCKS)
    workload = Workload(
        names=tuple(f"b{k}" for k in range(BLOCKS)),
        global_batch=batch,
        times=times,
        state_bytes=(state,) * BLOCKS,
        gradient_bytes=(state // 8,) * BLOCKS,
        activation_bytes=(activation,) * BLOCKS,
        boundary_bytes=(boundary,) * (BLOCKS - 1) + (0,),
        boundary_back_bytes=(boundary,) * (BLOCKS - 1) + (0,),
    )
    return Cluster(found, inside_latency_s=dict.fromkeys(regions, 1e-4), between=between), workload


def random_wide_case(seed: int) -> tuple[Cluster, Workload]:
    """Two or three devices whose gradients are sometimes so small that whole models side by side pay."""
    cluster, workload = random_case(seed, devices=3)
    lighter = 10 ** random.Random(seed).uniform(0, 3)
    return cluster, replace(workload, gradient_bytes=tuple(int(g / lighter) for g in workload.gradient_bytes))


def rows(cluster: Cluster) -> Iterator[Row]:
    """Every row of disjoint groups of like devices, one of each kind of row that differs in names only."""
    seen = set()

    def like(peer: str) -> tuple[object, ...]:
        d = cluster.devices[peer]
        return d.kind, d.region, d.memory_bytes, d.port_bytes_per_s

    def extend(row: Row, free: tuple[str, ...]) -> Iterator[Row]:
        if row:
            shape = tuple(tuple(like(p) for p in group) for group in row)
            if shape in seen:
                return
            seen.add(shape)
            yield row
        for size in (1, 2, 4):
            for group in itertools.combinations(free, size):
                if len({cluster.devices[p].kind for p in group}) == 1:
                    yield from extend((*row, group), tuple(p for p in free if p not in group))

    yield from extend((), tuple(cluster.devices))


def stages_of(
    row: Row,
    bounds: Sequence[int],
    shares: Sequence[Sequence[int]],
    num_micro: int,
    cluster: Cluster,
    workload: Workload,
) -> Iterator[tuple[Stage, ...]]:
    """The stages of a pipeline with a fan of windows, as far as memory allows."""
    lives = []
    for j, (group, taken) in enumerate(zip(row, shares)):
        first, end = bounds[j], bounds[j + 1]
        held = workload.state_sum_bytes(first, end)
        rooms = [
            (cluster.devices[p].memory_bytes - held) // workload.live_bytes(first, end, n) for p, n in zip(group, taken)
        ]
        lives.append(min(num_micro, *rooms))
    if min(lives) < 1:
        return
    tried = set()
    for factor in WINDOWS:
        windows = tuple(
            max(1, live if math.isinf(factor) else min(live, round(factor * (2 * (len(row) - j) + 1))))
            for j, live in enumerate(lives)
        )
        if windows in tried:
            continue
        tried.add(windows)
        yield tuple(
            Stage(
                bounds[j], bounds[j + 1], tuple(Member(p, n) for p, n in zip(row[j], shares[j])),
                window=windows[j], live_cap=lives[j], codec_out="bf16", codec_back="bf16",
            )
            for j in range(len(row))
        )  # fmt: skip


def cuts(blocks: int, stages: int) -> Iterator[tuple[int, ...]]:
    for inner in itertools.combinations(range(1, blocks), stages - 1):
        yield (0, *inner, blocks)


def sharings(group: Sequence[str], micro: int, cluster: Cluster, workload: Workload) -> list[tuple[int, ...]]:
    """Every way to give the samples of a micro-batch to the members of a group."""
    kinds = [workload.times[cluster.devices[p].kind] for p in group]
    sizes = [range(k.sizes[0], min(k.largest, micro) + 1) for k in kinds]
    return [taken for taken in itertools.product(*sizes) if sum(taken) == micro]


class Best:
    """The least period so far; what cannot beat it by its plain work is not simulated."""

    def __init__(self, cluster: Cluster, workload: Workload) -> None:
        self.cluster, self.workload = cluster, workload
        self.period_s, self.plan = math.inf, None  # type: float, Plan | None

    def judge(self, plan: Plan) -> None:
        instance = build(plan, self.cluster, self.workload)
        if bound_s(instance) >= self.period_s:
            return
        assert not shortages(plan, self.cluster, self.workload)
        ends = run(instance, 3).applied_s
        period_s = (ends[2] - ends[0]) / 2
        if period_s < self.period_s:
            self.period_s, self.plan = period_s, plan


def divisors(workload: Workload) -> list[int]:
    return [m for m in range(1, workload.global_batch + 1) if workload.global_batch % m == 0]


def exhaustive(cluster: Cluster, workload: Workload) -> tuple[float, Plan | None]:
    """The least period over everything with equal shares and one pipeline, and a plan that has it."""
    best = Best(cluster, workload)
    for micro in divisors(workload):
        num_micro = workload.global_batch // micro
        for row in rows(cluster):
            shares = [(micro // len(group),) * len(group) for group in row]
            kinds = [(workload.times[cluster.devices[g[0]].kind], n[0]) for g, n in zip(row, shares)]
            if any(micro % len(g) for g in row) or not all(k.sizes[0] <= n <= k.largest for k, n in kinds):
                continue
            for bounds in cuts(workload.num_blocks, len(row)):
                for stages in stages_of(row, bounds, shares, num_micro, cluster, workload):
                    best.judge(Plan(micro, (Pipeline(num_micro, stages),)))
    return best.period_s, best.plan


def any_rows(peers: Sequence[str]) -> Iterator[Row]:
    """Every row of disjoint groups of these devices, whatever they are."""
    for size in range(1, len(peers) + 1):
        for group in itertools.combinations(peers, size):
            yield (group,)
            for rest in any_rows([p for p in peers if p not in group]):
                yield (group, *rest)


def pipelines_of(row: Row, micro: int, num_micro: int, cluster: Cluster, workload: Workload) -> Iterator[Pipeline]:
    for shares in itertools.product(*(sharings(group, micro, cluster, workload) for group in row)):
        for bounds in cuts(workload.num_blocks, len(row)):
            for stages in stages_of(row, bounds, shares, num_micro, cluster, workload):
                yield Pipeline(num_micro, stages)


def exhaustive_wide(cluster: Cluster, workload: Workload) -> tuple[float, Plan | None]:
    """The same over every sharing of samples, unlike devices in one group, and two pipelines side by side."""
    best = Best(cluster, workload)
    peers = list(cluster.devices)
    for micro in divisors(workload):
        num_micro = workload.global_batch // micro
        for row in any_rows(peers):
            for pipeline in pipelines_of(row, micro, num_micro, cluster, workload):
                best.judge(Plan(micro, (pipeline,)))
            rest = [p for p in peers if not any(p in g for g in row)]
            for other in any_rows(rest):
                if max(row) < max(other):  # each pair once
                    continue
                for own in range(1, num_micro):
                    second = list(pipelines_of(other, micro, num_micro - own, cluster, workload))
                    for one in pipelines_of(row, micro, own, cluster, workload):
                        for two in second:
                            best.judge(Plan(micro, (one, two)))
    return best.period_s, best.plan
