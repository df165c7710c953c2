"""What callbacks have asked of a run: an end, evaluations, checkpoints, other learning rates.

The idea: a wish counts from the first step that has not begun, so what was computed stays true. Changes of the learning rate are
numbers that a run writes down beside its losses: a step that is computed again, by whatever owner, has the rate that it had. So are
evaluations and checkpoints that were asked for: an owner that comes later makes them, too.
"""

from __future__ import annotations

import math
import threading
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from meshcee.errors import UsageError

__all__ = ["Change", "Control"]

WISHES = frozenset({"lr_changes", "evaluations", "checkpoints", "kept_checkpoints", "stops"})  # in a report


class Change(NamedTuple):
    """From this step on every group's rate is multiplied, and then raised to `least`; a rate that is lowered is never raised."""

    step: int
    times: float
    least: float


class Control:
    """Of one run, by its job's name; `metrics` are those that its evaluations have. All threads may ask at any time.

    `id`: the run's, from `on_resume` or the first step on. `saves`: the run has a folder. `evaluates`: it evaluates before its
    last step, whoever asks for it.
    """

    terms: tuple[str, ...] = ()  # what each step tells of beside the loss, from `on_resume` and `on_plan` on

    def __init__(
        self, name: str = "job", *, metrics: Sequence[str] = (), saves: bool = False, evaluates: bool = True
    ) -> None:
        self.name, self.metrics, self.saves, self.evaluates = name, tuple(metrics), saves, evaluates
        self.id: str | None = None
        self._lock = threading.Lock()
        self._next = 0
        self._changes: list[Change] = []  # by step
        self._news: dict[str, Any] = {}  # that belong to no report yet
        self._told: dict[int, Mapping[str, Any]] = {}  # of reports with wishes, by step
        self._evaluations: set[int] = set()
        self._checkpoints: set[int] = set()
        self._settled: set[int] = set()  # of these: nothing is to be told of them any more
        self._spared: list[int] = []
        self._stops = False

    # -- for callbacks

    @property
    def next_step(self) -> int:
        """The first step that has not begun: what is asked now counts for it."""
        return self._next

    def stop(self) -> None:
        """End after the steps that have begun, with everything saved."""
        with self._lock:
            self._stops = self._news["stops"] = True

    def evaluate(self) -> None:
        """Evaluate after the next step that begins."""
        if not self.metrics:
            raise UsageError("a callback asks for an evaluation: give the job eval_data")
        with self._lock:
            self._evaluations.add(self._next)
            self._note("evaluations", self._next)

    def checkpoint(self, *, keep: bool = False) -> None:
        """Save the state before the next step that begins. `keep`: it outlives newer ones, until the next that is kept."""
        self._check_saves()
        with self._lock:
            self._checkpoints.add(self._next)
            self._note("checkpoints", self._next)
            if keep:
                self._spare(self._next)

    def keep(self, steps: int) -> None:
        """The checkpoint after so many steps outlives newer ones, until the next that is kept."""
        self._check_saves()
        if not isinstance(steps, int) or steps < 0:
            raise UsageError(f"keep({steps!r:.40}): a number of steps")
        with self._lock:
            self._spare(steps)

    def scale_lr(self, times: float, *, least: float = 0.0, step: int | None = None) -> int:
        """Multiply every rate that the schedule gives, from this step or the next that begins; it goes no lower than `least`.

        A rate that is below `least` already stays, where `times` is below 1. Returns the step. Changes add up, in the order of
        their steps.
        """
        if not (isinstance(times, Real) and isinstance(least, Real) and 0 < times < math.inf and 0 <= least < math.inf):
            raise UsageError(f"scale_lr({times!r:.40}, least={least!r:.40}): a positive factor, and a rate")
        return self._change(step, times, least)

    def set_lr(self, lr: float, *, step: int | None = None) -> int:
        """Give every group this rate to the end, from this step or the next that begins: a schedule counts no more.

        In torch's loop a schedule goes on from what `param_groups` are given, or overwrites it. To keep a schedule, multiply its
        rates by `scale_lr`. Returns the step.
        """
        if not (isinstance(lr, Real) and 0 <= lr < math.inf):
            raise UsageError(f"set_lr({lr!r:.40}): a rate is a number, and not negative")
        return self._change(step, 0.0, lr)

    def _change(self, step: int | None, times: float, least: float) -> int:
        with self._lock:
            begins = self._next if step is None else step
            if begins < self._next:
                raise UsageError(f"the rate of step {begins + 1} was to change, but step {self._next} has begun")
            change = Change(begins, float(times), float(least))
            insort(self._changes, change, key=lambda known: known.step)
            self._note("lr_changes", change)
        return begins

    def _spare(self, steps: int) -> None:
        self._spared.append(steps)
        self._note("kept_checkpoints", steps)

    def _note(self, what: str, wish: Any) -> None:
        found = self._news.setdefault(what, [])
        if found[-1:] != [wish] or what == "lr_changes":  # two equal changes multiply a rate twice
            found.append(wish)

    def _check_saves(self) -> None:
        if not self.saves:
            raise UsageError(
                "a checkpoint is asked for, and this run has no folder: join a mesh, use the command line, or say keeps=True"
            )

    # -- for the owner

    def begin(self, step: int) -> None:
        """What is asked from now on counts for later steps."""
        with self._lock:
            self._next = max(self._next, step + 1)

    def options(self, step: int, groups: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
        """What each group is stepped with, of what the schedule gives."""
        with self._lock:
            changes: list[Change] = []
            for change in reversed(self._changes):
                if change.step <= step:
                    changes.insert(0, change)
                    if not change.times:
                        break
        found = [dict(group) for group in groups]
        for group in found if changes else ():
            for change in changes:
                lr = max(group["lr"] * change.times, change.least)
                if lr < group["lr"] or not 0 < change.times < 1:  # as torch's ReduceLROnPlateau, with eps=0
                    group["lr"] = lr
        return tuple(found)

    def is_set(self, step: int) -> bool:
        """Whether the rates of this step are those of `set_lr`, whatever the schedule says."""
        with self._lock:
            return any(not change.times for change in self._changes if change.step <= step)

    def evaluates_after(self, step: int) -> bool:
        return step in self._evaluations

    def saves_before(self, step: int) -> bool:
        return step in self._checkpoints

    def passed_over(self, made: Sequence[int]) -> list[int]:
        """Checkpoints that were asked for, and in whose place only newer ones were made, by their steps. Each is given once."""
        with self._lock:
            passed = {step for step in self._checkpoints - self._settled if step < max(made, default=0)}
            self._settled |= passed
        return sorted(passed - {*made})

    def put_off(self, step: int) -> bool:
        """Members have no room for a copy before this step: the next will do. Whether this state was to be kept; no other is."""
        with self._lock:
            if step in self._checkpoints:
                self._checkpoints = self._checkpoints - {step} | {step + 1}
                self._note("checkpoints", step + 1)
            return step in self._spared

    @property
    def is_stopping(self) -> bool:
        return self._stops

    def spares(self, on_disk: Iterable[int]) -> int | None:
        """Which of these checkpoints outlives newer ones: the last that was to be kept and is there."""
        there = set(on_disk)
        with self._lock:
            self._spared = self._spared[-1000:]
            return next((s for s in reversed(self._spared) if s in there), None)

    def news(self, step: int) -> dict[str, Any]:
        """What was asked for since the report before that of this step, as a report has it (meshcee/files/home.py)."""
        with self._lock:
            found, self._news = self._news, {}
            if found:
                self._told[step] = {"step": step, **found}
        return found

    def take_back(self, step: int) -> None:
        """This step and later ones are done again, and told of again: what was asked for since then is withdrawn."""
        self.restore([line for told, line in sorted(self._told.items()) if told < step], step)

    def restore(self, reports: Sequence[Mapping[str, Any]], next_step: int, *, is_over: bool = False) -> None:
        """A run goes on that has told these, in this order, of steps before this one. `is_over`: it has ended since, as asked."""

        def told(what: str) -> list[Any]:
            return [wish for line in reports for wish in line.get(what, ())]

        with self._lock:
            self._changes = sorted((Change(*change) for change in told("lr_changes")), key=lambda change: change.step)
            self._evaluations, self._checkpoints = set(told("evaluations")), set(told("checkpoints"))
            self._spared, self._next, self._news = told("kept_checkpoints"), next_step, {}
            self._settled = set(self._checkpoints)  # perhaps by another process
            self._told = {line["step"]: line for line in reports if WISHES & line.keys()}
            asked = next((line["stops"] for line in reversed(reports) if "stops" in line), False)
            self._stops = asked and not is_over
            if asked and is_over:
                self._news["stops"] = False
