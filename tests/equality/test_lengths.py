"""Samples of several lengths, and a module that keeps one of the lengths from pass to pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshcee
from meshcee.equality import net
from meshcee.equality.net import examine
from meshcee.errors import UnequalError
from tests import mutation

MOST = {"length": 1}  # of the module, as code keeps settings


class Net(nn.Module):
    def __init__(self, change: Callable[[Any, torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(40, 8), nn.Linear(8, 40)
        self.change = change
        self.most, self.least, self.last, self.first = 1, 100, 0, 0
        self.held = {"most": 1}
        self.places: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        return self.change(self, self.head(torch.tanh(self.words(x))), x.shape[1])

    def table(self, length: int) -> torch.Tensor:
        if self.places is None or self.places.shape[0] < length:
            self.places = torch.arange(length).float()
        return self.places


def longest(net: Any, out: torch.Tensor, length: int) -> torch.Tensor:
    net.most = max(net.most, length)
    return out / net.most


def shortest(net: Any, out: torch.Tensor, length: int) -> torch.Tensor:
    net.least = min(net.least, length)
    return out / net.least


def previous(net: Any, out: torch.Tensor, length: int) -> torch.Tensor:
    before, net.last = net.last or length, length
    return out * (before / 10)


def first(net: Any, out: torch.Tensor, length: int) -> torch.Tensor:
    net.first = net.first or length
    return out * (length / net.first)


def in_a_dict(net: Any, out: torch.Tensor, length: int) -> torch.Tensor:
    net.held["most"] = max(net.held["most"], length)
    return out / net.held["most"]


def in_a_global(net: Any, out: torch.Tensor, length: int) -> torch.Tensor:
    MOST["length"] = max(MOST["length"], length)
    return out / MOST["length"]


def from_its_end(net: Any, out: torch.Tensor, length: int) -> torch.Tensor:
    return out + net.table(length)[-length:, None]


def a_share_of_all(net: Any, out: torch.Tensor, length: int) -> torch.Tensor:
    return out + (net.table(length) / net.table(length).sum())[:length, None]


def from_its_beginning(net: Any, out: torch.Tensor, length: int) -> torch.Tensor:
    return out + net.table(length).to(out.dtype)[:length, None]


def of_this_pass(net: Any, out: torch.Tensor, length: int) -> torch.Tensor:
    net.last = length
    return out / net.last


KEPT = {
    "longest": (longest, "'most'"),
    "shortest": (shortest, "'least'"),
    "previous": (previous, "'last'"),
    "first": (first, "'first'"),
    "in a dict": (in_a_dict, r"\['most'\] of attribute 'held'"),
    "in a global": (in_a_global, r"\['length'\] of the global 'MOST'"),
    "a table from its end": (from_its_end, "'places'"),
    "a share of all": (a_share_of_all, "'places'"),
}


class Loss:
    def __init__(self) -> None:
        self.most = 0

    def __call__(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.most = max(self.most, y.shape[1])
        return cross_entropy(out, y) / self.most


def cross_entropy(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    x = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return x, x


def job_of(change: Any, loss: Any = cross_entropy) -> meshcee.Job:
    torch.manual_seed(0)
    data = [torch.randint(1, 40, (5 + i * 7 % 16,)) for i in range(64)]
    optimizer = meshcee.Optimizer("SGD", lr=1.0)
    sizes = {"batch_size": 8, "micro_batch_size": 2, "steps": 5}
    return meshcee.Job(model=Net(change), loss=loss, data=data, collate=padded, optimizer=optimizer, **sizes)


def look(job: meshcee.Job) -> None:
    found = meshcee.capture(job)
    examine(job, found, [2], [tuple((b, b + 1) for b in range(found.train.num_blocks))])


@pytest.mark.parametrize("what", KEPT)
def test_a_length_that_forward_keeps_for_later_passes_is_refused(what: str) -> None:
    change, name = KEPT[what]
    MOST["length"] = 1
    with pytest.raises(UnequalError, match=rf"changes .*{name}.* at .*test_lengths\.py"):
        look(job_of(change))
    assert MOST["length"] == 1


def test_a_length_that_the_loss_keeps_is_refused() -> None:
    loss = Loss()
    with pytest.raises(UnequalError, match=r"changes attribute 'most' of the loss"):
        look(job_of(lambda net, out, length: out, loss))
    assert loss.most == 0


@pytest.mark.parametrize("change", [from_its_beginning, of_this_pass])
def test_what_no_later_pass_can_tell_is_trained(change: Any) -> None:
    look(job_of(change))


def test_the_look_is_what_finds_it() -> None:
    with mutation.changed(net.Net, "if call is not None:", "if False:"):
        look(job_of(longest))
