"""A worker of the baselines: trains one row after another as it is told, and reports each step.

The idea: torch takes long to start and a row's steps may be long, so that processes are started once and trained in turn, and
how many steps a row gets is decided when its first has been seen. One JSON object a line. In: {"order": ...} sets a row up,
{"go": N} trains N more steps, {"end": true} ends the row, and the end of the input the worker. Out: {"ready": true}, then
{"step", "at_s", "loss", "samples"} when its part of a step is done, on the clock that all processes of a machine share, and
{"over": true}.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.rivals.job import job
from benchmarks.rivals.pace import PacedDevice
from meshcee.capture import stack
from meshcee.sampling.order import draw, read

__all__ = ["Order", "Train", "Trainer", "samples_of", "say", "serve"]

# Trains one step: its mean loss, None where it is not known, and over how many samples.
Train = Callable[[int], tuple[float | None, int]]


@dataclass(frozen=True)
class Order:
    system: str
    rank: int
    addresses: list[str]  # of all ranks, in order
    speeds_flops_per_s: list[float]
    flops: list[float]  # of each layer's F, for one sample
    micro: int  # samples in a micro-batch
    port: int
    seed: str = ""  # hivemind: where the first peer is

    @property
    def world(self) -> int:
        return len(self.addresses)

    def device(self) -> PacedDevice:
        return PacedDevice(self.speeds_flops_per_s[self.rank])


Trainer = Callable[[Order], AbstractContextManager[Train]]


def samples_of(step: int, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """The inputs and targets of a step's samples, in the order that meshcee draws them."""
    drawn: Sequence[int] = draw(job.seed, len(job.data), job.batch_size, step)
    batch: Any = stack(read(job.data, drawn[part], job.seed, step))
    return batch


def say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def serve(trainers: dict[str, Trainer]) -> None:
    """Until the input ends."""
    torch.set_num_threads(1)
    requests: Iterator[dict[str, Any]] = map(json.loads, sys.stdin)
    for request in requests:
        order, steps = Order(**request["order"]), itertools.count()
        with trainers[order.system](order) as train:
            say(ready=True)
            while more := next(requests, {}).get("go", 0):
                for step in itertools.islice(steps, more):
                    loss, samples = train(step)
                    say(step=step, at_s=time.monotonic(), loss=loss, samples=samples)
        say(over=True)
