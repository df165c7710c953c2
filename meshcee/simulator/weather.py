"""Lines whose bandwidth and latency change while time goes on.

The idea: the changes are known beforehand, so the end of a message is found by integration when it is queued, and the
event loop stays as it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from meshcee.figures.scenario import LinkChange

__all__ = ["Weather"]


class Weather:
    """Piecewise constant bandwidth and latency of the lines between regions."""

    def __init__(
        self, changes: Iterable[LinkChange], lines: Sequence[tuple[str, str]], bandwidths: Sequence[float]
    ) -> None:
        self._bandwidths = list(bandwidths)
        self._speeds: dict[int, tuple[list[float], list[float]]] = {}
        self._delays: dict[int, tuple[list[float], list[float]]] = {}
        for change in sorted(changes, key=lambda c: c.at_s):
            a, b = change.between
            for i, line in enumerate(lines):
                if line not in (("@" + a, "@" + b), ("@" + b, "@" + a)):
                    continue
                if change.bandwidth_bytes_per_s is not None:
                    times, values = self._speeds.setdefault(i, ([0.0], [bandwidths[i]]))
                    times.append(change.at_s)
                    values.append(change.bandwidth_bytes_per_s)
                if change.extra_latency_s is not None:
                    times, values = self._delays.setdefault(i, ([0.0], [0.0]))
                    times.append(change.at_s)
                    values.append(change.extra_latency_s)

    def serve(self, line: int, held_s: float, begin_s: float) -> float:
        """When a message that takes `held_s` at the nominal bandwidth has left, if the line starts it at `begin_s`."""
        known = self._speeds.get(line)
        if known is None:
            return begin_s + held_s
        times, speeds = known
        left, now = held_s * self._bandwidths[line], begin_s
        k = bisect_right(times, now) - 1
        while k + 1 < len(times) and left > speeds[k] * (times[k + 1] - now):
            left -= speeds[k] * (times[k + 1] - now)
            k += 1
            now = times[k]
        return now + left / speeds[k]

    def extra_s(self, line: int, at_s: float) -> float:
        """Latency on top of the nominal one, for what leaves at this time."""
        known = self._delays.get(line)
        return 0.0 if known is None else known[1][bisect_right(known[0], at_s) - 1]
