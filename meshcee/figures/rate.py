"""How fast a link is, read off what crosses it anyway.

The idea: the bytes of a large frame leave the sender together, so how far apart they arrive is the link's doing. No clock is
compared with another machine's, and nothing is sent for it. On a link faster than the machine it shows the machine.
"""

from __future__ import annotations

__all__ = ["Rate"]

LEAST_BYTES = 32 * 1024  # behind the first read of a frame: fewer say more about buffers than about the link
LEAST_S = 1e-3


class Rate:
    """Of one direction of one stream. `begin` with the first bytes of what left together, a frame or more, `more` with the
    others, `end` with the last."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._frame_bytes = 0
        self._bytes = 0
        self._seconds = 0.0

    @property
    def running(self) -> bool:
        """Whether a frame has begun and not ended."""
        return self._began_s is not None

    def begin(self, now_s: float) -> None:
        self._began_s, self._frame_bytes = now_s, 0

    def more(self, size: int) -> None:
        self._frame_bytes += size

    def end(self, now_s: float) -> None:
        if self._began_s is not None:
            self.add(self._frame_bytes, now_s - self._began_s)
        self._began_s = None

    def add(self, size: int, seconds: float) -> None:
        """So many bytes took so long; too few of them, or too short a time, are not counted."""
        if size >= LEAST_BYTES and seconds >= LEAST_S:
            self._bytes += size
            self._seconds += seconds

    def take(self) -> float | None:
        """Bytes per second since the last call; None when nothing large has passed."""
        found = self._bytes / self._seconds if self._bytes else None
        self._bytes, self._seconds = 0, 0.0
        return found
