"""meshcee and what people would use instead, training the same model on the same emulated wide-area networks (needs root).

The idea: every row is one system on one network of `wan_testbeds.json`, run several times in the lab, each device paced to its
profile; a row counts only if its losses are the plain loop's. Rows of one kind share a start. Two cores have no time for all
that meshcee does in a second, so it runs in slow motion; the others, which do the same work in three to fourteen times the time,
run half as slow, and hivemind has time-outs of its own, which no motion stretches. How busy the cores were is kept with each row.
Rows are kept in a JSON file, so that a benchmark that was stopped goes on where it was; the table is drawn from the file
(`wan_table.py`).

    python -m benchmarks.wan [--out FILE] [--network NAME ...] [--system LABEL ...] [--repetitions N] [--table]
    python -m benchmarks.wan --slower 4 ...            on a busier machine: devices, bandwidths and latencies, all 4 times slower
    python -m benchmarks.wan --meshcee "codec:--codec int8" ...    a column for meshcee with these flags of `meshcee train`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise, permutations
from pathlib import Path
from typing import Any

from benchmarks.lab import why_not
from benchmarks.lab.namespaces import congestion_control
from benchmarks.measure import machine
from benchmarks.rivals.launch import WARM, Bed, Run, System, run_jobs
from benchmarks.rivals.rows import run_rivals
from benchmarks.wan_table import table
from meshcee.capture import capture
from meshcee.errors import unwrap
from meshcee.figures.scenario import load_scenario, packaged
from meshcee.plan import Plan

FOLDER = Path(__file__).resolve().parent
NETWORKS = ("cee-small", "three-cities", "last-mile", "sag")
STEPS = 8  # of meshcee's rows; WARM of them are not counted
MANY_STEPS = 1000  # of meshcee's job on a network that changes, which is ended earlier
SLOWER = 2.0  # two cores have time for six devices, their network and what is measured
WINDOW_S = 24.0  # for how long a network with a trace is watched: it changes after half of it
PACKED = (26 / 32, 10 / 32)  # of a boundary's bytes, at least: exact and as 16 bits, when exponents are packed
MTU = 4000  # packets of 1,500 bytes would keep a core busy, of 9,000 be too coarse for the slowest links


def bed_of(name: str, flops: list[float], slower: float = 1.0) -> Bed:
    """Devices are as fast as it takes to train the lab's model in the time that OPT-350 takes, sample for sample."""
    scenario = load_scenario(FOLDER / "wan_testbeds.json", name, packaged("gpu_profiles.json"))
    speeds = {}
    for device in scenario.cluster.devices.values():
        seconds = sum(table[-1] - table[0] for table in scenario.workload.times[device.kind].cumulated(1))
        speeds[device.name] = 3 * sum(flops) / float(seconds)
    return Bed(scenario, speeds, flops, slower)


def layer_flops() -> tuple[list[float], float]:
    """FLOPs of each layer's F for one sample, by meshcee's own count, and the bytes of a boundary for one sample."""
    from benchmarks.rivals.job import LAYERS, job

    flops = [0.0] * (LAYERS + 2)
    costs = capture(job).costs
    for cost in costs:
        flops[int(cost.name.split("..")[0].split(".")[0])] += cost.flops
    return flops, float(costs[0].boundary_bytes)


def systems_of(bed: Bed, meshcee: Sequence[str]) -> list[System]:
    """All rows of a network. `meshcee` has entries LABEL:FLAGS."""
    work = bed.scenario.workload
    need = sum(work.state_bytes) + work.live_bytes(0, work.num_blocks, 1)
    fit = tuple(d.name for d in bed.scenario.cluster.devices.values() if d.memory_bytes >= need)
    best = max(fit, key=lambda host: bed.speeds_flops_per_s[host])
    everyone = tuple(bed.hosts)
    ours = System("meshcee", "meshcee", everyone)
    if bed.scenario.trace:  # what a change of plan may cost depends on how much is left to train
        ours = replace(ours, endless=True, environment={"WAN_STEPS": str(MANY_STEPS)})
    found = [ours]
    for entry in dict.fromkeys(meshcee):
        label, _, flags = entry.partition(":")
        found.append(replace(ours, label=f"meshcee {label}", flags=tuple(flags.split())))
    found.append(System("best single device", "single", (best,)))
    found.append(System(f"torch DDP, {len(fit)} that fit", "ddp", fit))
    for hosts in dict.fromkeys((fit, everyone)):  # what a careful person leaves out may be what slows a pipeline down
        for name, title in (("gpipe", "GPipe"), ("1f1b", "1F1B"), ("zb", "interleaved zero-bubble")):
            which = f"all {len(hosts)}" if hosts == everyone else f"{len(hosts)} that fit"
            found.append(System(f"torch {title}, {which}", name, hosts))
    found.append(System(f"hivemind optimizer, {len(fit)} that fit", "hivemind", fit))
    return found


# -- what no system can beat -------------------------------------------------------------------------------------------


def bounds(bed: Bed, boundary_bytes: float, micros: int) -> dict[str, float]:
    """Seconds of a step at best: `bare`, all devices busy all the time; `filled`, with the unavoidable fill and drain.

    For any chain of devices with the work cut as finely as one likes: the bottleneck does F and B of all micro-batches,
    and the last gradient comes back after all F and B of the chain and two crossings of each link. Weight gradients may
    fill that wait. The best chain of the best subset counts, regions in any order.
    """
    total, cluster = 3 * sum(bed.flops), bed.scenario.cluster
    bare = micros * total / sum(bed.speeds_flops_per_s.values())
    filled = math.inf
    regions = cluster.regions
    for order in permutations(regions):
        chain = [name for region in order for name in regions[region]]
        for size in range(1, len(chain) + 1):
            for used in combinations(chain, size):
                period = total / sum(bed.speeds_flops_per_s[host] for host in used)
                crossing = 0.0
                for a, b in pairwise(used):
                    path = cluster.path(a, b)
                    assert path is not None
                    crossing += path.seconds(boundary_bytes)
                    period = max(period, boundary_bytes / path.bandwidth_bytes_per_s)
                residence = size * period * 2 / 3 + 2 * crossing
                filled = min(filled, max(micros * period, (micros - 1) * period * 2 / 3 + residence))
    return {"bare": bare, "filled": filled}


# -- measuring ---------------------------------------------------------------------------------------------------------


def figures(bed: Bed, result: Run, losses: Sequence[float]) -> dict[str, Any]:
    """What is kept of a run."""
    ends = result.ends_s
    window_s = ends[-1] - ends[result.warm - 1]
    period = window_s / (len(ends) - result.warm)
    loads = {}
    for link in bed.scenario.cluster.graph.edges(data=True):
        name = f"{link[0][1:]}>{link[1][1:]}" if link[0][0] == link[1][0] == "@" else ""
        port = f"{link[0]} out" if link[1][0] == "@" else f"{link[1]} in"
        carried = result.lines.get(name or port, 0)
        if math.isfinite(link[2]["bandwidth"]):
            loads[name or port] = carried / link[2]["bandwidth"] / window_s
    busiest = max(loads, key=lambda name: loads[name], default="")
    found = {
        "step_s": period,
        "steps": [b - a for a, b in pairwise(ends)],
        "losses": result.losses,
        "loss_difference": max(abs(a - b) for a, b in zip(result.losses, losses)),
        "busiest_line": busiest,
        "busiest_line_share": loads.get(busiest, 0.0),
        "dropped_share": result.dropped,
        "router_share": result.cpu_s / window_s / bed.slower,
        "cores_busy": result.busy,
        "slower": bed.slower,
        "load": os.getloadavg()[0],
    }
    if result.plan:
        plan = Plan.from_json(result.plan)
        found["stages"] = [
            f"{', '.join(result.names.get(m.peer, m.peer) for m in stage.members)}: {stage.first}..{stage.end - 1}"
            f", {stage.codec_out}, window {stage.window}"
            for pipeline in plan.pipelines
            for stage in pipeline.stages
        ]
        found["predicted_s"] = plan.predicted.step_s / bed.slower if plan.predicted else None
        found["limit"] = result.limit
    if result.trace_s is not None:
        drop = result.trace_s + bed.scenario.trace[0].at_s
        counted = ends[result.warm - 1 :]
        parts = {"step_before_s": [e for e in counted if e <= drop], "step_after_s": [e for e in counted if e > drop]}
        for key, some in parts.items():
            if len(some) > 1:
                found[key] = (some[-1] - some[0]) / (len(some) - 1)
    return found


def steps_for(bed: Bed, system: System, least: int, data: dict[str, Any]) -> int:
    """Enough to fill the window of a trace, judged by the same system without it."""
    if not bed.scenario.trace:
        return least
    known = [r["step_s"] for r in data["rows"].get(f"cee-small / {system.label}", []) if "step_s" in r]
    return max(least, WARM + math.ceil(WINDOW_S / statistics.median(known))) if known else least + 4


async def measure(options: argparse.Namespace, data: dict[str, Any]) -> None:
    flops, boundary = await asyncio.to_thread(layer_flops)
    await asyncio.to_thread(plain_losses, 16, data)
    for name in options.network or NETWORKS:
        bed = bed_of(name, flops, options.slower)
        exact, rounded = (bounds(bed, share * boundary, 36) for share in PACKED)
        data["bounds"][name] = exact | {"filled_16_bit": rounded["filled"]}
        systems = [
            system
            for system in systems_of(bed, options.meshcee)
            if not options.system or any(system.label.startswith(wanted) for wanted in options.system)
        ]
        rows = {system.label: data["rows"].setdefault(f"{name} / {system.label}", []) for system in systems}
        for kept in rows.values() if options.again else ():
            kept[:] = [r for r in kept if "step_s" in r]
        for repetition in range(options.repetitions):
            for kind in (["meshcee"], ["hivemind"], [s.name for s in systems if s.name not in ("meshcee", "hivemind")]):
                # One that fails takes those behind it along: these start again.
                while wanted := [s for s in systems if s.name in kind and is_wanted(rows[s.label], repetition)]:
                    await _measure(bed, wanted, options, data, partial(_keep, bed, options, data, rows))


def is_wanted(kept: Sequence[dict[str, Any]], repetition: int) -> bool:
    return len(kept) <= repetition and not any("why" in r for r in kept)


async def _measure(
    bed: Bed,
    systems: Sequence[System],
    options: argparse.Namespace,
    data: dict[str, Any],
    told: Callable[[System, Run | Exception], None],
) -> None:
    """Rows of one kind, from one start."""
    if systems[0].name == "meshcee":
        # Peers remember how poor a link has become: where it does, no second job meets the same ones.
        those = systems[:1] if bed.scenario.trace else systems
        jobs = [(system, steps_for(bed, system, options.steps, data)) for system in those]
        await run_jobs(bed, jobs, told, options.limit, MTU)
        return
    window_s = WINDOW_S if bed.scenario.trace else 0.0
    await run_rivals(replace(bed, slower=bed.slower / 2), systems, told, options.limit, MTU, window_s=window_s)


def _keep(
    bed: Bed,
    options: argparse.Namespace,
    data: dict[str, Any],
    rows: dict[str, list[dict[str, Any]]],
    system: System,
    result: Run | Exception,
) -> None:
    if isinstance(result, Exception):
        found: dict[str, Any] = {"why": str(unwrap(result))[:400]}
    else:
        losses = plain_losses(len(result.losses), data)
        found = figures(replace(bed, slower=result.slower), result, losses)
    rows[system.label].append(found)
    save(options.out, data)
    said = found.get("why") or f"{found['step_s']:.2f} s a step, loss off by {found['loss_difference']:.1e}"
    print(f"{bed.scenario.name} / {system.label}: {said}", file=sys.stderr, flush=True)


def plain_losses(steps: int, data: dict[str, Any]) -> list[float]:
    if len(data["plain_losses"]) < steps:
        command = [sys.executable, "-m", "benchmarks.rivals.reference", str(steps)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # idle threads of OpenMP spin
        done = subprocess.run(command, check=True, capture_output=True, env=environment)
        data["plain_losses"] = json.loads(done.stdout)
    losses: list[float] = data["plain_losses"]
    return losses


def load(path: Path) -> dict[str, Any]:
    if path.exists():
        data: dict[str, Any] = json.loads(path.read_text())
        return data
    return {
        "machine": machine(),
        "congestion_control": congestion_control(),
        "plain_losses": [],
        "bounds": {},
        "rows": {},
    }


def save(path: Path, data: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1) + "\n")
    part.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wan", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=FOLDER / "wan.json", help="where rows are kept; default: %(default)s"
    )
    parser.add_argument("--network", action="append", choices=NETWORKS, default=[])
    parser.add_argument("--system", action="append", default=[], help="rows whose label begins so; default: all")
    parser.add_argument(
        "--meshcee", action="append", default=["16-bit:--codec auto"], help="LABEL:FLAGS, another row for meshcee"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of meshcee; the first {WARM} are not counted")
    parser.add_argument(
        "--slower",
        type=float,
        default=SLOWER,
        help="slow motion: seconds of this machine to one second of the figures; but for meshcee: half",
    )
    parser.add_argument("--limit", type=float, default=400.0, help="seconds that a start, or a row, may take")
    parser.add_argument("--again", action="store_true", help="try again what failed")
    parser.add_argument("--table", action="store_true", help="measure nothing, draw the table")
    options = parser.parse_args()
    data = load(options.out)
    if not options.table:
        if reason := why_not():
            sys.exit(f"the benchmark needs the WAN lab, which cannot run here: {reason}")
        asyncio.run(measure(options, data))
    print(table(data))


if __name__ == "__main__":
    main()
