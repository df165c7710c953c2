"""How often an audit finds a lie, held against the arithmetic, and what it does to who is honest.

`python -m benchmarks.audit [--lies 1000] [--shares 0.1 0.01] [--kinds activation update]` prints a JSON line. Three members train
a small network in one process on virtual time, and one of them lies in every step (tests/rig/liars.py). The owner only notes
whom it finds, so a run has as many lies as steps. The rest is the product: frames, signatures, proofs, the executor.

The idea: each lying step is a trial of its own. What is found follows a binomial distribution with the share as its chance, where
only computing again shows the lie. Where a member's own words contradict each other, all are found.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.measure import machine
from meshcee.audit import chosen
from meshcee.capture import Capture, capture
from meshcee.job import Job
from meshcee.optim import Optimizer
from tests.rig.audited import identity, watch
from tests.rig.liars import LIES, Liar
from tests.rig.virtual_time import quiet, run

COMPUTED = ("activation", "gradient", "weight gradient", "update", "moment", "loss")  # found where they are looked for
SAID = tuple(lie for lie in LIES if lie not in (*COMPUTED, "copy", "count"))  # always found
MEMBERS, LAST, SAMPLES = 3, 2, 4


def job_of(steps: int, share: float) -> Job:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 4)]
    data = [(row, row) for row in torch.randn(64, 4)]
    how = {"batch_size": SAMPLES, "micro_batch_size": SAMPLES, "codec": "none", "adapt": False}
    optimizer = Optimizer("AdamW", lr=1e-3)
    return Job(nn.Sequential(*layers), nn.functional.mse_loss, data, optimizer, steps=steps, audit=share, **how)


def tried(kind: str, lies: int, share: float, captured: Capture) -> dict[str, Any]:
    """So many steps with this lie: how many were found, how many were to be expected, and whether anybody else was named."""
    liar_id = identity(LAST if kind == "loss" else 1).peer_id
    seed, began_s = f"{kind} {share}".encode(), time.perf_counter()
    with quiet(), Liar(kind, lambda peer, step: peer == liar_id).at_work():
        found = run(watch(job_of(lies, share), captured, MEMBERS, SAMPLES, seed=seed))
    steps = {step for peer, step, _ in found.found if peer == liar_id}
    chance = 0.0 if kind == "honest" else share if kind in COMPUTED else 1.0
    return {
        "kind": kind,
        "share": share,
        "lies": 0 if kind == "honest" else lies,
        "chosen": sum(chosen(seed, share, (1, 1), step, liar_id) for step in range(lies)),
        "found": len(steps),
        "expected": round(lies * chance, 1),
        "deviations": round((len(steps) - lies * chance) / max(1e-9, math.sqrt(lies * chance * (1 - chance))), 2)
        if 0 < chance < 1
        else 0.0,
        "accused_wrongly": len([peer for peer, _, _ in found.found if peer != liar_id or kind == "honest"]),
        "honest_steps": lies * (MEMBERS - (kind != "honest")),
        "judged": found.judged,
        "step_ms": round(1e3 * (time.perf_counter() - began_s) / lies, 1),
    }


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--lies", type=int, default=1000)
    asked.add_argument("--shares", type=float, nargs="+", default=[0.1])
    asked.add_argument("--kinds", nargs="+", default=["honest", *COMPUTED, *SAID])
    options = asked.parse_args()
    torch.set_num_threads(1)
    captured = capture(replace(job_of(1, 0.0)))
    found = []
    for share in options.shares:
        for kind in options.kinds:
            found.append(tried(kind, options.lies, share, captured))
            print(json.dumps(found[-1]), flush=True)
    print(json.dumps({"benchmark": "audit", "machine": machine(), "kinds": found}))


if __name__ == "__main__":
    main()
