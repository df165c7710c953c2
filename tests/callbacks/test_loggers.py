"""Loggers by name: what each library is given for the same three steps, and what is said where it is missing.

The services' libraries are stood in for by modules that write down their calls; the signatures are those of their documents.
"""

from __future__ import annotations

import csv
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from meshcee.callbacks import Callback, Control, Listeners, called
from meshcee.errors import UsageError
from meshcee.files import disk
from meshcee.files.home import Home
from peers.owner.epoch import Report
from peers.state.checkpoint import CheckpointStore
from tests.rig.disks import RefusingDisk
from tests.rig.job_file import JOB

REPORTS = [
    Report(0, 3, 2.5, 0.1, 80.0, 1.0, "", lr=0.01),
    Report(
        1,
        3,
        2.0,
        0.2,
        40.0,
        1.0,
        "",
        lr=0.01,
        norm=1.5,
        metrics={"loss": 2.25, "accuracy": 0.5},
        tokens_per_s=320.0,
        bound_share=0.75,
        crossed_bytes=4096,
    ),
    Report(2, 3, 1.5, 0.1, 80.0, 1.0, "", lr=0.001),
]
FIRST = {"loss": 2.5, "lr": 0.01, "samples_per_s": 80.0, "step_s": 0.1}
SECOND = {
    "loss": 2.0,
    "lr": 0.01,
    "norm": 1.5,
    "samples_per_s": 40.0,
    "tokens_per_s": 320.0,
    "step_s": 0.2,
    "bound_share": 0.75,
    "crossed_bytes": 4096.0,
    "eval/loss": 2.25,
    "eval/accuracy": 0.5,
}


def elsewhere(call: Callable[[], None] | None) -> None:
    """In a thread of its own, as an owner may."""
    if call is not None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()


def log(callbacks: list[Callback], *, resumed: int = 0, error: str | None = None) -> None:
    """A whole run, or what comes behind so many steps that are known."""
    listeners = Listeners(callbacks, Control("tune", metrics=("loss", "accuracy")))
    if resumed:
        elsewhere(listeners.event("on_resume", [report.to_json() for report in REPORTS[:resumed]]))
    elsewhere(listeners.plan(None))
    for report in REPORTS[resumed:]:
        elsewhere(listeners.step(report))
    elsewhere(listeners.plan(None))  # another one: nothing is opened again
    elsewhere(listeners.end(None, error))


class Calls(ModuleType):
    """A library whose functions write down how they were called; `gives` are what they return."""

    def __init__(self, name: str, made: list[tuple[Any, ...]], gives: dict[str, Any]) -> None:
        super().__init__(name)
        for function, value in gives.items():
            setattr(self, function, self.writing(made, function, value))

    @staticmethod
    def writing(made: list[tuple[Any, ...]], function: str, value: Any = None) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            made.append((function, *args, *options.items()))
            return value

        return call


@pytest.mark.parametrize("resumed", [0, 2])
def test_csv_has_a_line_for_each_step(tmp_path: Path, resumed: int) -> None:
    file = tmp_path / "run.csv"
    file.write_text("step,loss\n0,2.5\n1,2.0\n2,1.")  # as an owner that was killed leaves it
    log(called([f"csv:{file}"]), resumed=resumed)
    rows = rows_of(file)
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    figures = ["loss", "lr", "norm", "samples_per_s", "tokens_per_s", "step_s", "bound_share", "crossed_bytes"]
    assert list(rows[0]) == ["step", *figures, "eval/loss", "eval/accuracy"]
    assert [{k: float(v) for k, v in row.items() if v and k != "step"} for row in rows[:2]] == [FIRST, SECOND]


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_csv_of_a_run_that_goes_on_has_the_metrics_that_its_job_had_before(tmp_path: Path) -> None:
    listeners = Listeners(called([f"csv:{tmp_path / 'run.csv'}"]), Control("tune"))
    elsewhere(listeners.event("on_resume", [report.to_json() for report in REPORTS[:2]]))
    elsewhere(listeners.step(REPORTS[2]))
    rows = rows_of(tmp_path / "run.csv")
    assert [row["eval/accuracy"] for row in rows] == ["", "0.5", ""]


@pytest.mark.parametrize("full", [False, True])
def test_csv_has_a_line_for_each_step_that_an_audit_takes_back(tmp_path: Path, full: bool) -> None:
    """As it was told last; also where the disk has refused rows until then."""
    small, file = RefusingDisk(tmp_path), tmp_path / "run.csv"
    listeners = Listeners(called([f"csv:{file}"]), Control("tune", metrics=("loss", "accuracy")))
    with disk.using(small):
        elsewhere(listeners.plan(None))
        for step, loss in ((0, 2.5), (1, 9.0), (2, 9.5), (1, 2.0), (2, 1.5)):
            small.error = errno.ENOSPC if full and loss != 2.5 and step == 1 else None
            elsewhere(listeners.step(replace(REPORTS[0], step=step, loss=loss)))
        elsewhere(listeners.end(None, None))
    assert [(row["step"], row["loss"]) for row in rows_of(file)] == [("0", "2.5"), ("1", "2.0"), ("2", "1.5")]


@pytest.mark.parametrize("mended", [False, True])
def test_rows_of_csv_wait_for_a_smallthat_is_full(tmp_path: Path, mended: bool) -> None:
    full, file = RefusingDisk(tmp_path), tmp_path / "run.csv"
    listeners = Listeners(called([f"csv:{file}"]), Control("tune", metrics=("loss", "accuracy")))
    with disk.using(full), capture_logs() as logged:
        elsewhere(listeners.plan(None))
        for report in REPORTS:
            elsewhere(listeners.step(report))
            full.error = errno.ENOSPC
        before = file.read_text().splitlines()
        full.error = None if mended else errno.EROFS
        elsewhere(listeners.end(None, None))
    assert [row.split(",")[0] for row in before] == ["step", "0"]
    steps = [row.split(",")[0] for row in file.read_text().splitlines()]
    assert steps == (["step", "0", "1", "2"] if mended else ["step", "0"])
    told = [line["event"] for line in logged]
    assert told[0] == f"the log csv:{file} cannot be written, and will be tried again"
    assert told[1:] == ([f"the log csv:{file} can be written again"] if mended else [])
    assert "bytes are needed" in logged[0]["disk"]


def test_a_csv_file_that_no_smalltakes_is_told_of_before_the_first_step(tmp_path: Path) -> None:
    listeners = Listeners(called([f"csv:{tmp_path / 'run.csv'}"]), Control("tune"))
    begins = listeners.plan(None)
    assert begins is not None
    with (
        disk.using(RefusingDisk(tmp_path, errno.ENOSPC)),
        pytest.raises(UsageError, match="cannot be written: No space"),
    ):
        begins()


@pytest.mark.parametrize(
    ("name", "error", "end"),
    [("wandb", None, ("exit_code", 0)), ("wandb", "lost", ("exit_code", 1)), ("trackio", None, None)],
)
def test_wandb_and_trackio_are_called_as_they_want(
    monkeypatch: pytest.MonkeyPatch, name: str, error: str | None, end: tuple[str, int] | None
) -> None:
    made: list[tuple[Any, ...]] = []
    run = SimpleNamespace(log=Calls.writing(made, "log"), finish=Calls.writing(made, "finish"))
    monkeypatch.setitem(sys.modules, name, Calls(name, made, {"init": run}))
    log(called([f"{name}:mine"]), error=error)
    third = {**FIRST, "loss": 1.5, "lr": 0.001}
    assert made == [
        ("init", ("project", "mine"), ("name", "tune")),
        ("log", FIRST, ("step", 0)),
        ("log", SECOND, ("step", 1)),
        ("log", third, ("step", 2)),
        ("finish", *([end] if end else [])),
    ]


@pytest.mark.parametrize("error", [None, "lost"])
def test_mlflow_is_called_by_its_client(monkeypatch: pytest.MonkeyPatch, error: str | None) -> None:
    made: list[tuple[Any, ...]] = []
    run = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    gives = {"create_run": run, "log_metric": None, "set_terminated": None}
    client = SimpleNamespace(**{call: Calls.writing(made, call, value) for call, value in gives.items()})
    library = {"set_experiment": SimpleNamespace(experiment_id="7"), "MlflowClient": client}
    monkeypatch.setitem(sys.modules, "mlflow", Calls("mlflow", made, library))
    log(called(["mlflow"]), error=error)
    assert made[:3] == [("set_experiment", "meshcee"), ("MlflowClient",), ("create_run", "7", ("run_name", "tune"))]
    logged = [call[1:] for call in made if call[0] == "log_metric"]
    assert [call for call in logged if call[-1] == ("step", 1)] == [
        ("r1", *pair, ("step", 1)) for pair in SECOND.items()
    ]
    assert made[-1] == ("set_terminated", "r1", "FINISHED" if error is None else "FAILED")


def test_a_service_that_is_down_for_a_while_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library raises an error of its own, which is none of the system's."""
    run, got = SimpleNamespace(info=SimpleNamespace(run_id="r1")), list[int]()

    def log_metric(run: str, name: str, value: float, step: int) -> None:
        if step == 1:
            raise RuntimeError("the tracking server answers 503")
        got.append(step)

    def set_terminated(run: str, state: str) -> None:
        raise RuntimeError("the tracking server is gone")

    client = SimpleNamespace(create_run=lambda *a, **b: run, log_metric=log_metric, set_terminated=set_terminated)
    library = {"set_experiment": SimpleNamespace(experiment_id="7"), "MlflowClient": client}
    monkeypatch.setitem(sys.modules, "mlflow", Calls("mlflow", [], library))
    with capture_logs() as logged:
        log(called(["mlflow"]))
    assert set(got) == {0, 2}
    why = ["the tracking server answers 503", None, "the tracking server is gone"]
    assert [line.get("disk") for line in logged] == why, "it is said, and when it is over"


def test_tensorboard_hides_what_a_dead_owner_wrote_beyond_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    writer = SimpleNamespace(add_scalar=Calls.writing(made, "add_scalar"), close=Calls.writing(made, "close"))
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    module = Calls("torch.utils.tensorboard", made, {"SummaryWriter": writer})
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    log(called(["tensorboard:there"]), resumed=2)
    assert made[0] == ("SummaryWriter", "there", ("purge_step", 2))
    assert ("add_scalar", "loss", 1.5, 2) in made
    assert made[-1] == ("close",)
    made.clear()
    listeners = Listeners(called(["tensorboard:there"]), Control("tune"))
    elsewhere(listeners.plan(None))
    for report in (*REPORTS[:2], REPORTS[0]):  # an audit takes both back
        elsewhere(listeners.step(report))
    assert [call for call in made if call[0] != "add_scalar"] == [
        ("SummaryWriter", "there", ("purge_step", None)),
        ("close",),
        ("SummaryWriter", "there", ("purge_step", 0)),
    ]


@pytest.mark.parametrize("name", ["tensorboard:there", "wandb", "mlflow", "trackio:mine"])
def test_a_library_that_is_missing_is_one_sentence(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    library = name.partition(":")[0]
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=f"not installed here: pip install {library}$"):
        called([name])


@pytest.mark.parametrize(
    ("name", "says"),
    [("paper", "there is no logger 'paper'"), ("csv", "csv:FILE"), ("csv:/no/such/run.csv", "a folder that is there")],
)
def test_what_is_no_logger_is_refused(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        called([name])


@pytest.mark.slow
def test_a_local_run_logs_and_keeps_a_folder_with_checkpoints(tmp_path: Path) -> None:
    """`train --local` keeps what a run on a mesh keeps."""
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "meshcee", "train", "job.py", "--local", "2", "--log", "csv:run.csv"]
    environment = {**os.environ, "MESHCEE_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    run = Home(tmp_path / "home").run("last")
    assert run.state == "done"
    assert CheckpointStore(run.checkpoints).complete()[0].next_step == 3
    with (tmp_path / "run.csv").open(newline="") as lines:
        logged = [float(row["loss"]) for row in csv.DictReader(lines)]
    assert logged == [line["loss"] for line in run.reports()]
    assert len(logged) == 3
