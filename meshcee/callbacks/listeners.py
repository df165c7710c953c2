"""The callbacks of a run, as its owner calls them: which of them hear of an event, and how.

The idea: here it is decided what is to be called; the owner calls it in the thread where the user's code runs.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import structlog

from meshcee.callbacks.callback import Callback
from meshcee.callbacks.control import Control
from meshcee.errors import UsageError
from meshcee.events import Event
from meshcee.sampling import Reading
from meshcee.user_code import calling

__all__ = ["Listeners", "called"]

log = structlog.get_logger()

_NONE = contextlib.nullcontext()
ORDER = ("never", "evaluations", "steps")


class Listeners:
    """Of one run, over all its epochs. Each method gives what is to be called, if anything."""

    def __init__(self, callbacks: Sequence[Callback], control: Control) -> None:
        self._callbacks, self._control = tuple(callbacks), control
        self._has_plan = self._is_over = False
        self._saved = -1  # the checkpoint that was told of last
        self.around: contextlib.AbstractContextManager[Any] = _NONE  # the user's own callbacks
        self.reading: Reading | None = None
        self.waits = max((one.waits for one in self._callbacks), key=ORDER.index, default="never")

    def event(self, name: str, *what: Any) -> Callable[[], None] | None:
        """Every callback hears of it, in order. The call raises UsageError where one of them fails."""
        heard = [one for one in self._callbacks if getattr(type(one), name) is not getattr(Callback, name)]

        def call() -> None:
            for one in heard:
                of_function = one.of_function if isinstance(one, _Each) else ""
                is_ours = not of_function and type(one).__module__.startswith("meshcee.")
                who = of_function or f"{type(one).__name__}.{name}"
                reading = _NONE if is_ours else self._reading_by(who, name, what)
                with calling(who), reading, _NONE if is_ours else self.around:
                    getattr(one, name)(self._control, *what)

        return call if heard else None

    def _reading_by(self, who: str, name: str, what: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
        """UsageError where this call changes what samples are read with, and steps to come have been read by then."""
        if self.reading is None:
            return _NONE
        is_late = name in ("on_checkpoint", "on_loss", "on_change")
        if name in ("on_step", "on_evaluate"):
            (report,) = what
            has_waited = self.waits == "steps" or (self.waits == "evaluations" and report.metrics)
            is_late = report.step + 1 < report.steps and (self.reading.is_elsewhere or not has_waited)
        return self.reading.by(who, is_late=is_late)

    def plan(self, plan: Any) -> Callable[[], None] | None:
        """It begins."""
        name, self._has_plan = "on_change" if self._has_plan else "on_plan", True
        return self.event(name, plan)

    def step(self, report: Any) -> Callable[[], None] | None:
        """It was told of, with its evaluation if there was one."""
        return _in_turn([self.event("on_step", report), self.event("on_evaluate", report) if report.metrics else None])

    def saved(self, found: Iterable[tuple[int, Path]]) -> Callable[[], None] | None:
        """These checkpoints were made, one perhaps twice. They hear once of each that is still there, the oldest first."""
        made = sorted({*found})
        for steps in self._control.passed_over([steps for steps, _ in made]):
            log.warning(Event.CHECKPOINT_MISSED, steps=steps)
        new = [(steps, folder) for steps, folder in made if steps > self._saved and folder.exists()]
        self._saved = max((self._saved, *(steps for steps, _ in new)))
        return _in_turn([self.event("on_checkpoint", *one) for one in new])

    def take_back(self, step: int) -> None:
        """This step and later ones are done again: of checkpoints behind it they hear anew."""
        self._saved = min(self._saved, step)

    def end(self, result: Any, error: str | None) -> Callable[[], None] | None:
        """Once, however it ends."""
        if self._is_over:
            return None
        self._is_over = True
        return self.event("on_end", result, error)


def _in_turn(calls: Iterable[Callable[[], None] | None]) -> Callable[[], None] | None:
    found = [call for call in calls if call is not None]

    def call() -> None:
        for one in found:
            one()

    return call if found else None


class _Each(Callback):
    """A function that hears of every step."""

    waits = "never"

    def __init__(self, call: Callable[[Control, Any], object]) -> None:
        self._call = call
        self.of_function = f"the callback {getattr(call, '__name__', type(call).__name__)}"

    def on_step(self, run: Control, report: Any) -> None:
        self._call(run, report)


def _check_events(kind: type[Callback]) -> None:
    """UsageError for a method that nobody would ever call, as another library's event."""
    events = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(kind):
        if name.startswith("on_") and name not in events and callable(getattr(kind, name)):
            raise UsageError(
                f"{kind.__name__}.{name} is no event of a run, so nobody calls it: the events are {', '.join(events)}"
            )


def called(callbacks: Any) -> tuple[Callback, ...]:
    """Callbacks from what a user gives. A function (run, report) hears of each step; a text names a logger."""
    if not isinstance(callbacks, list | tuple):
        raise UsageError("callbacks is a list: callbacks=[meshcee.EarlyStop()]")
    found = []
    for one in callbacks:
        if isinstance(one, Callback):
            _check_events(type(one))
            if one.waits not in ("steps", "evaluations", "never"):
                raise UsageError(
                    f"{type(one).__name__}.waits is 'steps', 'evaluations' or 'never', not {one.waits!r:.40}"
                )
            found.append(one)
        elif isinstance(one, str):
            from meshcee.callbacks.loggers import logger

            found.append(logger(one))
        elif callable(one) and not isinstance(one, type):
            with contextlib.suppress(ValueError):  # of some of C's nobody knows
                try:
                    inspect.signature(one).bind(None, None)
                except TypeError as error:
                    raise UsageError(f"a function among the callbacks is called with (run, report): {error}") from error
            found.append(_Each(one))
        else:
            raise UsageError(
                f"a callback is a meshcee.Callback or a function of (run, report), or names a logger, not {one!r:.80}"
            )
    return tuple(found)
