"""What is known of devices, links and blocks: the numbers that a planner may use.

The idea: plain frozen values with units in their names, validated on construction, so that an absurd figure from the
network is refused here and nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from meshcee.errors import ProtocolError

__all__ = ["BlockCost", "DeviceProfile", "LinkProfile"]


def _positive(**figures: float) -> None:
    for name, value in figures.items():
        if not math.isfinite(value) or value <= 0:
            raise ProtocolError(f"{name} must be a positive finite number, got {value!r}")


@dataclass(frozen=True)
class DeviceProfile:
    """One device. `speed_flops_per_s` is measured (a matrix product and a small block), never a data sheet's."""

    kind: str  # "cpu", "cuda", "mps"
    name: str  # what the vendor calls it
    memory_bytes: int  # what a stage may use
    speed_flops_per_s: float
    threads: int = 1

    def __post_init__(self) -> None:
        _positive(memory_bytes=self.memory_bytes, speed_flops_per_s=self.speed_flops_per_s, threads=self.threads)


@dataclass(frozen=True)
class LinkProfile:
    """One ordered pair of peers, as measured by the sender."""

    latency_s: float  # one way
    bandwidth_bytes_per_s: float
    measured_at: float = 0.0  # wall clock, seconds since the epoch

    def __post_init__(self) -> None:
        _positive(bandwidth_bytes_per_s=self.bandwidth_bytes_per_s)
        if not math.isfinite(self.latency_s) or self.latency_s < 0:
            raise ProtocolError(f"latency_s must be finite and not negative, got {self.latency_s!r}")


@dataclass(frozen=True)
class BlockCost:
    """The cost of one block for ONE sample of a micro-batch (parameters are per block, whatever the batch).

    `boundary_bytes` is what crosses the cut after this block, forward, per sample; `boundary_grad_bytes` what comes
    back. `activation_bytes` is held from F until W.
    """

    name: str  # the modules it covers, e.g. "h.0" or "wte..h.0"
    flops: float  # forward, per sample
    parameter_bytes: int  # at full precision, trainable and frozen
    trainable_bytes: int
    activation_bytes: int
    boundary_bytes: int
    boundary_grad_bytes: int
    parameters: tuple[str, ...] = field(default=())  # original names
