"""Some of `eval_data`, and each metric of a job once, before the first step: or hours may pass before an evaluation fails.

The idea: what is wrong with the form of an output or a target fails with any weights, so the job is refused. An error of
values, as a division by no hits, may be gone once the model is trained, so it is told and the run begins.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

from torch import nn

from meshcee.capture import Capture
from meshcee.capture.unread import unread
from meshcee.errors import UsageError
from meshcee.job import Job
from meshcee.sampling import NO_STEP, batch_of, generators_put_back
from meshcee.stage.chain import Chain
from meshcee.user_code import as_number, calling

__all__ = ["try_data", "try_metrics"]

LOOKED_AT = 8  # micro-batches
LOOK_S = 1.0  # for those behind the first and the last

_OF_VALUES = (ArithmeticError, ValueError)


def try_data(job: Job, captured: Capture, size: int) -> None:
    """Raises UsageError where a micro-batch of `eval_data` is none that the graph holds for: the first, the last, some between."""
    last, until_s = (len(job.eval_data) - 1) // size, time.monotonic() + LOOK_S
    with generators_put_back(), unread(job.model):
        for micro in dict.fromkeys((0, last, *(k * last // LOOKED_AT for k in range(LOOKED_AT)))):
            if micro not in (0, last) and time.monotonic() > until_s:
                return
            if said := captured.misfit(captured.inputs_of(_batch(job, size, micro)), forward_only=True):
                raise UsageError(f"eval_data, micro-batch {micro + 1}: {said}")


def _batch(job: Job, size: int, micro: int) -> tuple[Any, Any]:
    """As it is fed."""
    first = micro * size
    indices = range(first, min(first + size, len(job.eval_data)))
    return batch_of(job.eval_data, indices, job.seed, NO_STEP, first, name="eval_data", collate=job.collate)


def try_metrics(job: Job, captured: Capture, size: int, say: Callable[[str], None]) -> None:
    """Raises UsageError with a metric's name and the user's line where it fails on the first micro-batch of `eval_data`."""
    with generators_put_back():
        batch = _batch(job, size, 0)
        _, output = Chain(job, captured, 1).evaluate(batch)
        for name, metric in job.metrics.items():
            _try(name, metric, output, batch[1], job.model, say)


def _try(
    name: str, metric: Callable[[Any, Any], float], output: Any, target: Any, model: Any, say: Callable[[str], None]
) -> None:
    try:
        spared: Any = {id(module): module for module in (model.modules() if isinstance(model, nn.Module) else ())}
        alone = copy.deepcopy(metric, spared)  # of an object that keeps what it is given, or the model
    except Exception:  # classes raise what they like
        return
    what = f"metric {name!r}"
    try:
        with unread(model), calling(what):
            found = alone(output, target)
    except UsageError as error:
        if not isinstance(error.__cause__, _OF_VALUES):
            raise
        say(f"before training, {error}; an evaluation that fails ends the run")
    else:
        as_number(what, found)
