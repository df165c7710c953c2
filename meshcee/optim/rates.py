"""A schedule of learning rates by name, and those of transformers.

The idea: the owner steps it, once a step, and tells members the options of each group; so a member needs to know none of it.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from meshcee.errors import UsageError
from meshcee.optim.optimizer import plain_number
from meshcee.user_code import calling

__all__ = ["Schedule", "check_is_schedule"]


class Schedule:
    """A torch.optim.lr_scheduler class by name, stepped once per optimizer step by the owner.

    >>> Schedule("CosineAnnealingLR", T_max=1000)
    >>> Schedule("SequentialLR", schedulers=[Schedule("LinearLR"), Schedule("ExponentialLR", gamma=0.9)], milestones=[5])
    >>> Schedule("CosineWithWarmup", warmup=100, steps=1000)

    "ConstantWithWarmup" (with `warmup` alone), "LinearWithWarmup" and "CosineWithWarmup" are those of transformers, bit for bit.
    """

    def __init__(self, name: str, **options: Any) -> None:
        if not isinstance(name, str):
            given = getattr(name, "__name__", type(name).__name__)
            raise UsageError(f'a schedule is named: Schedule("{given}", ...), and not the class or object itself')
        if name == "ReduceLROnPlateau":
            raise UsageError(
                "'ReduceLROnPlateau' follows evaluations: train(..., callbacks=[meshcee.ReduceOnPlateau(...)])"
            )
        if name == "SWALR":
            raise UsageError(
                "'SWALR' reads the rate that it finds: Schedule('LinearLR', start_factor=1.0, end_factor=swa_lr / lr, "
                "total_iters=N) ends at a constant rate, too, and Job(ema=0.999) keeps an average of the weights"
            )
        of_torch = [one for one in torch.optim.lr_scheduler.__all__ if one != "LRScheduler"]  # the base of all
        known = [*WARMUPS, *of_torch]
        if name not in known:
            ours = ", ".join(WARMUPS)
            meant = "".join(f"; did you mean {one!r}?" for one in difflib.get_close_matches(name, known, 1))
            raise UsageError(
                f"schedule {name!r} is not a step-driven class of torch.optim.lr_scheduler, nor {ours}{meant}"
            )
        _check_options(name, options)
        for key, value in options.items() if name in WARMUPS else ():
            if type(plain_number(value)) is not int or value < 0:
                raise UsageError(f"schedule {name!r}: {key}={value!r:.40} is no whole number of steps: say {key}=30")
        chained = options.get("schedulers", ())
        if not isinstance(chained, list | tuple) or not all(isinstance(part, Schedule) for part in chained):
            raise UsageError(f"schedule {name!r}: `schedulers` is a list of meshcee.Schedule(...)")
        if name == "SequentialLR" and any("schedulers" in part.options for part in chained[1:]):
            raise UsageError(
                "torch's SequentialLR goes over to no chain (torch 2.13): put the chain first, or list its schedules themselves"
            )
        self.name = name
        self.options = options

    def __repr__(self) -> str:
        """The same in every process, so functions have their names."""
        return f"Schedule({self.name!r}, {self.words})"

    @property
    def words(self) -> str:
        """The options, for who compares two runs."""
        return repr(sorted((key, _named(value)) for key, value in self.options.items()))

    @property
    def functions(self) -> Iterator[Any]:
        """All that its options have of the user's code."""
        return _functions(list(self.options.values()))

    @property
    def factor(self) -> Callable[[int], float] | None:
        """What the rate is multiplied by at each step, where its name and numbers say that."""
        return partial(WARMUPS[self.name][0], **self.options) if self.name in WARMUPS else None

    def build(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        options = dict(self.options)
        if self.factor is not None:
            kind = torch.optim.lr_scheduler.LambdaLR
            options = {"lr_lambda": self.factor}
        else:
            kind = getattr(torch.optim.lr_scheduler, self.name)
        if "schedulers" in options:
            options["schedulers"] = [part.build(optimizer) for part in options["schedulers"]]
        try:
            with calling(f"torch.optim.lr_scheduler.{self.name}"):
                built: torch.optim.lr_scheduler.LRScheduler = kind(optimizer=optimizer, **options)
        except UsageError as error:
            if "cycle_momentum" not in str(error):
                raise
            raise UsageError(
                f"schedule {self.name!r} changes the momentum, and the optimizer has none: say cycle_momentum=False, or take an "
                "optimizer with a momentum or with betas, as SGD or AdamW"
            ) from error.__cause__
        return built


def check_is_schedule(given: Any) -> None:
    """UsageError for anything else, as a class of torch's or the name of one."""
    if not isinstance(given, Schedule):
        found = getattr(given, "__name__", type(given).__name__)
        raise UsageError(f'schedule is a meshcee.Schedule("CosineAnnealingLR", T_max=1000), or None; got {found}')


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    """UsageError for what is missing, and for what the schedule does not have."""
    of_class: Mapping[str, inspect.Parameter] = {}
    if name in WARMUPS:
        known = needed = sorted(WARMUPS[name][1])
    else:
        of_class = inspect.signature(getattr(torch.optim.lr_scheduler, name)).parameters
        known = [key for key in of_class if key != "optimizer"]
        needed = [key for key in known if of_class[key].default is inspect.Parameter.empty]
    wrong = [f"has no {key!r}" for key in options if key not in known]
    wrong += [f"needs {key!r}" for key in needed if key not in options]
    if wrong:
        counts = ", counts of steps" if name in WARMUPS else ""
        raise UsageError(f"schedule {name!r} {wrong[0]}: its options are {', '.join(known)}{counts}")
    for key, value in options.items() if name not in WARMUPS else ():
        if unlike := _unlike(value, str(of_class[key].annotation)):
            raise UsageError(f"schedule {name!r}: {key}={value!r:.40} is no {unlike}")
    if options.get("last_epoch", -1) != -1:
        raise UsageError(
            f"schedule {name!r}: leave last_epoch out, as a run that is resumed goes on in its schedule by itself"
        )


def _unlike(value: Any, hint: str) -> str:
    """What an option should be, in words, where it is not what torch's annotation says; "" for all that it does not say."""
    several = value if isinstance(value, list | tuple) and "[" in hint else [value]
    numbers = all(isinstance(plain_number(one), int | float) for one in several)
    if value is None and "None" in hint:
        return ""
    if hint.startswith("Callable"):
        return "" if all(map(callable, several)) else "function: give one that returns a number"
    if hint.startswith(("list[int]", "Iterable[int]")):
        is_list = not isinstance(value, str) and isinstance(value, Iterable) and (numbers or several is not value)
        return "" if is_list else "list of steps: write one, as [3, 5]"
    return "" if numbers or not hint.startswith(("int", "float")) else "number: write one, as 3 or 0.5"


def _constant(step: int, warmup: int) -> float:
    return step / max(1, warmup) if step < warmup else 1.0


def _linear(step: int, warmup: int, steps: int) -> float:
    return step / max(1, warmup) if step < warmup else max(0.0, (steps - step) / max(1, steps - warmup))


def _cosine(step: int, warmup: int, steps: int) -> float:
    if step < warmup:
        return step / max(1, warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((step - warmup) / max(1, steps - warmup)))))


# What the learning rate is multiplied by at each step, and the options that say so.
WARMUPS: dict[str, tuple[Callable[..., float], set[str]]] = {
    "ConstantWithWarmup": (_constant, {"warmup"}),
    "LinearWithWarmup": (_linear, {"warmup", "steps"}),
    "CosineWithWarmup": (_cosine, {"warmup", "steps"}),
}


def _functions(value: Any) -> Iterator[Any]:
    if isinstance(value, Schedule):
        yield from value.functions
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _functions(part)
    elif callable(value):
        yield value


class _Name:
    """Stands for a function in a text; its address would be another one in every process."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __repr__(self) -> str:
        return f"{self._of.__module__}.{self._of.__qualname__}"


def _named(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_named, value))
    if not callable(value):
        return value
    return _Name(value if hasattr(value, "__qualname__") else type(value))
