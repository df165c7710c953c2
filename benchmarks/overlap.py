"""A group's gradients summed beside the last W, against after it: what a step gains.

The idea: two members of one group in this process share every micro-batch of an MLP, over an in-process link of a given
bandwidth; one thread each. The same job is trained in turns with sums that begin early and sums that begin at the step's end;
losses and weights must be the same bits. What can be hidden is no more than the last micro-batch's W, so the gain is largest
where a sum takes as long as that.

    python -m benchmarks.overlap [--turns N] [--micros M] [--mbit LINK ...] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.measure import Turns, machine, row
from meshcee.job import Job
from meshcee.optim import Optimizer
from peers.groups.buckets import FinishedBuckets
from peers.transport.memory import Impairment, MemoryNetwork
from tests.rig.mesh_fixture import Trained, grouped, train

WIDTH, LAYERS, ROWS, STEPS = 768, 8, 2048, 6  # 19 MB of gradients; rows of a micro-batch
LINKS_MBIT = (100, 300, 1000, 10_000)


def job_of(micros: int) -> Job:
    torch.manual_seed(0)
    layers = [module for _ in range(LAYERS) for module in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    data = list(zip(torch.randn(ROWS * micros, WIDTH), torch.randn(ROWS * micros, WIDTH)))
    return Job(
        model=nn.Sequential(*layers),
        loss=nn.functional.mse_loss,
        data=data,
        optimizer=Optimizer("SGD", lr=1e-3),
        batch_size=ROWS * micros,
        micro_batch_size=ROWS,
        steps=STEPS,
        adapt=False,
    )


async def trained(micros: int, mbit: float, *, early: bool) -> tuple[float, Trained]:
    """The median seconds of a step after the first, and what came out."""
    network = MemoryNetwork()
    for there, back in (("p0", "p1"), ("p1", "p0")):
        network.impair(there, back, Impairment(latency_s=0.0005, bandwidth_bytes_per_s=mbit * 1e6 / 8))
    late = mock.patch.object(FinishedBuckets, "hear", return_value=contextlib.nullcontext())
    with contextlib.nullcontext() if early else late:
        shares = ((ROWS // 2, ROWS - ROWS // 2),)
        found = await train(job_of(micros), 1, ROWS, network=network, adapt=lambda plan: grouped(plan, shares))
    return statistics.median(report.step_s for report in found.reports[1:]), found


def same(one: Trained, other: Trained) -> bool:
    return one.losses == other.losses and all(torch.equal(one.state[n], other.state[n]) for n in one.state)


def compare(micros: int, mbit: float, turns: int) -> dict[str, Any]:
    early_s, late_s = [], []
    for _ in range(turns):
        at_end, late = asyncio.run(trained(micros, mbit, early=False))
        beside, early = asyncio.run(trained(micros, mbit, early=True))
        if not same(late, early):
            raise SystemExit("sums that begin early gave other numbers")
        late_s.append(at_end)
        early_s.append(beside)
    return {"mbit": mbit, "micros": micros, **Turns(late_s, early_s).to_json()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--micros", type=int, default=2)
    parser.add_argument("--mbit", type=float, nargs="+", default=LINKS_MBIT)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of table rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    here, began_s = machine(), time.perf_counter()
    found = [compare(options.micros, mbit, options.turns) for mbit in options.mbit]
    if options.json:
        print(json.dumps({"machine": here, "seconds": time.perf_counter() - began_s, "rows": found}, indent=2))
        return
    print(row("Mbit/s", "micro-batches", "after W, ms a step", "beside it", "times faster", "from to"))
    for r in found:
        figures = f"{r['baseline_s'] * 1e3:.0f}", f"{r['ours_s'] * 1e3:.0f}", f"{r['ratio']:.2f}"
        print(row(f"{r['mbit']:.0f}", r["micros"], *figures, f"{r['ratio_min']:.2f} to {r['ratio_max']:.2f}"))


if __name__ == "__main__":
    main()
