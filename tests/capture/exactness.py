"""A model cut wherever it may be, against the plain loop: every loss and every bit of the state.

The idea: a cut is no promise for one program but for all, so small models are cut at every position that is allowed, and
graph and state go the way that they go to peers: the graph as bytes, the state as contiguous tensors by name.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshcee.capture import Capture, capture, decode_program, encode_program
from meshcee.job import Job
from meshcee.optim import Optimizer
from tests.rig.chain import Chain
from tests.rig.reference import reference

__all__ = ["asserted", "captured", "difference", "job_of"]

WIDTH = 8
Loss = Callable[[Any, Any], torch.Tensor]


def job_of(model: nn.Module, loss: Loss = F.mse_loss, steps: int = 2, **options: Any) -> Job:
    """Six samples a step, in micro-batches of two."""
    g = torch.Generator().manual_seed(5)
    data = [(torch.randn(WIDTH, generator=g), torch.randn(WIDTH, generator=g)) for _ in range(24)]
    settings: dict[str, Any] = {"batch_size": 6, "micro_batch_size": 2, "codec": "none", "data": data} | options
    return Job(model=model, loss=loss, optimizer=Optimizer("AdamW", lr=1e-2), steps=steps, **settings)


def captured(job: Job, seed: int | None = None) -> Capture:
    """The job as peers get it, cut at every position where a cut is allowed, or at those that a seed draws."""

    def chosen(inputs: Any, nodes: Sequence[Any], live: Sequence[float | None], work: Any) -> list[int]:
        allowed = [p for p in range(1, len(nodes)) if live[p] is not None]
        if seed is None:
            return allowed
        drawn = random.Random(seed)
        share = drawn.choice([0.1, 0.3, 1.0])
        return [p for p in allowed if drawn.random() < share]

    assert isinstance(job.model, nn.Module)
    before = _places(job.model)
    bits = copy.deepcopy(job.model.state_dict())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("meshcee.capture.programs"), "find_cuts", chosen)
        found = capture(job)
    assert _places(job.model) == before  # the user's model is left as it was
    assert all(torch.equal(tensor, bits[name]) for name, tensor in job.model.state_dict().items())
    state = {name: tensor.contiguous() for name, tensor in found.state.items()}
    return dataclasses.replace(found, train=decode_program(encode_program(found.train)), state=state)


def _places(model: nn.Module) -> dict[str, tuple[int, bool]]:
    """Which object stands in each place, and a module's mode."""
    named: list[tuple[str, Any]] = [*model.named_parameters(remove_duplicate=False)]
    named += [*model.named_buffers(remove_duplicate=False), *model.named_modules(remove_duplicate=False)]
    return {name: (id(thing), getattr(thing, "training", False)) for name, thing in named}


def difference(job: Job, orders: Sequence[str] = ("late", "fused"), seed: int | None = None) -> str:
    """What of the losses and the state is not the plain loop's; "" when all is. The job's model is left as it was."""
    want = reference(job)
    for order in orders:
        own = dataclasses.replace(job, model=copy.deepcopy(job.model))
        found = captured(own, seed)
        chain = Chain(own, found, found.train.num_blocks, order, split=order != "fused")
        for step, (got, losses) in enumerate(zip(chain.run(job.steps), want.losses, strict=True)):
            for micro, (a, b) in enumerate(zip(got, losses, strict=True)):
                if not torch.equal(a, b):
                    return f"{order}: the loss of step {step}, micro-batch {micro}: {a} instead of {b}"
        state = chain.state()
        for name, tensor in want.state.items():
            if not torch.equal(state[name], tensor):
                return f"{order}: {name} differs after {job.steps} steps"
    return ""


def asserted(h: torch.Tensor) -> torch.Tensor:
    """Here and not in a test: pytest rewrites the assertions of those."""
    lengths = (h > 0).sum(dim=1)
    assert lengths.max().item() <= h.shape[1]
    return h
