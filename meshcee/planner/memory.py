"""What a stage needs of its device's memory, in one place.

The idea: 16 bytes a trainable parameter, whatever the precision (fp32: weight, gradient and two moments; bf16: weight
and gradient at two bytes, master and moments at four), plus what every live micro-batch keeps from its F to its W.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshcee.profile import BlockCost

__all__ = ["STATE_FACTOR", "activation_bytes", "stage_bytes", "state_bytes"]

STATE_FACTOR = 4  # 16 bytes for each four of an fp32 parameter


def state_bytes(costs: Sequence[BlockCost]) -> int:
    """Parameters, gradients and moments of these blocks, held all the time."""
    return sum(STATE_FACTOR * c.trainable_bytes + (c.parameter_bytes - c.trainable_bytes) for c in costs)


def activation_bytes(costs: Sequence[BlockCost], samples: int) -> int:
    """What one micro-batch of this many samples keeps from F to W."""
    return samples * sum(c.activation_bytes for c in costs)


def stage_bytes(costs: Sequence[BlockCost], samples: int, live: int) -> int:
    """Everything, with `live` micro-batches between F and W."""
    return state_bytes(costs) + live * activation_bytes(costs, samples)
