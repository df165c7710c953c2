"""What benchmarks share: who measured, runs in turns, and a row for a table.

The idea: two things are compared by running them in turns on one machine, so that a machine that slows down slows both;
the figure is the median over the turns of the ratio within a turn.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["Turns", "machine", "median_interval", "row"]


def machine(device: str = "cpu") -> dict[str, Any]:
    """Enough to know a figure's origin, and nothing that names the machine's user."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip() or "unknown",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


@dataclass(frozen=True)
class Turns:
    """Seconds of the baseline and of ours, turn by turn."""

    baseline_s: Sequence[float]
    ours_s: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        """Baseline over ours: 1 means no overhead, less means that ours is slower."""
        return [b / o for b, o in zip(self.baseline_s, self.ours_s, strict=True)]

    def interval(self) -> tuple[float, float]:
        """Of the median ratio."""
        return median_interval(self.ratios)

    def to_json(self) -> dict[str, Any]:
        return {
            "baseline_s": statistics.median(self.baseline_s),
            "ours_s": statistics.median(self.ours_s),
            "ratio": statistics.median(self.ratios),
            "ratio_min": min(self.ratios),
            "ratio_max": max(self.ratios),
            "turns": len(self.ratios),
        }


def median_interval(values: Sequence[float], sure: float = 0.95) -> tuple[float, float]:
    """An interval that holds the median with at least this probability, whatever the distribution: by the sign test.

    With fewer than six values there is none for 0.95, and it is without bounds.
    """
    ordered, total, cut, below = sorted(values), 2.0 ** len(values), 0, 0.0
    while cut < len(ordered) and (below := below + math.comb(len(ordered), cut) / total) <= (1 - sure) / 2:
        cut += 1
    return (ordered[cut - 1], ordered[-cut]) if cut else (-math.inf, math.inf)


def row(*cells: object) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(str(cell) for cell in cells) + " |"
