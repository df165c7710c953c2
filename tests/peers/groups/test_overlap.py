"""A group sums its gradients while the last W still computes, and no bit of them is another one for that."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import pytest
import torch
from torch import nn

from peers.groups import buckets
from peers.groups.buckets import FinishedBuckets, buckets_of
from peers.groups.collective import GroupSum
from peers.groups.direct_sum import DirectSum
from tests.peers.groups.test_groups import train_shared
from tests.rig.faults import MICRO, captured_job, job_of
from tests.rig.mesh_fixture import Trained

SHARES = ((2, 1, 1), (1, 3))
SMALL = 256  # bytes of a bucket: one for each parameter of the job


def sum_in_buckets_of(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.groups.GroupSum", functools.partial(GroupSum, bucket_bytes=size))
    monkeypatch.setattr("peers.groups.DirectSum", functools.partial(DirectSum, bucket_bytes=size))


async def train(shares: Any = SHARES, *, direct: bool = False) -> Trained:
    return await train_shared(job_of(0.5, direct), shares, captured=captured_job())


def assert_same(one: Trained, other: Trained) -> None:
    assert one.losses == other.losses
    assert one.state.keys() == other.state.keys()
    for name, tensor in one.state.items():
        assert torch.equal(tensor, other.state[name]), name


@pytest.mark.parametrize("direct", [False, True], ids=["streams", "gloo"])
async def test_sums_that_begin_early_are_those_of_the_end(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sum_in_buckets_of(SMALL, monkeypatch)
    early = await train(direct=direct)
    with monkeypatch.context() as late:
        late.setattr(FinishedBuckets, "hear", lambda self: contextlib.nullcontext())
        assert_same(early, await train(direct=direct))
    if not direct:  # which members add up a number, and in which order, is gloo's to choose by a bucket's size
        sum_in_buckets_of(1 << 30, monkeypatch)
        assert_same(early, await train())


async def test_the_first_bucket_is_summed_before_the_last_w_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """W waits, in its thread, for a sum that begins while it runs, or for ten seconds."""
    sum_in_buckets_of(SMALL, monkeypatch)
    finished, spread, summed, waits = FinishedBuckets.finish, buckets.spread, threading.Event(), []

    def noted(*args: Any) -> None:
        spread(*args)
        summed.set()

    def waiting(self: FinishedBuckets, name: str, parameter: torch.Tensor) -> None:
        if self.bucket_of[name] == max(self.bucket_of.values()):
            waits.append(summed.wait(10))
        finished(self, name, parameter)

    monkeypatch.setattr(buckets, "spread", noted)
    monkeypatch.setattr(FinishedBuckets, "finish", waiting)
    await train(((3, 1), (MICRO,)))
    assert waits
    assert all(waits)


def test_buckets_go_from_the_end_of_the_model_to_its_begin() -> None:
    sizes = {"first": 6, "second": 2, "third": 1, "half": 5, "last": 3}
    parameters = {
        name: nn.Parameter(torch.zeros(size, dtype=torch.bfloat16 if name == "half" else torch.float32))
        for name, size in sizes.items()
    }
    found = buckets_of(parameters, 2, limit_bytes=24)
    assert [bucket.names for bucket in found] == [("last", "third", "second"), ("half",), ("first",)]
    assert [bucket.bounds for bucket in found] == [(0, 3, 6), (0, 2, 5), (0, 3, 6)]
