"""An error of the user's own model, loss or data: of which samples it is, at which line, and what torch says.

The idea: whoever has met the error lets the same samples fail again, the halves of those that fail, and so on. What is left are
the samples to blame, or all of them. Of a backward pass torch's anomaly mode remembers the line of forward.
"""

from __future__ import annotations

import contextlib
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import structlog
from torch import autograd, nn

from meshcee.errors import UsageError
from meshcee.events import Event
from meshcee.job import Job
from meshcee.sampling import indices_of, inputs_of
from meshcee.user_code import Place, is_ours, place_in

__all__ = [
    "BACKWARD_PASS",
    "blame",
    "forward_place",
    "listed",
    "names_of",
    "odd_ones",
    "warnings_told",
    "without_numbers",
]

log = structlog.get_logger()

BACKWARD_PASS = "the backward pass"
MOST_ODD = 4  # samples that are looked for
MOST_NAMED, MOST_SAID = 32, 1000  # samples of a micro-batch, characters of an error
_OF_LIBRARIES = (DeprecationWarning, PendingDeprecationWarning, ResourceWarning)  # no user's to mend
_FRAME = re.compile(r'File "(.+?)", line (\d+), in .*\n\s*(.*)')


def names_of(job: Job, step: int, first: int, end: int, *, evaluate: bool = False) -> list[str]:
    """How the samples of a step, or of an evaluation, from place `first` to `end` are called."""
    if evaluate:
        return [f"eval_data[{place}]" for place in range(first, end)]
    if job.streams:
        return [f"sample {place + 1} of step {step + 1}" for place in range(first, end)]
    return [f"data[{i}]" for i in indices_of(job, step)[first:end]]


def odd_ones(fails: Callable[[Sequence[int]], bool], rows: Sequence[int]) -> list[int]:
    """Of these rows, which fail together, those that fail by themselves, up to some; all where no half of them does."""
    if len(rows) == 1:
        return list(rows)
    middle = len(rows) // 2
    found: list[int] = []
    for half in (rows[:middle], rows[middle:]):
        if len(found) < MOST_ODD and fails(half):
            found += odd_ones(fails, half)
    return found or list(rows)


@contextlib.contextmanager
def warnings_told() -> Iterator[None]:
    """What the user's code and torch warn of meanwhile is told once, by the user's own filters: peers run no code that warns."""
    with warnings.catch_warnings(record=True) as heard:
        filters: Any = warnings.filters
        filters[:] = [("default" if action == "error" else action, *rest) for action, *rest in filters]
        try:
            yield
        finally:
            for text, warning in {f"{w.category.__name__}: {w.message}": w for w in reversed(heard)}.items():
                if not issubclass(warning.category, _OF_LIBRARIES):
                    at = {} if is_ours(warning.filename) else {"at": f"{warning.filename}:{warning.lineno}"}
                    log.warning(Event.CODE_WARNS, warning=re.sub(r"\s+", " ", text), **at)


def forward_place(run: Callable[[], Any]) -> Place:
    """The line of forward whose gradient fails in `run`."""
    with warnings.catch_warnings(record=True) as told, autograd.set_detect_anomaly(True, check_nan=False):
        warnings.simplefilter("always")
        with contextlib.suppress(Exception):  # it is told already
            run()
    said = next((str(w.message) for w in told if "Traceback of forward call" in str(w.message)), "")
    return place_in([(file, int(line), code) for file, line, code in _FRAME.findall(said)])


def blame(
    what: str,
    error: BaseException,
    model: nn.Module,
    names: Sequence[str],
    of: int,
    place: Place | None,
    *,
    together: bool,
) -> UsageError:
    """`what` of the job raised this on the samples of these names, out of `of`. `together`: no fewer of them fail."""
    frames = [(f.filename, f.lineno or 0, f.line or "") for f in traceback.extract_tb(error.__traceback__)]
    where = str(place if place is not None else place_in(frames)) or _module(error, model)
    names = list(dict.fromkeys(names))
    samples = f"all {of} samples of a micro-batch" if MOST_ODD < of == len(names) else " and ".join(names)
    said = re.sub(r"\s+", " ", str(error)).partition(" Hint:")[0].strip().rstrip(".;")
    said = f"{type(error).__name__}: {said[:MOST_SAID]}{'...' * (len(said) > MOST_SAID)}"
    if "modified by an inplace operation" in said:
        advice = "what this line needs for its gradient is changed in place later: write `h = h + 1` there instead of `h += 1`"
    elif together:
        advice = f"fewer samples do not fail: give another micro_batch_size, or mend {what}"
    else:
        advice = f"mend {samples}, or {what}"
    return UsageError(f"{what} fails{where}, on {samples}: {said}; {advice}")


def without_numbers(names: Sequence[str], batch: tuple[Any, Any] | None) -> str:
    """Which of these samples hold something that is no finite number, or which samples there are."""
    for path, tensor in (inputs_of(batch) if batch is not None else {}).items():
        if tensor.is_floating_point() and len(rows := (~tensor.isfinite()).reshape(len(tensor), -1).any(1).nonzero()):
            odd = [names[int(row)] for row in rows]
            return f"Of its samples {listed(odd)} {'has' if len(odd) == 1 else 'have'} NaN or infinity in {path}"
    return f"Its samples are {listed(names)}"


def listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + f" and {more} more" * (more > 0)


def _module(error: BaseException, model: nn.Module) -> str:
    """The innermost module of the model in which it was raised."""
    own = {id(module): name for name, module in model.named_modules() if name}
    called = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    name = next((own[id(module)] for module in reversed(called) if id(module) in own), "")
    return f" in module {name!r}" if name else ""
