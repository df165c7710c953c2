"""What cannot be captured is told with the operation, the line and the way out; what export would leave out is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from meshcee.capture import capture
from meshcee.errors import CaptureError
from meshcee.job import Job, Optimizer

HERE = r"test_refusals\.py:\d+"


class Calls(nn.Module):
    """A linear layer, and then whatever a test wants."""

    def __init__(self, then: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.then = then

    def forward(self, x: torch.Tensor) -> Any:
        return self.then(self.linear, self.linear(x))


def job_of(model: nn.Module) -> Job:
    data = [(torch.randn(4), torch.randn(4)) for _ in range(8)]
    return Job(model=model, loss=F.mse_loss, optimizer=Optimizer("SGD", lr=0.1), data=data, batch_size=4, steps=1)


class Sign(torch.autograd.Function):
    """A sign whose gradient is made up: torch.export would record the sign alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


@torch.library.custom_op("tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def branches(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
    if h.sum() > 0:
        return h
    return -h


def loops(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
    for _ in range(int(h.max().item())):
        h = h + 1
    return h


def prints(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
    print(f"{h.mean():.3f}")
    return h


def hooks(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
    h.register_hook(lambda grad: grad * 2)
    return h


def casts(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return linear(h).float()


def grows(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        linear.weight[0].mul_(0.9)
    return linear(h)


REFUSED = {
    "a parameter written through a view": (
        grows,
        rf"changes parameter 'linear\.weight' in place at .*{HERE} `linear\.w",
    ),
    "a branch on data": (branches, rf"at .*{HERE} `if h\.sum\(\) > 0:`: .*values of a tensor; .*torch\.where"),
    "a loop of .item()": (loops, rf"at .*{HERE} `for _ in range\(int\(h\.max\(\)\.item\(\)\)\):`.*values of a tensor"),
    "a product with .item()": (lambda _, h: h * h.max().item(), rf"aten\.item.*{HERE}.*keep it a tensor"),
    "a print of a value": (prints, rf"{HERE} `print\(.*look at values outside the model"),
    "a numpy call": (
        lambda _, h: h + torch.from_numpy(np.sign(h.detach().numpy())),
        rf"{HERE}.*numpy.*torch functions",
    ),
    "a size that depends on data": (
        lambda _, h: h[h.nonzero()[:, 0]].mean(0) + h,
        rf"aten\.nonzero.*{HERE}.*functions",
    ),
    "sparse tensors": (lambda _, h: h.to_sparse().to_dense(), rf"{HERE}.*to_sparse.*torch functions"),
    "another library's operator": (lambda _, h: twice(h), rf"operation tests\.twice\.default at .*{HERE}.*allow-list"),
    "a fixed batch size": (lambda _, h: h.view(3, 4), rf"{HERE} .*h\.view\(3, 4\).*fixes a size.*x\.shape"),
    "a size that mixes samples": (lambda _, h: h.flatten()[1:].mean() + h, rf"operation .*{HERE}.*keep samples apart"),
    "a parameter's .data": (lambda linear, h: F.linear(h, linear.weight.data), r"\.data is used.*\.detach\(\)"),
    "autocast": (casts, rf"autocast is on at .*{HERE}.*precision='bf16'"),
    "a custom autograd.Function": (lambda _, h: Sign.apply(h), rf"autograd\.Function .*Sign at .*{HERE}.*own backward"),
    "a hook on a gradient": (hooks, rf"register_hook is called at .*{HERE} .*run no hooks"),
    "Python's random": (lambda _, h: h * random.random(), r"draws from Python's random.*torch\.rand"),
    "numpy's random": (lambda _, h: h * float(np.random.rand()), r"draws from Python's numpy\.random.*torch\.rand"),
    "a re-entrant checkpoint": (
        lambda linear, h: torch.utils.checkpoint.checkpoint(linear, h, use_reentrant=True),
        r"use_reentrant=False, or use Job\(recompute=True\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_says_what_where_and_what_to_do(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    then, message = REFUSED[name]
    with pytest.raises(CaptureError, match=message) as raised:
        capture(job_of(Calls(then)))
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")  # torch has nothing to add


def test_hooks_that_are_there_before_are_refused() -> None:
    on_parameter = nn.Linear(4, 4)
    on_parameter.weight.register_hook(lambda grad: grad * 2)
    after = nn.Linear(4, 4)
    after.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    on_module = nn.Sequential(nn.Linear(4, 4))
    on_module[0].register_full_backward_hook(lambda module, given, made: None)
    for model, name in ((on_parameter, "parameter 'weight'"), (after, "parameter 'weight'"), (on_module, "module '0'")):
        with pytest.raises(CaptureError, match=rf"{name} has a .*hook.* remove the hook"):
            capture(job_of(model))


def transposed(model: nn.Module, weight: torch.Tensor) -> None:
    model.other = nn.Parameter(weight.t())


def sliced(model: nn.Module, weight: torch.Tensor) -> None:
    model.register_buffer("other", weight.detach()[1:])


def expanded(model: nn.Module, weight: torch.Tensor) -> None:
    model.other = nn.Parameter(torch.zeros(1, 4).expand(4, 4))


@pytest.mark.parametrize("share", [transposed, sliced, expanded])
def test_memory_that_two_have_and_training_changes(share: Callable[[nn.Module, torch.Tensor], None]) -> None:
    model = Calls(lambda _, h: h + model.get_submodule("").__getattr__("other").sum())
    share(model, model.linear.weight)
    with pytest.raises(CaptureError, match=r"'(other|linear.weight)' shares memory with .* in forward"):
        capture(job_of(model))


def test_slices_of_one_flat_tensor_are_parameters_like_others() -> None:
    model = nn.Linear(4, 4)
    flat = torch.randn(4, 5)
    model.weight, model.bias = nn.Parameter(flat[:, :4]), nn.Parameter(flat[:, 4])
    assert capture(job_of(model)).param_order == ("weight", "bias")


def test_what_changes_no_number_is_captured() -> None:
    def checkpointed(linear: nn.Module, h: torch.Tensor) -> torch.Tensor:
        print("here")
        return torch.utils.checkpoint.checkpoint(linear, h, use_reentrant=False)

    program = capture(job_of(Calls(checkpointed))).train
    assert [node.operator.name for node in program.nodes].count("aten.linear.default") == 2
