"""Orders that a user's sampler gives: `Job(sampler=...)`, a torch Sampler or a function of (data epoch, seed).

The idea: an order is a function of (seed, data epoch), so any step can be drawn again. A Sampler of torch draws from torch's own
generator, which is seeded around the draw. An order takes 4 bytes a sample, and is made once a data epoch.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from meshcee.errors import UsageError
from meshcee.fields import Count, ShortText, read
from meshcee.job import Job
from meshcee.sampling.order import Same, generators_put_back, seed_generators
from meshcee.user_code import calling

__all__ = ["Orders", "check_orders", "check_repeats", "digest_of", "forget_orders", "orders_at", "sampled"]

MOST_TIMES = 64  # that each sample is drawn in a data epoch, on average
AT_LEAST = 1 << 24  # samples in a data epoch are not too many, however small the data


def sampled(sampler: Any, seed: int, length: int, batch_size: int, step: int) -> list[int]:
    """Indices of the step's samples, the incomplete last batch of a data epoch dropped."""
    count = len(_order(Same(sampler), seed, length, 0))
    if count < batch_size:
        raise UsageError(f"the sampler gives {count} samples in a data epoch, fewer than batch_size={batch_size}")
    data_epoch, position = divmod(step, count // batch_size)
    order = _order(Same(sampler), seed, length, data_epoch)
    if len(order) != count:
        raise UsageError(
            f"the sampler gives {len(order)} samples in data epoch {data_epoch + 1} and gave {count} in the first: every one must "
            "have as many, so that a step can be found again"
        )
    drawn: list[int] = order[position * batch_size : (position + 1) * batch_size].tolist()
    return drawn


@dataclass(frozen=True)
class Orders:
    """Of the data epoch that a step is in, and of the next one, by their digests; "" where the job does not come so far."""

    data_epoch: Count
    this: ShortText = ""
    next: ShortText = ""


def orders_at(job: Job, step: int) -> Orders:
    sampler, seed, length = job.sampler, job.seed, len(job.data)
    steps = len(_order(Same(sampler), seed, length, 0)) // job.batch_size  # of a data epoch
    at, last = step // steps, (job.steps - 1) // steps
    return Orders(at, *(digest_of(sampler, seed, length, each) if each <= last else "" for each in (at, at + 1)))


def check_orders(job: Job, step: int, state: Mapping[str, Any]) -> None:
    """UsageError where these are others than a run had that was stopped before this step."""
    had, now = read(dict(state), Orders, "the orders of the sampler", defaults=True), orders_at(job, step)
    for ahead, (one, other) in enumerate(((had.this, now.this), (had.next, now.next))):
        if one and other and one != other:
            raise UsageError(
                f"the run was made with a sampler that gives another order in data epoch {now.data_epoch + ahead + 1} here; "
                "resume it with the job that it was started with, or start a new run"
            )


def digest_of(sampler: Any, seed: int, length: int, data_epoch: int = 0) -> str:
    """Of the order of a data epoch."""
    return _digest(Same(sampler), seed, length, data_epoch)


@functools.lru_cache(maxsize=3)
def _digest(sampler: Same, seed: int, length: int, data_epoch: int) -> str:
    order = _order(sampler, seed, length, data_epoch)
    return hashlib.sha256(order.numpy().astype("<i8").tobytes()).hexdigest()[:16]


def check_repeats(job: Job) -> None:
    """UsageError for a sampler that gives another order when it is asked again, or other lengths in the first two data epochs."""
    first, again = (_drawn(job.sampler, job.seed, len(job.data), 0) for _ in range(2))
    if not torch.equal(first, again):
        raise UsageError(
            "the sampler gives another order when it is asked again, and a run could not go on where it stopped: let it draw from "
            "`random`, `numpy.random` or torch's own generator, let set_epoch(epoch) say which data epoch it is, or make it a "
            "function (data epoch, seed) -> indices"
        )
    second = len(first) // job.batch_size  # the step that it begins with
    sampled(job.sampler, job.seed, len(job.data), job.batch_size, min(second, job.steps - 1))


def forget_orders() -> None:
    """A sampler is asked again: it may have changed since an earlier job had it."""
    _order.cache_clear()
    _digest.cache_clear()


@functools.lru_cache(maxsize=3)  # the first data epoch's, this one's, and the one's of who looks back
def _order(sampler: Same, seed: int, length: int, data_epoch: int) -> torch.Tensor:
    return _drawn(sampler.it, seed, length, data_epoch)


def _drawn(sampler: Any, seed: int, length: int, data_epoch: int) -> torch.Tensor:
    with generators_put_back(), calling(f"the sampler, in data epoch {data_epoch + 1},"):
        seed_generators(seed, data_epoch, 0, "order")
        if isinstance(sampler, Sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(data_epoch)
            found = iter(sampler)
        else:
            found = iter(sampler(data_epoch, seed))
        most = max(MOST_TIMES * length, AT_LEAST)
        order = np.fromiter(map(operator.index, itertools.islice(found, most + 1)), np.int64)
    if len(order) > most:
        raise UsageError(
            f"the sampler does not end: it gives more than {most} samples in a data epoch; let it end, as with "
            "itertools.islice(indices, len(data))"
        )
    if len(order) and not (order.min() >= 0 and order.max() < length):
        wrong = order[(order < 0) | (order >= length)][0]
        raise UsageError(f"the sampler gives index {wrong}, and data has {length} samples, from 0 to {length - 1}")
    return torch.from_numpy(order.astype(np.int32) if length < 1 << 31 else order)
