"""Parity on one device: the mesh and a chain of stages against the eager loop, with deterministic algorithms.

The idea: this is a process of its own, because cuBLAS reads its setting once; on a CPU it does the same, so that it is
tried where there is no GPU.

    python -m tests.rig.device_parity cuda:0 MODEL:PRECISION ...    prints {"MODEL:PRECISION": [what differs, ...], ...}
    python -m tests.rig.device_parity cuda:0 random:SEED ...        the same of random jobs (tests/rig/random_jobs.py)
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace

import torch

from meshcee.capture import capture
from meshcee.errors import MeshceeError
from meshcee.job import Job
from meshcee.stage.plan_checks import check_kinds
from tests.rig import random_jobs, zoo
from tests.rig.chain import Chain
from tests.rig.mesh_fixture import even_plan, train
from tests.rig.reference import reference

STAGES, STEPS = 3, 3


def job_of(case: str) -> Job:
    name, _, which = case.partition(":")
    if name != "random":
        return zoo.make(name, steps=STEPS, precision=which)
    drawn = replace(random_jobs.draw(int(which)), eval_every=0, ema=None, eval_ema=False, audit=0.0, steps=STEPS)
    return random_jobs.job_of(replace(drawn, order="shuffled", stored=False, columns=False))


def differences(case: str, device: str) -> list[str]:
    job = job_of(case)
    assert job.micro_batch_size is not None
    try:
        captured = capture(job)
        stages = min(STAGES, captured.train.num_blocks)
        want = reference(job_of(case), device=device, in_place=True)  # a copy has no strided parameters
        plan = even_plan(captured.train.num_blocks, stages, job.batch_size, job.micro_batch_size)
        check_kinds(captured, plan, dict.fromkeys(plan.peers, torch.device(device).type))
    except (ArithmeticError, RuntimeError, MeshceeError):
        return []  # the plain loop does not run there, or the job is refused
    state = {name: tensor.cpu() for name, tensor in want.state.items()}
    losses = [[float(loss) for loss in step] for step in want.losses]
    found = []
    for order in ("late", "fused"):
        chain = Chain(job, captured, stages, order, device=device)
        got = [[float(loss) for loss in step] for step in chain.run(STEPS)]
        if got != losses:
            found.append(f"losses of a chain, {order}")
        left = {name: t.cpu() for name, t in chain.state().items()}  # in bf16 frozen weights are rounded here
        found += [
            f"{name} of a chain, {order}" for name, t in left.items() if not torch.equal(t, state[name].to(t.dtype))
        ]
    trained = asyncio.run(train(job, stages, job.micro_batch_size, device=device, captured=captured))
    if trained.losses != want.totals:
        found.append("losses of the mesh")
    found += [f"{name} of the mesh" for name, t in trained.state.items() if not torch.equal(t, state[name])]
    return found


def main() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    device, *models = sys.argv[1:]
    print(json.dumps({model: differences(model, device) for model in models}))


if __name__ == "__main__":
    main()
