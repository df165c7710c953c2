"""Parity on one device: the mesh and a chain of stages against the eager loop, with deterministic algorithms.

The idea: this is a process of its own, because cuBLAS reads its setting once; on a CPU it does the same, so that it is
tried where there is no GPU.

    python -m tests.rig.device_parity cuda:0 MODEL:PRECISION ...    prints {"MODEL:PRECISION": [what differs, ...], ...}
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import torch

from meshcee.capture import capture
from tests.rig import zoo
from tests.rig.chain import Chain
from tests.rig.mesh_fixture import train
from tests.rig.reference import reference

STAGES, STEPS = 3, 3


def differences(model: str, precision: str, device: str) -> list[str]:
    job = zoo.make(model, steps=STEPS, precision=precision)
    assert job.micro_batch_size is not None
    want = reference(job, device=device)
    state = {name: tensor.cpu() for name, tensor in want.state.items()}
    losses = [[float(loss) for loss in step] for step in want.losses]
    found = []
    captured = capture(job)
    for order in ("late", "fused"):
        chain = Chain(job, captured, STAGES, order, device=device)
        got = [[float(loss) for loss in step] for step in chain.run(STEPS)]
        if got != losses:
            found.append(f"losses of a chain, {order}")
        found += [
            f"{name} of a chain, {order}" for name, t in chain.state().items() if not torch.equal(t.cpu(), state[name])
        ]
    trained = asyncio.run(train(job, STAGES, job.micro_batch_size, device=device))
    share = job.micro_batch_size / job.batch_size
    if trained.losses != [sum(loss * share for loss in step) for step in losses]:
        found.append("losses of the mesh")
    found += [f"{name} of the mesh" for name, t in trained.state.items() if not torch.equal(t, state[name])]
    return found


def main() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    device, *models = sys.argv[1:]
    print(json.dumps({model: differences(*model.split(":"), device) for model in models}))


if __name__ == "__main__":
    main()
