"""How fast to send to another member: hardly faster than the link carries it.

The idea: TCP learns a link's bandwidth from what it is given all the time, and a pipeline gives it bursts. It then runs into the
end of a router's queue, again and again, and a packet lost there holds up a step by two round trips. But the bandwidth is known:
probes have measured it, and each step the receiver tells how fast frames have come. A figure that is too low mends itself: whoever
sees as much come as was let through does not see the link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from peers.transport import Stream

__all__ = ["Throttle"]

# Times what is known. A step begins with a burst of a second or two, and what is too much must have room in a queue of 100 ms.
HASTE = 1.08
ALL = 0.96  # of what was let through: so much comes only where the throttle is what limits it
RECENT = 5  # steps in which what a link has shown is believed


class Throttle:
    """Of the stream to one member. `known`: bytes per second, as published; inf where there is no limit or nobody knows."""

    def __init__(self, stream: Stream, known: Callable[[], float]) -> None:
        self._stream, self._known = stream, known
        self._shown: deque[float] = deque(maxlen=RECENT)
        self._set(0.0)

    def hear(self, rate: float) -> None:
        """So many bytes per second came in a step. What begins slowly, or shares the link, shows less than it has."""
        self._shown.append(rate)
        self._set(2 * rate if rate >= ALL * self.bytes_per_s else max(self._shown))

    def _set(self, shown: float) -> None:
        self.bytes_per_s = HASTE * max(self._known(), shown)
        self._stream.throttle(self.bytes_per_s)
