"""AdamW that keeps its two moments in 8 bits each: 2 bytes of a parameter in place of 8.

The idea: a moment is codes of one byte, and a scale for each block of 256 numbers. Code c stands for (c / n) ** 4 of the scale, so
small numbers beside large ones are not lost. Moments are read in full, updated as torch's AdamW updates them, used, and stored
again. A number between two codes becomes the upper one as often as it is near to it. Rounded to the nearest, a mean that changes by
a thousandth in a step would stand still. A sequence of the step and the place decides, no generator. All are plain operators of
torch, in one order, so the same bits come out wherever a kernel class is the same.

Moments in blocks are those of Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861, section 2. Their
codes are others and are rounded to the nearest, so bits differ from those of bitsandbytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

__all__ = ["BLOCK", "SMALLEST", "AdamW8bit", "first_state"]

BLOCK = 256  # numbers that share a scale
SMALLEST = 4096  # numbers; the moments of a smaller parameter are kept in full
PIECE = 1 << 16  # numbers that are updated at a time: they stay in a CPU's cache, and nothing is in full for longer
SCALES = "_scales"  # behind the name of a moment
LARGEST = torch.finfo(torch.float32).max
# Multiples of the golden ratio's fraction, and of its square's, are spread as evenly as can be.
PLACE, STEP, RANGE = 0x9E3779, 0x61C887, 1 << 24


class AdamW8bit(torch.optim.Optimizer):
    """torch.optim.AdamW with moments in 8 bits, for loops of your own and, by its name, for `meshcee.Optimizer`.

    >>> meshcee.Optimizer("AdamW8bit", lr=3e-4)

    lr, betas, eps and weight_decay are AdamW's, for each group as well. The state of a parameter of n numbers is `step`, the
    codes `exp_avg` (int8) and `exp_avg_sq` (uint8) in the parameter's shape, and of each the scales (float32, of ceil(n / 256)).
    Below 4,096 numbers both moments are float32.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if unknown := sorted(set(param_group) - {"params", "param_names", *self.defaults}):
            raise TypeError(f"there is no option {unknown[0]}")
        options = {**self.defaults, **param_group}
        for name in ("lr", "eps", "weight_decay"):
            if not options[name] >= 0:
                raise ValueError(f"{name} is {options[name]}: it may not be below 0")
        if len(options["betas"]) != 2 or not all(0 <= beta < 1 for beta in options["betas"]):
            raise ValueError(f"betas are {options['betas']}: give two numbers from 0 to below 1")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(_real(parameter), _real(parameter.grad), self.state[parameter], group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.put_back(state_dict, self.param_groups)

    def put_back(self, state_dict: dict[str, Any], groups: Iterable[dict[str, Any]]) -> None:
        """What torch's own `load_state_dict` has cast to the types of parameters, as it was; `groups` are those of the state."""
        saved = [k for group in state_dict["param_groups"] for k in group["params"]]
        every = [parameter for group in groups for parameter in group["params"]]
        own = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        for k, parameter in zip(saved, every, strict=True):
            for name, value in state_dict["state"].get(k, {}).items() if id(parameter) in own else ():
                device = "cpu" if name == "step" else parameter.device
                self.state[parameter][name] = value.detach().to(device, copy=True)


def first_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Before its first step. It costs no more than the tensors that are made: on the meta device nothing."""
    parameter = _real(parameter)
    step = torch.tensor(0.0, dtype=torch.float32)
    return {"step": step} | _zeros("exp_avg", parameter) | _zeros("exp_avg_sq", parameter)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Of a complex number both are updated alone, as by AdamW."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _update(
    parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], options: dict[str, Any]
) -> None:
    if not state:
        state |= first_state(parameter)
    state["step"] += 1
    count = int(state["step"].item())
    beta1, beta2 = options["betas"]
    correction1, correction2 = 1 - beta1**count, math.sqrt(1 - beta2**count)
    with _flat(parameter) as numbers, _flat(state["exp_avg"]) as mean, _flat(state["exp_avg_sq"]) as square:
        grads = gradient.contiguous().view(-1)
        scales = state.get("exp_avg" + SCALES), state.get("exp_avg_sq" + SCALES)
        for begin in range(0, len(numbers), PIECE):
            place = slice(begin, begin + PIECE)
            blocks = slice(begin // BLOCK, (begin + PIECE) // BLOCK)
            of_m, of_v = (None if every is None else every[blocks] for every in scales)
            grad = grads[place].float()
            m, v = _read(mean[place], of_m), _read(square[place], of_v)
            m.lerp_(grad, 1 - beta1)
            # An infinite mean of squares would leave nothing of its block.
            v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2).clamp_(max=LARGEST)
            numbers[place].mul_(1 - options["lr"] * options["weight_decay"])
            denominator = v.sqrt().div_(correction2).add_(options["eps"])
            numbers[place].add_((m / denominator).mul_(-options["lr"] / correction1))
            if of_m is not None and of_v is not None:
                threshold = _thresholds(len(grad), begin, count, grad.device)
                _write(mean[place], of_m, m, threshold)
                _write(square[place], of_v, v, 1 - threshold)


def _zeros(name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    if parameter.numel() < SMALLEST:
        return {name: torch.zeros_like(parameter, dtype=torch.float32)}
    kind = torch.int8 if name == "exp_avg" else torch.uint8
    scales = torch.zeros(math.ceil(parameter.numel() / BLOCK), dtype=torch.float32, device=parameter.device)
    return {name: torch.zeros_like(parameter, dtype=kind), name + SCALES: scales}


@contextmanager
def _flat(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Its numbers in a row, to be changed, however they lie in memory."""
    numbers = tensor.contiguous().view(-1)
    yield numbers
    if not tensor.is_contiguous():
        tensor.copy_(numbers.view(tensor.shape))


def _read(codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """A moment in full; what has no scales is full."""
    if scales is None:
        return codes
    root = codes.float() / torch.iinfo(codes.dtype).max
    numbers = _in_blocks(_fourth_power(root).copysign(root))
    return (numbers * scales[:, None]).view(-1)[: len(codes)]


def _write(codes: torch.Tensor, scales: torch.Tensor, moment: torch.Tensor, threshold: torch.Tensor) -> None:
    """A mean of squares that is not 0 stays so: as 0 beside a mean that is not 0 it could make a step of any size."""
    most = torch.iinfo(codes.dtype).max
    blocks = _in_blocks(moment)
    scales.copy_(blocks.abs().amax(1))
    parts = (blocks / torch.where(scales > 0, scales, 1.0)[:, None]).view(-1)[: len(moment)]
    sizes = parts.abs()
    lower = (sizes.sqrt().sqrt() * most).floor()
    below, above = _fourth_power(lower / most), _fourth_power((lower + 1) / most)
    found = lower + ((sizes - below) / (above - below) > threshold)
    if codes.dtype == torch.uint8:
        found = torch.where(sizes > 0, found.clamp(min=1), 0.0)
    codes.copy_(found.clamp(max=most).copysign(parts))


def _fourth_power(x: torch.Tensor) -> torch.Tensor:
    square = x * x
    return square * square


def _in_blocks(flat: torch.Tensor) -> torch.Tensor:
    return F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


def _thresholds(count: int, begin: int, step: int, device: torch.device) -> torch.Tensor:
    """Numbers from 0 to below 1, for places from `begin` on: at each place they fill that range evenly as steps go by."""
    shifted = _places(device)[:count] + (begin * PLACE + step * STEP) % RANGE
    return (shifted % RANGE).float() / RANGE


@functools.lru_cache
def _places(device: torch.device) -> torch.Tensor:
    return (torch.arange(PIECE, device=device) * PLACE % RANGE).int()
