"""Whose fault an error is: the user's own model or loss, asked again on the same samples, or a peer.

The idea: what the module itself fails with on these samples, no peer is to blame for.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

from meshcee.capture import Capture
from meshcee.capture.export import EXAMPLES
from meshcee.capture.graph import FAILED_ASSERT
from meshcee.equality.failing import listed, names_of, without_numbers
from meshcee.equality.net import Net
from meshcee.errors import MeshceeError, NonFiniteLossError, UsageError
from meshcee.files import large_apart
from meshcee.job import Job
from meshcee.sampling import few_of, probes
from meshcee.sampling.odd import names_of_probes

__all__ = ["blamed", "refuse_failing"]

FAILING_S = 10.0  # a pass of the module that asks whether it fails too
PROBED = 16  # samples: as many as capture looks at


def blamed(
    job: Job,
    captured: Capture,
    raised: MeshceeError,
    batch: tuple[Any, Any] | None,
    step: int,
    rows: tuple[int, int],
    *,
    evaluate: bool,
) -> MeshceeError:
    """What a micro-batch has raised on a peer, with its samples: those of the step, or of an evaluation, from the first of `rows`.

    UsageError where the user's own module, which was looked at, fails alike on them here: then no peer is at fault. Any machine
    may be out of memory: that is held against no user's code. `batch`: the samples, if they are here.
    """
    names = names_of(job, step, *rows, evaluate=evaluate)
    if isinstance(raised, NonFiniteLossError):
        return NonFiniteLossError(f"{raised}. {without_numbers(names, batch)}")
    said = f"{'the evaluation after ' * evaluate}step {step + 1}: "
    asserts = FAILED_ASSERT in str(raised)
    if asserts and (batch is None or not job.verify):
        return UsageError(f"{said}{_failed_assert(captured, names)}")
    if batch is None or not job.verify or (memory := re.compile("memory", re.IGNORECASE)).search(str(raised)):
        return raised
    error = _own_error(job, captured, batch, names, evaluate=evaluate)
    if asserts:
        return UsageError(f"{said}{error or _failed_assert(captured, names)}")
    if error is None or f"{type(error.__cause__).__name__}: " not in str(raised) or memory.search(str(error.__cause__)):
        return raised
    return UsageError(f"{said}{error}")


def _failed_assert(captured: Capture, names: Sequence[str]) -> str:
    """With the weights of that step, which are not here."""
    lines = list(dict.fromkeys(line for program in captured.programs for line in program.asserted))
    at = f"{lines[0]} or another one of {len(lines)}" if len(lines) > 1 else "".join(lines)
    return (
        f"an assert on values does not hold{at}, with the weights and random numbers of that step, on {listed(names)}"
    )


def _own_error(
    job: Job, captured: Capture, batch: tuple[Any, Any], names: Sequence[str], *, evaluate: bool = False
) -> UsageError | None:
    """What the user's own model or loss fails with on this batch, whose rows have these names; None where it is not known to."""
    with warnings.catch_warnings(action="ignore"), large_apart():
        return Net(job, captured, (), FAILING_S, lambda text: None).failing(batch, names, evaluate=evaluate)


def refuse_failing(job: Job, captured: Capture) -> None:
    """Raise UsageError where the user's own model or loss fails on samples that were looked at."""
    samples = dict(zip(names_of_probes(job, PROBED), probes(job, PROBED)))

    def error_of(sample: Any, name: str) -> UsageError | None:
        return _own_error(job, captured, few_of(job, sample, EXAMPLES), [name] * EXAMPLES)

    found = [error for name, (sample, _) in samples.items() if (error := error_of(sample, name)) is not None]
    if found and len(found) == len(samples):
        raise error_of(next(iter(samples.values()))[0], "each sample that was looked at") or found[0]
    if found:
        raise found[0]
