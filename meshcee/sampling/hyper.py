"""The options of each optimizer step, evaluated by the owner and sent with the step.

The idea: torch's own scheduler drives torch's own optimizer over one dummy parameter a group. Every option that the scheduler
changes (learning rate, momentum, betas) is read off the groups. So any step-driven scheduler works, and peers need no scheduler.
A scheduler only goes forward, and a run goes back when it loses a peer: so copies of both are kept now and then. The user's
functions are not copied: they may hold anything, and their rates must follow from the step alone.
"""

from __future__ import annotations

import copy
import itertools
import re
import threading
import time
import warnings
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import xxhash

from meshcee.errors import UsageError
from meshcee.optim import Optimizer
from meshcee.user_code import calling

if TYPE_CHECKING:
    from meshcee.optim.rates import Schedule

__all__ = ["HyperSchedule", "rate_digests", "scheduled", "some_rates"]

DRIVEN = ("lr", "momentum", "betas")  # what torch's schedulers write
KEPT_EVERY = 1024  # steps; going back then takes some 30 ms
MOST_KEPT = 64
MOST_DRIVEN = 256  # steps that are walked through for `some_rates`, which takes some 10 ms
LOOK_S = 2.0
DIGEST_S = 1.0

_digested: WeakKeyDictionary[Schedule, tuple[tuple[Optimizer, set[int]], dict[int, str]]] = WeakKeyDictionary()


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


def some_rates(optimizer: Optimizer, schedule: Schedule | None, steps: int) -> list[str]:
    """What the functions of a schedule give in some of its steps; nothing for one without any: its words say all. These are the
    first steps, and then each is twice as late as the one before. So a job with more steps has the same ones first.
    """
    if schedule is None or next(schedule.functions, None) is None:
        return []
    driven = HyperSchedule(optimizer, schedule)
    end = steps if schedule.name == "LambdaLR" else min(steps, MOST_DRIVEN + 1)
    return [repr(driven.at(step)) for step in (1, 2, 3, *(1 << k for k in range(2, end.bit_length()))) if step < end]


def rate_digests(optimizer: Optimizer, schedule: Schedule | None, steps: int, *more: int) -> dict[int, str]:
    """Of all rates before some steps, the last of `steps` and `more` among them; nothing for a schedule whose words say all.

    The others are the first steps, and then each is an eighth later. Of very many it has what `DIGEST_S` allows. All epochs of a
    run have the same.
    """
    if schedule is None:
        return {}
    functions = list(schedule.functions) if schedule.factor is None else [schedule.factor]
    if not functions:
        return {}
    asked = optimizer, {steps, *more, *itertools.accumulate(range(200), lambda end, _: end + 1 + end // 8)}
    if (known := _digested.get(schedule)) is not None and known[0] == asked:
        return known[1]
    says_all = schedule.name == "LambdaLR" or schedule.factor is not None  # its functions
    driven = None if says_all else HyperSchedule(optimizer, schedule)
    found, digest, until_s = dict[int, str](), xxhash.xxh64(), time.monotonic() + DIGEST_S
    with calling("the schedule"):
        for step in range(steps):
            digest.update(repr(driven.at(step)).encode() if driven else array("d", [each(step) for each in functions]))
            if step + 1 in asked[1]:
                found[step + 1] = digest.hexdigest()
                if time.monotonic() > until_s:
                    break
    _digested[schedule] = asked, found
    return found


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
