"""`meshcee check` and `meshcee capture`: what becomes of a job, found in this process. Nothing is joined.

The idea: `check` takes the same look that every run takes before its first step, and then trains whole steps both ways. `capture`
shows how the model falls into blocks and what each costs.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch

from meshcee.capture import capture
from meshcee.equality import STAGES, check, refuse
from meshcee.errors import UsageError
from meshcee.figures import BlockCost
from meshcee.figures.amounts import amount, size
from meshcee.files import disk
from meshcee.files.steady import write_fact
from meshcee.picture import picture_of_capture
from peers.cli.session import configure_logging, load_job
from peers.cli.ui import self_contained

__all__ = ["run_capture", "run_check"]

# What is said of a block: heading, field of BlockCost, whether it counts bytes.
FIGURES = (
    ("FLOPs", "flops", False),
    ("parameters", "parameter_bytes", True),
    ("activations", "activation_bytes", True),
    ("crosses the cut", "boundary_bytes", True),
)


def run_check(path: Path, stages: str | None, steps: int | None, threads: int | None, *, as_json: bool) -> None:
    """Check the job in this file; raises UnequalError (exit code 10) where something differs."""
    configure_logging(as_json=as_json, level="warning")
    if threads:
        torch.set_num_threads(threads)
    start_s = time.perf_counter()
    checked = check(load_job(path), _counts(stages), steps, say=(lambda text: None) if as_json else _say)
    if as_json:
        result: dict[str, Any] = {"equal": checked.equal, **dataclasses.asdict(checked)}
        write_fact({"result": result})
    else:
        for note in checked.notes:
            _say(f"note: {note}")
    refuse(checked)
    if not as_json:
        told = ", ".join(map(str, checked.stages))
        print(f"equal, bit for bit: {len(checked.losses)} steps on {told} stages and in the plain loop")
        threads = torch.get_num_threads()
        print(f"  in {time.perf_counter() - start_s:.1f} s, with {threads} thread{'s' * (threads > 1)}")


def _say(text: str) -> None:
    print(f"  {text}", flush=True)


def _counts(text: str | None) -> tuple[int, ...]:
    if text is None:
        return STAGES
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--stages is a list of numbers such as 1,2,3,5, not {text!r}") from None


def run_capture(path: Path, html: Path | None, *, as_json: bool) -> None:
    """Print the blocks of the job in this file; with `html`, draw them too."""
    if html is not None:
        disk.check_place(html, "--html")
    job = load_job(path)
    start_s = time.perf_counter()
    captured = capture(job)
    seconds = time.perf_counter() - start_s
    costs = captured.costs
    if html is not None:
        picture = picture_of_capture(costs, time.time())
        disk.publish(html, self_contained(picture, f"meshcee capture: {job.name}").encode())
    if as_json:
        result: dict[str, Any] = {
            "job": job.name,
            "seconds": seconds,
            "flops": sum(c.flops for c in costs),
            "state_bytes": captured.state_bytes,
            "random": captured.train.uses_random,
            "blocks": [dataclasses.asdict(c) for c in costs],
        }
        write_fact(result)
        return
    print(
        f"{job.name}: {len(costs)} block{'s' * (len(costs) != 1)}, {amount(sum(c.flops for c in costs))} FLOPs forward per sample, "
        f"{size(captured.state_bytes)} of parameters and buffers; captured in {seconds:.1f} s"
    )
    print(_table(costs))
    if html is not None:
        print(f"drawn in {html}")


def _table(costs: tuple[BlockCost, ...]) -> str:
    """One line a block; all figures are per sample, except parameters."""
    rows = [["", "block", *(heading for heading, _, _ in FIGURES)]]
    for i, cost in enumerate(costs):
        figures = [(getattr(cost, field), in_bytes) for _, field, in_bytes in FIGURES]
        rows.append([str(i), cost.name, *(size(v) if in_bytes else amount(v) for v, in_bytes in figures)])
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(w) if k == 1 else cell.rjust(w) for k, (cell, w) in enumerate(zip(row, widths)))
        for row in rows
    )
