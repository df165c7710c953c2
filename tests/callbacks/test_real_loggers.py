"""The loggers' own libraries, without a network: what they have kept of three steps is what was logged.

The idea: tests/callbacks/test_loggers.py says how the libraries are called, and this file that they take it so. `make newest`
installs them all.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshcee.callbacks import Control, Listeners, called
from tests.callbacks.test_loggers import FIRST, REPORTS, SECOND, elsewhere, log

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries that are not ours

LOGGED = [FIRST, SECOND, {**FIRST, "loss": 1.5, "lr": 0.001}]


def by_step(scalars: dict[str, dict[int, float]]) -> list[dict[str, float]]:
    """What was logged at each step, of {name: {step: value}}."""
    steps = sorted({step for values in scalars.values() for step in values})
    return [{name: values[step] for name, values in scalars.items() if step in values} for step in steps]


def test_tensorboard_reads_what_was_logged_and_nothing_of_a_dead_owner(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the log extra is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    dead = Listeners(called([f"tensorboard:{tmp_path}"]), Control("tune"))
    elsewhere(dead.plan(None))
    for report in (*REPORTS[:2], *(replace(REPORTS[0], step=step) for step in (2, 3))):
        elsewhere(dead.step(report))
    elsewhere(dead.end(None, "lost"))
    log(called([f"tensorboard:{tmp_path}"]), resumed=2)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}
    assert by_step(found) == [pytest.approx(figures) for figures in LOGGED]  # they are kept in fp32


def records_of(log: bytes) -> Iterator[bytes]:
    """Of a log as LevelDB writes it, behind 7 bytes of wandb's own; in blocks of 32 KiB, with parts of (checksum, length, kind)."""
    place, found = 7, b""
    while place < len(log):
        if (left := -place % 32768) < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", log, place + 4)
        found += log[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield found
            found = b""


@pytest.mark.parametrize("error", [None, "lost"])
def test_wandb_keeps_what_was_logged_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str | None
) -> None:
    wandb: Any = pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    log(called(["wandb:mine"]), error=error)
    wandb.teardown()  # it remembers its folder in this process
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = [Record.FromString(data) for data in records_of(file.read_bytes())]
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name) == ("mine", "tune")
    found = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            found.append({name: value for name, value in row.items() if not name.startswith("_")})
    assert found == LOGGED
    assert [r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit"] == [1 if error else 0]


@pytest.mark.parametrize("error", [None, "lost"])
def test_mlflow_gives_back_what_was_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str | None) -> None:
    mlflow: Any = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'runs.db'}")
    log(called(["mlflow:mine"]), error=error)
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (run.info.run_name, run.info.status) == ("tune", "FAILED" if error else "FINISHED")
    found = {
        name: {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, name)}
        for name in run.data.metrics
    }
    assert by_step(found) == LOGGED


def test_trackio_gives_back_what_was_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # it reads this when it is imported
    trackio: Any = pytest.importorskip("trackio", reason="trackio is not installed: pip install trackio")
    log(called(["trackio:mine"]))
    (run,) = trackio.Api().runs("mine")
    assert run.name == "tune"
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("mine", "tune")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [{name: value for name, value in row.items() if name not in ("step", "timestamp")} for row in rows] == LOGGED
