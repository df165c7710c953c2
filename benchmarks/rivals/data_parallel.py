"""One device alone, or torch's DistributedDataParallel over gloo: every device holds the whole model.

The idea: each device gets samples in proportion to its speed, better than DDP's usual equal shares, and its gradient is
weighted so that the average is the mean over all samples. DDP sends gradients while the backward still runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate, pairwise

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.rivals.job import build, job, loss
from benchmarks.rivals.pace import paced
from benchmarks.rivals.worker import Order, order, report, samples_of

__all__ = ["shares"]


def shares(samples: int, speeds: Sequence[float]) -> list[slice]:
    """Samples for each device, so that the slowest is done as early as can be."""
    counts = [0] * len(speeds)
    for _ in range(samples):
        then = [(count + 1) / speed for count, speed in zip(counts, speeds)]
        counts[then.index(min(then))] += 1
    ends = [0, *accumulate(counts)]
    return [slice(a, b) for a, b in pairwise(ends)]


def main(order: Order) -> None:
    together = order.system == "ddp"
    if together:
        os.environ["GLOO_SOCKET_IFNAME"] = "lab0"
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{order.addresses[0]}:{order.port}",
            rank=order.rank,
            world_size=order.world,
            timeout=timedelta(seconds=120),
        )
    part = shares(job.batch_size, order.speeds_flops_per_s)[order.rank]
    size = part.stop - part.start
    layers = paced(build(), [size * work for work in order.flops], order.device())
    optimizer = job.optimizer.build(dict(layers.named_parameters()))
    model: nn.Module = DistributedDataParallel(layers) if together else layers
    for step in range(order.steps):
        x, y = samples_of(step, part)
        value = loss(model(x), y)
        (value * (size * order.world / job.batch_size)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        report(step, value.item(), size)
    if together:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(order())
