"""The self-test: a small model trained on stages beside the plain loop, and fingerprints of three kernels.

The idea: `meshcee.check` does the first. The second computes each kernel twice from the same numbers: two machines of one kernel
class print the same fingerprints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional as F

from meshcee.equality import check
from meshcee.equality.watch import digest
from meshcee.errors import MeshceeError
from meshcee.figures.kernels import KernelClass
from meshcee.job import Job, Optimizer
from peers.cli.doctor.facts import Exactness
from peers.device import capability

__all__ = ["KERNELS", "a_job", "fingerprints", "self_test"]

STEPS, STAGES = 2, (1, 2)
CHARS = 8  # of a fingerprint that is shown


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


def _product(drawn: torch.Generator) -> torch.Tensor:
    return torch.randn(256, 384, generator=drawn) @ torch.randn(384, 256, generator=drawn)


def _attention(drawn: torch.Generator) -> torch.Tensor:
    query, key, value = (torch.randn(2, 4, 128, 32, generator=drawn) for _ in range(3))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _softmax(drawn: torch.Generator) -> torch.Tensor:
    return torch.randn(64, 1000, generator=drawn).softmax(-1)


KERNELS: Mapping[str, Callable[[torch.Generator], torch.Tensor]] = {
    "product": _product,
    "attention": _attention,
    "softmax": _softmax,
}


def fingerprints() -> dict[str, str]:
    return {name: digest(kernel(torch.Generator().manual_seed(0))).hex()[:CHARS] for name, kernel in KERNELS.items()}


def self_test(threads: int) -> Exactness:
    """On the processor, with so many threads, whatever thread this is called in."""
    torch.set_num_threads(threads)
    kernels = str(KernelClass("cpu", capability(), str(torch.__version__), threads))
    first, again = fingerprints(), fingerprints()
    prints = {name: (first[name], again[name]) for name in KERNELS}
    try:
        checked = check(a_job(), STAGES, STEPS)
    except MeshceeError as error:
        return Exactness(kernels, "", str(error), prints)
    return Exactness(kernels, checked.differs, "", prints)
