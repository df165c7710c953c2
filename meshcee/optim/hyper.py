"""The options of each optimizer step, evaluated by the owner and sent with the step.

The idea: torch's own scheduler drives torch's own optimizer over one dummy parameter a group. Every option that the scheduler
changes (learning rate, momentum, betas) is read off the groups. So any step-driven scheduler works, and peers need no scheduler.
A scheduler only goes forward, and a run goes back when it loses a peer: so copies of both are kept now and then. The user's
functions are not copied: they may hold anything, and their rates must follow from the step alone.
"""

from __future__ import annotations

import copy
import re
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from meshcee.errors import UsageError
from meshcee.optim.optimizer import Optimizer
from meshcee.user_code import calling

if TYPE_CHECKING:
    from meshcee.optim.rates import Schedule

__all__ = ["HyperSchedule", "scheduled"]

DRIVEN = ("lr", "momentum", "betas")  # what torch's schedulers write
KEPT_EVERY = 1024  # steps; going back then takes some 30 ms
MOST_KEPT = 64
LOOK_S = 2.0


class HyperSchedule:
    """One for a run. `at(step)` may be called by several threads; it is slow where the steps before it were not asked for."""

    def __init__(self, optimizer: Optimizer, schedule: Schedule | None) -> None:
        self._given = optimizer, schedule
        names = {f"{i}": torch.nn.Parameter(torch.zeros(1, 1)) for i in range(len(optimizer.groups) + 1)}
        by_index = Optimizer(
            optimizer.name, groups={str(i): g for i, g in enumerate(optimizer.groups.values())}, **optimizer.options
        )
        self._optimizer = by_index.build(names)
        with _unwarned():
            self._scheduler = schedule.build(self._optimizer) if schedule else None
        self._step = 0
        self._first = self._copied((self._optimizer, self._scheduler))
        self._kept = deque([(0, self._first)], maxlen=MOST_KEPT)  # as they were before these steps
        self._lock = threading.Lock()

    def at(self, step: int) -> tuple[dict[str, Any], ...]:
        """The options of this step for every group. UsageError where one of them is no number of Python's, or a function fails."""
        with self._lock:
            if self._scheduler is not None and step != self._step:
                self._go_to(step)
            groups = self._optimizer.param_groups
            return tuple({k: _plain(g[k], k, step) for k in DRIVEN if k in g} for g in groups)

    def check(self, steps: int) -> None:
        """UsageError for a schedule that fails before the last of so many steps, or gives other rates when it is asked again.

        Of very many steps each of the two looks at what `LOOK_S` allows.
        """
        if self._scheduler is None:
            return
        for step, (once, again) in enumerate(zip(self._rates(steps), HyperSchedule(*self._given)._rates(steps))):
            if re.search(r"\b(nan|inf)\b", once):
                raise UsageError(f"the schedule gives a rate that is no number at step {step + 1}: {once:.200}")
            if again != once:
                raise UsageError(
                    f"the schedule gives other rates at step {step + 1} when asked again; they must follow from the step alone"
                )

    def _rates(self, steps: int) -> list[str]:
        """By step, each as a text: equal where all bits are, NaN too."""
        found, until_s = list[str](), time.monotonic() + LOOK_S
        for step in range(steps):
            try:
                self._go_to(step)
            except UsageError as error:
                raise UsageError(f"the schedule has no rate for step {step + 1} of steps={steps}: {error}") from (
                    error.__cause__ or error
                )
            found.append(repr(self.at(step)))
            if time.monotonic() > until_s:
                break
        return found

    def _copied(self, pair: Any) -> Any:
        """A copy that shares the user's functions: with a method its whole object would be copied, a model or a lock."""
        functions = self._given[1].functions if self._given[1] else ()
        return copy.deepcopy(pair, {id(function): function for function in functions})

    def _go_to(self, step: int) -> None:
        if step < self._step:
            while self._kept and self._kept[-1][0] > step:
                self._kept.pop()
            self._step, pair = self._kept[-1] if self._kept else (0, self._first)
            self._optimizer, self._scheduler = self._copied(pair)
        if isinstance(self._scheduler, torch.optim.lr_scheduler.LambdaLR):  # needs no rate of the steps before
            self._step = self._scheduler.last_epoch = step - 1
        with _unwarned():
            while self._step < step:
                assert self._scheduler is not None
                with calling(partial("the schedule, after step {}".format, self._step + 1)):  # some take a function
                    self._scheduler.step()
                self._step += 1
                if self._step % KEPT_EVERY == 0:
                    self._kept.append((self._step, self._copied((self._optimizer, self._scheduler))))


@contextmanager
def _unwarned() -> Iterator[None]:
    """Torch warns that optimizer.step() was not called: the peers call it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def scheduled(optimizer: Optimizer, schedule: Schedule | None) -> Optimizer:
    """The same with the momentum that the schedule begins with: SGD and RMSprop keep a buffer where they have any."""
    if schedule is None:
        return optimizer
    *own, rest = [{k: v for k, v in g.items() if k == "momentum"} for g in HyperSchedule(optimizer, schedule).at(0)]
    groups = {pattern: {**extra, **more} for (pattern, extra), more in zip(optimizer.groups.items(), own, strict=True)}
    found = Optimizer(optimizer.name, groups=groups, **{**optimizer.options, **rest})
    return found.averaging(optimizer.ema, optimizer.eval_ema)


def _plain(value: Any, name: str, step: int) -> Any:
    """As it is sent. What torch computes with a float32 of numpy's or a tensor has other bits than with a float."""
    if isinstance(value, tuple | list):
        return [_plain(part, name, step) for part in value]
    if not isinstance(value, int | float):
        kind = getattr(value, "dtype", type(value).__name__)
        raise UsageError(
            f"the schedule gives a number of {kind} for {name} at step {step + 1}; have your function return float(...)"
        )
    return float(value)
