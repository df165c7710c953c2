"""A group's gradients laid end to end in buckets, and which of them are whole.

The idea: the last W of a step finishes the gradients of the last block first, and those of the first block last. A bucket holds
parameters that are neighbours in the model, from its end on; so the first buckets can be summed while W still works on the
others. Small tensors share a bucket, so that there are few rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from meshcee.errors import ProtocolError
from meshcee.figures.workload import SUM_BUCKET_BYTES
from peers.device import Compute
from peers.wire import need

__all__ = [
    "BUCKET_BYTES",
    "Bucket",
    "FinishedBuckets",
    "buckets_of",
    "flattened",
    "presence_of",
    "spread",
    "spread_aside",
]

BUCKET_BYTES = SUM_BUCKET_BYTES


@dataclass(frozen=True)
class Bucket:
    """Parameters of one type, laid end to end; member i sums numbers [bounds[i], bounds[i + 1])."""

    names: tuple[str, ...]
    dtype: torch.dtype
    bounds: tuple[int, ...]


def buckets_of(parameters: Mapping[str, torch.Tensor], members: int, limit_bytes: int) -> tuple[Bucket, ...]:
    """The same on every member: the last parameters first, by type, a new bucket where one is full."""
    groups: list[list[str]] = []
    open_of: dict[torch.dtype, int] = {}
    sizes: list[int] = []
    for name in reversed(list(parameters)):
        tensor = parameters[name]
        at = open_of.get(tensor.dtype)
        if at is None or sizes[at] + tensor.nbytes > limit_bytes:
            at = open_of[tensor.dtype] = len(groups)
            groups.append([])
            sizes.append(0)
        groups[at].append(name)
        sizes[at] += tensor.nbytes
    found = []
    for names in groups:
        count = sum(parameters[name].numel() for name in names)
        bounds = tuple(count * i // members for i in range(members + 1))
        found.append(Bucket(tuple(names), parameters[names[0]].dtype, bounds))
    return tuple(found)


class FinishedBuckets:
    """Of which buckets the gradients of one step are whole: nothing will be added to them any more."""

    def __init__(self, buckets: Sequence[Bucket], parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self.bucket_of = {name: k for k, bucket in enumerate(buckets) for name in bucket.names}
        self._missing = [len(bucket.names) for bucket in buckets]
        self._events = [asyncio.Event() for _ in buckets]
        self._loop = asyncio.get_running_loop()

    async def until(self, bucket: int) -> None:
        await self._events[bucket].wait()

    def all(self) -> None:
        """The last W is over; a parameter that has got no gradient does not tell."""
        for event in self._events:
            event.set()

    @contextlib.contextmanager
    def hear(self) -> Iterator[None]:
        """Around the last W, in the thread that runs it: autograd tells of each gradient as soon as it has added to it."""
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(self.finish, name))  # type: ignore[no-untyped-call]
            for name, parameter in self._parameters.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def finish(self, name: str, parameter: torch.Tensor) -> None:
        bucket = self.bucket_of[name]
        self._missing[bucket] -= 1
        if not self._missing[bucket]:
            self._loop.call_soon_threadsafe(self._events[bucket].set)


def presence_of(header: Mapping[str, Any], bucket: Bucket) -> list[bool]:
    """Which parameters of the bucket have a gradient, as another member says."""
    present = need(header, "present", list[bool])
    if len(present) != len(bucket.names):
        raise ProtocolError("gradients of a group need word for each parameter whether it has one")
    return present


def flattened(
    parameters: Mapping[str, torch.Tensor], bucket: Bucket, device: torch.device | str = "cpu"
) -> tuple[list[bool], torch.Tensor]:
    """Which parameters of the bucket have a gradient, and all gradients end to end, zeros where there is none."""
    grads = [parameters[name].grad for name in bucket.names]
    flat = [
        torch.zeros(parameters[name].numel(), dtype=bucket.dtype, device=device)
        if g is None
        else g.reshape(-1).to(device)
        for name, g in zip(bucket.names, grads)
    ]
    return [g is not None for g in grads], torch.cat(flat)


def spread(
    parameters: Mapping[str, torch.Tensor], bucket: Bucket, present: Sequence[bool], chunks: Sequence[torch.Tensor]
) -> None:
    """The inverse: set the gradients that are present from the bucket's numbers."""
    flat, start = torch.cat(list(chunks)), 0
    for name, is_there in zip(bucket.names, present):
        parameter = parameters[name]
        numbers = flat[start : start + parameter.numel()]
        start += parameter.numel()
        if is_there:
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(numbers.reshape(parameter.shape))


def spread_aside(
    compute: Compute,
    parameters: Mapping[str, torch.Tensor],
    bucket: Bucket,
    present: Sequence[bool],
    chunks: Sequence[torch.Tensor],
) -> asyncio.Future[Any]:
    """`spread` in the thread beside the device's, from chunks in the host's memory."""
    staging = compute.staging
    if staging is None:
        return compute.run_aside(spread, parameters, bucket, present, chunks)

    def work() -> None:
        spread(parameters, bucket, present, staging.arrive(lambda: [staging.to_device(torch.cat(list(chunks)))]))

    return compute.run_aside(work)
