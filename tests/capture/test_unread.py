"""What shares memory with weights that are trained, and functions beside the model that read them: a plain loop sees the newest."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshcee
from meshcee.capture import capture
from meshcee.capture import export as export_room
from meshcee.capture.unread import WeightWatch, refuse_told_beside
from meshcee.errors import CaptureError, UsageError
from tests.mutation import breaks, changed

ROWS = [(torch.randn(16, generator=torch.Generator().manual_seed(i)), i % 5) for i in range(32)]


class Net(nn.Module):
    """`view` makes, outside of forward, what forward multiplies with."""

    def __init__(self, view: Callable[[Net], Any] = lambda net: None, take: Callable[[Any], Any] = lambda held: held):
        super().__init__()
        self.a, self.b, self.o, self.bn = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 5), nn.BatchNorm1d(16)
        self.__dict__["held"] = view(self)
        self._take = take

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self._take(self.held)
        h = F.relu(self.bn(self.a(x)))
        return self.o(h if held is None else h * held.sum())


def job_of(model: nn.Module, **options: Any) -> meshcee.Job:
    given = {"loss": F.cross_entropy, "data": ROWS, "optimizer": meshcee.Optimizer("SGD", lr=0.1)} | options
    return meshcee.Job(model=model, batch_size=8, micro_batch_size=4, steps=3, **given)


VIEWS: dict[str, tuple[Callable[[Net], Any], Callable[[Any], Any]]] = {
    "detached": (lambda net: net.a.weight.detach(), lambda held: held),
    "data of a part": (lambda net: net.a.weight.data[0], lambda held: held),
    "transposed": (lambda net: net.a.weight.detach().T, lambda held: held),
    "in a list": (lambda net: [net.a.weight.detach()], lambda held: held[0]),
    "state_dict": (lambda net: net.a.state_dict(), lambda held: held["weight"]),
    "array": (lambda net: net.a.weight.detach().numpy(), torch.from_numpy),
    "copied from an array": (lambda net: net.a.weight.detach().numpy(), torch.tensor),
    "a buffer that forward writes": (lambda net: [net.bn.running_mean.view(-1)], lambda held: held[0]),
}


def is_refused(view: str) -> None:
    with pytest.raises(
        CaptureError, match=r"used at .*test_unread.py.* shares memory with '(a.weight|bn.running_mean)'"
    ):
        capture(job_of(Net(*VIEWS[view])))


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_what_training_changes_is_refused(view: str) -> None:
    is_refused(view)
    with changed(export_room.writes.refuse_aliases, "first < own_end", "end < first"):
        assert breaks(lambda: is_refused(view))


def test_a_loss_that_keeps_a_view_of_a_weight_is_refused() -> None:
    net = Net()
    kept = net.o.weight.detach()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target) + kept.square().sum()

    with pytest.raises(CaptureError, match=r"used at .*test_unread.py.* shares memory with 'o.weight'"):
        capture(job_of(net, loss=loss))


def test_a_function_that_makes_the_model_may_keep_no_view_either() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.o = nn.Linear(16, 1024), nn.Linear(1024, 5)
            self.w = self.o.weight.detach()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.o(self.a(x)) + self.w.sum()

    with pytest.raises(CaptureError, match=r"shares memory with 'o.weight'"):
        capture(job_of(Wide))  # type: ignore[arg-type]


def test_views_of_frozen_weights_and_copies_are_nobodys_business() -> None:
    frozen = Net(lambda net: net.b.weight.detach())
    frozen.b.requires_grad_(requires_grad=False)
    copied = Net(lambda net: net.a.weight.detach().clone())
    for model in (frozen, copied):
        job = job_of(model)
        assert meshcee.train(job, local=2, stages=2).losses == meshcee.plain(job).losses


class Pseudo(torch.utils.data.Dataset[Any]):
    def __init__(self, net: Net) -> None:
        self.net = net

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Any:
        with torch.no_grad():
            return ROWS[index][0], int(self.net.o.weight[:, 0].argmax())


def attacked(net: Net) -> Callable[[Any], Any]:
    def collate(rows: Any) -> Any:
        x = torch.stack([row[0] for row in rows]).requires_grad_()
        y = torch.tensor([row[1] for row in rows])
        (gradient,) = torch.autograd.grad(F.cross_entropy(net.eval()(x), y), x)
        net.train()
        return (x + 0.1 * gradient.sign()).detach(), y

    return collate


def caught(net: Net) -> Callable[[Any], float]:
    def weight(target: torch.Tensor) -> float:
        try:
            return float(net.o.weight.detach().abs().max()) + len(target)
        except Exception:
            return 1.0

    return weight


def sorted_by(net: Net) -> Callable[[int, int], list[int]]:
    return lambda epoch, seed: sorted(range(32), key=lambda i: float(net.o.weight.detach()[0, i % 16]))


def rate_by(net: Net) -> meshcee.Schedule:
    return meshcee.Schedule("LambdaLR", lr_lambda=lambda step: 1 / (1 + float(net.o.weight.detach().abs().max())))


READERS: dict[str, Callable[[Net], dict[str, Any]]] = {
    "data": lambda net: {"data": Pseudo(net)},
    "collate": lambda net: {"collate": attacked(net)},
    "weight": lambda net: {"weight": caught(net)},
    "sampler": lambda net: {"sampler": sorted_by(net)},
}


@pytest.mark.parametrize("reader", READERS)
def test_a_function_beside_the_model_that_reads_trained_weights_is_refused(reader: str) -> None:
    def story() -> None:
        net = Net()
        with pytest.raises(UsageError, match=rf"{reader}.* reads '[abo].*(weight|bias)', which is trained or written"):
            capture(job_of(net, **READERS[reader](net)))

    story()
    with changed(WeightWatch.named, "in self._storages", "in ()"):
        assert breaks(story)


def test_a_metric_that_reads_trained_weights_is_refused() -> None:
    net = Net()
    job = job_of(net, eval_data=ROWS[:8], metrics={"norm": lambda output, target: float(net.o.weight.norm())})
    with pytest.raises(UsageError, match=r"metric 'norm'.* reads 'o.weight', which is trained or written"):
        meshcee.train(job, local=1)


def test_other_functions_may_read_a_copy_and_what_is_frozen() -> None:
    net = Net()
    net.b.requires_grad_(requires_grad=False)
    teacher = Net()
    scale = np.float32(2.0)

    def collate(rows: Any) -> Any:
        x = torch.stack([row[0] for row in rows])
        with torch.no_grad():
            return teacher.eval()(net.b(x)).detach().repeat(1, 4)[:, :16] * scale, torch.tensor(
                [row[1] for row in rows]
            )

    job = job_of(net, collate=collate)
    assert meshcee.train(job, local=2, stages=2).losses == meshcee.plain(job).losses


FACTOR = {"lam": 1.0}


@pytest.mark.parametrize("where", ["attribute", "global", "data"])
def test_what_data_tells_the_loss_beside_x_and_y_is_refused(where: str) -> None:
    """Mixup's factor, which the loss of a plain loop reads from where `collate` has left it."""

    def story() -> None:
        FACTOR["lam"] = 1.0
        net = Net()
        net.lam = 1.0

        def tell() -> None:
            if where == "attribute":
                net.lam = random.random()
            else:
                FACTOR["lam"] = random.random()

        def collate(rows: Any) -> Any:
            if where != "data":
                tell()
            return torch.stack([row[0] for row in rows]), torch.tensor([row[1] for row in rows])

        class Told(torch.utils.data.Dataset[Any]):
            def __len__(self) -> int:
                return len(ROWS)

            def __getitem__(self, index: int) -> Any:
                if where == "data":
                    tell()
                return ROWS[index]

        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(output, target) * (net.lam if where == "attribute" else FACTOR["lam"])

        with pytest.raises(UsageError, match=r"reading data changes .*lam.* have only x and y: let collate"):
            capture(job_of(net, loss=loss, collate=collate, data=Told()))

    story()
    with changed(refuse_told_beside, "for place in before.changed()", "for place in ()"):
        assert breaks(story)


def test_what_only_data_keeps_may_change() -> None:
    seen: list[int] = []

    def collate(rows: Any) -> Any:
        seen.append(len(rows))
        return torch.stack([row[0] for row in rows]), torch.tensor([row[1] for row in rows])

    job = job_of(Net(), collate=collate)
    assert meshcee.train(job, local=1).losses == meshcee.plain(job).losses


class Experiment:
    """Holds the model, as scripts do; what it gives a job reads no weight."""

    def __init__(self) -> None:
        self.net = Net()

    def accuracy(self, output: torch.Tensor, target: torch.Tensor) -> float:
        return float((output.argmax(-1) == target).float().mean())

    def norm(self, output: torch.Tensor, target: torch.Tensor) -> float:
        return float(self.net.o.weight.norm())

    def collate(self, rows: Any) -> Any:
        x = (
            torch.stack([row[0] for row in rows])
            + self.net.o.weight.new_zeros(1)
            + torch.zeros_like(self.net.o.bias)[:1]
        )
        return x.to(self.net.o.weight), torch.tensor([row[1] for row in rows])


def test_an_object_that_holds_the_model_may_measure_and_collate() -> None:
    own = Experiment()
    options: dict[str, Any] = {"eval_data": ROWS[:8], "collate": own.collate}
    found = meshcee.train(job_of(own.net, metrics={"accuracy": own.accuracy}, **options), local=1)
    assert found.metrics
    with pytest.raises(UsageError, match=r"metric 'norm'.* reads 'o.weight'"):
        meshcee.train(job_of(own.net, metrics={"norm": own.norm}, **options), local=1)


def test_frozen_weights_that_lie_beside_trained_ones_may_be_read() -> None:
    net = Net()
    flat = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    nn.utils.vector_to_parameters(flat, net.parameters())
    net.b.requires_grad_(requires_grad=False)

    def collate(rows: Any) -> Any:
        return net.b(torch.stack([row[0] for row in rows])).detach(), torch.tensor([row[1] for row in rows])

    capture(job_of(net, collate=collate))


def test_what_forward_writes_is_not_for_others_to_read() -> None:
    net = Net()

    def collate(rows: Any) -> Any:
        x = torch.stack([row[0] for row in rows])
        return x * (1 + net.bn.running_mean), torch.tensor([row[1] for row in rows])

    with pytest.raises(UsageError, match=r"Job.collate.* reads 'bn.running_mean'"):
        capture(job_of(net, collate=collate))


def test_a_sampler_and_a_schedule_that_read_weights_later_are_refused_at_once() -> None:
    net = Net()

    def mined(epoch: int, seed: int) -> list[int]:
        if epoch == 0:
            return list(range(16))
        return sorted(range(16), key=lambda i: float(net.o.weight.detach()[0, i]))

    def warmed(step: int) -> float:
        return 0.1 if step < 2 else 1 / (1 + float(net.o.weight.detach().norm()))

    with pytest.raises(UsageError, match=r"the sampler, in data epoch 2.* reads 'o.weight'"):
        capture(job_of(net, sampler=mined, data=ROWS[:16]))
    with pytest.raises(UsageError, match=r"LambdaLR at .* reads 'o.weight'"):
        meshcee.train(job_of(net, schedule=rate_by(net)), local=1)
    with pytest.raises(UsageError, match=r"the schedule, after step 2.* reads 'o.weight'"):
        meshcee.train(job_of(net, schedule=meshcee.Schedule("LambdaLR", lr_lambda=warmed)), local=1)
