"""Models as people write them, each with one thing that a tutorial would not have. These are not drawn.

The idea: every snippet is what a user wrote or would write, as short as it can be; some cannot be trained by peers at all,
and then a clear refusal is what is asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from benchmarks.held.made import CLASSES, SAMPLES, Made, class_loss

__all__ = ["ALL", "make"]


class MLP(nn.Module):
    def __init__(self, layers: int = 4, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.head = nn.Linear(width, CLASSES)

    def between(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.between(self.first(x)))


class Transposed(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.between(self.first(x))
        return self.head((h.T.mT @ self.layers[0].weight.T).mH.T)


class LayerDrop(MLP):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.3:
                continue
            h = h + torch.tanh(layer(h))
        return h


class Sampled(MLP):
    """A variational bottleneck with torch.distributions as they come, validation on."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        h = super().between(h)
        return torch.distributions.Normal(h, F.softplus(h) + 1e-3).rsample()


class Experts(MLP):
    """Each expert computes the rows that the gate sends to it, as Hugging Face's loop does."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        chosen = h[:, : len(self.layers)].argmax(-1)
        out = torch.zeros_like(h)
        for i, layer in enumerate(self.layers):
            rows = torch.where(chosen == i)[0]
            out.index_add_(0, rows, layer(h[rows]))
        return out


class Cumulative(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16, momentum=None)

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return super().between(self.norm(h))


class Teacher(MLP):
    """BYOL: a teacher that follows the student by an average, changed in place while the forward pass runs."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    def between(self, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for mine, theirs in zip(self.layers.parameters(), self.teacher.parameters()):
                theirs.mul_(0.99).add_(mine, alpha=0.01)
            target = h
            for layer in self.teacher:
                target = target + torch.tanh(layer(target))
        return super().between(h) - 0.1 * target


class Physics(MLP):
    """A network that is told what its derivative should be."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        u = super().forward(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return u + slope[:, :CLASSES]


class Mapped(MLP):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: super(Mapped, self).between(row))(h)


class Filled(MLP):
    """A tensor that is filled by parts."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        o = torch.zeros_like(h)
        o[:, :8] = self.layers[0](h)[:, :8]
        o[:, 8:] = self.layers[1](h)[:, 8:]
        return super().between(o)


class Scored(MLP):
    """The unit ball, written into a tensor that exists."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            unit = F.normalize(self.layers[0].weight, dim=1, out=torch.empty(16, 16))
        return super().between(h) + h @ unit


class Noisy(MLP):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return super().between(h + 0.1 * torch.randint_like(h, 0, 3))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.pos = nn.Embedding(31, 16), nn.Parameter(torch.randn(24, 16))
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True) for _ in range(3)])
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.pos[: x.shape[1]]
        for layer in self.layers:
            h = layer(h)
        return self.head(h.mean(1))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 16, batch_first=True), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x.unsqueeze(-1), lengths, batch_first=True, enforce_sorted=False)
        _, (h, _) = self.lstm(packed)
        return self.head(h[-1])


class Temperature(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output * self.scale, target)


class Optional(MLP):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if mask is None else x * mask)


def _plain(model: nn.Module, **options: Any) -> Made:
    g = torch.Generator().manual_seed(4)
    return Made(model, class_loss, [(torch.randn(6, generator=g), i % CLASSES) for i in range(SAMPLES)], **options)


def _with(change: Callable[[MLP], Any]) -> Callable[[], Made]:
    def make_it() -> Made:
        model = MLP()
        change(model)
        return _plain(model)

    return make_it


def _frozen_norm() -> Made:
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, CLASSES)
    )
    model[1].eval()
    return _plain(model)


def _compiled() -> Made:
    return _plain(torch.compile(MLP()))  # type: ignore[arg-type]


def _scripted() -> Made:
    return _plain(
        torch.jit.script(
            nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES))
        )
    )


def _lazy() -> Made:
    return _plain(nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.LazyLinear(CLASSES)))


def _positions() -> Made:
    g = torch.Generator().manual_seed(4)
    rows = [torch.randint(0, 31, (4 + 3 * (i % 7),), generator=g) for i in range(SAMPLES)]
    return Made(Positions(), class_loss, [(r, i % CLASSES) for i, r in enumerate(rows)], sizes=(1, 1, 1))


def _packed() -> Made:
    g = torch.Generator().manual_seed(4)
    rows = [((torch.randn(9, generator=g), torch.tensor(2 + i % 8)), i % CLASSES) for i in range(SAMPLES)]
    return Made(Packed(), class_loss, rows)


def _optional() -> Made:
    g = torch.Generator().manual_seed(4)
    return Made(Optional(), class_loss, [((torch.randn(6, generator=g), None), i % CLASSES) for i in range(SAMPLES)])


def _temperature() -> Made:
    made = _plain(MLP())
    made.loss = Temperature()
    return made


def _spectral(model: MLP) -> None:
    for i, layer in enumerate(model.layers):
        model.layers[i] = parametrizations.spectral_norm(layer)


ALL: dict[str, Callable[[], Made]] = {
    "transposed": lambda: _plain(Transposed()),
    "layerdrop": lambda: _plain(LayerDrop()),
    "distributions": lambda: _plain(Sampled()),
    "experts_loop": lambda: _plain(Experts()),
    "cumulative_batch_norm": lambda: _plain(Cumulative(), sizes=(3, 2)),
    "ema_teacher": lambda: _plain(Teacher()),
    "autograd_grad": lambda: _plain(Physics()),
    "vmap": lambda: _plain(Mapped()),
    "filled_by_parts": lambda: _plain(Filled()),
    "normalize_out": lambda: _plain(Scored()),
    "randint_like": lambda: _plain(Noisy()),
    "position_table": _positions,
    "packed_sequence": _packed,
    "loss_with_a_parameter": _temperature,
    "none_in_x": _optional,
    "frozen_batch_norm": _frozen_norm,
    "compiled": _compiled,
    "scripted": _scripted,
    "lazy_linear": _lazy,
    "spectral_norm": _with(_spectral),
    "orthogonal": _with(lambda m: parametrizations.orthogonal(m.layers[0])),
    "weight_norm": _with(lambda m: parametrizations.weight_norm(m.layers[0])),
    "whole_model_eval": lambda: _plain(nn.Sequential(MLP(), nn.Dropout(0.5), nn.Linear(CLASSES, CLASSES)).eval()),
}


def make(name: str) -> Made:
    torch.manual_seed(7)
    return ALL[name.split(":")[1]]()
