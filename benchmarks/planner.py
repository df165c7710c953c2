"""meshcee's plans against other planners' on the testbeds, all priced by the same simulator under true link costs.

    python benchmarks/planner.py [--testbed NAME ...] [--effort 1] [--json]

Boundaries are 16-bit everywhere; what int8 would gain is a column of its own. A baseline that does not fit is reported as
out of memory and left out of means. Prints the tables of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence

import baselines
from baselines import Result

from meshcee.figures.profile import Cluster
from meshcee.figures.scenario import load_scenario, packaged
from meshcee.figures.workload import Workload
from meshcee.planner.search import Effort, plans

TESTBEDS = ("cee-small", "cee-medium", "two-clusters", "three-cities", "eight-cities", "cee-fluctuating")
Baseline = Callable[[Cluster, Workload], Result]


def _uniform(schedule: str, by_speed: bool) -> Baseline:
    return lambda c, w: baselines.uniform(c, w, schedule, by_speed=by_speed)


def _after(cost: baselines.Cost, all_devices: bool, schedule: str) -> Baseline:
    return lambda c, w: baselines.planned(c, w, cost, all_devices=all_devices, schedule=schedule)


BASELINES: dict[str, Baseline] = {
    "uniform, listed, GPipe": _uniform("gpipe", False),
    "uniform, listed, 1F1B": _uniform("1f1b", False),
    "uniform, by speed, GPipe": _uniform("gpipe", True),
    "uniform, by speed, 1F1B": _uniform("1f1b", True),
    "data parallel, all": lambda c, w: baselines.data_parallel(c, w, fitting=False),
    "data parallel, that fit": lambda c, w: baselines.data_parallel(c, w, fitting=True),
    "after Metis, all devices": _after(baselines.metis, True, "1f1b"),
    "after Metis, subsets": _after(baselines.metis, False, "1f1b"),
    "after Sailor": _after(baselines.sailor, False, "1f1b"),
    "after Asteroid": _after(baselines.asteroid, False, "1f1b"),
    "after HAPT": _after(baselines.hapt, False, "1f1b"),
}
LONG: dict[str, Baseline] = {
    "after Metis, all devices, long": _after(baselines.metis, True, "long"),
    "after Metis, subsets, long": _after(baselines.metis, False, "long"),
    "after Sailor, long": _after(baselines.sailor, False, "long"),
    "after Asteroid, long": _after(baselines.asteroid, False, "long"),
    "after HAPT, long": _after(baselines.hapt, False, "long"),
}


def measure(name: str, effort: float) -> dict[str, object]:
    """One testbed: everybody's samples per second and mean share of devices' time at work."""
    scenario = load_scenario(packaged("testbeds.json"), name, packaged("gpu_profiles.json"))
    cluster, workload = scenario.cluster, scenario.workload
    begun_s = time.process_time()
    choice = plans(cluster, workload, effort=Effort().times(effort))
    took_s = time.process_time() - begun_s
    ours = baselines.priced(choice.best, cluster, workload, fused=False)
    coded = plans(cluster, workload, codecs=("bf16", "int8"), effort=Effort().times(effort)).best
    predicted = coded.predicted
    results = {"meshcee": ours}
    for label, baseline in (BASELINES | LONG).items():
        results[label] = baseline(cluster, workload)
    single = choice.single
    results["best single device"] = Result(
        None if single is None else workload.global_batch / single[1],
        0.0 if single is None else 1 / len(cluster.devices),
    )
    return {
        "testbed": name,
        "planning_s": took_s,
        "int8_samples_per_s": None if predicted is None else predicted.samples_per_s,
        "lower_bound_samples_per_s": workload.global_batch / choice.best.predicted.lower_bound_s
        if choice.best.predicted
        else None,
        "results": {label: vars(r) for label, r in results.items()},
    }


def mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values)) if values else math.nan


def _rate(found: Mapping[str, object], label: str) -> float | None:
    results = found["results"]
    assert isinstance(results, Mapping)
    value = results[label]["samples_per_s"]
    return None if value is None else float(value)


def tables(measured: Sequence[Mapping[str, object]]) -> str:
    """Markdown."""
    names = [str(m["testbed"]) for m in measured]
    lines = [f"| planner | {' | '.join(names)} | meshcee is faster by (mean) |", "|---" * (len(names) + 2) + "|"]
    labels = ["meshcee", *BASELINES, *LONG, "best single device"]
    for label in labels:
        cells, ratios = [], []
        for m in measured:
            rate, ours = _rate(m, label), _rate(m, "meshcee")
            cells.append("out of memory" if rate is None else f"{rate:.2f}")
            if rate is not None and ours is not None:
                ratios.append(ours / rate)
        lines.append(f"| {label} | {' | '.join(cells)} | {mean(ratios):.2f} |")
    int8 = [f"{m['int8_samples_per_s']:.2f}" for m in measured]
    bound = [f"{m['lower_bound_samples_per_s']:.2f}" for m in measured]
    lines.append(f"| meshcee, int8 allowed | {' | '.join(int8)} | |")
    lines.append(f"| bound: all devices busy, links free | {' | '.join(bound)} | |")
    planning = [f"{m['planning_s']:.2f}" for m in measured]
    lines.append(f"| planning, CPU seconds | {' | '.join(planning)} | |")
    for title, group in (("as published", [*BASELINES, "best single device"]), ("with long warm-up", list(LONG))):
        ratios = []
        for m in measured:
            best = max((r for label in group if (r := _rate(m, label)) is not None), default=None)
            ours = _rate(m, "meshcee")
            if best is not None and ours is not None:
                ratios.append(ours / best)
        lines.append("")
        lines.append(
            f"Against the best baseline {title} on each testbed: {mean(ratios):.2f} (worst {min(ratios):.2f})."
        )
    lines += [
        "",
        "| mean share of time that a device of the cluster computes | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for label in ("meshcee", "after Metis, all devices", "after Sailor", "after HAPT", "uniform, listed, 1F1B"):
        used = [m["results"][label]["utilisation"] for m in measured]  # type: ignore[index]
        lines.append(f"| {label} | {' | '.join(f'{u:.0%}' for u in used)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--testbed", nargs="*", default=list(TESTBEDS), choices=TESTBEDS)
    parser.add_argument("--effort", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    measured = []
    for name in options.testbed:
        measured.append(measure(name, options.effort))
        if options.json:
            print(json.dumps(measured[-1]), flush=True)
    if not options.json:
        print(tables(measured))


if __name__ == "__main__":
    main()
