"""What a user writes to hear of a run while it trains.

The idea: each event is a method that does nothing until a subclass says otherwise. Every event comes once, whatever the mesh has to
do twice. Only steps that an audit has taken back are told anew, and what was asked for in them is forgotten. What a callback wants
of the run it asks of the `Control` that it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from meshcee.callbacks.control import Control

__all__ = ["Callback"]


class Callback:
    """Override what you need. Methods run one after the other in a thread, beside training.

    `waits` says what training waits for. With "evaluations" no step begins before `on_evaluate` has returned, so what it asks
    counts from the next step on, the same in every run. With "steps" that holds for `on_step` as well, and no two steps overlap.
    With "never" training waits for nothing. With `needs_folder`, `meshcee.train` keeps the run, as with `keeps=True`.
    """

    waits: ClassVar[str] = "evaluations"
    needs_folder: ClassVar[bool] = False

    def on_begin(self, run: Control) -> None:
        """Before all else: raise UsageError for what this run lacks. `run.metrics` are those of its evaluations."""

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
