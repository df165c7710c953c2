"""`meshcee run list | stop | checkpoint | logs`, `meshcee checkpoint export`: this machine's own runs, read from their folders."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from meshcee.errors import UsageError
from meshcee.files import hugging_face
from meshcee.files.home import Home, Run
from meshcee.files.steady import write_fact
from meshcee.files.tensor_files import OnDemand, save
from peers.cli.session import Screen, safetensors_file
from peers.cli.ui.wishes import ask_to_stop, wish_checkpoint
from peers.state.checkpoint import Checkpoint, CheckpointStore

__all__ = ["export", "find", "list_runs", "save_run", "show_logs", "stop_run"]


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
        "checkpoints": [c.next_step for c in CheckpointStore.found(run).complete()],
    }


def _figure(value: object) -> str:
    """Figures that are no numbers are kept as null."""
    return f"{value:.4f}" if isinstance(value, float) else "nan"


def list_runs(*, as_json: bool) -> None:
    summaries = [_summary(run) for run in Home().runs()]
    if as_json:
        for summary in summaries:
            write_fact(summary)
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
    Screen().print(table)


def stop_run(run_id: str) -> None:
    """Send the owner the first Ctrl-C, unless somebody has; wait until it has saved."""
    run = Home().run(run_id)
    process = ask_to_stop(run)
    typer.echo(f"{run.id}: finishing its step and saving ...")
    deadline_s = time.monotonic() + 60
    while run.state == "running":
        if time.monotonic() > deadline_s:
            raise UsageError(f"run {run.id} is still busy after 60 s; `kill {process.pid}` aborts it")
        time.sleep(0.2)
    typer.echo(f"{run.id}: {run.state}")


def save_run(run_id: str) -> None:
    """Ask the owner; `meshcee run list` shows when it is done."""
    run = Home().run(run_id)
    wish_checkpoint(run)
    typer.echo(f"{run.id}: it saves its state before its next step")


def show_logs(run_id: str, *, as_json: bool) -> None:
    run = Home().run(run_id)
    for report in run.reports():
        if as_json:
            write_fact(report)
        else:
            metrics = "  ".join(f"{k} {_figure(v)}" for k, v in report["metrics"].items())
            terms = "".join(f"  {k} {_figure(v)}" for k, v in report.get("terms", {}).items())
            line = f"step {report['step'] + 1}/{report['steps']}  loss {_figure(report['loss'])}{terms}"
            print(f"{line}  {report['samples_per_s']:.1f} samples/s  {report['limit']}  {metrics}".rstrip())
    if not as_json and (ended := run.result):
        print(run.state + (f": {ended['error']}" if ended.get("error") else ""))


def find(wanted: str) -> Checkpoint:
    """RUN or RUN@STEP: the newest checkpoint of a run of this machine, or that one."""
    run_id, _, step = wanted.partition("@")
    run = Home().run(run_id)
    return CheckpointStore.found(run).find(step, run.id)


def export(wanted: str, hf: Path | None, out: Path | None, *, ema: bool = False, as_json: bool) -> None:
    if (hf is None) == (out is None):
        raise UsageError("say what to write: --out FILE.safetensors, or --hf DIR for Hugging Face's from_pretrained")
    out = out and safetensors_file(out)
    checkpoint = find(wanted)
    checkpoint.verify()
    manifest = checkpoint.manifest
    state = checkpoint.weights(manifest["persistent"])
    if ema:
        if not (averages := checkpoint.averages):
            raise UsageError(
                "the run keeps no average of its weights: train the job with ema=0.999, or leave --ema out"
            )
        weights = state
        state = OnDemand(weights, lambda name: averages[name] if name in averages else weights[name])
    if hf is not None:
        kind, count = hugging_face.write(hf, manifest, state, checkpoint.changed)
        how = f", for {kind}.from_pretrained"
    else:
        assert out is not None
        names = {name: name for name in state}
        names |= {other: name for other, name in manifest["aliases"].items() if name in state}
        save(out, OnDemand(names, lambda name: state[names[name]]))
        how, count = "", len(state)
    place = str(hf or out)
    if as_json:
        write_fact({"out": place, "next_step": checkpoint.next_step, "tensors": count})
    else:
        print(f"{place}: {count} tensors, as they were after {checkpoint.next_step} steps{how}")
