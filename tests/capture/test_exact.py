"""Ordinary code whose meaning lies in memory: views, writes, buffers. Cut anywhere, it trains what the plain loop trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshcee.capture import capture
from meshcee.errors import PlanError
from meshcee.stage import check_count
from tests.capture.exactness import WIDTH, difference, job_of


class Around(nn.Module):
    """Layers around whatever a test wants, and buffers for it to write."""

    ema: torch.Tensor
    count: torch.Tensor
    table: torch.Tensor

    def __init__(self, then: Callable[[Around, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("ema", torch.zeros(WIDTH))
        self.register_buffer("table", torch.zeros(3, WIDTH), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.then = then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.then(self, self.a(x)))


CASES: dict[str, Callable[[], nn.Module]] = {}


def case(then: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    CASES[then.__name__.strip("_")] = lambda: Around(then)
    return then


@case
def filled_through_a_view(m: Around, h: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(h)
    out[:, :4] = h[:, :4]
    return m.b(out)


@case
def a_view_that_is_older_than_the_write(m: Around, h: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(h)
    older = out[:, 2:6]
    out[:, :4] = h[:, :4]
    return m.b(out) + older.sum(1, keepdim=True)


@case
def filled_without_gradient(m: Around, h: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(h)
    with torch.no_grad():
        out[:, :4] = h[:, :4]
    behind = torch.zeros_like(h)
    behind.detach()[:, 4:] = h[:, 4:].detach()
    return m.b(out + behind) * h


@case
def a_view_that_the_schema_does_not_tell(m: Around, h: torch.Tensor) -> torch.Tensor:
    turned = torch.einsum("ij->ji", m.b(h))
    turned.mul_(2)
    return turned.t() + h


@case
def buffers_written_through_views(m: Around, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.table[0].mul_(0.9).add_(h.mean(0))
        m.table[1] = m.table[0] * 2
        m.count += 1
        m.ema.lerp_(h.mean(0), 0.1)
    return m.b(h) + m.table.sum(0) * m.count + m.ema


class Overwrites(nn.Module):
    """Writes its sample, as a masked loss does its labels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[:, 0] = 1.0
        x.mul_(2)
        return self.b(self.a(x)) + x


CASES["writes_its_sample"] = Overwrites


@case
def rows_with_gaps_and_expanded_ones(m: Around, h: torch.Tensor) -> torch.Tensor:
    gate, kept = m.b(h).chunk(2, -1)
    whole = torch.cat([F.gelu(gate) * kept, F.silu(kept[:, ::2]), F.silu(gate[:, ::2])], -1)
    return whole + F.gelu(h.mean(0)).expand(h.shape[0], -1)


class Laid(nn.Module):
    """Parameters and buffers that are transposed, that have gaps, or that are expanded."""

    expanded: torch.Tensor
    turned: torch.Tensor
    constant: torch.Tensor

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(width, WIDTH).t())
        self.mix = nn.Parameter(torch.randn(width, width).t())
        self.gaps = nn.Parameter(torch.randn(WIDTH, 2 * width)[:, ::2])
        self.down = nn.Parameter(torch.randn(2 * width, WIDTH)[:width])
        self.register_buffer("expanded", torch.randn(width).expand(3, width))
        self.register_buffer("turned", torch.randn(width, 5).t())
        self.constant = torch.randn(width, 6).t()[:, ::2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.turned.mul_(0.9).add_(x.mean())
        h = F.gelu(x @ F.gelu(self.up)) @ self.mix + x @ F.gelu(self.gaps)
        h = h + F.gelu(self.expanded).sum(0) + F.gelu(self.turned).sum(0)
        h = h + F.gelu(self.constant).sum(1).repeat(2).sum()
        return F.gelu(F.layer_norm(h, h.shape[-1:])) @ self.down


CASES["parameters_and_buffers_as_they_lie"] = Laid


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", CASES)
def test_cut_anywhere_it_is_the_plain_loop(name: str) -> None:
    torch.manual_seed(1)
    assert difference(job_of(CASES[name]())) == ""


class FilledFirst(nn.Module):
    """What leaves the first stage depends on parameters alone, through a view that was written."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        out = x.new_zeros(x.shape)
        older = out[:, 1:4]
        out[:, :4] = h[:, 4:]
        return self.b(F.layer_norm(out + older.sum(1, keepdim=True) * 0.1, (WIDTH,)))


@pytest.mark.cases(3)
@pytest.mark.parametrize("seed", range(6))
def test_a_gradient_that_only_a_write_has_brought(seed: int) -> None:
    torch.manual_seed(1)
    assert difference(job_of(FilledFirst()), seed=seed) == ""


def test_a_loss_that_writes_its_target() -> None:
    def masked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        target[target < 0] = 0.0
        return F.mse_loss(output, target)

    torch.manual_seed(1)
    assert difference(job_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), masked)) == ""


def test_a_loss_that_writes_its_target_leaves_the_model_its_blocks() -> None:
    """The copy of the target that it writes is made where the loss begins, as no cut may come between."""

    def halved(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        target.mul_(0.5)
        return F.mse_loss(output, target)

    def blocks(loss: Any) -> int:
        return capture(job_of(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)]), loss)).train.num_blocks

    assert blocks(halved) == blocks(F.mse_loss) > 3


class InPlace(nn.Module):
    """A residual stream that is written from the first layer to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        for layer in self.layers:
            h += layer(h.relu())
        return h


def test_more_stages_than_blocks_are_refused_with_the_line_that_keeps_the_model_together() -> None:
    program = capture(job_of(InPlace())).train
    assert program.num_blocks == 1
    said = rf"^2 stages .* the model has 1 block: no stage .* in place at {__file__}:\d+ `h \+= layer.*`: write `h = h \+ \.\.\.`"
    with pytest.raises(PlanError, match=said):
        check_count(program, 2)
    check_count(program, 1)
    check_count(program, None)
    several = capture(job_of(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)]))).train
    with pytest.raises(PlanError, match=r"the model has [4-9] blocks: ask for fewer stages$"):
        check_count(several, 10)
