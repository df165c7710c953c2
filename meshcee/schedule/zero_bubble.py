"""The local zero-bubble rule: what a stage does next, from nothing but what has arrived.

The idea: B as soon as its gradient is there, since another stage waits for it; F while few micro-batches are in
flight; W whenever nothing else can run. Each kind runs in micro order, so sums have one order.

W's that are put off are not lost: a stage runs them while it waits for the commit of this step and the first F of the
next, time that nothing else could fill. A second, softer window, above which W goes before F, saves memory where memory
is short and costs up to a tenth of the speed (docs/simulator.md); it is off unless it is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshcee.schedule.actions import Kind

__all__ = ["StageView", "choose", "hard_window", "period_s", "residence_s", "soft_window"]


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
    soft: int | None = None  # in flight above which W goes before F; None: the window


def choose(view: StageView) -> Kind | None:
    """The next kind of work, or None when the stage must wait."""
    if view.gradient_here:
        return Kind.B
    in_flight = view.forwards - view.backwards
    may = view.input_here and in_flight < view.window and view.forwards - view.weights < view.live_cap
    if may and (view.soft is None or in_flight < view.soft):
        return Kind.F
    if view.weight_here:
        return Kind.W
    return Kind.F if may else None


def period_s(stages_s: Sequence[float], occupancies_s: Sequence[float]) -> float:
    """T: the time between micro-batches once the pipeline is full. Latency does not enter.

    stages_s       f + b + w of each stage
    occupancies_s  bytes over bandwidth of each boundary and direction
    """
    return max(*stages_s, *occupancies_s, 0.0)


def residence_s(stages_s: Sequence[float], boundaries_s: Sequence[float]) -> list[float]:
    """R_j: how long a micro-batch takes from its F at stage j to the end of its B there, with nothing in its way.

    stages_s      f + b of each stage
    boundaries_s  latency and occupancy, there and back, of each boundary
    """
    residence = [0.0] * len(stages_s)
    for j in range(len(stages_s) - 1, -1, -1):
        residence[j] = stages_s[j] + (boundaries_s[j] + residence[j + 1] if j < len(boundaries_s) else 0.0)
    return residence


def soft_window(residence: float, period: float) -> int:
    """Micro-batches that fill the pipeline from here on, by Little's law, and one more."""
    return math.ceil(residence / period - 1e-9) + 1


def hard_window(residence: float, period: float) -> int:
    """Twice as many, and two: room for jitter."""
    return math.ceil(2 * residence / period - 1e-9) + 2
