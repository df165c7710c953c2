"""What a stage draws is its own: other threads of the process draw meanwhile, and no mask is another one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshcee
from meshcee.capture.graph.operators import find_operator
from meshcee.errors import GraphError
from meshcee.job import Job
from meshcee.stage.draws import Draws
from tests.mutation import changed

WIDTH = 16


class Noisy(nn.Module):
    """Draws in every way that one operator can."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.draw(self.first(x).tanh())
        y: torch.Tensor = self.last(self.draw(h))
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(2, WIDTH, num_layers=3, dropout=0.3, batch_first=True)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.cell(x.reshape(-1, 2, 2))[0][:, -1])
        return y


def attended(h: torch.Tensor) -> torch.Tensor:
    heads = h.reshape(h.shape[0], 2, 2, 4)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3).reshape(h.shape)


DRAWS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: Noisy(lambda h: F.dropout(h, 0.3)),
    "dropout in place": lambda: Noisy(lambda h: F.dropout(h + 0, 0.3, inplace=True)),
    "dropout of features": lambda: Noisy(lambda h: F.dropout1d(h.reshape(-1, 4, 4), 0.3).reshape(h.shape)),
    "alpha dropout": lambda: Noisy(lambda h: F.alpha_dropout(h, 0.3, training=True)),
    "noise": lambda: Noisy(lambda h: h + torch.randn_like(h)),
    "noise of a shape": lambda: Noisy(lambda h: h + torch.rand(h.shape[0], WIDTH)),
    "an integer": lambda: Noisy(lambda h: h * torch.randint(1, 3, (h.shape[0], 1))),
    "integers alike": lambda: Noisy(lambda h: h * torch.randint_like(h, 1, 3)),
    "an order": lambda: Noisy(lambda h: h[:, torch.randperm(WIDTH)]),
    "coins": lambda: Noisy(lambda h: h * torch.bernoulli(torch.full_like(h, 0.5))),
    "a normal number": lambda: Noisy(lambda h: torch.normal(h, 0.1)),
    "a category": lambda: Noisy(
        lambda h: h + torch.multinomial(h.detach().abs() + 0.1, 2).float().mean(1, keepdim=True)
    ),
    "Gumbel": lambda: Noisy(lambda h: F.gumbel_softmax(h)),
    "rrelu": lambda: Noisy(lambda h: F.rrelu(h, training=True)),
    "attention": lambda: Noisy(attended),
    "recurrent layers": Recurrent,
}


def job_of(kind: str) -> Job:
    torch.manual_seed(0)
    rows = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
    optimizer = meshcee.Optimizer("AdamW", lr=1e-2)
    return Job(
        model=DRAWS[kind](),
        loss=F.mse_loss,
        data=rows,
        optimizer=optimizer,
        batch_size=8,
        micro_batch_size=4,
        steps=6,
        threads=1,
    )


@pytest.mark.cases(5)
@pytest.mark.parametrize("kind", DRAWS)
def test_whatever_a_stage_draws_is_what_the_plain_loop_draws(kind: str) -> None:
    job = job_of(kind)
    expected = meshcee.plain(job).losses
    before = torch.get_rng_state()
    assert list(meshcee.train(job, local=1).losses) == expected
    assert torch.equal(torch.get_rng_state(), before), "the user's own generator is as it was"


def beside(job: Job) -> list[float]:
    def draw(run: Any, report: Any) -> None:
        for _ in range(50):
            torch.manual_seed(0)
            torch.multinomial(torch.ones(10), 5)

    return list(meshcee.train(job, local=1, callbacks=[draw]).losses)


def test_callbacks_that_draw_change_no_mask() -> None:
    job = job_of("dropout")
    assert beside(job) == meshcee.plain(job).losses


@pytest.mark.slow
def test_from_the_processs_generator_masks_would_be_others() -> None:
    job = job_of("dropout")
    with changed(Draws, "torch.Generator()", "torch.default_generator"):
        assert any(beside(job) != meshcee.plain(job).losses for _ in range(8))  # by when the callback draws


def test_every_operator_that_draws_can_be_given_a_generator() -> None:
    """Or is made of others, which can: so nobody asks a CPU's default generator."""
    drawing, without = [], []
    for name, packet in ((name, getattr(torch.ops.aten, name)) for name in dir(torch.ops.aten)):
        for overload in getattr(packet, "overloads", list)():
            with suppress(GraphError):
                if (found := find_operator(f"aten.{name}.{overload}")).random:
                    drawing.append(found.name)
                    if not torch._C._dispatch_has_kernel_for_dispatch_key(
                        f"aten::{name}.{overload}".removesuffix(".default"), "CompositeImplicitAutograd"
                    ):
                        without += [] if takes_a_generator(name, overload) else [found.name]
    assert len(drawing) > 20
    assert without == []


def is_composite(name: str, overload: str) -> bool:
    full = f"aten::{name}.{overload}".removesuffix(".default")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd"))


def takes_a_generator(name: str, overload: str) -> bool:
    packet = getattr(torch.ops.aten, name)
    wanted = {argument.name for argument in getattr(packet, overload)._schema.arguments} | {"generator"}
    return any({a.name for a in getattr(packet, one)._schema.arguments} == wanted for one in packet.overloads())
