"""Where no link is slow: N processes of one machine with one thread each, meshcee beside torch's pipelines and a plain loop.

The idea: with loopback between them a step is compute, and what a system adds to it. Each turn runs all rows one after another on
the same job (lan_job.py): the plain loop in one process, torch's 1F1B and GPipe over gloo on the cuts that suit them best, and
`meshcee train` on as many `meshcee peer --threads 1`, told nothing else. A figure is the median step of a turn, a ratio is taken
within a turn. Losses of meshcee must be the plain loop's, bit for bit.

    python -m benchmarks.lan [--processes 2 4] [--turns 3] [--steps 12] [--out docs/lan.json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.lan_job import FLOPS, MICRO, MICRO_BATCHES, build, job, loss
from benchmarks.measure import machine, row
from benchmarks.one_host import ROOT, WARM_UP, environment, figures, lines_of, meshcee, terminals
from meshcee.capture import stack
from meshcee.sampling.order import draw, read

TORCH = ("1f1b", "gpipe")
LIMIT_S = 900.0

Step = Callable[[Any, Any], float | None]  # of inputs and targets of a whole batch: the loss, where it is known


def plain() -> Step:
    model = build()
    optimizer = job.optimizer.build(dict(model.named_parameters()))

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        total, weight = 0.0, 1 / MICRO_BATCHES
        for x, y in zip(inputs.split(MICRO), targets.split(MICRO), strict=True):
            value = loss(model(x), y)
            (value * weight).backward()  # type: ignore[no-untyped-call]
            total += value.item() * weight
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def pipeline(schedule: str, rank: int, world: int, port: int) -> Step:
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage

    from benchmarks.rivals.pipeline import SCHEDULES, cuts

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    layers, model = cuts(FLOPS, [1.0] * world, 1)[rank], build()
    module = torch.nn.Sequential(*(model[k] for k in layers))
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    runs = SCHEDULES[schedule](stage, MICRO_BATCHES, loss_fn=loss)
    optimizer = job.optimizer.build(dict(module.named_parameters()))

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        losses: list[torch.Tensor] = []
        last = rank == world - 1
        runs.step(*([] if rank else [inputs]), **({"target": targets, "losses": losses} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).detach().mean()) if last else None

    return step


def work(schedule: str, rank: int, world: int, port: int, steps: int) -> None:
    """One process of a row that is not meshcee's: a JSON line a step, on the clock that all processes share."""
    torch.set_num_threads(1)
    step = plain() if schedule == "plain" else pipeline(schedule, rank, world, port)
    for number in range(steps):
        drawn = draw(job.seed, len(job.data), job.batch_size, number)
        batch: Any = stack(read(job.data, drawn, job.seed, number))
        value = step(*batch)
        print(json.dumps({"at_s": time.monotonic(), "loss": value}), flush=True)


def other(schedule: str, world: int, steps: int, folder: Path) -> dict[str, Any]:
    """A row of torch's: seconds of a step, and its losses."""
    port = random.randrange(20000, 30000)
    command = [sys.executable, "-m", "benchmarks.lan", "--worker", schedule]
    options: dict[str, Any] = {
        "cwd": ROOT,
        "env": {**environment(folder), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        "stdout": subprocess.PIPE,
        "text": True,
    }
    started = [
        subprocess.Popen([*command, *map(str, (rank, world, port, steps))], **options)
        for rank in range(1 if schedule == "plain" else world)
    ]
    try:
        told = [process.communicate(timeout=LIMIT_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    if any(process.returncode for process in started):
        raise SystemExit(f"{schedule} failed on {world} processes")
    lines = [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in told]
    ends = [max(parts[number]["at_s"] for parts in lines) for number in range(steps)]
    taken = [after - before for before, after in itertools.pairwise(ends)]
    return {"step_s": statistics.median(taken[WARM_UP - 1 :]), "losses": [one["loss"] for one in lines[-1]]}


def ours(world: int, steps: int, folder: Path) -> dict[str, Any]:
    os.environ["LAN_STEPS"] = str(steps)
    with terminals(world, folder, together=False, more=("--threads", "1", "--device", "cpu")) as token:
        found = figures(lines_of(meshcee("train", str(ROOT / "benchmarks/lan_job.py"), "--join", token), folder))
    return {"step_s": found.pop("measured_s"), **found}


def turn(world: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="meshcee-lan-") as name:
        folder = Path(name)
        rows = {schedule: other(schedule, world, steps, folder) for schedule in ("plain", *TORCH)}
        rows["meshcee"] = ours(world, steps, folder)
    if rows["meshcee"]["losses"] != rows["plain"]["losses"]:
        raise SystemExit("meshcee's losses are not the plain loop's")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, help="write everything as JSON to this file")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        schedule, *numbers = options.worker
        return work(schedule, *map(int, numbers))
    found: dict[str, Any] = {"machine": machine(), "steps": options.steps, "turns": []}
    print(row("processes", "plain, s a step", *TORCH, "meshcee", "1f1b / meshcee", "expected", "stages"))
    for world in options.processes:
        for _ in range(options.turns):
            rows = turn(world, options.steps)
            found["turns"].append({"processes": world, **rows})
            mesh = rows["meshcee"]
            seconds = [f"{rows[name]['step_s']:.3f}" for name in ("plain", *TORCH, "meshcee")]
            ratio = f"{rows['1f1b']['step_s'] / mesh['step_s']:.2f}"
            print(row(world, *seconds, ratio, f"{mesh['expected_s']:.3f}", mesh["stages"]), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
