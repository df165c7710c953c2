"""One device alone, or torch's DistributedDataParallel over gloo: every device holds the whole model.

The idea: each device gets samples in proportion to its speed, better than DDP's usual equal shares, and its gradient is
weighted so that the average is the mean over all samples. DDP sends gradients while the backward still runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate, pairwise

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.rivals.job import build, job, loss
from benchmarks.rivals.pace import paced
from benchmarks.rivals.process_group import process_group
from benchmarks.rivals.worker import Order, Train, samples_of

__all__ = ["shares", "trainer"]


def shares(samples: int, speeds: Sequence[float]) -> list[slice]:
    """Samples for each device, so that the slowest is done as early as can be."""
    counts = [0] * len(speeds)
    for _ in range(samples):
        then = [(count + 1) / speed for count, speed in zip(counts, speeds)]
        counts[then.index(min(then))] += 1
    ends = [0, *accumulate(counts)]
    return [slice(a, b) for a, b in pairwise(ends)]


@contextmanager
def trainer(order: Order) -> Iterator[Train]:
    together = order.system == "ddp"
    part = shares(job.batch_size, order.speeds_flops_per_s)[order.rank]
    size = part.stop - part.start
    layers = paced(build(), [size * work for work in order.flops], order.device())
    optimizer = job.optimizer.build(dict(layers.named_parameters()))
    with process_group(order) if together else nullcontext():
        model: nn.Module = DistributedDataParallel(layers) if together else layers

        def train(step: int) -> tuple[float, int]:
            x, y = samples_of(step, part)
            value = loss(model(x), y)
            (value * (size * order.world / job.batch_size)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            return value.item(), size

        yield train
