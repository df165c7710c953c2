"""Layers of many kinds over (samples, T, width), from which random models are made: what people's modules do, a line or two each.

The idea: a kind is its parts and a function of them. A new habit of people's models is a new entry here, and from then on it meets
every optimizer, plan and blow that is drawn (tests/rig/random_jobs.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

__all__ = ["KINDS", "Layer"]

Make = Callable[[int], Any]  # of a width: a module, a parameter or a buffer
Saved = dict[str, list[Tensor]]  # what layers before have put by


@dataclass(frozen=True)
class Kind:
    parts: dict[str, Make]
    forward: Callable[[Any, Tensor, Saved], Tensor]
    mutates: bool  # a buffer or a frozen weight, as it computes
    whole: bool  # samples of a micro-batch see one another


@dataclass(frozen=True)
class Unsaved:
    """A buffer that is in no state dict."""

    value: Tensor


KINDS: dict[str, Kind] = {}


class Layer(nn.Module):
    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind, self.width = kind, width
        for name, make in KINDS[kind].parts.items():
            made = make(width)
            if isinstance(made, Unsaved):
                self.register_buffer(name, made.value, persistent=False)
            elif isinstance(made, Tensor) and not isinstance(made, nn.Parameter):
                self.register_buffer(name, made)
            else:
                setattr(self, name, made)

    def forward(self, h: Tensor, saved: Saved) -> Tensor:
        return KINDS[self.kind].forward(self, h, saved)


def kind(*, mutates: bool = False, whole: bool = False, **parts: Make) -> Callable[[Any], Any]:
    def add(forward: Callable[[Any, Tensor, Saved], Tensor]) -> Any:
        KINDS[forward.__name__] = Kind(parts, forward, mutates, whole)
        return forward

    return add


def linear(width: int) -> nn.Linear:
    return nn.Linear(width, width)


def square(width: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(width, width) * 0.3)


def buffer(value: Tensor) -> Make:
    return lambda width: value.clone()


def zeros(width: int) -> Tensor:
    return torch.zeros(width)


def counter(width: int) -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def residual(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return h + torch.tanh(self.l(h))


def of_channels(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return self.n(h.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


def recurrent(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return h + self.r(h)[0]  # type: ignore[no-any-return]


def as_it_comes(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return self.n(h)  # type: ignore[no-any-return]


# Functions that several kinds share.
for name, forward, part, make in (
    ("linear", residual, "l", linear),
    ("frozen", residual, "l", lambda d: nn.Linear(d, d).requires_grad_(False)),
    ("weight_norm", residual, "l", lambda d: parametrizations.weight_norm(nn.Linear(d, d))),
    ("orthogonal", residual, "l", lambda d: parametrizations.orthogonal(nn.Linear(d, d))),
    ("spectral_norm", residual, "l", lambda d: parametrizations.spectral_norm(nn.Linear(d, d))),
    ("layer_norm", as_it_comes, "n", nn.LayerNorm),
    ("rms_norm", as_it_comes, "n", nn.RMSNorm),
    ("prelu", as_it_comes, "n", lambda d: nn.PReLU()),
    ("transformer", as_it_comes, "n", lambda d: nn.TransformerEncoderLayer(d, 2, 2 * d, 0.1, batch_first=True)),
    ("norm_first", as_it_comes, "n", lambda d: nn.TransformerEncoderLayer(d, 2, d, 0.1, batch_first=True, norm_first=True)),
    ("group_norm", of_channels, "n", lambda d: nn.GroupNorm(2, d)),
    ("batch_norm", of_channels, "n", nn.BatchNorm1d),
    ("batch_norm_in_eval", of_channels, "n", lambda d: nn.BatchNorm1d(d).eval()),
    ("instance_norm", of_channels, "n", lambda d: nn.InstanceNorm1d(d, affine=True, track_running_stats=True)),
    ("lstm", recurrent, "r", lambda d: nn.LSTM(d, d, batch_first=True)),
    ("gru", recurrent, "r", lambda d: nn.GRU(d, d, batch_first=True, num_layers=2, dropout=0.2)),
    ("bilstm", recurrent, "r", lambda d: nn.LSTM(d, d // 2, batch_first=True, bidirectional=True)),
    ("rnn", recurrent, "r", lambda d: nn.RNN(d, d, batch_first=True)),
):  # fmt: skip
    KINDS[name] = Kind(
        {part: make},
        forward,
        name in ("spectral_norm", "batch_norm", "instance_norm"),
        name in ("batch_norm", "instance_norm"),
    )


# -- what has weights ---------------------------------------------------------------------------------------------------


@kind(l=linear)
def in_place(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return torch.relu_(self.l(h)) + h


@kind(l=linear)
def detached(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return self.l(h.detach())


@kind(l=linear)
def half_detached(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return self.l(h) * 0.5 + (self.l(h) * 0.5).detach()


@kind(l=linear, e=linear)
def more_in_eval(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return self.l(h) if self.training else self.l(h) + 0.1 * self.e(h)


@kind(l=linear)
def checkpointed(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return checkpoint(lambda z: F.dropout(torch.tanh(self.l(z)), 0.2, self.training), h, use_reentrant=False) + h


@kind(a=lambda d: nn.Linear(d, 2 * d), b=lambda d: nn.Linear(2 * d, d), drop=lambda d: nn.Dropout(0.2))
def mlp(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return h + self.drop(self.b(F.gelu(self.a(h))))


@kind(q=lambda d: nn.Linear(d, 3 * d), o=lambda d: nn.Linear(d, d, bias=False))
def attention(self: Any, h: Tensor, saved: Saved) -> Tensor:
    samples, length, width = h.shape
    q, k, v = (x.view(samples, length, 2, width // 2).transpose(1, 2) for x in self.q(h).chunk(3, -1))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
    return h + self.o(mixed.transpose(1, 2).reshape(samples, length, width))


@kind(c=lambda d: nn.Conv1d(d, d, 3, padding=1))
def conv1(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return h + F.silu(self.c(h.transpose(1, 2))).transpose(1, 2)


@kind(c=lambda d: nn.Conv2d(2, 2, 3, padding=1))
def conv2(self: Any, h: Tensor, saved: Saved) -> Tensor:
    samples, length, width = h.shape
    z = h.reshape(samples, length, 2, width // 2).permute(0, 2, 1, 3)
    return h + torch.tanh(self.c(z)).permute(0, 2, 3, 1).reshape(samples, length, width)


@kind(c=lambda d: nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last))
def channels_last(self: Any, h: Tensor, saved: Saved) -> Tensor:
    samples, length, width = h.shape
    z = h.reshape(samples, length, 2, width // 2).permute(0, 2, 1, 3).contiguous(memory_format=torch.channels_last)
    return h + torch.tanh(self.c(z)).permute(0, 2, 3, 1).reshape(samples, length, width)


@kind(w=square)
def used_twice(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return torch.tanh(torch.tanh(h @ self.w) @ self.w.t()) + h


@kind(a=linear, b=linear)
def sum_of_two(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return self.b(torch.tanh(self.a(h))) + self.a(h)


@kind(t=lambda d: torch.arange(d) % 3 == 0, f=lambda d: Unsaved(torch.ones(d, dtype=torch.float16)))
def constants(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return torch.where(self.t, h, 0.5 * h) * self.f.float()


@kind(w=lambda d: nn.Parameter(torch.randn(d // 2 + 1, dtype=torch.cfloat)))
def spectrum(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(h) * self.w, n=self.width)


@kind(l=linear, w=lambda d: torch.randn(d // 2 + 1, dtype=torch.cfloat))
def constant_spectrum(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(self.l(h)) * self.w, n=self.width)


def without_bias(width: int) -> nn.Linear:
    made = nn.Linear(width, width)
    made.bias.requires_grad_(False)
    return made


@kind(l=without_bias)
def frozen_bias(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return h + torch.tanh(self.l(h))


@kind(u=lambda d: nn.Parameter(torch.ones(3)), l=linear)
def unused(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return h + self.l(h)


@kind(s=lambda d: nn.Parameter(torch.tensor(0.9)))
def scalar(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return h * self.s


@kind(e=lambda d: nn.Parameter(torch.zeros(0, d)), w=lambda d: nn.Parameter(torch.ones(1, d)))
def empty(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return h * torch.cat([self.e, self.w]).sum(0)


@kind(l=lambda d: nn.Linear(d, d).double())
def double(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return h + self.l(h.double()).float()


@kind(l=lambda d: nn.Linear(d, d).bfloat16())
def bf16(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return h + self.l(h.bfloat16()).float()


@kind(w=lambda d: nn.Parameter(torch.randn(d, d).mul(0.3).t()))
def transposed(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return h + torch.tanh(F.linear(h, self.w))


@kind(w=lambda d: nn.Parameter((torch.randn(d, d, 2) * 0.3).permute(2, 0, 1)[0]))
def strided(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return h + torch.tanh(F.linear(h, self.w))


@kind(g=lambda d: nn.Linear(d, 3, bias=False), w=lambda d: nn.Parameter(torch.randn(3, d, d) * 0.3))
def experts(self: Any, h: Tensor, saved: Saved) -> Tensor:
    scores = self.g(h).softmax(-1)
    best = scores.topk(2, -1)
    chosen = torch.zeros_like(scores).scatter(-1, best.indices, best.values)
    return h + torch.einsum("btd,edf,bte->btf", h, self.w, chosen)


@kind(l=lambda d: nn.Bilinear(d, d, d))
def bilinear(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return self.l(h.contiguous(), torch.tanh(h).contiguous())


def rows(h: Tensor) -> Tensor:
    return (h.detach().abs().sum(-1) * 3).long() % 5


@kind(e=lambda d: nn.Embedding(5, d, padding_idx=0))
def embedding(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return h + self.e(rows(h))


@kind(p=lambda d: nn.ParameterDict({"b": nn.Parameter(torch.randn(d) * 0.1), "a": nn.Parameter(torch.randn(d) * 0.1)}))
def parameter_dict(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return h * (1 + self.p["a"]) + self.p["b"]


def two_of_one_weight(width: int) -> nn.ModuleList:
    pair = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])
    pair[1].weight = pair[0].weight
    return pair


@kind(pair=two_of_one_weight)
def tied(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return self.pair[1](torch.tanh(self.pair[0](h)))


@kind(e=lambda d: nn.Parameter(torch.randn(6, d)))
def straight_through(self: Any, h: Tensor, saved: Saved) -> Tensor:
    nearest = self.e[(h.unsqueeze(-2) - self.e).pow(2).sum(-1).argmin(-1)]
    return h + (nearest - h).detach() + 0.1 * nearest


@kind(w=square)
def normalized_weight(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return h @ F.normalize(self.w, dim=0)


# -- what draws ---------------------------------------------------------------------------------------------------------


def drawing(forward: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor, Saved], Tensor]:
    return lambda self, h, saved: forward(h) if self.training else h


for name, draw in {
    "noise": lambda h: h + 0.1 * torch.randn_like(h),
    "depth": lambda h: h * (torch.rand(h.shape[0], 1, h.shape[2]) > 0.2).float(),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.1, True),
    "channel_dropout": lambda h: F.dropout1d(h, 0.2, True),
    "gumbel": lambda h: h * F.gumbel_softmax(h, dim=-1, hard=True) + h,
    "bernoulli": lambda h: h * torch.bernoulli(torch.full_like(h, 0.8)),
}.items():
    KINDS[name] = Kind({}, drawing(draw), False, False)


# -- what has neither ---------------------------------------------------------------------------------------------------

for name, pure in {
    "sort": lambda h: torch.sort(h, dim=-1).values,
    "cumsum": lambda h: torch.cumsum(h, 1) * 0.3,
    "flip": lambda h: h.flip(1),
    "expand": lambda h: h.unsqueeze(2).expand(-1, -1, 2, -1).mean(2),
    "signed_zeros": lambda h: h * torch.where(h > 0, 1.0, -0.0) + 0.1 * h,
    "permute": lambda h: h.transpose(1, 2).contiguous().transpose(1, 2),
    "center": lambda h: h - h.mean(0, keepdim=True),
}.items():
    KINDS[name] = Kind({}, lambda self, h, saved, pure=pure: pure(h), False, name == "center")  # type: ignore[misc]


def saving(what: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor, Saved], Tensor]:
    def forward(self: Any, h: Tensor, saved: Saved) -> Tensor:
        saved.setdefault(what, []).append(change(h))
        return h

    return forward


for name, change in {
    "save": lambda h: h,
    "save_spectrum": torch.fft.rfft,
    "save_mask": lambda h: h > 0,
    "save_index": lambda h: h.argmax(-1),
}.items():
    KINDS[name] = Kind({}, saving(name, change), False, False)


@kind()
def use(self: Any, h: Tensor, saved: Saved) -> Tensor:
    """Whatever was put by, some layers later: it crosses the cuts between them."""
    for kept in saved.pop("save", []):
        h = h + 0.3 * kept
    for kept in saved.pop("save_spectrum", []):
        h = h + 0.1 * torch.fft.irfft(kept, n=h.shape[-1])
    for kept in saved.pop("save_mask", []):
        h = torch.where(kept, h, 0.7 * h)
    for kept in saved.pop("save_index", []):
        h = h + 0.01 * kept.unsqueeze(-1)
    return h


# -- what changes buffers, or what is frozen ----------------------------------------------------------------------------


@kind(mutates=True, n=counter)
def count(self: Any, h: Tensor, saved: Saved) -> Tensor:
    self.n += 1
    return h * (1 + 0.01 * (self.n % 5))


@kind(mutates=True, n=counter, l=linear)
def count_in_training(self: Any, h: Tensor, saved: Saved) -> Tensor:
    if self.training:
        self.n += 1
    return h + self.l(h) * (self.n % 2 == 0)


@kind(mutates=True, n=counter, l=linear)
def count_in_eval(self: Any, h: Tensor, saved: Saved) -> Tensor:
    if not self.training:
        self.n += 1
    return h + self.l(h) * (1 + 0.01 * (self.n % 50))


@kind(mutates=True, n=buffer(torch.zeros(3, dtype=torch.int32)))
def counts(self: Any, h: Tensor, saved: Saved) -> Tensor:
    self.n.add_(torch.tensor([1, 2, 3], dtype=torch.int32))
    return h * (1 + 0.01 * (self.n % 5).sum())


@kind(mutates=True, m=zeros)
def running(self: Any, h: Tensor, saved: Saved) -> Tensor:
    if self.training:
        self.m.mul_(0.9).add_(0.1 * h.detach().mean((0, 1)))
    return h - self.m


@kind(mutates=True, m=lambda d: Unsaved(torch.zeros(d)))
def running_unsaved(self: Any, h: Tensor, saved: Saved) -> Tensor:
    if self.training:
        self.m.mul_(0.9).add_(0.1 * h.detach().mean((0, 1)))
    return h - self.m


@kind(mutates=True, t=lambda d: torch.arange(d) % 2 == 0)
def toggle(self: Any, h: Tensor, saved: Saved) -> Tensor:
    if self.training:
        self.t.logical_not_()
    return torch.where(self.t, h, 0.5 * h)


@kind(mutates=True, l=linear, w=lambda d: torch.ones(d // 2 + 1, dtype=torch.cfloat))
def running_spectrum(self: Any, h: Tensor, saved: Saved) -> Tensor:
    z = torch.fft.rfft(self.l(h))
    if self.training:
        self.w.mul_(0.9).add_(0.1 * z.detach().sum((0, 1)) / (z.shape[0] * z.shape[1]))
    return torch.fft.irfft(z + self.w, n=self.width)


@kind(mutates=True, l=linear, t=lambda d: nn.Linear(d, d).requires_grad_(False))
def teacher(self: Any, h: Tensor, saved: Saved) -> Tensor:
    with torch.no_grad():
        self.t.weight.mul_(0.9).add_(self.l.weight, alpha=0.1)
    return self.l(h) + 0.3 * self.t(h).detach()


@kind(mutates=True, q=lambda d: torch.zeros(4, d), p=lambda d: torch.zeros(1, dtype=torch.long))
def queue(self: Any, h: Tensor, saved: Saved) -> Tensor:
    if self.training:
        self.q = torch.cat([self.q[1:], h.detach().mean((0, 1))[None]])
        self.p.add_(1)
    return h + 0.1 * self.q.mean(0)


@kind(mutates=True, s=lambda d: nn.Parameter(torch.ones(())), n=buffer(torch.zeros(5, dtype=torch.int64)))
def histogram(self: Any, h: Tensor, saved: Saved) -> Tensor:
    if self.training:
        found = rows(h).flatten()
        self.n.index_add_(0, found, torch.ones_like(found))
    return h * self.s + 0.001 * (self.n % 7).float().sum()


@kind(
    mutates=True,
    whole=True,
    c=lambda d: nn.Conv2d(1, 3, 3, padding=1, bias=False),
    n=lambda d: nn.BatchNorm2d(3),
    o=lambda d: nn.Conv2d(3, 1, 1),
)
def batch_norm_2d(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return h + self.o(F.relu(self.n(self.c(h.unsqueeze(1))), inplace=True)).squeeze(1)


@kind(q=linear, k=linear, v=linear, scale=lambda d: Unsaved(torch.tensor(1 / math.sqrt(d))))
def cross(self: Any, h: Tensor, saved: Saved) -> Tensor:
    """Attention to what was put by, if anything."""
    other = saved["save"][-1] if saved.get("save") else h
    return h + (self.q(h) @ self.k(other).transpose(1, 2) * self.scale).softmax(-1) @ self.v(other)


@kind(l=linear, gamma=lambda d: nn.Parameter(torch.full((d,), 0.1)))
def layer_scale(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return torch.addcmul(h, self.gamma, self.l(h))


@kind(down=lambda d: nn.Linear(d, 2), up=lambda d: nn.Linear(2, d))
def squeeze_excite(self: Any, h: Tensor, saved: Saved) -> Tensor:
    return h * torch.sigmoid(self.up(F.relu(self.down(h.mean(1))))).unsqueeze(1)


def angles(width: int) -> Unsaved:
    return Unsaved(torch.outer(torch.arange(8.0), 10.0 ** -torch.arange(width // 2)))


@kind(q=linear, angles=angles)
def rotary(self: Any, h: Tensor, saved: Saved) -> Tensor:
    turn = torch.polar(torch.ones_like(self.angles), self.angles)[: h.shape[1]]
    pairs = torch.view_as_complex(self.q(h).reshape(*h.shape[:2], -1, 2))
    return h + torch.view_as_real(pairs * turn).flatten(2)
