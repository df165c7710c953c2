"""The law, for jobs that nobody thought of: random models, optimizers and settings, trained under random blows on virtual time.

`python -m benchmarks.random_jobs COUNT [--first 0] [--blows 2]` prints a JSON line for each seed. A job of tests/rig/random_jobs.py
is trained by a mesh as in benchmarks/virtual_chaos.py. The run begins on a random plan, and moves to others; sometimes its user
leaves and resumes the run. Losses, evaluations, weights, averages and what the optimizer keeps must equal those of a plain loop
(tests/rig/reference.py). What capture refuses is told with its reason, and so are jobs that the plain loop cannot train. Exit
code 1 when a run differed.

The idea: a break of the law needs several features to meet, so what is drawn is everything at once.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from structlog.testing import capture_logs

from benchmarks.blows import BLOWS
from benchmarks.one_seed import decided_by
from benchmarks.storm_job import Work
from benchmarks.virtual_chaos import one, one_thread, quick_planning
from meshcee.callbacks import Callback, Control
from meshcee.capture import capture
from meshcee.errors import MeshceeError
from meshcee.files.home import Home
from meshcee.optim import adamw8bit
from meshcee.plan import Plan
from peers.device.compute import Pace
from peers.owner.epoch import Report
from peers.owner.result import Result
from peers.state.checkpoint import CheckpointStore
from tests.rig.random_jobs import Drawn, draw, job_of, plan_of
from tests.rig.reference import Reference, reference
from tests.rig.virtual_time import run

__all__ = ["FINE", "play"]

FEW_NUMBERS = 32  # a drawn model has few, and most of its moments are to be codes
FINE = frozenset({"equal", "refused", "nothing to equal"})


class Rates(Callback):
    """Asks for other learning rates as a user would, after a step."""

    waits = "steps"

    def __init__(self, rates: Mapping[int, tuple[str, float]]) -> None:
        self.rates = rates

    def on_step(self, run: Control, report: Report) -> None:
        if report.step in self.rates:
            how, value = self.rates[report.step]
            run.set_lr(value) if how == "set" else run.scale_lr(value)


def work_of(drawn: Drawn, expected: Reference) -> Work:
    """The job, and what a plain loop makes of it; MeshceeError where it is refused."""
    job = job_of(drawn)
    captured = capture(job)
    blocks = captured.train.num_blocks
    alone = bool(captured.train.slice(0, blocks).mutated) or drawn.audit > 0  # neither is for several pipelines

    def differs(result: Result, home: Home) -> str:
        return "; ".join(differences(drawn, expected, result, home))

    def another_plan(peers: Sequence[str], chance: random.Random) -> Plan:
        return plan_of(drawn, blocks, peers, chance, alone)

    def callbacks() -> dict[str, Any]:
        return {"callbacks": [Rates(drawn.rates)]} if drawn.rates else {}

    first = another_plan([f"p{i}" for i in range(drawn.peers)], random.Random(drawn.seed))
    return Work(job, captured, expected.totals, differs, another_plan, {"plan": first}, callbacks, drawn.breaks_at)


def differences(drawn: Drawn, expected: Reference, result: Result, home: Home) -> list[str]:
    """Besides losses."""
    found = []
    if result.metrics != expected.metrics:
        found.append(f"evaluations: {result.metrics}, not {expected.metrics}")
    found += unequal("state", result.state_dict, expected.state)
    found += unequal("ema", result.ema, expected.ema)
    last = next(iter(CheckpointStore(home.run(result.run or "last").checkpoints).complete()), None)
    if last is not None and last.next_step == drawn.steps:
        names = {name.rpartition("/")[0] for name in expected.moments}
        kept = last.optimizer(names)
        found += unequal("optimizer", {n: kept[n] for n in kept if n in expected.moments}, expected.moments)
    return found


def unequal(what: str, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    if found.keys() != expected.keys():
        return [f"{what} has other names: {sorted(found.keys() ^ expected.keys())}"]
    return [f"{what} {name}" for name, tensor in expected.items() if not same(found[name], tensor)]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """In dtype, shape and every value, where no number equals no number."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def play(seed: int, blows: int = 2, drawn: Drawn | None = None) -> dict[str, Any]:
    """The run of a seed, or of a draw that was changed by hand; "outcome" is one of FINE, or what differs."""
    drawn = drawn or draw(seed)
    about = {"seed": seed, "layers": drawn.layers}
    left = ("kill the owner",) if drawn.breaks_at is not None else ()  # no standby follows a run that its user has left
    kinds = [kind for kind in BLOWS if kind not in left]
    small = mock.patch.object(adamw8bit, "SMALLEST", FEW_NUMBERS)
    with capture_logs() as logged, quick_planning(), one_thread(), small:
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # its kernels have other bits in eval mode: docs/models.md
        try:
            expected = reference(job_of(drawn), rates=drawn.rates, in_place=True)
        except (MeshceeError, ArithmeticError, RuntimeError, TypeError, ValueError) as error:  # of torch
            return {**about, "outcome": "nothing to equal", "why": str(error)}
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
        if not all(map(math.isfinite, expected.totals)):
            return {**about, "outcome": "nothing to equal", "why": "a loss is no finite number"}
        try:
            work = work_of(drawn, expected)
        except MeshceeError as error:
            return {**about, "outcome": "refused", "why": str(error)}
        with decided_by(seed):
            result = run(one(seed, logged, work, kinds, blows, pace=Pace(drawn.pace)), inline=True)
    if result["outcome"] != "equal":
        Path(tempfile.gettempdir(), f"meshcee-job-{seed}.log").write_text("\n".join(map(str, logged)))
    return {**about, **result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--blows", type=int, default=2)
    options = parser.parse_args()
    outcomes: collections.Counter[str] = collections.Counter()
    for seed in range(options.first, options.first + options.count):
        result = play(seed, options.blows)
        print(json.dumps(result, default=str), flush=True)
        outcomes[result["outcome"]] += 1
    print(json.dumps(outcomes))
    sys.exit(bool(outcomes.keys() - FINE))


if __name__ == "__main__":
    main()
