"""What a person sees while a job trains: one live line on a terminal, plain lines elsewhere, JSON lines with --json.

The idea: reports are values; this file is the only one that draws them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from meshcee.errors import MeshceeError
from meshcee.files.steady import write_fact
from meshcee.plan import Plan
from peers.cli.session import Screen, printable
from peers.mesh_view import named
from peers.owner import Report

__all__ = ["GONE", "JsonView", "LineView", "RichView", "View", "called", "naming", "plan_table", "view_for"]

GONE = "a peer that has left"  # in place of a name that nobody tells any more


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _metrics(report: Report) -> str:
    return "  ".join(f"eval {name} {value:.4f}" for name, value in report.metrics.items())


def _loss(report: Report) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in (("loss", report.loss), *report.terms.items()))


def _tokens(report: Report) -> str:
    return "" if report.tokens_per_s is None else f"  {report.tokens_per_s:.0f} tokens/s"


class View(Protocol):
    """Shows the plan once, then reports. Lifetime is `with`."""

    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def note(self, text: str) -> None: ...

    def wait(self, text: str) -> None: ...

    def plan(self, plan: Plan, names: Mapping[str, str]) -> None: ...

    def report(self, report: Report) -> None: ...


class _Base:
    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class JsonView(_Base):
    """One JSON object a line on standard output."""

    def note(self, text: str) -> None:
        write_fact({"note": text})

    wait = note

    def plan(self, plan: Plan, names: Mapping[str, str]) -> None:
        write_fact({"plan": plan.to_json(), "names": dict(names)})

    def report(self, report: Report) -> None:
        write_fact({"report": report.to_json()})


class LineView(_Base):
    """For logs and pipes: a line for the first steps, then at most one a second, and for every evaluation."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_s = 0.0

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def wait(self, text: str) -> None:
        """What keeps the job, until the next step."""
        self.note(text)

    def plan(self, plan: Plan, names: Mapping[str, str]) -> None:
        self._console.print(plan_table(plan, names))

    def report(self, report: Report) -> None:
        now_s = time.monotonic()
        last = report.step + 1 == report.steps
        if not (last or report.metrics or report.step < 3 or now_s - self._last_s >= 1):
            return
        self._last_s = now_s
        self._console.print(
            f"step {report.step + 1:>5}/{report.steps}  {_loss(report)}  {report.samples_per_s:8.1f} samples/s"
            f"{_tokens(report)}  ETA {_duration(report.eta_s)}  limit: {report.limit}  {_metrics(report)}".rstrip(),
            highlight=False,
            soft_wrap=True,
        )


class RichView(LineView):
    """For a terminal: a live bar, which runs to and fro until the first step, with all else printed above it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._progress = Progress(
            TextColumn("training", style="bold"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TextColumn("{task.fields[limit]}", style="dim", markup=False),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("training", total=None, figures="", limit="")
        self._has_begun = False

    def __enter__(self) -> RichView:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._has_begun:
            self._progress.update(self._task, visible=False)
        self._progress.stop()

    def wait(self, text: str) -> None:
        super().wait(text)
        self._progress.update(self._task, limit=printable(text))

    def report(self, report: Report) -> None:
        self._has_begun = True
        self._progress.update(
            self._task,
            total=report.steps,
            completed=report.step + 1,
            figures=f"loss {report.loss:.4f}  {report.samples_per_s:.1f} samples/s{_tokens(report)}"
            f"  ETA {_duration(report.eta_s)}",
            limit=printable(report.limit),
        )
        if report.metrics:
            self._console.print(f"step {report.step + 1}: {_metrics(report)}", highlight=False)


def view_for(*, as_json: bool, console: Screen | None = None) -> View:
    """The view that suits standard output. What else is printed meanwhile goes to the same `console`: it moves the bar down."""
    if as_json:
        return JsonView()
    screen = console or Screen()
    return RichView(screen) if screen.is_live else LineView(screen)


def called(names: Mapping[str, str]) -> dict[str, str]:
    """Peers by names that tell them apart: where several have one, with how the id ends, which `meshcee drain` takes too."""
    count = Counter(names.values())
    return {peer: name if count[name] == 1 else f"{name} (…{peer[-8:]})" for peer, name in names.items()}


@asynccontextmanager
async def naming(names: Callable[[], Mapping[str, str]]) -> AsyncIterator[None]:
    """Errors from in here name peers, where what raised them knew only their ids."""
    try:
        yield
    except MeshceeError as error:
        error.args = (named(str(error), names()), *error.args[1:])
        raise


def plan_table(plan: Plan, names: Mapping[str, str]) -> Group:
    """The plan as a table: one row a stage, and one for each device left out, with the reason."""
    title = f"plan: micro-batches of {plan.micro_batch}"
    if plan.predicted is not None:
        title += f", {plan.predicted.step_s:.3g} s a step expected ({plan.predicted.samples_per_s:.4g} samples/s)"
    table = Table()
    for column in ("stage", "blocks", "peers", "window", "codec"):
        table.add_column(column)
    for number, pipeline in enumerate(plan.pipelines):
        back = [stage.codec_back for stage in pipeline.stages[1:]]
        codecs = [
            s.codec_out if s.codec_out == b else f"{s.codec_out}, back {b}" for s, b in zip(pipeline.stages, back)
        ]
        codecs.append("-")
        for i, stage in enumerate(pipeline.stages):
            members = ", ".join(f"{names.get(m.peer, GONE)} x{m.samples}" for m in stage.members)
            codec = codecs[i] + (", recomputes" if stage.recompute else "")
            table.add_row(plan.label(number, i), f"{stage.first}..{stage.end - 1}", members, str(stage.window), codec)
    for left in plan.left_out:
        table.add_row("-", "-", names.get(left.peer, GONE), "-", f"left out: {named(left.why, names)}")
    kernels = [Text(printable("kernels: " + "; ".join(plan.kernels)), style="table.caption")] if plan.kernels else []
    return Group(Text(title, style="table.title"), table, *kernels)
