"""The picture of a captured model: `meshcee capture --html`.

The idea: blocks with what each costs, drawn by the page that draws runs and plans. A name in it is the user's own text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshcee.figures import BlockCost
from meshcee.picture.values import Picture

__all__ = ["picture_of_capture"]


def picture_of_capture(costs: Sequence[BlockCost], at: float) -> Picture:
    """In the order of the model."""
    return Picture(at=at, blocks=tuple(replace(cost, parameters=()) for cost in costs))
