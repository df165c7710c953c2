"""How much memory this process has held at most since a moment, by the kernel's own count; and what it holds, by the byte.

The kernel counts pages. A page stays while one byte of it is in use, so what other tests did before is in its figure.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

__all__ = ["allocated", "growth", "holding"]


_COUNTS = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later (mallinfo(3)): ten counts of bytes or blocks."""

    _fields_ = [(name, ctypes.c_size_t) for name in _COUNTS]


def allocated() -> int:
    """Bytes that C's allocator has given and not taken back: tensors are among them, Python's small objects are not."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Mallinfo
    info = ask()
    return int(info.uordblks + info.hblkhd)


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


@contextlib.contextmanager
def holding() -> Iterator[Callable[[], int]]:
    """The function says how many bytes Python, numpy and tensors hold that they did not hold at first.

    The kernel's count is of pages, some of which nobody uses.
    """
    gc.collect()
    tracemalloc.start()
    try:
        before = _traced_bytes() + _tensors_bytes()
        yield lambda: _traced_bytes() + _tensors_bytes() - before
    finally:
        tracemalloc.stop()


def _traced_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def _tensors_bytes() -> int:
    """Of those whose memory is torch's own: what numpy has made is counted by Python."""
    tensors = (one for one in gc.get_objects() if type(one) is torch.Tensor and one.device.type == "cpu")
    found = {of.data_ptr(): of.nbytes() for of in (one.untyped_storage() for one in tensors) if of.resizable()}
    return sum(found.values())
