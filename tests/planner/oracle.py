"""Random small clusters, and the best plan on them by trying everything.

The idea: the oracle shares the simulator and the memory model with the planner, and nothing else: it enumerates rows of
disjoint groups, every cut, every micro-batch size and a fan of windows. What cannot beat the best so far by its plain
work is not simulated.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence

from meshcee.plan import Member, Pipeline, Plan, Stage
from meshcee.planner.memory import shortages
from meshcee.profile import Cluster, Device, LinkProfile
from meshcee.simulator import build, slowest_s
from meshcee.simulator.engine import run
from meshcee.workload import KindTimes, Workload

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


def rows(cluster: Cluster) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Every row of disjoint groups of like devices, one of each kind of row that differs in names only."""
    seen = set()

    def like(peer: str) -> tuple[object, ...]:
        d = cluster.devices[peer]
        return d.kind, d.region, d.memory_bytes, d.port_bytes_per_s

    def extend(row: tuple[tuple[str, ...], ...], free: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
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


def plans_of(row: Sequence[Sequence[str]], workload: Workload, micro: int, cluster: Cluster) -> Iterator[Plan]:
    """Every cut of the blocks for a row, with a fan of windows, as far as memory allows."""
    if any(micro % len(group) for group in row):
        return
    num_micro = workload.global_batch // micro
    for inner in itertools.combinations(range(1, workload.num_blocks), len(row) - 1):
        bounds = (0, *inner, workload.num_blocks)
        lives = []
        for j, group in enumerate(row):
            n = micro // len(group)
            kind = workload.times[cluster.devices[group[0]].kind]
            if not kind.sizes[0] <= n <= kind.largest:
                return
            room = min(cluster.devices[p].memory_bytes for p in group) - workload.held_bytes(bounds[j], bounds[j + 1])
            lives.append(min(num_micro, room // workload.live_bytes(bounds[j], bounds[j + 1], n)))
        if min(lives) < 1:
            continue
        tried = set()
        for factor in WINDOWS:
            windows = tuple(
                max(1, live if math.isinf(factor) else min(live, round(factor * (2 * (len(row) - j) + 1))))
                for j, live in enumerate(lives)
            )
            if windows in tried:
                continue
            tried.add(windows)
            stages = tuple(
                Stage(
                    bounds[j], bounds[j + 1], tuple(Member(p, micro // len(g)) for p in g),
                    window=windows[j], live_cap=lives[j], codec_out="bf16", codec_back="bf16",
                )
                for j, g in enumerate(row)
            )  # fmt: skip
            yield Plan(micro, (Pipeline(num_micro, stages),))


def exhaustive(cluster: Cluster, workload: Workload) -> tuple[float, Plan | None]:
    """The least period over everything, and a plan that has it."""
    best, found = math.inf, None
    for micro in (m for m in range(1, workload.global_batch + 1) if workload.global_batch % m == 0):
        for row in rows(cluster):
            if len(row) > workload.num_blocks:
                continue
            for plan in plans_of(row, workload, micro, cluster):
                instance = build(plan, cluster, workload)
                if plan.pipelines[0].num_micro * slowest_s(instance) >= best:
                    continue
                assert not shortages(plan, cluster, workload)
                ends = run(instance, 3).applied_s
                period = (ends[2] - ends[0]) / 2
                if period < best:
                    best, found = period, plan
    return best, found
