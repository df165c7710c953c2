"""`meshcee run list | stop | logs`: the runs that this machine owns, read from their folders."""

from __future__ import annotations

import signal
import time
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from meshcee.errors import UsageError
from peers.checkpoint import CheckpointStore
from peers.home import Home, Run
from peers.strict_json import dumps

__all__ = ["list_runs", "show_logs", "stop_run"]


def _summary(run: Run) -> dict[str, Any]:
    reports = run.reports()
    last = reports[-1] if reports else {}
    return {
        "run": run.id,
        "state": run.state,
        "step": last.get("step", -1) + 1,
        "steps": last.get("steps", run.info.get("steps", 0)),
        "loss": last.get("loss"),
        "started": run.info.get("started"),
        "checkpoints": [c.next_step for c in CheckpointStore(run.checkpoints).complete()],
    }


def _figure(value: object) -> str:
    """Figures that are no numbers are kept as null."""
    return f"{value:.4f}" if isinstance(value, float) else "nan"


def list_runs(*, as_json: bool) -> None:
    summaries = [_summary(run) for run in Home().runs()]
    if as_json:
        for summary in summaries:
            print(dumps(summary))
        return
    if not summaries:
        print("No runs yet: start one with `meshcee train JOB.py --join TOKEN`.")
        return
    table = Table()
    for column in ("run", "state", "step", "loss", "checkpoints"):
        table.add_column(column)
    for s in summaries:
        loss = _figure(s["loss"]) if s["step"] else "-"
        kept = ", ".join(f"@{step}" for step in s["checkpoints"]) or "-"
        table.add_row(str(s["run"]), str(s["state"]), f"{s['step']}/{s['steps']}", loss, kept)
    Console().print(table)


def stop_run(run_id: str) -> None:
    """Send the owner the first Ctrl-C; wait until it has saved."""
    run = Home().run(run_id)
    process = run.process
    if process is None or run.state != "running":
        raise UsageError(f"run {run.id} is not running ({run.state})")
    process.send_signal(signal.SIGINT)
    typer.echo(f"{run.id}: finishing its step and saving ...")
    deadline_s = time.monotonic() + 60
    while run.state == "running":
        if time.monotonic() > deadline_s:
            raise UsageError(f"run {run.id} is still busy after 60 s; `kill {process.pid}` aborts it")
        time.sleep(0.2)
    typer.echo(f"{run.id}: {run.state}")


def show_logs(run_id: str, *, as_json: bool) -> None:
    run = Home().run(run_id)
    for report in run.reports():
        if as_json:
            print(dumps(report))
        else:
            metrics = "  ".join(f"{k} {_figure(v)}" for k, v in report["metrics"].items())
            line = f"step {report['step'] + 1}/{report['steps']}  loss {_figure(report['loss'])}"
            print(f"{line}  {report['samples_per_s']:.1f} samples/s  {report['limit']}  {metrics}".rstrip())
    data = run.result
    if data and not as_json:
        print(f"{data['state']}" + (f": {data['error']}" if data.get("error") else ""))
