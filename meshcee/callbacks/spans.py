"""A run as spans of OpenTelemetry: its epochs, in each of them its steps, and its recoveries.

The idea: a span begins and ends with what a callback hears. Where spans go is for the program around: an SDK of the library,
which for example `opentelemetry-instrument meshcee train ...` sets up from the environment. Without one there are none.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

from meshcee.callbacks.callback import Callback
from meshcee.callbacks.control import Control
from meshcee.errors import UsageError

__all__ = ["Spans", "spans_where_set_up"]

LIBRARY = "opentelemetry.trace"


def spans_where_set_up(loggers: Collection[str] = ()) -> tuple[Callback, ...]:
    """One callback where the program around has set up where spans go, and these do not name it already; else none."""
    if "opentelemetry" in loggers or importlib.util.find_spec("opentelemetry") is None:
        return ()
    trace: Any = importlib.import_module(LIBRARY)
    is_set_up = not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    return (Spans(),) if is_set_up else ()


class Spans(Callback):
    """UsageError where the library is missing. `clock_ns` is the wall clock."""

    waits: ClassVar[str] = "never"

    def __init__(self, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        try:
            self._trace: Any = importlib.import_module(LIBRARY)
        except ImportError as error:
            raise UsageError(
                "the logger opentelemetry needs a library that is not installed here: pip install opentelemetry-api"
            ) from error
        self._clock_ns = clock_ns
        self._tracer = self._trace.get_tracer("meshcee")
        self._epoch: Any = None
        self._recovery: Any = None

    def on_plan(self, run: Control, plan: Any) -> None:
        self._end(self._epoch)
        figures = {"meshcee.stages": sum(len(p.stages) for p in plan.pipelines), "meshcee.peers": len(plan.peers)}
        if plan.predicted is not None:
            figures["meshcee.step_expected_s"] = plan.predicted.step_s
        about = {"meshcee.run": run.name, "meshcee.step": run.next_step, **figures}
        self._epoch = self._tracer.start_span("epoch", start_time=self._clock_ns(), attributes=about)

    def on_change(self, run: Control, plan: Any) -> None:
        self.on_plan(run, plan)

    def on_step(self, run: Control, report: Any) -> None:
        self._end(self._recovery)
        self._recovery = None
        ends_ns = self._clock_ns()
        about = {"meshcee.step": report.step, "meshcee.loss": report.loss, "meshcee.limit": report.limit}
        step = self._tracer.start_span(
            "step", self._within(), start_time=ends_ns - round(report.step_s * 1e9), attributes=about
        )
        step.end(ends_ns)

    def on_loss(self, run: Control, error: str, peers: Sequence[str]) -> None:
        """From here to the next step that is done, in an epoch of its own or of the plan that was lost."""
        if self._recovery is None:
            about = {"meshcee.step": run.next_step, "meshcee.lost": tuple(peers), "meshcee.error": error}
            self._recovery = self._tracer.start_span("recovery", start_time=self._clock_ns(), attributes=about)

    def on_end(self, run: Control, result: Any, error: str | None) -> None:
        if error is not None and self._epoch is not None:
            self._epoch.set_status(self._trace.StatusCode.ERROR, error)
        self._end(self._recovery)
        self._end(self._epoch)
        self._epoch = self._recovery = None

    def _within(self) -> Any:
        return self._trace.set_span_in_context(self._epoch) if self._epoch is not None else None

    def _end(self, span: Any) -> None:
        if span is not None:
            span.end(self._clock_ns())
