"""Random small modules: views, writes in place, tied and transposed parameters, buffers, draws, regions without gradient.

The idea: a module is a list of steps over a pool of tensors of one shape, (samples, WIDTH). Every step takes some of the pool
and puts its result there, so any list is a program, and a shorter list is a smaller one, which is what hypothesis needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

from tests.capture.exactness import WIDTH

__all__ = ["Module", "Step", "modules"]

HALF = WIDTH // 2


@dataclass(frozen=True)
class Step:
    """One operation: its kind, two places in the pool, and a number that chooses among variants."""

    kind: str
    first: int
    second: int
    variant: int


class Module(nn.Module):
    """Interprets steps. Parameters are made for the steps that want some."""

    ema: torch.Tensor
    table: torch.Tensor
    count: torch.Tensor

    def __init__(self, steps: tuple[Step, ...]) -> None:
        super().__init__()
        self.steps = steps
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH).t() * 0.3)
        self.gaps = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2] * 0.3)
        self.linears = nn.ModuleDict(
            {str(i): nn.Linear(WIDTH, WIDTH) for i, s in enumerate(steps) if s.kind == "linear"}
        )
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.tied.weight
        self.same = nn.ModuleList([self.tied, self.tied])  # one module in several places, as ALBERT's layers are
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("ema", torch.zeros(WIDTH))
        self.register_buffer("table", torch.randn(4, WIDTH).t()[:, ::2].t(), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("expanded", torch.randn(1).expand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pool = [x, self.tied(x)]
        for i, step in enumerate(self.steps):
            a, b = pool[step.first % len(pool)], pool[step.second % len(pool)]
            pool.append(STEPS[step.kind](self, i, a, b, step.variant))
        return self.again(torch.stack([F.layer_norm(p, (WIDTH,)) for p in pool[-3:]]).mean(0))


Run = Callable[[Module, int, torch.Tensor, torch.Tensor, int], torch.Tensor]
STEPS: dict[str, Run] = {}


def step(run: Run) -> Run:
    STEPS[run.__name__.strip("_")] = run
    return run


@step
def linear(m: Module, i: int, a: torch.Tensor, b: torch.Tensor, v: int) -> torch.Tensor:
    return m.linears[str(i)](a)


@step
def shared(m: Module, i: int, a: torch.Tensor, b: torch.Tensor, v: int) -> torch.Tensor:
    made = (m.tied(a), a @ m.turned, F.linear(a, m.turned), a @ F.gelu(m.gaps), a @ m.tied.weight, m.same[v % 2](a))
    return made[v % 6]


@step
def pointwise(m: Module, i: int, a: torch.Tensor, b: torch.Tensor, v: int) -> torch.Tensor:
    return (F.gelu(a), F.silu(a), torch.tanh(a) * b, a + b, a - b.mean(0), (a * b).sigmoid(), a / (b.abs() + 1))[v % 7]


@step
def filled(m: Module, i: int, a: torch.Tensor, b: torch.Tensor, v: int) -> torch.Tensor:
    """Zeros or a copy, written through a view, with views made before and after."""
    out = (torch.zeros_like(a), a.clone(), torch.empty_like(a).fill_(0.5), a.new_zeros(a.shape))[v % 4]
    older = out[:, 1:HALF]
    if v // 4 % 3 == 0:
        out[:, :HALF] = b[:, HALF:]
    elif v // 4 % 3 == 1:
        out[:, ::2].add_(b[:, ::2])
    else:
        out.t()[1:3].copy_(b.t()[:2])
    return out + older.sum(1, keepdim=True) * 0.1 if v % 2 else out


@step
def indexed(m: Module, i: int, a: torch.Tensor, b: torch.Tensor, v: int) -> torch.Tensor:
    places = torch.tensor([0, 3, 3, 5], device=a.device)
    out = a.clone()
    if v % 3 == 0:
        return out.index_add(1, places, b[:, :4])
    if v % 3 == 1:
        out[:, places[:2]] = b[:, 6:]
        return out
    return out.masked_fill(b > 0.5, 0.1)


@step
def parts(m: Module, i: int, a: torch.Tensor, b: torch.Tensor, v: int) -> torch.Tensor:
    one, two = a.chunk(2, -1)
    if v % 4 == 0:
        return torch.cat([F.gelu(one), two], -1)
    if v % 4 == 1:
        return torch.cat([two * one, F.silu(b[:, ::2])], -1)
    if v % 4 == 2:
        return torch.stack(a.unbind(-1)[::-1], -1)
    return torch.cat(b.split([3, 5], 1)[::-1], 1)


@step
def turned(m: Module, i: int, a: torch.Tensor, b: torch.Tensor, v: int) -> torch.Tensor:
    if v % 4 == 0:
        return F.gelu(a.t()).t()
    if v % 4 == 1:
        return (a.t() @ b).mean(0, keepdim=True) + a
    if v % 4 == 2:
        return a.view(-1, 2, HALF).transpose(1, 2).reshape(-1, WIDTH)
    return torch.einsum("ij->ji", a).contiguous().t()


@step
def expanded(m: Module, i: int, a: torch.Tensor, b: torch.Tensor, v: int) -> torch.Tensor:
    mean = a.mean((0, 1)[v % 2], keepdim=True).expand_as(a)
    return (F.gelu(mean) + b, mean * b, mean + m.get_buffer("expanded").gt(0))[v % 3]


@step
def drawn(m: Module, i: int, a: torch.Tensor, b: torch.Tensor, v: int) -> torch.Tensor:
    return (F.dropout(a, 0.3), a + torch.randn_like(b) * 0.1, a * (torch.rand(WIDTH, device=a.device) > 0.2))[v % 3]


@step
def cut_off(m: Module, i: int, a: torch.Tensor, b: torch.Tensor, v: int) -> torch.Tensor:
    if v % 3 == 0:
        return a.detach() * b
    with torch.no_grad():
        scale = F.gelu(m.tied(a)).sigmoid()
        if v % 3 == 1:
            scale[:, :2] = b[:, 2:4]
    return scale + b


@step
def counted(m: Module, i: int, a: torch.Tensor, b: torch.Tensor, v: int) -> torch.Tensor:
    """Buffers, written directly, through views, and by assignment."""
    with torch.no_grad():
        m.count += 1
        if v % 4 == 0:
            m.ema.lerp_(a.mean(0), 0.1)
        elif v % 4 == 1:
            m.table[0].mul_(0.9).add_(b.mean(0))
        elif v % 4 == 2:
            m.ema = 0.5 * m.ema + 0.5 * a.mean(0)
        else:
            m.table[:, ::2] = a[:2, :HALF]
    return a + F.gelu(m.table).sum(0) * 0.1 + m.ema * m.count


@step
def normed(m: Module, i: int, a: torch.Tensor, b: torch.Tensor, v: int) -> torch.Tensor:
    return (m.norm(a), F.layer_norm(a, (WIDTH,)), a.softmax(-1), F.normalize(a, dim=-1))[v % 4]


@step
def typed(m: Module, i: int, a: torch.Tensor, b: torch.Tensor, v: int) -> torch.Tensor:
    if v % 3 == 0:
        return (a.double() * b).float()
    if v % 3 == 1:
        return a.bfloat16().float() + b
    return torch.view_as_real(torch.fft.fft(a, dim=-1)).sum(-1) * 0.1 + torch.complex(a, b).imag


@step
def narrow(m: Module, i: int, a: torch.Tensor, b: torch.Tensor, v: int) -> torch.Tensor:
    """Regions of autocast, with shared weights, einsum, a region inside of another, and none that records gradients."""
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=v % 7 != 0):
        made = m.tied(a) + m.again(b)
        if v % 5 == 0:
            made = torch.einsum("ij,kj->ik", made, m.turned) + m.norm(made)
        if v % 5 == 1:
            with torch.no_grad():
                made = made + m.tied(b)
        if v % 5 == 2:
            with torch.autocast("cpu", enabled=False):
                made = m.tied(made.float() + b.float())
        if v % 5 == 3:
            made = torch.cat([made, a], -1)[:, ::2] + F.mse_loss(made, b)
    return (made + m.same[v % 2](a)).to(a.dtype)


@step
def in_place(m: Module, i: int, a: torch.Tensor, b: torch.Tensor, v: int) -> torch.Tensor:
    out = a * 1.5
    if v % 5 == 0:
        return out.add_(b)
    if v % 5 == 1:
        return out.mul_(b.detach())
    if v % 5 == 2:
        return F.relu_(out)
    return out.clamp_(-1, 1) if v % 5 == 3 else out.t().add_(b.t()).t()


def modules() -> st.SearchStrategy[tuple[Step, ...]]:
    """Lists of steps."""
    places = st.integers(0, 11)
    one = st.builds(Step, st.sampled_from(sorted(STEPS)), places, places, st.integers(0, 419))
    return st.lists(one, min_size=2, max_size=7).map(tuple)
