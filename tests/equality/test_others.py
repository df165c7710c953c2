"""The look before the first step computes with other weights, too: at the first ones a penalty or a gradient may be zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshcee
from meshcee.equality.watch import Watch
from meshcee.errors import CaptureError, UnequalError
from meshcee.job import Job
from tests.capture.exactness import WIDTH, job_of
from tests.mutation import breaks, changed

VERSION = "_version"
Then = Callable[[Any, torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """What lies behind `head` gets no gradient at first."""

    def __init__(self, then: Then = lambda _, h: h) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.drop, self.then = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.3),
            then,
        )
        nn.init.zeros_(self.head.weight)
        self.gain = nn.Parameter(torch.zeros(WIDTH))
        self.gain.decays = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.then(self, torch.tanh(self.body(x)))) * (1 + self.gain)


def penalized(by: str) -> Job:
    model = Model()
    start = {p: p.detach().clone() for p in model.parameters()}
    ids, names = {id(p) for p in start}, {n: p.detach().clone() for n, p in model.named_parameters()}

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = F.mse_loss(out, y)
        if by == "in":
            return found + sum(((p - start[p]) ** 2).sum() for p in model.parameters() if p in start)
        if by == "id":
            return found + sum((p**2).sum() for p in model.parameters() if id(p) in ids and p.dim() == 1)
        if by == "mark":
            return found + sum((p**2).sum() for p in model.parameters() if getattr(p, "decays", False))
        return found + sum(((p - names[n]) ** 2).sum() for n, p in model.named_parameters())

    return job_of(model, loss)


@pytest.mark.parametrize("by", ["name", "mark"])
def test_a_penalty_that_is_zero_at_first_trains_as_in_the_plain_loop(by: str) -> None:
    result, plain = meshcee.train(penalized(by), local=1), meshcee.plain(penalized(by))
    assert result.losses == plain.losses
    assert all(torch.equal(result.state_dict[name], tensor) for name, tensor in plain.state_dict.items())


@pytest.mark.parametrize("by", ["in", "id"])
def test_a_parameter_that_is_asked_for_by_identity_is_refused_though_its_term_is_zero_at_first(by: str) -> None:
    with pytest.raises(UnequalError, match=r"asks? by id\(\), `is`, `in` or a class which parameter.*named_parameters"):
        meshcee.train(penalized(by), local=1)


def checkpoints(m: Any, h: torch.Tensor) -> torch.Tensor:
    return checkpoint(m.drop, h, use_reentrant=False, preserve_rng_state=False)


def hooks(_: Any, h: torch.Tensor) -> torch.Tensor:
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda grads: tuple(0.1 * one for one in grads))
    return h


def counts(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h * 0.5 if getattr(m.body.weight, VERSION) > 3 else h


@pytest.mark.parametrize("then", [checkpoints, hooks])
def test_a_gradient_that_is_another_is_found_behind_a_head_that_begins_at_zero(then: Then) -> None:
    with pytest.raises(UnequalError, match=r"the gradient of parameter 'body\.\w+' differs"):
        meshcee.train(job_of(Model(then)), local=1)


def test_a_count_of_writes_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"_version is read at .*count steps in a buffer"):
        meshcee.train(job_of(Model(counts)), local=1)


def test_weights_with_which_a_model_fails_are_left_alone() -> None:
    def strict(m: Any, h: torch.Tensor) -> torch.Tensor:
        if isinstance(m.gain, nn.Parameter) and not torch.equal(m.gain, torch.zeros(WIDTH)):
            raise ValueError("only with a gain of zero")
        return h

    meshcee.train(job_of(Model(strict), steps=1), local=1)


def test_without_other_weights_they_are_trained() -> None:
    with changed(Watch.move, "parameter.requires_grad and", "False and"):
        assert breaks(lambda: test_a_gradient_that_is_another_is_found_behind_a_head_that_begins_at_zero(hooks))
