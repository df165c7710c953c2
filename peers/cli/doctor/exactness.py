"""The self-test: a small model trained on stages beside the plain loop, and fingerprints of three kernels on each device.

The idea: `meshcee.check` does the first. The second computes each kernel twice, as a peer does that tells its fingerprints to the
mesh. So they can be compared with those of every peer of the same kernel class.
"""

from __future__ import annotations

import asyncio

import torch
from torch import nn
from torch.nn import functional as F

from meshcee.equality import check
from meshcee.errors import MeshceeError
from meshcee.job import Job
from meshcee.optim import Optimizer
from peers.cli.doctor.facts import Exactness, Kernels
from peers.device import Compute, fingerprints, kernel_class

__all__ = ["a_job", "self_test"]

STEPS, STAGES = 2, (1, 2)
MOST_THREADS = 64


def a_job() -> Job:
    """Small, and with a product, a normalization and a softmax; the same on each machine."""
    drawn = torch.Generator().manual_seed(0)
    rows = [torch.randn(16, generator=drawn) for _ in range(16)]

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16), nn.Softmax(-1))

    return Job(
        name="self-test",
        model=model,
        loss=F.mse_loss,
        data=[(row, row.softmax(-1)) for row in rows],
        optimizer=Optimizer("AdamW", lr=0.01),
        batch_size=8,
        micro_batch_size=4,
        steps=STEPS,
        seed=0,
    )


def self_test(threads: int, most_threads: int) -> Exactness:
    """The model on the processor with so many threads, whatever thread this is called in. Kernels on each device, and on the
    processor with every number of threads up to `most_threads`: peers of its class may have any.
    """
    kernels = asyncio.run(_kernels(threads, most_threads))
    torch.set_num_threads(threads)
    try:
        checked = check(a_job(), STAGES, STEPS)
    except MeshceeError as error:
        return Exactness("", str(error), kernels)
    return Exactness(checked.differs, "", kernels)


async def _kernels(threads: int, most_threads: int) -> tuple[Kernels, ...]:
    """The first is that of the processor as peers here would use it."""
    counts = dict.fromkeys((threads, *range(1, min(most_threads, MOST_THREADS) + 1)))
    found = [await _of("cpu", count) for count in counts]
    found += [await _of(f"cuda:{n}", threads) for n in range(torch.cuda.device_count())]
    return (*found, await _of("mps", threads)) if torch.backends.mps.is_available() else tuple(found)


async def _of(name: str, threads: int) -> Kernels:
    """As a peer's device thread computes them."""
    torch.set_num_threads(threads)
    device = torch.device(name)
    what = str(kernel_class(device, threads))
    try:
        async with Compute(name) as compute:
            first, again = [dict(await compute.run(fingerprints, device)) for _ in range(2)]
    except (RuntimeError, MeshceeError) as error:  # what a driver that is broken raises
        return Kernels(name, what, {}, str(error).partition("\n")[0])
    return Kernels(name, what, {kernel: (first[kernel], again[kernel]) for kernel in first})
