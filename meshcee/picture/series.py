"""The curves of a run of any length in bounded memory.

The idea: a point is a bucket of `stride` steps. When there are too many, pairs become one and the stride doubles, so what a run of
a million steps looks like costs no more than one of a thousand. A loss keeps its extremes: a spike is never averaged away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshcee.files.home import is_retraction
from meshcee.picture.values import Curves

__all__ = ["Series"]

MOST = 1024  # points
MEANS = ("loss", "lr", "norm", "samples_per_s", "step_s")
MOST_METRICS = 16  # evaluations' metrics, and terms of the loss, that are drawn


def figure(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


@dataclass
class _Bucket:
    step: int
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    low: float = math.inf
    high: float = -math.inf

    def hear(self, report: Mapping[str, Any]) -> None:
        for name in MEANS:
            if (value := figure(report.get(name))) is not None:
                self.sums[name] = self.sums.get(name, 0.0) + value
                self.counts[name] = self.counts.get(name, 0) + 1
        if (loss := figure(report.get("loss"))) is not None:
            self.low, self.high = min(self.low, loss), max(self.high, loss)

    def add(self, other: _Bucket) -> None:
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + other.counts[name]
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)

    def mean(self, name: str) -> float | None:
        return _short(self.sums[name] / self.counts[name]) if name in self.counts else None


def _short(value: float) -> float:
    """Six digits: a page shows fewer, and they are a third of the bytes."""
    return float(f"{value:.6g}")


class Series:
    """`hear` with every report, in the order of steps; one that comes again changes nothing."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self.stride = 1
        self._buckets: list[_Bucket] = []
        self._next = 0  # the first step that is not in any
        self._metrics: dict[str, list[tuple[int, float | None]]] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def hear(self, report: Mapping[str, Any]) -> None:
        step = report.get("step")
        if isinstance(step, int) and is_retraction(report):
            self._take_back(step)
            return
        if not isinstance(step, int) or step < self._next:
            return
        self._next = step + 1
        first = step - step % self.stride
        if not self._buckets or self._buckets[-1].step != first:
            if len(self._buckets) >= self._most:
                self._halve()
                first = step - step % self.stride
            if not self._buckets or self._buckets[-1].step != first:
                self._buckets.append(_Bucket(first))
        self._buckets[-1].hear(report)
        told = (("train/", report.get("terms")), ("", report.get("metrics")))
        found = {f"{of}{name}": value for of, part in told if isinstance(part, Mapping) for name, value in part.items()}
        for name, value in found.items():
            if name in self._metrics or len(self._metrics) < MOST_METRICS:
                points = self._metrics.setdefault(name, [])
                points.append((step, figure(value)))
                if len(points) > self._most:
                    del points[1::2]  # the first and the last stay

    def _take_back(self, step: int) -> None:
        """Points from this step on are told again. A point of several steps goes with its first ones."""
        if step >= self._next:
            return
        first = step - step % self.stride
        self._buckets = [bucket for bucket in self._buckets if bucket.step < first]
        self._next = first
        for points in self._metrics.values():
            points[:] = [point for point in points if point[0] < step]

    def _halve(self) -> None:
        while len(self._buckets) >= self._most:
            self.stride *= 2
            found: list[_Bucket] = []
            for bucket in self._buckets:
                first = bucket.step - bucket.step % self.stride
                if found and found[-1].step == first:
                    found[-1].add(bucket)
                else:
                    bucket.step = first
                    found.append(bucket)
            self._buckets = found

    def curves(self, since: int = 0) -> Curves:
        """The points from this one on; the last may still change."""
        buckets = self._buckets[since:]
        means = {name: tuple(bucket.mean(name) for bucket in buckets) for name in MEANS}
        return Curves(
            stride=self.stride,
            steps=tuple(bucket.step for bucket in buckets),
            loss_low=tuple(_short(b.low) if b.low < math.inf else None for b in buckets),
            loss_high=tuple(_short(b.high) if b.high > -math.inf else None for b in buckets),
            metrics={name: tuple(points) for name, points in self._metrics.items()},
            **means,
        )
