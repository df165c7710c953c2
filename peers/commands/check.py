"""`meshcee check`: does this job train as the plain loop does? Nothing is joined; all is computed in this process.

The idea: the same look that every run takes before its first step, and then whole steps; what differs is said as an error, with the
line, and with whose doing it is.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch

from meshcee.errors import UsageError
from peers.checking import STAGES, check, refuse
from peers.commands.session import configure_logging
from peers.jobfile import load_job
from peers.strict_json import dumps

__all__ = ["run_check"]


def run_check(path: Path, stages: str | None, steps: int | None, threads: int | None, *, as_json: bool) -> None:
    """Check the job in this file; raises UnequalError (exit code 10) where something differs."""
    configure_logging(as_json=as_json, level="warning")
    if threads:
        torch.set_num_threads(threads)
    start_s = time.perf_counter()
    checked = check(load_job(path), _counts(stages), steps, say=(lambda text: None) if as_json else _say)
    if as_json:
        result: dict[str, Any] = {"equal": checked.equal, **dataclasses.asdict(checked)}
        print(dumps({"result": result}), flush=True)
    else:
        for note in checked.notes:
            _say(f"note: {note}")
    refuse(checked)
    if not as_json:
        told = ", ".join(map(str, checked.stages))
        print(f"equal, bit for bit: {len(checked.losses)} steps on {told} stages and in the plain loop")
        print(f"  in {time.perf_counter() - start_s:.1f} s, with {torch.get_num_threads()} threads")


def _say(text: str) -> None:
    print(f"  {text}", flush=True)


def _counts(text: str | None) -> tuple[int, ...]:
    if text is None:
        return STAGES
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--stages is a list of numbers such as 1,2,3,5, not {text!r}") from None
