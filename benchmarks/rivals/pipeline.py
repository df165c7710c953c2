"""torch.distributed.pipelining over gloo: GPipe, 1F1B, and the interleaved zero-bubble schedule, on all devices.

The idea: as the library is meant to be used, with the cuts that suit the devices best: contiguous layers in the listed order
of devices, so that the slowest stage is as fast as it can be. The library's stage class is told to take the paced time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble

from benchmarks.rivals.job import build, job, loss
from benchmarks.rivals.pace import PacedDevice
from benchmarks.rivals.process_group import process_group
from benchmarks.rivals.worker import Order, Train, samples_of

__all__ = ["SCHEDULES", "cuts", "trainer"]

SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "zb": ScheduleInterleavedZeroBubble}


def cuts(flops: Sequence[float], speeds: Sequence[float], chunks: int) -> list[range]:
    """The layers of each stage; stage i runs on device i modulo their number, `chunks` stages on each.

    One chunk: the exact best partition. More: layers are given one by one to the device that is then least loaded, which
    counts them as equal.
    """
    layers, devices = len(flops), len(speeds)
    if chunks == 1:
        sums = [0.0, *accumulate(flops)]
        best: list[list[tuple[float, tuple[int, ...]]]] = [
            [(float("inf"), ())] * (layers + 1) for _ in range(devices + 1)
        ]
        best[0][0] = (0.0, (0,))
        for d in range(1, devices + 1):
            for end in range(d, layers + 1):
                best[d][end] = min(
                    (max(worst, (sums[end] - sums[first]) / speeds[d - 1]), (*bounds, end))
                    for first in range(d - 1, end)
                    for worst, bounds in [best[d - 1][first]]
                )
        bounds = best[devices][layers][1]
        return [range(a, b) for a, b in pairwise(bounds)]
    counts = [1] * (devices * chunks)
    for _ in range(layers - len(counts)):
        load = [(sum(counts[d::devices]) + 1) / speed for d, speed in enumerate(speeds)]
        device = load.index(min(load))
        stage = min(range(device, len(counts), devices), key=lambda i: counts[i])
        counts[stage] += 1
    ends = [0, *accumulate(counts)]
    return [range(a, b) for a, b in pairwise(ends)]


class PacedStage(PipelineStage):
    """The library's stage, taking as long as the device would."""

    def pace(self, device: PacedDevice, flops: float) -> PacedStage:
        """`flops` of F for one micro-batch."""
        self._paced, self._flops = device, flops
        return self

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        self._paced.begin()
        result = super().forward_one_chunk(*args, **options)
        self._paced.end(self._flops)
        return result

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        self._paced.begin()
        result = super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._paced.end(self._flops * (2 if full_backward else 1))
        return result

    def backward_weight_one_chunk(self, *args: Any, **options: Any) -> Any:
        self._paced.begin()
        result = super().backward_weight_one_chunk(*args, **options)
        self._paced.end(self._flops)
        return result


@contextmanager
def trainer(order: Order) -> Iterator[Train]:
    chunks = 2 if order.system == "zb" else 1
    layers = cuts(order.flops, order.speeds_flops_per_s, chunks)
    model, device = build(), order.device()
    mine = [i for i in range(len(layers)) if i % order.world == order.rank]
    first, last = 0 in mine, len(layers) - 1 in mine
    with process_group(order):
        stages = []
        for i in mine:
            module = nn.Sequential(*(model[k] for k in layers[i]))
            stage = PacedStage(module, i, len(layers), torch.device("cpu"))
            stages.append(stage.pace(device, order.micro * sum(order.flops[k] for k in layers[i])))
        count = job.batch_size // order.micro
        schedule = SCHEDULES[order.system](stages if chunks > 1 else stages[0], count, loss_fn=loss)
        named = {f"{s.stage_index}.{n}": p for s in stages for n, p in s.submod.named_parameters()}
        optimizer = job.optimizer.build(named)

        def train(step: int) -> tuple[float | None, int]:
            x, y = samples_of(step)
            losses: list[torch.Tensor] = []
            schedule.step(*([x] if first else []), **({"target": y, "losses": losses} if last else {}))
            optimizer.step()
            optimizer.zero_grad()
            return (float(torch.stack(losses).detach().mean()), len(y)) if last else (None, 0)

        yield train
