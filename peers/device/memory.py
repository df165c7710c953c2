"""How much memory a stage takes at most, as measured: to be held against what its plan counts.

The idea: on a GPU torch counts its tensors. On a processor the kernel knows the most that a process had resident, and sets it back
when asked; so a count begins before a stage is built. Where several devices compute in one process, that figure belongs to none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["MemoryCount"]

_on_processor: set[MemoryCount] = set()  # in this process


class MemoryCount:
    """Of one device of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = None  # bytes that were taken when the count began; None: nothing can be said

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """While a processor is at work."""
        _on_processor.add(self)
        try:
            yield
        finally:
            _on_processor.discard(self)

    def begin(self) -> None:
        """What is taken from here on is counted."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
            return
        self._before = None
        with contextlib.suppress(OSError, StopIteration):
            Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak is what is resident now
            self._before = _peak_bytes()

    def most_bytes(self) -> int | None:
        """The most that was taken at a time since then; None where nothing can be said."""
        if self._before is None or len(_on_processor) > 1:
            return None
        try:
            now = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else _peak_bytes()
        except (OSError, StopIteration):  # a worker that may open no files any more
            self._before = None
            return None
        return max(0, now - self._before)


def _peak_bytes() -> int:
    """Of pages of this process's own: those of files are shared with others."""
    lines = Path("/proc/self/status").read_text().splitlines()
    peak, files = (next(int(row.split()[1]) for row in lines if row.startswith(of)) for of in ("VmHWM:", "RssFile:"))
    return 1024 * (peak - files)
