"""The local zero-bubble rule: what a stage does next, from nothing but what has arrived.

The idea: B as soon as its gradient is there, since another stage waits for it; F while few micro-batches are in
flight; W whenever nothing else can run. Each kind runs in micro order, so sums have one order.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshcee.schedule.actions import Kind

__all__ = ["StageView", "choose"]


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
    full = view.forwards - view.weights >= view.live_cap
    if full and view.weight_here:
        return Kind.W
    if view.gradient_here:
        return Kind.B
    if view.input_here and not full and view.forwards - view.backwards < view.window:
        return Kind.F
    if view.weight_here:
        return Kind.W
    return None
