"""What a thin residual stream saves on last-mile lines: real peers in the WAN lab (needs root, 10 minutes).

The idea: four devices with a line of their own each. The plain transformer crosses them exactly, as bf16 and as int8, the two
thin ones exactly. All rows run on the same peers, one after another. Exact rows count only if their losses are the plain loop's.

    python -m benchmarks.subspace_lab [--mbit 80] [--steps 8] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import meshcee
from benchmarks import subspace_job
from benchmarks.lab import why_not
from benchmarks.measure import machine, row
from benchmarks.rivals.launch import WARM, Bed, Run, System, run_jobs
from meshcee.errors import MeshceeError, unwrap
from meshcee.figures.measured import JobCosts, Measured
from meshcee.figures.profile import BlockCost, Cluster, Device, DeviceProfile, LinkProfile
from meshcee.figures.scenario import Scenario
from meshcee.planner import situation

ROWS = {
    "plain, 32 bits": (0, "none"),
    "plain, bf16": (0, "bf16"),
    "plain, int8": (0, "int8"),
    "subspace of 32, 32 bits": (32, "none"),
    "subspace of 8, 32 bits": (8, "none"),
}
PEERS, MEMORY_BYTES, SPEED_FLOPS_PER_S, LATENCY_S = 4, 1 << 33, 5e10, 0.01  # as in benchmarks/subspace.py
SLOWER, MTU = 10.0, 4000  # two cores emulate four devices in slow motion
LIMIT_S = 150.0  # of a row


def bed_of(mbit: float) -> Bed:
    line = LinkProfile(LATENCY_S, mbit * 1e6 / 8)
    names = [f"home-{i}" for i in range(PEERS)]
    devices = [Device(name, name, name, MEMORY_BYTES, line.bandwidth_bytes_per_s) for name in names]
    between = {(a, b): line for a in names for b in names if a != b}
    cluster = Cluster(devices, inside_latency_s=dict.fromkeys(names, LATENCY_S), between=between)
    profiles = {name: DeviceProfile("cpu", name, MEMORY_BYTES, SPEED_FLOPS_PER_S) for name in names}
    block = BlockCost("any", 1e6, 1, 1, 1, 1, 1)  # the lab takes lines from a scenario, and no work
    workload = situation(Measured(profiles, {}, {}, {}), JobCosts([block], 1))[1]
    return Bed(Scenario("last mile", cluster, workload), dict.fromkeys(names, SPEED_FLOPS_PER_S), [], SLOWER)


def plain_losses(rank: int, steps: int) -> list[float]:
    torch.set_num_threads(1)  # as the peers compute
    return meshcee.plain(subspace_job.made(rank, steps)).losses


async def measure(mbit: float, steps: int) -> dict[str, Any]:
    bed, found = bed_of(mbit), dict[str, Any]()
    systems = [
        System(
            label,
            "meshcee",
            tuple(bed.hosts),
            job=subspace_job.__file__,
            flags=("--codec", codec, "--stages", str(PEERS)),
            environment={"SUBSPACE_RANK": str(rank)},
        )
        for label, (rank, codec) in ROWS.items()
    ]

    def told(system: System, result: Run | Exception) -> None:
        if isinstance(result, Exception):
            raise result
        assert result.plan is not None
        found[system.label] = {
            "step_s": (result.ends_s[-1] - result.ends_s[WARM - 1]) / steps,
            "predicted_s": result.plan["predicted"]["step_s"] / SLOWER,
            "bytes_a_step": sum(result.lines.values()) / steps,
            "losses": result.losses,
            "cores_busy": result.busy,
            "load": os.getloadavg()[0],
        }
        print(f"{system.label}: {found[system.label]['step_s']:.3f} s a step", file=sys.stderr, flush=True)

    await run_jobs(bed, [(system, steps + WARM) for system in systems], told, LIMIT_S, MTU)
    return found


def table(rows: dict[str, Any]) -> str:
    lines = [row("model, crosses as", "s a step", "predicted, s", "times the plain one", "losses"), row(*["---"] * 5)]
    first = rows["plain, 32 bits"]["step_s"]
    for label, found in rows.items():
        exact = {True: "equal", False: "**other**", None: "rounded"}[found["equal"]]
        figures = f"{found['step_s']:.3f}", f"{found['predicted_s']:.3f}", f"{first / found['step_s']:.2f}"
        lines.append(row(label, *figures, exact))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.subspace_lab", description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, default=80.0, help="of each device's line, in Mbit/s")
    parser.add_argument("--steps", type=int, default=8, help=f"that are counted; {WARM} more come first")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(f"the benchmark needs the WAN lab, which cannot run here: {reason}")
    about = machine()
    try:
        rows = asyncio.run(measure(options.mbit, options.steps))
    except (MeshceeError, BaseExceptionGroup) as error:
        sys.exit(str(unwrap(error)))
    plain = {rank: plain_losses(rank, options.steps + WARM) for rank, _ in ROWS.values()}
    for label, (rank, codec) in ROWS.items():
        rows[label]["equal"] = rows[label]["losses"] == plain[rank] if codec == "none" else None
    if options.out is not None:
        told = {"machine": about, "mbit": options.mbit, "slower": SLOWER, "rows": rows}
        options.out.write_text(json.dumps(told, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
