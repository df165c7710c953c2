"""Loggers by name: a file of CSV, and the services that people look at runs with.

The idea: each is a callback of a few lines over the library's own interface, and what it logs is the same for all. A library is
asked for when a logger is made, so a missing one is told of before anything runs.
"""

from __future__ import annotations

import csv
import importlib
import io
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshcee.callbacks.callback import Callback
from meshcee.callbacks.control import Control
from meshcee.callbacks.spans import Spans
from meshcee.errors import UsageError
from meshcee.files import Trouble, disk

__all__ = ["logger"]

FIGURES = ("loss", "lr", "norm", "samples_per_s", "tokens_per_s", "step_s", "bound_share", "crossed_bytes")
MOST_ROWS = 10_000  # that wait for a disk


class _Logger(Callback, ABC):
    """`open` comes first, with what a run that is resumed has reported; then `log` for each step, and `close`.

    A disk or a service that refuses what comes behind `open` ends nothing, whatever its library raises.
    """

    waits = "never"
    what: str  # as people name it
    needs_bytes = 0
    _is_open = False
    _next = 0  # the step behind the last that it was told of
    _trouble = Trouble()

    @abstractmethod
    def open(self, run: Control, reports: Sequence[Mapping[str, Any]]) -> None: ...

    @abstractmethod
    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    def take_back(self, step: int) -> None:
        """This step and later ones come anew, as an audit wants it. A service keeps what it was told."""

    @abstractmethod
    def close(self, error: str | None) -> None: ...

    def on_resume(self, run: Control, reports: Sequence[Mapping[str, Any]]) -> None:
        self._is_open, self._next = True, max((report["step"] + 1 for report in reports), default=0)
        self.open(run, reports)

    def on_plan(self, run: Control, plan: Any) -> None:
        if not self._is_open:
            self.on_resume(run, ())

    def on_step(self, run: Control, report: Any) -> None:
        figures = _figures(vars(report))
        last, self._next = self._next, report.step + 1
        with self._going_on():
            if report.step < last:
                self.take_back(report.step)
            self.log(report.step, figures)

    def on_end(self, run: Control, result: Any, error: str | None) -> None:
        if self._is_open:
            with self._going_on():
                self.close(error)

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            refused = error if isinstance(error, OSError) else OSError(str(error))
            self._trouble.tell(f"the log {self.what}", refused, self.needs_bytes)
        else:
            self._trouble.over(f"the log {self.what}")


def _figures(report: Mapping[str, Any]) -> dict[str, float]:
    """What there is of a step, and of the evaluation behind it."""
    found = {name: report.get(name) for name in FIGURES}
    found |= {f"train/{name}": value for name, value in report.get("terms", {}).items()}
    found |= {f"eval/{name}": value for name, value in report.get("metrics", {}).items()}
    return {name: float(value) for name, value in found.items() if value is not None}


class _Csv(_Logger):
    """A line a step. A run that is resumed writes the file anew from what it has reported. Rows that a disk refuses wait."""

    def __init__(self, path: str) -> None:
        self._path, self.what = Path(path), f"csv:{path}"
        self._waiting: deque[bytes] = deque(maxlen=MOST_ROWS)
        self._goes: int | None = None  # the file's rows from this step on
        if not path or not os.path.isdir(self._path.parent):
            raise UsageError(f"csv:FILE wants a file in a folder that is there, not {path!r:.200}")
        if not os.path.exists(path) or os.path.isdir(path):
            disk.check_place(self._path, "csv:FILE")
        elif not os.access(path, os.W_OK):
            raise UsageError(f"csv:FILE: {path} is there and cannot be written; name another file")

    def open(self, run: Control, reports: Sequence[Mapping[str, Any]]) -> None:
        told = [{"step": r["step"], **_figures(r)} for r in reports]
        names = (*(f"train/{name}" for name in run.terms), *(f"eval/{name}" for name in run.metrics))
        names = (*names, *(name for row in told for name in row))
        self._columns = [*dict.fromkeys(("step", *FIGURES, *names))]  # also of metrics that the job had before
        rows = [dict(zip(self._columns, self._columns)), *told]
        try:
            self._path = self._path.absolute()
            disk.File(self._path).abort()  # what stood there is gone
            disk.append(self._path, b"".join(map(self._line, rows)))
        except OSError as error:
            raise disk.kind_of(error)(
                f"{self.what}: the file cannot be written: {error.strerror}; {disk.remedy(error)}"
            ) from error

    def _line(self, row: Mapping[str, Any]) -> bytes:
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._columns).writerow(row)
        return text.getvalue().encode()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._waiting.append(self._line({"step": step, **figures}))
        self._write()

    def take_back(self, step: int) -> None:
        self._goes = step if self._goes is None else min(self._goes, step)
        self._waiting = deque((row for row in self._waiting if _is_before(step, row)), MOST_ROWS)

    def close(self, error: str | None) -> None:
        if self._waiting:
            self._write()

    def _write(self) -> None:
        if self._goes is not None:
            known = self._path.read_bytes().splitlines(keepends=True)
            disk.publish(self._path, b"".join(row for row in known if _is_before(self._goes, row)))
            self._goes = None
        rows = b"".join(self._waiting)
        self.needs_bytes = len(rows)
        disk.append(self._path, rows)
        self._waiting.clear()


def _is_before(step: int, row: bytes) -> bool:
    """Whether it is of an earlier step, or the head."""
    found = row.partition(b",")[0]
    return not found.isdigit() or int(found) < step


class _TensorBoard(_Logger):
    def __init__(self, folder: str) -> None:
        if not folder:
            raise UsageError("tensorboard:DIR wants a folder")
        _library("tensorboard")
        self._folder, self.what = folder, f"tensorboard:{folder}"

    def open(self, run: Control, reports: Sequence[Mapping[str, Any]]) -> None:
        self._begin(self._next or None)  # it hides what an owner that died wrote beyond

    def _begin(self, step: int | None) -> None:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(self._folder, purge_step=step)

    def take_back(self, step: int) -> None:
        self._writer.close()
        self._begin(step)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self, error: str | None) -> None:
        self._writer.close()


class _Init(_Logger):
    """wandb, and trackio, which is used alike."""

    def __init__(self, name: str, project: str) -> None:
        self._library, self._project, self.what = _library(name), project, name
        self._ends = {True: {"exit_code": 1}, False: {"exit_code": 0}} if name == "wandb" else {True: {}, False: {}}

    def open(self, run: Control, reports: Sequence[Mapping[str, Any]]) -> None:
        self._run = self._library.init(project=self._project or "meshcee", name=run.name)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self, error: str | None) -> None:
        self._run.finish(**self._ends[error is not None])


class _Mlflow(_Logger):
    """By its client: the short functions remember a run by thread."""

    def __init__(self, experiment: str) -> None:
        self._library, self._experiment, self.what = _library("mlflow"), experiment, "mlflow"

    def open(self, run: Control, reports: Sequence[Mapping[str, Any]]) -> None:
        experiment = self._library.set_experiment(self._experiment or "meshcee")
        self._client = self._library.MlflowClient()
        self._id = self._client.create_run(experiment.experiment_id, run_name=run.name).info.run_id

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._client.log_metric(self._id, name, value, step=step)

    def close(self, error: str | None) -> None:
        self._client.set_terminated(self._id, "FINISHED" if error is None else "FAILED")


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"the logger {name} needs a library that is not installed here: pip install {name}") from error


LOGGERS: dict[str, Callable[[str], Callback]] = {
    "csv": _Csv,
    "tensorboard": _TensorBoard,
    "wandb": lambda project: _Init("wandb", project),
    "mlflow": _Mlflow,
    "trackio": lambda project: _Init("trackio", project),
    "opentelemetry": lambda _: Spans(),
}


def logger(text: str) -> Callback:
    """`csv:FILE`, `tensorboard:DIR`, `opentelemetry`, or `wandb`, `mlflow` or `trackio`, these with :PROJECT if wanted."""
    name, _, where = text.partition(":")
    if name not in LOGGERS:
        known = "csv:FILE, tensorboard:DIR, wandb, mlflow, trackio or opentelemetry"
        raise UsageError(f"there is no logger {name!r:.40}: say {known}")
    return LOGGERS[name](where)
