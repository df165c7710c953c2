"""`meshcee capture`: how a job's model falls into blocks, and what each costs. Nothing is joined, nothing is trained.

The idea: the same capture that training starts with, printed; what fails here would fail there, with the same words.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from meshcee import disk
from meshcee.capture import capture
from meshcee.capture.page import FIGURES, amount, page, size
from meshcee.profile import BlockCost
from peers.jobfile import load_job
from peers.strict_json import dumps

__all__ = ["run_capture"]


def run_capture(path: Path, html: Path | None, *, as_json: bool) -> None:
    """Print the blocks of the job in this file; with `html`, draw them too."""
    job = load_job(path)
    start_s = time.perf_counter()
    captured = capture(job)
    seconds = time.perf_counter() - start_s
    costs = captured.costs
    if html is not None:
        disk.publish(html, page(costs, f"meshcee capture: {job.name}").encode())
    if as_json:
        result: dict[str, Any] = {
            "job": job.name,
            "seconds": seconds,
            "flops": sum(c.flops for c in costs),
            "state_bytes": captured.state_bytes,
            "random": captured.train.uses_random,
            "blocks": [dataclasses.asdict(c) for c in costs],
        }
        print(dumps(result), flush=True)
        return
    print(
        f"{job.name}: {len(costs)} blocks, {amount(sum(c.flops for c in costs))} FLOPs forward per sample, "
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
