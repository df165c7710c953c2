"""An evaluation's graph is held against the model in eval mode, under no_grad and with other weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshcee
from meshcee.capture import capture
from meshcee.capture.evaluated import Evaluated
from meshcee.errors import CaptureError
from meshcee.job import Job
from tests.mutation import changed

ROWS = [(x, x.sum(0, keepdim=True)) for x in torch.randn(16, 8, generator=torch.Generator().manual_seed(0))]


class Lora(nn.Linear):
    """Merges in eval mode, as loralib does."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out)
        self.a, self.b = nn.Parameter(torch.randn(2, width)), nn.Parameter(torch.randn(out, 2))
        self.weight.requires_grad, self.merged = False, False

    def train(self, mode: bool = True) -> Lora:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (self.b @ self.a).data * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if self.merged else y + x @ self.a.T @ self.b.T


class Of(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.n = nn.Linear(8, 8), nn.Linear(8, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.changed(self.first(x)))
        return y

    def changed(self, h: torch.Tensor) -> torch.Tensor:
        return h


class Asks(Of):
    def changed(self, h: torch.Tensor) -> torch.Tensor:
        return h if torch.is_grad_enabled() else h * 3


class AsksTensors(Of):
    def changed(self, h: torch.Tensor) -> torch.Tensor:
        return h * 2 if h.requires_grad else h


class Counts(Of):
    def changed(self, h: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.n += 1
        return h * max(self.n, 1)


class Folds(Of):
    def train(self, mode: bool = True) -> Folds:
        super().train(mode)
        if not mode:
            self.fused = self.last.weight.detach() * 1.0
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        y: torch.Tensor = self.last(h) if self.training else F.linear(h, self.fused, self.last.bias)
        return y


class Usual(Of):
    """Other layers in eval mode, as always."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)

    def changed(self, h: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(h)) if self.training else self.norm(h).tanh()


def job_of(model: nn.Module, **more: Any) -> Job:
    told = {"batch_size": 8, "micro_batch_size": 4, "steps": 3, "optimizer": meshcee.Optimizer("SGD", lr=0.1)}
    return Job(model=model, loss=F.mse_loss, data=ROWS, **told | more)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Asks, AsksTensors, Counts, Folds])
def test_a_graph_that_evaluates_otherwise_is_refused(kind: type[nn.Module]) -> None:
    model = kind()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CaptureError, match="gives other numbers than its graph"):
        capture(job_of(model, eval_data=ROWS))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.training
    assert list(meshcee.train(job_of(kind()), local=1).losses)  # what is not evaluated may be as it likes


def test_weights_that_eval_writes_are_told_of_and_put_back() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Lora(8, 1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CaptureError, match=r"model\.eval\(\) writes '1\.weight'"):
        capture(job_of(model, eval_data=ROWS))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_usual_models_are_evaluated_and_their_weights_left_alone() -> None:
    model = Usual()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert capture(job_of(model, eval_data=ROWS)).evaluate is not None
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_without_other_weights_what_is_folded_would_pass() -> None:
    with changed(Evaluated, "for times in (1.0, OTHER)", "for times in (1.0,)"):
        capture(job_of(Folds(), eval_data=ROWS))
