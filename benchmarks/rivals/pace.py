"""An emulated device for programs that are not ours: as long as `peers.device.compute` makes the same work take.

The idea: the real computation is done, then the thread waits until flops / speed seconds have passed since the device was
free. F is paced by a stage's FLOPs, B and W by as many each, as meshcee's executor counts them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

__all__ = ["PacedDevice", "paced"]

TIMER_S = 0.002


class PacedDevice:
    """`begin` before a piece of work, `end(flops)` after it."""

    def __init__(self, speed_flops_per_s: float) -> None:
        self.speed_flops_per_s = speed_flops_per_s
        self.busy_s = 0.0
        self._free_s = 0.0
        self._begun_s = 0.0

    def begin(self) -> None:
        now_s = time.perf_counter()
        self._begun_s = self._free_s if now_s - self._free_s < TIMER_S else now_s

    def end(self, flops: float) -> None:
        seconds = flops / self.speed_flops_per_s
        self.busy_s += seconds
        self._free_s = self._begun_s + seconds
        left_s = self._free_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


class _Mark(Function):
    """The identity; its backward says that the gradient has come this far."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passed: Any) -> Tensor:
        ctx.passed = passed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.passed()
        return gradient, None


class _Paced(nn.Module):
    """A layer whose F takes flops / speed, and whose whole backward twice that."""

    def __init__(self, layer: nn.Module, flops: float, device: PacedDevice) -> None:
        super().__init__()
        self.layer, self._flops, self._device = layer, flops, device

    def forward(self, x: Tensor) -> Tensor:
        device, flops = self._device, self._flops
        device.begin()
        y = self.layer(_Mark.apply(x, lambda: device.end(2 * flops)) if x.requires_grad else x)
        device.end(flops)
        marked: Tensor = _Mark.apply(y, device.begin)
        return marked


def paced(model: nn.Sequential, flops: Sequence[float], device: PacedDevice) -> nn.Sequential:
    """The same layers (and the same parameters), each paced; `flops` of one F for the samples of one call."""
    return nn.Sequential(*(_Paced(layer, work, device) for layer, work in zip(model, flops, strict=True)))
