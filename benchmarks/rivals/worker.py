"""What the workers of all baselines share: what they are told, the samples of a step, and what they report.

The idea: a worker is told everything by one JSON object on its command line, and reports one JSON object a line:
{"step", "at_s", "loss", "samples"} when its part of a step is done, on the clock that all processes of a machine share.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.rivals.job import job
from benchmarks.rivals.pace import PacedDevice
from meshcee.capture import stack
from meshcee.sampling import draw

__all__ = ["Order", "order", "report", "samples_of"]


@dataclass(frozen=True)
class Order:
    system: str
    rank: int
    addresses: list[str]  # of all ranks, in order
    speeds_flops_per_s: list[float]
    flops: list[float]  # of each layer's F, for one sample
    steps: int
    micro: int  # samples in a micro-batch
    port: int
    seed: str = ""  # hivemind: where the first peer is

    @property
    def world(self) -> int:
        return len(self.addresses)

    def device(self) -> PacedDevice:
        return PacedDevice(self.speeds_flops_per_s[self.rank])


def order() -> Order:
    torch.set_num_threads(1)
    return Order(**json.loads(sys.argv[1]))


def samples_of(step: int, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """The inputs and targets of a step's samples, in the order that meshcee draws them."""
    drawn: Sequence[int] = draw(job.seed, len(job.data), job.batch_size, step)
    batch: Any = stack([job.data[i] for i in drawn[part]])
    return batch


def report(step: int, loss: float | None, samples: int = 0) -> None:
    """`loss` is the mean over `samples`; None where it is not known."""
    print(json.dumps({"step": step, "at_s": time.monotonic(), "loss": loss, "samples": samples}), flush=True)
