"""What a GPU sends and receives, beside what it computes: copies on streams of their own, through page-locked memory.

The idea: a GPU does what is queued on one stream in order. A copy on the stream that computes would wait for all that is
queued there, and hold up what comes behind. On a stream of its own it waits for one mark, when its values are made. The
thread beside the device's waits for each copy before it lets anything go. So whoever holds a frame, or values that have
arrived, holds what is there, and nobody above this file knows of streams.

Whose memory is whose: torch's allocator knows only the stream on which memory was taken (`torch.Tensor.record_stream`). What
leaves is held by its frame's promise until its copy is done, so it cannot be given away before. What arrives is taken on the
stream that copies and used on the one that computes, which is recorded. Page-locked memory is torch's own: its allocator keeps
what is let go, and gives it away again once the streams that have used it are past that.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

__all__ = ["Locked", "Staging"]

T = TypeVar("T")
MOST_LOCKED_BYTES = 1 << 30  # under way at once; torch rounds each piece up to a power of two


class Locked:
    """Page-locked memory of the host, which a GPU reads and writes by itself, up to `most_bytes` at once.

    Beyond that it is ordinary memory: copies from it are slower, and as right. It comes back when nobody holds it any more.
    """

    def __init__(self, most_bytes: int = MOST_LOCKED_BYTES) -> None:
        self.left_bytes = most_bytes
        self._lock = threading.RLock()  # what a garbage collection gives back comes in the midst of anything

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Room for a flat tensor's numbers."""
        size = tensor.nbytes
        with self._lock:
            if size > self.left_bytes:
                return torch.empty(tensor.shape, dtype=tensor.dtype)
            self.left_bytes -= size
        try:
            room = self.allocate(tensor)
        except BaseException:
            self._back(size)
            raise
        # Its storage lives as long as any view of it, a frame's payload too.
        weakref.finalize(room.untyped_storage(), self._back, size).atexit = False
        return room

    def allocate(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def _back(self, size: int) -> None:
        with self._lock:
            self.left_bytes += size


class Staging:
    """Of one CUDA device. `leave` and `arrive` belong on the thread beside the device's, `mark` anywhere."""

    def __init__(self, device: torch.device, locked: Locked | None = None) -> None:
        self.device = device
        self._locked = locked or Locked()
        self._computing = torch.cuda.default_stream(device)  # no thread of a peer computes on another one
        self.leaving, self.arriving, self._summing = (torch.cuda.Stream(device) for _ in range(3))  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        """Passed when the device has done all that it was asked to compute until now."""
        return _marked(self._computing)

    def leave(self, made: torch.cuda.Event, call: Callable[[], T], _held: Any = None) -> T:
        """The call's result, when its kernels and copies are done; they begin when `made` is passed. What they read must be
        held until then: by the call, or as `_held`."""
        with torch.cuda.stream(self.leaving):
            self.leaving.wait_event(made)
            try:
                return call()
            finally:  # an error too must not let memory go that is still read
                _marked(self.leaving).synchronize()

    def sum(self, made: torch.cuda.Event, call: Callable[[], T], _held: Any = None) -> T:
        """As `leave`, for what waits for other members: a stream of its own, so nothing else waits with it."""
        with torch.cuda.stream(self._summing):
            self._summing.wait_event(made)
            try:
                return call()
            finally:
                _marked(self._summing).synchronize()

    def arrive(self, call: Callable[[], Sequence[T]]) -> list[T]:
        """Values that the call brings and decodes, when they are there."""
        with torch.cuda.stream(self.arriving):
            try:
                values = list(call())
            finally:
                _marked(self.arriving).synchronize()
        for value in values:
            if isinstance(value, torch.Tensor) and value.device.type == self.device.type:
                value.record_stream(self._computing)
        return values

    def to_host(self, flat: torch.Tensor) -> torch.Tensor:
        """Within `leave`: a flat tensor's copy, which is whole when `leave` returns."""
        if flat.device.type != self.device.type:
            return flat  # the state of a generator
        return self.copied(self._locked.like(flat), flat)

    def to_device(self, flat: torch.Tensor) -> torch.Tensor:
        """Within `arrive`: the same the other way."""
        room = self._locked.like(flat).copy_(flat)
        return self.copied(torch.empty(flat.shape, dtype=flat.dtype, device=self.device), room)

    @staticmethod
    def copied(room: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        return room.copy_(flat, non_blocking=True)


def _marked(stream: Any) -> torch.cuda.Event:
    """`blocking`: who waits for it sleeps; torch lets go of the GIL meanwhile."""
    mark = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    mark.record(stream)
    return mark
