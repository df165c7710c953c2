"""What an optimizer's moments take, how long its update takes, and what a small GPT learns with it.

`python benchmarks/optimizers.py [--numbers 8388608] [--turns 7] [--steps 300] [--seeds 3] [--json]`

The idea: updates of one matrix are timed in turns with AdamW's, so that a machine that slows down slows both. The GPT is the one of
`meshcee demo`, trained in the plain loop with the same seeds; its loss is the mean over the last fifth of the steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import machine, row

import meshcee
from meshcee.optim import Optimizer
from peers.cli.session import load_job

EXAMPLE = Path(__file__).parent.parent / "examples" / "gpt.py"
OPTIMIZERS = ("AdamW8bit", "Adafactor", "SGD")
LEARNS = ("AdamW", "AdamW8bit")


def updated_s(optimizer: torch.optim.Optimizer) -> float:
    began_s = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - began_s


def update(name: str, numbers: int, turns: int) -> dict[str, Any]:
    """Against AdamW, in turns; and the bytes that are kept of a parameter."""
    built = {}
    for kind in ("AdamW", name):
        matrix = torch.nn.Parameter(torch.randn(numbers // 1024, 1024))
        matrix.grad = torch.randn_like(matrix)
        built[kind] = Optimizer(kind, lr=1e-3).build({"matrix": matrix})
        built[kind].step()
    seconds: dict[str, list[float]] = {kind: [] for kind in built}
    for _ in range(turns):
        for kind, optimizer in built.items():
            seconds[kind].append(updated_s(optimizer))
    (state,) = built[name].state.values() or [{}]
    kept = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    slower = statistics.median(ours / base for base, ours in zip(seconds["AdamW"], seconds[name]))
    return {
        "optimizer": name,
        "bytes_of_a_parameter": round(kept / numbers, 3),
        "ns_of_a_parameter": round(statistics.median(seconds[name]) / numbers * 1e9, 2),
        "times_as_long_as_adamw": round(slower, 2),
    }


def learned(name: str, steps: int, seed: int) -> float:
    job = load_job(EXAMPLE)
    optimizer = Optimizer(name, **job.optimizer.options)
    losses = meshcee.plain(replace(job, optimizer=optimizer, seed=seed, steps=steps)).losses
    return statistics.mean(losses[-(steps // 5) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numbers", type=int, default=1 << 23)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "machine": machine(),
        "updates": [update(name, options.numbers, options.turns) for name in OPTIMIZERS],
        "losses": {
            name: [round(learned(name, options.steps, seed), 4) for seed in range(options.seeds)] for name in LEARNS
        },
    }
    if options.json:
        print(json.dumps(found))
        return
    print(row("optimizer", "bytes of a parameter", "ns of a parameter", "times as long as AdamW"))
    for each in found["updates"]:
        print(row(*each.values()))
    for name, losses in found["losses"].items():
        print(row(name, *losses))


if __name__ == "__main__":
    main()
