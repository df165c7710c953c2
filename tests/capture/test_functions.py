"""The user's autograd.Functions: traced with their backward pass, and trained as in eager code, wherever a stage begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshcee
from meshcee.capture.export.functions import traced_functions
from meshcee.errors import CaptureError
from tests.rig.habits import job_of
from tests.rig.habits.gradients import through

STEPS = 2


@pytest.mark.parametrize("settings", [{}, {"recompute": True}, {"precision": "bf16"}], ids=str)
@pytest.mark.parametrize("name", ["CustomFunctions", "CodeBook"])
def test_functions_train_as_in_the_plain_loop_on_any_number_of_stages(name: str, settings: dict[str, Any]) -> None:
    found = meshcee.check(dataclasses.replace(job_of(name), **settings), stages=(1, 2, 3, 5), steps=STEPS)
    assert found.equal, found.differs


def test_peers_train_a_function_and_none_of_its_code() -> None:
    job = dataclasses.replace(job_of("CustomFunctions"), adapt=False)
    result, plain = meshcee.train(job, local=3), meshcee.plain(job)
    assert result.losses == plain.losses
    assert all(torch.equal(plain.state_dict[name], tensor) for name, tensor in result.state_dict.items())


class Doubled(torch.autograd.Function):
    """What the functions below have in common."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return 2 * grad


class InPlace(Doubled):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.mark_dirty(x)
        return x.mul_(2)


class Unmade(Doubled):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return 2 * x, 3 * x


class Written(Doubled):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.mul_(2)


class Drawn(Doubled):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad + torch.rand_like(grad)


class Summed(Doubled):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.sum(1)


class Chosen(Doubled):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad if grad.sum() > 0 else 2 * grad


class Differentiated(Doubled):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            return torch.autograd.grad(x.sin().sum(), x)


COUNTED = {"calls": 0}
calls = 0


class Average(Doubled):
    """Gradients are divided by their running mean."""

    mean: Any = None

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        now = grad.abs().mean()
        Average.mean = now if Average.mean is None else 0.9 * Average.mean + 0.1 * now
        return grad / Average.mean


class Reached(Doubled):
    mean = torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        Reached.mean = 0.9 * Reached.mean + 0.1 * grad.abs().mean()
        return grad * (1 + Reached.mean)


class Counted(Doubled):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        COUNTED["calls"] += 1
        return grad if COUNTED["calls"] < 200 else 2 * grad


class Global(Doubled):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        global calls
        calls += 1
        return grad if calls < 200 else 2 * grad


class Default(Doubled):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, seen: list[int] = []) -> Any:  # noqa: B006
        seen.append(1)
        return grad if len(seen) < 200 else 2 * grad


class Scheduled(Doubled):
    """Its second input is an object that counts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, schedule: Any = None) -> Any:
        ctx.schedule = schedule
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.schedule.step += 1
        return grad / ctx.schedule.step, None


class Schedule:
    step = 1


class Nothing(Doubled):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None


HERE = r"test_functions\.py:\d+"
REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a function that changes its input": (
        lambda h: InPlace.apply(h + 0),
        rf"InPlace at .*{HERE}.*return a new tensor",
    ),
    "a function that wants None": (
        lambda h: sum(Unmade.apply(h)),
        rf"Unmade at .*{HERE}.*leave set_materialize_grads out",
    ),
    "a backward that writes": (lambda h: Written.apply(h), rf"in place .*mul_.* at .*{HERE} .*clone\(\) of it"),
    "a mean that backward keeps": (Average.apply, rf"Average at .*{HERE}.*changes attribute 'mean' of class Average"),
    "a mean that was there": (Reached.apply, rf"Reached at .*{HERE}.*changes attribute 'mean' of class Reached"),
    "a counter in a dict": (Counted.apply, r"changes \['calls'\] of the global 'COUNTED'"),
    "a counter": (Global.apply, r"changes the global 'calls'"),
    "a list that is a default": (Default.apply, r"changes default 0 of backward"),
    "an object that is given": (lambda h: Scheduled.apply(h, Schedule()), r"changes attribute 'step' of"),
    "a backward without gradients": (Nothing.apply, rf"Nothing at .*{HERE}.*write x\.detach\(\) in its place"),
    "a backward that draws": (lambda h: Drawn.apply(h), rf"draws random numbers at .*{HERE} .*draw them in forward"),
    "a backward of another shape": (
        lambda h: Summed.apply(h),
        rf"at .*{HERE} .*makes a gradient of \[2\] for an input of",
    ),
    "a backward that branches": (lambda h: Chosen.apply(h), rf"at .*{HERE} .*write a branch with torch\.where"),
    "a backward that differentiates": (lambda h: Differentiated.apply(h), rf"computes a gradient .* at .*{HERE}"),
}


class Applied(nn.Module):
    def __init__(self, then: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(4, 1), then

    def forward(self, x: torch.Tensor) -> Any:
        return self.then(self.linear(x))


@pytest.mark.parametrize("what", REFUSED)
def test_another_function_is_refused(what: str) -> None:
    then, message = REFUSED[what]
    with pytest.raises(CaptureError, match=message):
        meshcee.capture(small(Applied(then)))


def test_what_backward_has_changed_while_it_was_traced_is_put_back() -> None:
    for function in (Average, Reached, Counted, Global, Default):
        with pytest.raises(CaptureError):
            meshcee.capture(small(Applied(function.apply)))
    assert Average.mean is None
    assert torch.equal(Reached.mean, torch.zeros(()))
    assert (COUNTED, calls, Default.backward.__defaults__) == ({"calls": 0}, 0, ([],))


class Converted(torch.autograd.Function):
    """As published norms do: in full precision, whatever comes. Torch gives a tensor itself where it is so already."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        full = x.float()
        ctx.save_for_backward(full, weight)
        return full * weight.float()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        rows = grad.view(-1, grad.shape[-1]) * x.float().reshape(-1, grad.shape[-1])
        return grad * weight.float(), rows.sum(0)


class Dropped(torch.autograd.Function):
    """Evaluation leaves nothing for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
        if not training:
            return x
        ctx.mask = torch.empty_like(x).bernoulli_(1 - p) / (1 - p)
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.mask, None, None


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight, self.mix, self.last = (
            nn.Linear(4, 4),
            nn.Parameter(torch.ones(4)),
            nn.Linear(3, 3),
            nn.Linear(4, 1),
        )

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x).unsqueeze(1) * torch.arange(1.0, 4.0).view(3, 1)
        h = h + Converted.apply(h, self.weight)
        h = self.mix(h.transpose(1, 2)).transpose(1, 2)  # gradients arrive transposed
        return self.last(Dropped.apply(h, 0.1, self.training).mean(1))


def test_conversions_that_do_nothing_strides_and_evaluations() -> None:
    job = small(Norms())
    job = dataclasses.replace(job, steps=2, micro_batch_size=2, eval_data=job.data, eval_every=1)
    found = meshcee.check(job, stages=(1, 2, 3), steps=2)
    assert found.equal, found.differs


def small(model: nn.Module) -> meshcee.Job:
    data = [(torch.randn(4), torch.randn(1)) for _ in range(8)]
    return meshcee.Job(
        model=model, loss=F.mse_loss, data=data, optimizer=meshcee.Optimizer("SGD", lr=0.1), batch_size=4, steps=1
    )


def test_apply_is_torchs_own_again_after_an_error() -> None:
    with pytest.raises(CaptureError):
        meshcee.capture(small(Applied(lambda h: through(h) * float(h.sum()))))
    weight = torch.tensor([0.5, 2.0], requires_grad=True)
    through(weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 0.0]
    assert type(through(weight).grad_fn).__name__ == "StraightThroughBackward"


def test_apply_is_torchs_own_in_other_threads_and_in_all_of_them_at_the_end() -> None:
    def gradient() -> list[float]:
        weight = torch.tensor([0.5, 2.0], requires_grad=True)
        through(weight).sum().backward()
        assert weight.grad is not None
        return weight.grad.tolist()

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        first, second = traced_functions(), traced_functions()
        one.submit(first.__enter__).result(60)
        two.submit(second.__enter__).result(60)
        assert gradient() == [1.0, 0.0]
        one.submit(first.__exit__, None, None, None).result(60)
        assert gradient() == one.submit(gradient).result(60) == [1.0, 0.0]
        assert through(torch.ones(1)).item() == 1.0
        two.submit(second.__exit__, None, None, None).result(60)
        assert two.submit(gradient).result(60) == gradient() == [1.0, 0.0]
