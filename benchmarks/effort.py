"""The planner against itself with 50 times the effort, on random clusters: what a longer search would still find.

    python -m benchmarks.effort [--cases 30] [--first 0] [--times 50] [--file effort.jsonl]

The idea: a case is its seed. Memory is tight in a third of the cases: the model fits only when it is spread. In another third one
device is far ahead of all others. Both searches price plans with the same simulator, whole. One JSON object a case; a case that is
in the file is not searched again. The last line has the figures over all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import machine
from meshcee.errors import PlanError
from meshcee.figures import Cluster, Device, LinkProfile
from meshcee.figures.workload import KindTimes, Workload
from meshcee.planner.search import Effort, plans

BLOCKS = 24
DEVICES = (5, 18)
SORTS = ("tight memory", "one far ahead", "neither")
CLOSE = 1.02


def case(seed: int) -> tuple[Cluster, Workload]:
    """A cluster of up to six regions and four kinds of devices, and a model of 24 blocks of unlike costs."""
    rng, sort = random.Random(seed), SORTS[seed % len(SORTS)]
    count = rng.randint(*DEVICES)
    regions = [f"r{i}" for i in range(rng.randint(1, min(6, count // 2)))]
    kinds = {f"k{i}": 10 ** rng.uniform(-2.5, -1.5) for i in range(rng.randint(2, 4))}  # seconds of a block's F
    if sort == "one far ahead":
        kinds["ahead"] = min(kinds.values()) / rng.uniform(4, 10)
    state, activation = 100 * 2**20, 48 * 2**20
    whole = BLOCKS * (state + 4 * activation)
    devices = []
    for i in range(count):
        room = whole * (rng.uniform(0.9, 2.2) / count if sort == "tight memory" else rng.uniform(0.3, 3))
        kind = "ahead" if sort == "one far ahead" and i == 0 else rng.choice(sorted(kinds.keys() - {"ahead"}))
        devices.append(Device(f"d{i}", kind, rng.choice(regions), int(room), 10 ** rng.uniform(8, 9.5)))
    between = {}
    for a, b in itertools.combinations(regions, 2):
        between[a, b] = between[b, a] = LinkProfile(10 ** rng.uniform(-3, -1), 10 ** rng.uniform(6.7, 8.7))
    boundary = int(10 ** rng.uniform(5, 6.5))
    costs = [rng.uniform(0.5, 1.5) for _ in range(BLOCKS)]
    times = {}
    for kind, seconds in kinds.items():
        rows = [[n * seconds * cost * (1 + 0.3 * (n == 1)) for cost in costs] for n in (1, 2, 4)]
        half = [[1.1 * x for x in row] for row in rows]
        times[kind] = KindTimes((1, 2, 4), rows, half, half, [seconds / 10] * BLOCKS)
    crossing = (boundary,) * (BLOCKS - 1) + (0,)
    workload = Workload(
        names=tuple(f"b{k}" for k in range(BLOCKS)),
        global_batch=32,
        times=times,
        state_bytes=(state,) * BLOCKS,
        gradient_bytes=(state // 8,) * BLOCKS,
        activation_bytes=(activation,) * BLOCKS,
        boundary_bytes=crossing,
        boundary_back_bytes=crossing,
    )
    return Cluster(devices, inside_latency_s=dict.fromkeys(regions, 1e-4), between=between), workload


def searched(seed: int, times: int) -> dict[str, Any]:
    """Seconds of a step by the plan found, and CPU seconds of the search: as usual, and with so many times the effort."""
    cluster, workload = case(seed)
    found: dict[str, Any] = {"seed": seed, "sort": SORTS[seed % len(SORTS)], "devices": len(cluster.devices)}
    usual = Effort()
    for name, effort in (("usual", usual), ("long", usual.times(times, rows=times))):
        begun_s = time.process_time()
        try:
            predicted = plans(cluster, workload, effort=effort).best.predicted
            assert predicted is not None
            found[f"{name}_s"] = predicted.step_s
        except PlanError:
            found[f"{name}_s"] = None  # nothing fits
        found[f"{name}_cpu_s"] = round(time.process_time() - begun_s, 2)
    return found


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """By sort and over all: the geometric mean and the worst of usual over long, and how many are close."""
    found: dict[str, Any] = {"machine": machine()}
    for sort in (*SORTS, "all"):
        of = [line for line in lines if sort in ("all", line["sort"])]
        ratios = [line["usual_s"] / line["long_s"] for line in of if line["long_s"] and line["usual_s"]]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            close = sum(ratio <= CLOSE for ratio in ratios)
            found[sort] = {"cases": len(of), "planned": len(ratios), "close": close}
            found[sort] |= {"mean": round(mean, 4), "worst": round(max(ratios), 4)}
        found.setdefault(sort, {"cases": len(of), "planned": 0})
        found[sort]["only long fits"] = sum(bool(line["long_s"]) and not line["usual_s"] for line in of)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--file", type=Path, default=Path("effort.jsonl"))
    asked = parser.parse_args()
    lines = [json.loads(line) for line in asked.file.read_text().splitlines()] if asked.file.exists() else []
    known = {line["seed"] for line in lines}
    with asked.file.open("a") as file:
        for seed in range(asked.first, asked.first + asked.cases):
            if seed not in known:
                lines.append(searched(seed, asked.times))
                print(json.dumps(lines[-1]), file=file, flush=True)
                print(json.dumps(lines[-1]), flush=True)
    print(json.dumps(summary(lines)))


if __name__ == "__main__":
    main()
