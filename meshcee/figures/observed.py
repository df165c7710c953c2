"""What the steps of a job show of the mesh that runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Observed"]


@dataclass(frozen=True)
class Observed:
    """What a step showed of the mesh that ran it."""

    compute_s: Mapping[str, float] = field(default_factory=dict)  # peer -> seconds of its F, B and W together
    rates: Mapping[tuple[str, str], float] = field(default_factory=dict)  # (from, to) -> bytes per second
    depths: Mapping[tuple[str, str], float] = field(default_factory=dict)  # -> most bytes on their way when more came
    fed: Mapping[str, tuple[int, float]] = field(default_factory=dict)  # peer -> inputs' bytes, and how many a second
    # peer -> what its time went into: f, b, w, wait, apply, encode, decode, and their total
    seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    memory_bytes: Mapping[str, int] = field(default_factory=dict)  # peer -> the most that its stage has taken
    data_s: float | None = None  # that its samples took the owner; None where others read, or read ahead
