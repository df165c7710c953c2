"""What a user writes to hear of a run while it trains.

The idea: each event is a method that does nothing until a subclass says otherwise. Every event comes once, whatever the mesh has to
do twice; what a callback wants of the run it asks of the `Control` that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from meshcee.callbacks.control import Control
from meshcee.errors import UsageError

__all__ = ["Callback", "called"]


class Callback:
    """Override what you need. Methods run one after the other in a thread, beside training.

    `waits` says what training waits for. With "evaluations" no step begins before `on_evaluate` has returned, so what it asks
    counts from the next step on, the same in every run. With "steps" that holds for `on_step` as well, and no two steps overlap.
    With "never" training waits for nothing.
    """

    waits: ClassVar[str] = "evaluations"

    def on_plan(self, run: Control, plan: Any) -> None:
        """The first plan: a meshcee Plan, as `result.plan`."""

    def on_step(self, run: Control, report: Any) -> None:
        """A step is done: its Report, as `async for` gives it."""

    def on_evaluate(self, run: Control, report: Any) -> None:
        """So is the evaluation behind a step: `report.metrics` is not empty. After `on_step`."""

    def on_checkpoint(self, run: Control, steps: int, folder: Path) -> None:
        """The state after so many steps is on the disk."""

    def on_loss(self, run: Control, error: str, peers: Sequence[str]) -> None:
        """Peers were lost, by their names; the run goes on without them, or ends."""

    def on_change(self, run: Control, plan: Any) -> None:
        """Another plan goes on."""

    def on_resume(self, run: Control, reports: Sequence[Mapping[str, Any]]) -> None:
        """The run was begun before: what it reported, as JSON objects. What was asked of it then need not be asked again."""

    def on_end(self, run: Control, result: Any, error: str | None) -> None:
        """It is over: the Result, and what ended it early. Not where `async for` is left, or a second Ctrl-C ends it."""


class _Each(Callback):
    """A function that hears of every step."""

    waits = "never"

    def __init__(self, call: Callable[[Control, Any], object]) -> None:
        self._call = call

    def on_step(self, run: Control, report: Any) -> None:
        self._call(run, report)


def called(callbacks: Any) -> tuple[Callback, ...]:
    """Callbacks from what a user gives. A function (run, report) hears of each step; a text names a logger."""
    if not isinstance(callbacks, list | tuple):
        raise UsageError("callbacks is a list: callbacks=[meshcee.EarlyStop()]")
    found = []
    for one in callbacks:
        if isinstance(one, Callback):
            if one.waits not in ("steps", "evaluations", "never"):
                raise UsageError(
                    f"{type(one).__name__}.waits is 'steps', 'evaluations' or 'never', not {one.waits!r:.40}"
                )
            found.append(one)
        elif isinstance(one, str):
            from meshcee.callbacks.loggers import logger

            found.append(logger(one))
        elif callable(one) and not isinstance(one, type):
            found.append(_Each(one))
        else:
            raise UsageError(
                f"a callback is a meshcee.Callback or a function of (run, report), or names a logger, not {one!r:.80}"
            )
    return tuple(found)
