"""Stages on groups: members share the samples of every micro-batch, and train what one process would have trained.

The idea: shares reorder sums, so equal means 1e-9 in double precision and 1e-5 for losses in single; but members of one
group must end with the same bits, which the owner checks by hash each time it collects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from meshcee.job import Job
from tests import zoo
from tests.peers.mesh_fixture import Trained, grouped, train
from tests.reference import reference

MICRO = 6


def double(name: str, **options: Any) -> Job:
    """A model of the zoo in double precision: two micro-batches of six samples a step, with dropout and clipping."""
    settings: dict[str, Any] = {"batch_size": 2 * MICRO, "micro_batch_size": MICRO, "steps": 3}
    job = zoo.make(name, **settings | options)
    assert isinstance(job.model, nn.Module)
    job.model.double()
    return job


async def train_shared(job: Job, shares: Sequence[Sequence[int]], **options: Any) -> Trained:
    micro = sum(shares[0])
    return await train(job, len(shares), micro, adapt=lambda plan: grouped(plan, shares), **options)


def assert_close(trained: Trained, job: Job, tolerance: float) -> None:
    expected = reference(job)
    assert job.micro_batch_size is not None
    part = job.micro_batch_size / job.batch_size
    weights = 1.0 if job.reduction == "sum" else part
    wanted = [sum(float(loss) * weights for loss in step) for step in expected.losses]
    assert trained.losses == pytest.approx(wanted, rel=tolerance)
    for name, tensor in trained.state.items():
        torch.testing.assert_close(tensor, expected.state[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    "shares",
    [((4, 2), (6,)), ((6,), (1, 5)), ((4, 2), (1, 3, 2)), ((3, 1, 2),), ((1, 5), (5, 1), (2, 2, 2))],
    ids=lambda shares: "-".join("+".join(map(str, stage)) for stage in shares),
)
async def test_widths_and_unequal_shares_with_dropout_tied_weights_and_clipping(shares: Any) -> None:
    job = double("char_gpt")
    assert_close(await train_shared(job, shares), job, 1e-9)
