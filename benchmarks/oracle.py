"""The planner against exhaustive enumeration on random small clusters, as many as you like; goes on where it stopped.

    python -m benchmarks.oracle [--cases 200] [--devices 5] [--file oracle.jsonl]

One JSON object a line: seed, devices, best (s), planned (s), gap. A line that is there is not computed again.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from meshcee.errors import PlanError
from meshcee.planner.job import plan_cluster
from tests.planner.oracle import exhaustive, random_case


def measure(seed: int, devices: int) -> dict[str, float | int | None]:
    """One cluster; `gap` is None when nothing fits, for either."""
    cluster, workload = random_case(seed, devices=devices)
    best, _ = exhaustive(cluster, workload)
    try:
        predicted = plan_cluster(cluster, workload).predicted
        planned = math.inf if predicted is None else predicted.step_s
    except PlanError:
        planned = math.inf
    gap = planned / best - 1 if math.isfinite(best) else None
    return {"seed": seed, "devices": len(cluster.devices), "best_s": best, "planned_s": planned, "gap": gap}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--devices", type=int, default=5)
    parser.add_argument("--file", type=Path, default=Path("oracle.jsonl"))
    options = parser.parse_args()
    lines = options.file.read_text().splitlines() if options.file.exists() else []
    done = {found["seed"]: found for found in map(json.loads, lines)}
    for seed in range(options.cases):
        if seed not in done:
            done[seed] = measure(seed, options.devices)
            with options.file.open("a") as file:
                file.write(json.dumps(done[seed]) + "\n")
    gaps = sorted(found["gap"] for found in done.values() if found["gap"] is not None)
    within = sum(g <= 0.01 for g in gaps) / len(gaps)
    print(
        f"{len(gaps)} cases: {within:.1%} within 1 %, worst {gaps[-1]:.1%}, best {gaps[0]:.1%} (a better plan than enumerated)"
    )


if __name__ == "__main__":
    main()
