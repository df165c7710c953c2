"""Memory that goes back to the system when it is freed, and objects that nobody looks through again and again.

The idea: glibc gives a large allocation pages of its own, until the first of them is freed. From then on it puts
allocations of up to 32 MiB between small ones, where what is freed is often too narrow to be used again. Work that holds
one large tensor after the other would so end up with most of them resident.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["large_apart", "settled"]

_M_MMAP_THRESHOLD = -3  # of malloc.h
_LARGE_BYTES = 1 << 20
_USUAL_BYTES = 32 << 20  # where glibc's own adjustment ends up in a process that frees large tensors
_lock, _entered = threading.Lock(), 0


@contextmanager
def large_apart() -> Iterator[None]:
    """While this is entered, by anybody, allocations of a MiB and more get pages of their own. Does nothing without glibc."""
    global _entered
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "malloc_trim"):
        yield
        return
    with _lock:
        _entered += 1
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
    try:
        yield
    finally:
        with _lock:
            _entered -= 1
            if not _entered:
                libc.mallopt(_M_MMAP_THRESHOLD, _USUAL_BYTES)
                libc.malloc_trim(0)


@contextmanager
def settled() -> Iterator[None]:
    """While this is entered, Python's collector passes over what there is now. With torch these are 340,000 objects,
    which it would go through every now and then, for 0.2 s in which nothing else runs.

    What an earlier run has left is collected first, or it would be kept as long as this one. Does nothing where that is so already.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
