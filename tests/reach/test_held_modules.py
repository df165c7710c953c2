"""Modules that Python holds beside `named_modules`: in lists, dicts, closures, other objects, and in the loss.

The idea: a walk that comes to a module of the model by another way first must not leave it out. The look before the first step
moves all weights, and puts back what the walk has found.
"""

from __future__ import annotations

import dataclasses
import random
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshcee
from meshcee.equality.watch import Watch
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.reach import Remembered
from tests.mutation import breaks, changed

WIDTH = 4
HOLDERS: dict[str, Any] = {
    "list": lambda parts: list(parts),
    "tuple": lambda parts: tuple(parts),
    "dict": lambda parts: dict(enumerate(parts)),
    "nested": lambda parts: [{"all": (parts[0], list(parts[1:]))}],
    "object": lambda parts: types.SimpleNamespace(parts=list(parts)),
    "closure": lambda parts: lambda x: [part(x) for part in parts],
    "method": lambda parts: parts[-1].forward,
}


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Held(nn.Module):
    """As pyGAT and many tutorials: parts in a holder of Python's, and in a Sequential made of it, before or after."""

    def __init__(self, holder: str, count: int, first: bool) -> None:
        super().__init__()
        parts = [Part() for _ in range(count)]
        if first:
            self.held = HOLDERS[holder](parts)
        self.net = nn.Sequential(*parts)
        if not first:
            self.held = HOLDERS[holder](parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        return out


class Squared(nn.Module):
    """A loss that is a module and holds one, which it does not train."""

    def __init__(self, holder: str) -> None:
        super().__init__()
        self.calls, self.others = 0, HOLDERS[holder]([Part().requires_grad_(False) for _ in range(2)])

    def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (out - y).square().mean()


def drawn(seed: int) -> tuple[Held, Squared]:
    of = random.Random(seed)
    torch.manual_seed(seed)
    return Held(of.choice(sorted(HOLDERS)), of.randint(1, 3), of.random() < 0.7), Squared(of.choice(sorted(HOLDERS)))


@pytest.mark.parametrize("seed", range(20))
def test_every_weight_is_moved_and_put_back(seed: int) -> None:
    model, loss = drawn(seed)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    watch = Watch(model, loss)
    watch.move()
    assert not any(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert watch.look().keys() >= before.keys()
    watch.restore()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("seed", range(20))
def test_what_every_module_keeps_is_seen_and_put_back(seed: int) -> None:
    model, loss = drawn(seed)
    before = Remembered(model, loss)
    keeping = [part for part in (*model.modules(), loss) if hasattr(part, "calls")]
    for count, part in enumerate(keeping, 1):
        part.calls += 1
        assert len(before.changed(Remembered(model, loss, keeps=False))) == count
    before.put_back()
    assert before.changed(Remembered(model, loss, keeps=False)) == []
    assert [part.calls for part in keeping] == [0] * len(keeping)


def test_a_loss_that_is_a_module_is_looked_into() -> None:
    def story() -> None:
        loss = Squared("list")
        before = Remembered(nn.Linear(1, 1), loss)
        loss.calls += 1
        assert before.changed(Remembered(nn.Linear(1, 1), loss, keeps=False)) == [
            "attribute 'calls' of module 'Squared'"
        ]

    story()
    with changed(Remembered, "isinstance(item, (*_SCALARS, nn.Module))", "isinstance(item, _SCALARS)"):
        assert breaks(story)


def test_a_weight_that_is_not_put_back_ends_the_look() -> None:
    model, loss = drawn(0)
    watch = Watch(model, loss)
    watch.move()
    with (
        changed(Remembered, "kept.put_back()", "pass"),
        pytest.raises(RuntimeError, match="has not put back a weight"),
    ):
        watch.restore()


@pytest.mark.parametrize("holder", ["list", "dict"])
def test_a_run_of_modules_in_a_holder_begins_with_their_weights(holder: str) -> None:
    """With a rate of zero no weight may move."""
    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(WIDTH, generator=g), torch.randn(WIDTH, generator=g)) for _ in range(4)]
    model = Held(holder, 3, first=True)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options: dict[str, Any] = {"batch_size": 4, "micro_batch_size": 2, "steps": 2, "threads": 1}
    job = Job(model=model, loss=F.mse_loss, data=data, optimizer=Optimizer("SGD", lr=0.0), **options)
    result = meshcee.train(job, local=2)
    assert all(torch.equal(first[name], tensor) for name, tensor in result.state_dict.items())
    assert all(torch.equal(first[name], tensor) for name, tensor in model.state_dict().items())


class Counting(nn.Module):
    """Where a count may lie that forward adds to: a function of the test says."""

    class State:
        calls = 0

    class Called:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self) -> None:
            self.calls += 1

    anneal = Called()

    def __init__(self) -> None:
        super().__init__()
        self.table = [[float(i * j) for j in range(250)] for i in range(250)]  # more numbers than are looked at
        self.calls, self.settings = 0, Settings()
        self.note, self.entropy = Note(0), random.SystemRandom()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.anneal()
        return x * self.State.calls


class Settings(dict[str, int]):
    calls = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    calls: int


@pytest.mark.parametrize(
    "count",
    [
        lambda net: setattr(net, "calls", 1),
        lambda net: setattr(Counting.State, "calls", 1),
        lambda net: Counting.anneal(),
        lambda net: setattr(net.settings, "calls", net.settings.calls + 1),
        lambda net: object.__setattr__(net.note, "calls", 1),
    ],
    ids=["behind a table", "nested class", "callable of the class", "attribute of a dict", "frozen slots"],
)
def test_a_count_is_seen_and_put_back_wherever_it_lies(count: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting.State, "calls", 0)
    monkeypatch.setattr(Counting.anneal, "calls", 0)
    net = Counting()
    net.settings.calls = 0
    before = Remembered(net, F.mse_loss)
    count(net)
    assert len(before.changed(Remembered(net, F.mse_loss, keeps=False))) == 1
    before.put_back()
    assert before.changed(Remembered(net, F.mse_loss, keeps=False)) == []


def test_buffers_of_a_loss_are_put_back() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    before = Remembered(nn.Linear(1, 1), norm)
    norm(torch.randn(3, WIDTH))
    before.put_back()
    assert norm.num_batches_tracked == 0
    assert torch.equal(norm.running_mean, torch.zeros(WIDTH))  # type: ignore[arg-type]
