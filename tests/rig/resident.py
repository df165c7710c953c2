"""How much memory this process has held at most since a moment, by the kernel's own count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

__all__ = ["growth"]


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def growth() -> Callable[[], int]:
    """Start counting; the function that it returns says by how many bytes the resident memory has grown at most.

    Pages of files, as the code of a library that is called for the first time, are not counted: all processes share them.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is resident now
    except OSError as error:
        pytest.skip(f"this system does not let a process reset its peak of resident memory: {error}")
    before = _status("VmHWM") - _status("RssFile")
    return lambda: _status("VmHWM") - _status("RssFile") - before
