"""Replicas by default in the WAN lab: pipelines side by side beside the best plan of one pipeline (needs root, 15 minutes).

The idea: real peers on an emulated network, no flags. Each case runs twice, on the same hosts: as it is, and by an owner that
asks for one pipeline (benchmarks/one_pipeline.py). Losses are held against the plain loop's; predicted stands beside measured. Rows
are kept in a JSON file, so a run that was stopped goes on; the table is drawn from the file.

    python -m benchmarks.replicas [--out FILE] [--only CASE ...] [--repetitions 1] [--table]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import meshcee
from benchmarks import replicas_job, wan
from benchmarks.lab import why_not
from benchmarks.measure import machine, row
from benchmarks.rivals.launch import WARM, Bed, System, run
from meshcee.errors import MeshceeError, unwrap
from meshcee.figures.measured import JobCosts, Measured
from meshcee.figures.profile import BlockCost, Cluster, Device, DeviceProfile, LinkProfile
from meshcee.figures.scenario import Scenario
from meshcee.planner import situation
from peers.mesh_view import named

FOLDER = Path(__file__).resolve().parent
STEPS = 10  # and WARM before them
MTU = 4000
INSIDE = LinkProfile(0.00025, 125e6)
FORMS = {"default": "meshcee", "one pipeline": "benchmarks.one_pipeline"}  # -> what runs `train`

# Of each case: regions with their devices, the devices' speed, the line between regions.
BEDS: dict[str, tuple[tuple[int, ...], float, LinkProfile]] = {
    "thin line": ((2, 2), 2e9, LinkProfile(0.01, 2e6)),
    "batch norm": ((2, 2), 2e9, LinkProfile(0.01, 2e6)),
    "lopsided": ((6,), 0.5e9, LinkProfile(0.01, 2e6)),
    "large batch": ((2, 2), 3e9, LinkProfile(0.01, 2e6)),
}


def bed_of(case: str) -> Bed:
    regions, speed, link = BEDS[case]
    at = {f"{'abc'[r]}{i}": "abc"[r] for r, count in enumerate(regions) for i in range(count)}
    devices = [Device(name, name, region, 1 << 33, INSIDE.bandwidth_bytes_per_s) for name, region in at.items()]
    names = sorted(set(at.values()))
    between = {(x, y): link for x in names for y in names if x != y}
    cluster = Cluster(devices, inside_latency_s=dict.fromkeys(names, INSIDE.latency_s), between=between)
    profiles = {name: DeviceProfile("cpu", name, 1 << 33, speed) for name in at}
    block = BlockCost("any", 1e6, 1, 1, 1, 1, 1)  # the lab takes lines from a scenario, and no work
    workload = situation(Measured(profiles, {}, {}, {}), JobCosts([block], 1))[1]
    return Bed(Scenario(case, cluster, workload), dict.fromkeys(at, speed), [])


async def measure(case: str, form: str, limit_s: float) -> dict[str, Any]:
    bed = bed_of(case)
    system = System(
        form,
        "meshcee",
        tuple(bed.hosts),
        module=FORMS[form],
        job=replicas_job.__file__,
        environment={"REPLICAS_CASE": case},
        endless=True,
    )
    result = await run(bed, system, STEPS + WARM, limit_s, MTU)
    assert result.plan is not None
    plan = json.loads(named(json.dumps(result.plan), result.names))
    return {
        "step_s": (result.ends_s[-1] - result.ends_s[WARM - 1]) / STEPS,
        "predicted_s": plan["predicted"]["step_s"],
        "bound_s": plan["predicted"]["lower_bound_s"],
        "losses": result.losses,
        "plan": plan,
        "plans": len(result.plans),
        "cores_busy": result.busy,
        "load": os.getloadavg()[0],
    }


def plain_losses(case: str, steps: int = STEPS + WARM) -> list[float]:
    torch.set_num_threads(1)  # as the peers compute
    return meshcee.plain(replicas_job.made(case), steps=steps).losses


async def measure_all(options: argparse.Namespace, data: dict[str, Any]) -> None:
    for case in options.only or list(BEDS):
        plain = data["plain"].get(case) or await asyncio.to_thread(plain_losses, case)
        data["plain"][case] = plain
        for turn in range(options.repetitions):
            for form in FORMS:
                kept = data["rows"].setdefault(f"{case}: {form}", [])
                if len(kept) <= turn:
                    kept.append(await measure(case, form, options.limit))
                    wan.save(options.out, data)
                    told = f"{kept[-1]['step_s']:.2f} s a step, {kept[-1]['predicted_s']:.2f} predicted"
                    print(f"{case}: {form}: {told}, {shape(kept[-1]['plan'])}", file=sys.stderr, flush=True)


def shape(plan: Mapping[str, Any]) -> str:
    """As "16: a0 3, a1 6 + 8: b0 9": micro-batches, then blocks of each stage."""
    lines = []
    for pipeline in plan["pipelines"]:
        stages = (f"{s['members'][0]['peer']} {s['blocks'][1] - s['blocks'][0]}" for s in pipeline["stages"])
        lines.append(f"{pipeline['num_micro']}: {', '.join(stages)}")
    return " + ".join(lines)


def table(data: Mapping[str, Any]) -> str:
    lines = [
        row(
            "case", "plan", "predicted, s", "measured, s", "measured / predicted", "losses", "faster than one pipeline"
        ),
        row(*["---"] * 7),
    ]
    for case in BEDS:
        found = {form: data["rows"].get(f"{case}: {form}", []) for form in FORMS}
        if not all(found.values()):
            continue
        pairs = zip(*found.values())
        ratio = statistics.median(one["step_s"] / default["step_s"] for default, one in pairs)
        for form, rows in found.items():
            step_s, predicted_s = (statistics.median(r[key] for r in rows) for key in ("step_s", "predicted_s"))
            equal = all(r["losses"] == data["plain"][case][: len(r["losses"])] for r in rows)
            cells = [f"{case}, {form}", shape(rows[0]["plan"]), f"{predicted_s:.2f}", f"{step_s:.2f}"]
            cells += [f"{step_s / predicted_s:.2f}", "equal" if equal else "**other**"]
            lines.append(row(*cells, f"{ratio:.2f}" if form == "default" else ""))
    return "\n".join(lines)


def load(path: Path) -> dict[str, Any]:
    if path.exists():
        data: dict[str, Any] = json.loads(path.read_text())
        return data
    return {"machine": machine(), "plain": {}, "rows": {}}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER / "replicas.json", help="default: %(default)s")
    parser.add_argument("--only", action="append", choices=BEDS, default=[])
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--limit", type=float, default=400.0, help="seconds that a run may take, start included")
    parser.add_argument("--table", action="store_true", help="measure nothing, draw the table")
    options = parser.parse_args()
    data = load(options.out)
    if not options.table:
        if reason := why_not():
            sys.exit(f"the benchmark needs the WAN lab, which cannot run here: {reason}")
        try:
            asyncio.run(measure_all(options, data))
        except (MeshceeError, BaseExceptionGroup) as error:
            sys.exit(str(unwrap(error)))
    print(table(data))


if __name__ == "__main__":
    main()
