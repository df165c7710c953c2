"""What a job's samples come from, by step: data that has numbers (here), or a stream (stream.py).

The idea: whoever trains asks for samples by their place in a step, and knows nothing of numbers, orders and streams. The plain
loop, the checks and the owner ask alike, each with a source of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

import torch

from meshcee.errors import UsageError
from meshcee.job import Job
from meshcee.sampling.data import batch_of, batched, inputs_of, rebuild
from meshcee.sampling.order import NO_STEP, draw, read

__all__ = ["Source", "few_of", "indices_of", "inputs_of_one", "look_anew", "order_digest", "probes", "source_of"]


class Source(Protocol):
    """`first` and `end` are places in the step. May be called by several threads, one after the other."""

    def samples(self, step: int, first: int, end: int) -> list[Any]: ...
    def batch(self, step: int, first: int, end: int) -> tuple[Any, Any]:
        """The same samples as one (x, y)."""
        ...

    def state(self, step: int) -> dict[str, Any]:
        """For a checkpoint before this step: what `go_on` needs to give the same samples in another process."""
        ...

    def go_on(self, step: int, state: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


def source_of(job: Job) -> Source:
    if job.streams:
        from meshcee.sampling.stream import Stream

        return Stream(job)
    return _Numbered(job)


def look_anew(job: Job) -> None:
    """At the beginning of a job: what was remembered of its sampler or stream was an earlier job's."""
    if job.sampler is not None:
        from meshcee.sampling.sampler import forget_orders

        forget_orders()
    if job.streams:
        from meshcee.sampling.stream import forget_first

        forget_first()


class _Numbered:
    """Samples of data[i]: any of them can be had at any time, so there is nothing to remember but a sampler's orders."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def samples(self, step: int, first: int, end: int) -> list[Any]:
        return read(self._job.data, indices_of(self._job, step)[first:end], self._job.seed, step)

    def batch(self, step: int, first: int, end: int) -> tuple[Any, Any]:
        job = self._job
        return batch_of(job.data, indices_of(job, step)[first:end], job.seed, step, first, collate=job.collate)

    def state(self, step: int) -> dict[str, Any]:
        if self._job.sampler is None:
            return {}
        from meshcee.sampling.sampler import orders_at

        return asdict(orders_at(self._job, step))

    def go_on(self, step: int, state: Mapping[str, Any]) -> None:
        """UsageError where a sampler gives another order now."""
        if state and self._job.sampler is not None:
            from meshcee.sampling.sampler import check_orders

            check_orders(self._job, step, state)

    def close(self) -> None:
        pass


def indices_of(job: Job, step: int) -> list[int]:
    """Of the samples of a step, in order."""
    if job.sampler is None:
        return draw(job.seed, len(job.data), job.batch_size, step)
    from meshcee.sampling.sampler import sampled

    return sampled(job.sampler, job.seed, len(job.data), job.batch_size, step)


def order_digest(job: Job) -> str | None:
    """Of the order that a sampler gives, for who compares two runs."""
    if job.sampler is None:
        return None
    from meshcee.sampling.sampler import digest_of

    return digest_of(job.sampler, job.seed, len(job.data))


def probes(job: Job, count: int) -> list[tuple[Any, float]]:
    """So many samples to look at, and the seconds that each took to read: all over the data, or the first of a stream."""
    if job.streams:
        from meshcee.sampling.stream import first_of

        first = first_of(job).samples
        return [first[i % len(first)] for i in range(count)]
    found = []
    for i in range(count):
        began_s = time.perf_counter()
        (sample,) = read(job.data, [i * len(job.data) // count], job.seed)
        found.append((sample, time.perf_counter() - began_s))
    return found


def inputs_of_one(job: Job, sample: Any) -> dict[str, torch.Tensor]:
    """The raw inputs of a micro-batch of this sample alone."""
    return inputs_of(few_of(job, sample, 1))


def few_of(job: Job, sample: Any, count: int, step: int = NO_STEP, first: int = 0) -> tuple[Any, Any]:
    """A micro-batch of this sample, so many times. Of a `collate` that takes no such number, as one that pairs samples, rows of the
    micro-batch that the job says.
    """
    try:
        return batched([sample] * count, job.seed, step, first, collate=job.collate)
    except UsageError as error:
        size = job.micro_batch_size or job.batch_size
        try:
            batch = batched([sample] * size, job.seed, step, first, collate=job.collate)
        except UsageError:
            raise error from error.__cause__
        if job.micro_batch_size is None:
            raise UsageError(
                f"{error}: let it take any number of samples, or say micro_batch_size=N in the job"
            ) from error
    rows = [k % size for k in range(count)]
    inputs = {name: tensor[rows] for name, tensor in inputs_of(batch).items()}
    return rebuild(batch[0], "x", inputs), rebuild(batch[1], "y", inputs)
