"""The planner against exhaustive enumeration on random small clusters, as many as you like; goes on where it stopped.

    python -m benchmarks.oracle [--cases 200] [--oracle equal|wide] [--file oracle.jsonl] [--again]

`equal`: up to five devices, equal shares, one pipeline. `wide`: up to three, every sharing of the samples, two pipelines.
One JSON object a line: oracle, seed, devices, best_s (null: nothing fits); then planned_s, on a line of its own. A line that
is there is not computed again; `--again` plans anew, and keeps the enumerations, which take nearly all of the time.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from meshcee.errors import PlanError
from meshcee.planner.search import plans
from tests.planner.oracle import exhaustive, exhaustive_wide, random_case, random_wide_case

ORACLES = {
    "equal": (lambda seed: random_case(seed, devices=5), exhaustive),
    "wide": (random_wide_case, exhaustive_wide),
}

Line = dict[str, str | int | float | None]


def enumerated(oracle: str, seed: int) -> Line:
    case, enumerate_all = ORACLES[oracle]
    cluster, workload = case(seed)
    best_s, _ = enumerate_all(cluster, workload)
    return {"devices": len(cluster.devices), "best_s": best_s if math.isfinite(best_s) else None}


def planned(oracle: str, seed: int) -> Line:
    try:
        predicted = plans(*ORACLES[oracle][0](seed)).best.predicted
    except PlanError:
        predicted = None
    return {"planned_s": None if predicted is None else predicted.step_s}


def gap(line: Line) -> float | None:
    """How much slower the plan is; None when nothing fits for either, or only the planner found something."""
    best_s, planned_s = line["best_s"], line["planned_s"]
    if best_s is None:
        return None
    return float(planned_s) / float(best_s) - 1 if planned_s is not None else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--oracle", choices=list(ORACLES), default="equal")
    parser.add_argument("--file", type=Path, default=Path("oracle.jsonl"))
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    done: dict[int, Line] = {}
    for line in map(json.loads, options.file.read_text().splitlines() if options.file.exists() else []):
        if line["oracle"] == options.oracle:
            done.setdefault(line["seed"], {}).update(line)
    if options.again:
        for line in done.values():
            line.pop("planned_s", None)
    for key, measure in (("best_s", enumerated), ("planned_s", planned)):
        for seed in range(options.cases):
            if key not in done.setdefault(seed, {}):
                found = {"oracle": options.oracle, "seed": seed, **measure(options.oracle, seed)}
                done[seed].update(found)
                with options.file.open("a") as file:
                    file.write(json.dumps(found) + "\n")
    gaps = sorted((g, seed) for seed in range(options.cases) if (g := gap(done[seed])) is not None)
    within = sum(g <= 0.01 for g, _ in gaps) / len(gaps)
    print(
        f"{options.oracle}: {len(gaps)} cases of {options.cases} fit: {within:.1%} within 1 %, best {gaps[0][0]:.1%} "
        f"(a better plan than enumerated), worst {', '.join(f'{g:.1%} (seed {seed})' for g, seed in gaps[:-4:-1])}"
    )


if __name__ == "__main__":
    main()
