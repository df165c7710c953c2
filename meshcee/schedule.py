"""The local zero-bubble rule: what a stage does next, from nothing but what has arrived.

The idea: B as soon as its gradient is there, since another stage waits for it; F while few micro-batches are in
flight; W whenever nothing else can run. Each kind runs in micro order, so sums have one order.

W's that are put off are not lost. A stage runs them while it waits for the commit of this step and the first F of the
next, time that nothing else could fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Kind", "StageView", "choose", "residence_s"]


class Kind(StrEnum):
    """F forward, B input-gradient, W weight-gradient."""

    F = "F"
    B = "B"
    W = "W"


@dataclass(frozen=True)
class StageView:
    """What one stage sees within a step. `window` bounds F to B, `live_cap` F to W, both in micro-batches."""

    num_micro: int
    forwards: int  # F's done
    backwards: int
    weights: int
    input_here: bool  # the next F could run
    gradient_here: bool  # the next B could run
    weight_here: bool  # the next W could run
    window: int
    live_cap: int


def choose(view: StageView) -> Kind | None:
    """The next kind of work, or None when the stage must wait."""
    if view.gradient_here:
        return Kind.B
    in_flight = view.forwards - view.backwards
    if view.input_here and in_flight < view.window and view.forwards - view.weights < view.live_cap:
        return Kind.F
    return Kind.W if view.weight_here else None


def residence_s(stages_s: Sequence[float], boundaries_s: Sequence[float]) -> list[float]:
    """R_j: how long a micro-batch takes from its F at stage j to the end of its B there, with nothing in its way.

    stages_s      f + b of each stage
    boundaries_s  latency and occupancy, there and back, of each boundary
    """
    residence = [0.0] * len(stages_s)
    for j in range(len(stages_s) - 1, -1, -1):
        residence[j] = stages_s[j] + (boundaries_s[j] + residence[j + 1] if j < len(boundaries_s) else 0.0)
    return residence
