"""Rates that callbacks set or scale, with a schedule and without, against a loop that does the same to its groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import structlog

from meshcee.callbacks import Callback, Control
from meshcee.eager import plain_steps
from meshcee.events import Event
from meshcee.optim.rates import Schedule
from tests.peers.owner.test_callbacks import MICRO, STEPS, Reachable, job_of, run

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here


def at_step(step: int, does: Callable[[Control], object]) -> Callback:
    """This is asked for when that step has ended."""

    class Asks(Callback):
        waits = "steps"

        def on_step(self, run: Control, report: Any) -> None:
            if report.step == step:
                does(run)

    return Asks()


def by_hand(step: int, does: Callable[[dict[str, Any]], object], schedule: Schedule | None = None) -> list[float]:
    """The losses of a plain loop in which this happens to the groups behind that step."""
    losses, job = list[float](), job_of(schedule=schedule)
    for done in plain_steps(job, STEPS, MICRO):
        assert isinstance(job.optimizer, Reachable)
        losses.append(done.loss)
        for group in job.optimizer.built.param_groups if done.step == step else ():
            does(group)
    return losses


async def test_a_rate_that_is_set_is_that_of_a_loop_and_ends_a_schedule() -> None:
    set_twice = at_step(3, lambda run: (run.set_lr(0.05), run.set_lr(0.002)))
    result, reports = await run(job_of(), [set_twice])
    assert result.losses == by_hand(3, lambda group: group.update(lr=0.002))
    falling = Schedule("ExponentialLR", gamma=0.5)
    for schedule, times in ((None, 0), (falling, 1)):
        with structlog.testing.capture_logs() as logged:
            result, reports = await run(job_of(schedule=schedule), [set_twice])
        assert [report.lr for report in reports[4:]] == [0.002] * 6
        assert [line["event"] for line in logged].count(Event.SCHEDULE_OVER) == times
    assert result.losses != by_hand(3, lambda group: group.update(lr=0.002), falling)


async def test_a_rate_that_is_scaled_goes_on_with_its_schedule_as_in_a_loop() -> None:
    falling = Schedule("ExponentialLR", gamma=0.5)
    with structlog.testing.capture_logs() as logged:
        result, _ = await run(job_of(schedule=falling), [at_step(3, lambda run: run.scale_lr(0.5))])
    assert result.losses == by_hand(3, lambda group: group.update(lr=group["lr"] * 0.5), falling)
    assert Event.SCHEDULE_OVER not in [line["event"] for line in logged]
