"""A stage that is left frees its tensors at once: Python's collector, which runs when it likes, has nothing to do with them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import meshcee
from meshcee.capture import capture
from meshcee.job import Job
from tests.nn.test_quantized import deep
from tests.rig import zoo
from tests.rig.chain import Chain


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def tensors() -> dict[int, torch.Tensor]:
    return {id(thing): thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)}


def made_since(before: dict[int, torch.Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
    return [(tensor.dtype, tensor.shape) for key, tensor in tensors().items() if key not in before]


class Shifted(nn.Module):
    """It reads a tensor that is no parameter and no buffer: a constant of its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.shift = torch.arange(8.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x) + self.shift)


def job_of(name: str) -> Job:
    return deep(64) if name == "quantized" else zoo.make(name)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"order": "fused", "split": False}], ids=str)
@pytest.mark.parametrize("name", ["char_gpt", "unet", "fno", "quantized"])
def test_a_stage_that_is_left_frees_what_it_held(name: str, options: dict[str, Any], uncollected: None) -> None:
    job = job_of(name)
    found = capture(job)
    Chain(job, found, 2).run(1)  # what is kept for all runs is there: an order of samples, a generator's state
    gc.collect()
    before = tensors()
    chain = Chain(job, found, 2, **options)
    chain.run(2)
    assert made_since(before)
    del chain
    assert not made_since(before)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["char_gpt", "quantized"])
def test_a_micro_batch_leaves_no_activations_behind(name: str, uncollected: None) -> None:
    """Those of the last one would otherwise stay beside the optimizer's step, which no plan counts."""
    job = job_of(name)
    chain = Chain(job, capture(job), 2, split=True)
    gc.collect()
    before = tensors()  # graphs of the capture among them
    chain.run(1)
    assert not [t.shape for key, t in tensors().items() if key not in before and t.grad_fn is not None]


def test_a_constant_goes_with_its_stage(uncollected: None) -> None:
    """Its copy on another device is new, as on a GPU."""
    rows = [(row, -row) for row in torch.ones(8, 8)]
    optimizer = meshcee.Optimizer("AdamW", lr=1e-2)
    job = Job(Shifted(), nn.functional.mse_loss, data=rows, optimizer=optimizer, batch_size=4, steps=2)
    train = capture(job).train
    stage = train.slice(0, train.num_blocks)
    gc.collect()
    before = tensors()
    built = stage.build("meta")
    assert made_since(before) == [(torch.float32, torch.Size([8]))]
    del built
    assert not made_since(before)
