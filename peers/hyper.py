"""The options of each optimizer step, evaluated by the owner and sent with the step.

The idea: torch's own scheduler drives torch's own optimizer over one dummy parameter a group; whatever it changes
(learning rate, momentum, betas) is read off the groups, so any step-driven scheduler works and peers need none.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from meshcee.job import Optimizer, Schedule
from meshcee.user_code import calling

__all__ = ["HyperSchedule"]

DRIVEN = ("lr", "momentum", "betas")  # what torch's schedulers write


class HyperSchedule:
    """`current()` holds the options of the next step for every group; `advance()` steps the scheduler."""

    def __init__(self, optimizer: Optimizer, schedule: Schedule | None) -> None:
        names = {f"{i}": torch.nn.Parameter(torch.zeros(1)) for i in range(len(optimizer.groups) + 1)}
        by_index = Optimizer(
            optimizer.name, groups={str(i): g for i, g in enumerate(optimizer.groups.values())}, **optimizer.options
        )
        self._optimizer = by_index.build(names)
        self._scheduler = schedule.build(self._optimizer) if schedule else None

    def current(self) -> tuple[dict[str, Any], ...]:
        groups = self._optimizer.param_groups
        return tuple({k: _plain(g[k]) for k in DRIVEN if k in g} for g in groups)

    def advance(self) -> None:
        if self._scheduler is not None:
            with warnings.catch_warnings():
                # torch warns that optimizer.step() was not called: the peers call it.
                warnings.simplefilter("ignore", UserWarning)
                with calling("the schedule"):  # some take a function
                    self._scheduler.step()


def _plain(value: Any) -> Any:
    return [float(v) for v in value] if isinstance(value, tuple | list) else float(value)
