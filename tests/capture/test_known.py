"""Numbers that follow from fixed numbers alone are what they are in eager mode; what follows from anything else is refused.

The idea: MONAI's Dice sums over `torch.arange(2, dims).tolist()`, and others take weights from `torch.linspace` or leave out a
diagonal by `~torch.eye(d)`. No value of the data is in these. A generated test draws such expressions, with and without data,
weights, buffers and sizes in them.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshcee.errors import CaptureError, MeshceeError
from tests.capture.exactness import WIDTH, difference, job_of

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")  # the drawn models do so

GLOBAL = torch.linspace(0.5, 2.0, 4)


def dice(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The lines of monai.losses.DiceLoss.forward."""
    axes = torch.arange(1, len(output.shape)).tolist()
    truth = target.sigmoid()
    both = torch.sum(output.sigmoid() * truth, dim=axes)
    return (1 - (2 * both + 1e-5) / (output.sigmoid().sum(axes) + truth.sum(axes) + 1e-5)).mean()


def weighted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return sum((float(w) * F.mse_loss(output * (1 + w), target) for w in torch.linspace(0, 1, 3)), output.new_zeros(()))


def of_a_global(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output * int(GLOBAL.sum()), target) * GLOBAL[1].item()


def written(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(4)
    mask[1:3] = 0
    return F.mse_loss(output * int(mask.sum()), target) if bool((mask > 0).any()) else output.sum()


def off_diagonal(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As of VICReg, whose covariance has no size that varies."""
    covariance = output.T @ output / len(output)
    rest = covariance[~torch.eye(WIDTH, dtype=torch.bool)]
    return rest.view(WIDTH, WIDTH - 1).pow(2).mean() + F.mse_loss(output, target)


def columns(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output[:, torch.arange(WIDTH) > 2], target[:, None, torch.arange(WIDTH) > 2, ...][:, 0])


def beside_a_write(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A fixed number is written into what nobody knows."""
    output[:, 0] = 0.5
    return off_diagonal(output, target)


def gaussian(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """It raises where a variance is negative, and clamps them without a gradient."""
    return nn.GaussianNLLLoss(eps=0.5)(output, target, output.exp())


@pytest.mark.parametrize(
    "loss", [dice, weighted, of_a_global, written, off_diagonal, columns, gaussian, beside_a_write]
)
def test_what_follows_from_fixed_numbers_trains(loss: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(1)
    assert difference(job_of(nn.Linear(WIDTH, WIDTH), loss)) == ""


class Averaged(nn.Module):
    """A teacher that follows by functions of lists."""

    def __init__(self, step: Callable[[Any, Any], object]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self._step = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self._step(list(self.teacher.parameters()), list(self.net.parameters()))
            told = self.teacher(x)
        return self.net(x) - 0.1 * told  # type: ignore[no-any-return]


def twice(teacher: Any, net: Any) -> None:
    torch._foreach_mul_(teacher, 0.9)
    torch._foreach_add_(teacher, net, alpha=0.1)


def copied(teacher: Any, net: Any) -> None:
    torch._foreach_copy_(teacher, torch._foreach_mul(net, [0.1 * k for k in range(len(net))]))


@pytest.mark.parametrize("step", [lambda a, b: torch._foreach_lerp_(a, b, 0.1), twice, copied])
def test_functions_of_lists_are_those_of_their_tensors(step: Callable[[Any, Any], object]) -> None:
    torch.manual_seed(1)
    assert difference(job_of(Averaged(step))) == ""


# -- drawn expressions


class Drawn(nn.Module):
    """Its output is multiplied by a Python number that an expression gives, drawn by a seed."""

    FIXED = (
        lambda m, x: torch.arange(6.0),
        lambda m, x: torch.linspace(0.2, 1.7, 6),
        lambda m, x: torch.tensor([0.5, 1.5, -2.0, 0.25, 3.0, 1.0]),
        lambda m, x: torch.eye(6)[2] + 1,
        lambda m, x: torch.full((6,), 1.25),
        lambda m, x: GLOBAL.repeat(2)[:6],
    )
    OTHER = (
        lambda m, x: x[0, :6],
        lambda m, x: m.scale[:6],
        lambda m, x: m.seen[:6],
        lambda m, x: torch.rand(6),
        lambda m, x: torch.full((6,), x.shape[0] * 1.0),
        lambda m, x: torch.zeros(6).add_(x.detach().mean()),
    )
    UNARY = (
        lambda t: t.abs() + 0.1,
        lambda t: t.flip(0),
        lambda t: t.cumsum(0),
        lambda t: t[torch.arange(6) > 1].sum() + t,
        lambda t: torch.where(t > 1, t, t * 2),
        lambda t: t.clone().mul_(0.5),
        lambda t: sum(part.sum() for part in t.split(2)) + t,
        lambda t: t.unbind()[1] + t,
    )
    ASK = (
        lambda t: t.sum().item(),
        lambda t: float(t.mean()),
        lambda t: t.tolist()[3],
        lambda t: int(t.max()) + 1,
        lambda t: 2.0 if bool((t > 0.3).any()) else 0.5,
        lambda t: [1.0, 0.7, 0.4][int(t.argmax()) % 3],
        lambda t: 1.5 if t.sum() > 4 else 0.75,
    )

    def __init__(self, seed: int, share: float) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("seen", torch.ones(WIDTH))
        rng = random.Random(seed)
        self.is_fixed = True
        self.leaves: list[Any] = []
        for _ in range(rng.randint(1, 3)):
            other = rng.random() < share
            self.is_fixed &= not other
            self.leaves.append(rng.choice(self.OTHER if other else self.FIXED))
        self.steps = [rng.choice(self.UNARY) for _ in range(rng.randint(0, 3))]
        self.ask = rng.choice(self.ASK)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = sum((leaf(self, x) for leaf in self.leaves), torch.zeros(6))
        for step in self.steps:
            value = step(value)
        return self.net(x) * self.scale * self.ask(value)  # type: ignore[no-any-return]


def story(seed: int, share: float) -> bool | None:
    """Whether what is trained is equal; None where it is refused."""
    torch.manual_seed(seed)
    model = Drawn(seed, share)
    try:
        return difference(job_of(model), orders=("fused",)) == ""
    except MeshceeError:
        assert not model.is_fixed, "refused, and it follows from fixed numbers alone"
        return None


@pytest.mark.cases(10)
@pytest.mark.parametrize("seed", range(60))
def test_drawn_expressions_of_fixed_numbers_train(seed: int) -> None:
    assert story(seed, share=0.0) is True


@pytest.mark.cases(10)
@pytest.mark.parametrize("seed", range(100, 160))
def test_drawn_expressions_of_anything_else_are_equal_or_refused(seed: int) -> None:
    assert story(seed, share=0.6) is not False


def test_a_number_that_follows_from_the_number_of_samples_is_not_taken_for_a_fixed_one() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x) * float(torch.ones(x.shape[0]).sum())  # type: ignore[no-any-return]

    torch.manual_seed(1)
    with contextlib.suppress(CaptureError):
        assert difference(job_of(Counts())) == ""


def by_batch_norm(h: torch.Tensor) -> torch.Tensor:
    mean, variance = torch.zeros(WIDTH), torch.ones(WIDTH)
    F.batch_norm(h, mean, variance, training=True, momentum=1.0)
    return mean


def by_instance_norm(h: torch.Tensor) -> torch.Tensor:
    mean, variance = torch.zeros(1), torch.ones(1)
    torch.instance_norm(h[:, None], None, None, mean, variance, True, 1.0, 1e-5, False)
    return mean


def by_a_module(h: torch.Tensor) -> torch.Tensor:
    norm = nn.BatchNorm1d(WIDTH, affine=False)
    state = {"running_mean": torch.zeros(WIDTH), "running_var": torch.ones(WIDTH)}
    torch.func.functional_call(norm, state, (h,))
    return state["running_mean"]


@pytest.mark.parametrize("statistics", [by_batch_norm, by_instance_norm, by_a_module])
def test_statistics_that_a_norm_writes_are_no_fixed_numbers(statistics: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The norms' schemas do not say that they write."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.net(x)
            return h * 0.5 if float(statistics(h).max()) > 0.7 else h

    torch.manual_seed(1)
    with pytest.raises(CaptureError, match="made from the values of a tensor"):
        difference(job_of(Branches()))
