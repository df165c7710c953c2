"""Amounts as people say them: bytes in KiB, MiB or GiB, counts in thousands and millions, one time beside another.

The idea: a figure that a person reads has a unit and four digits at most; whatever prints one asks here.
"""

from __future__ import annotations

__all__ = ["amount", "size", "times_as_long"]

ALIKE = 1.005  # times as long: up to here nobody sees a difference
DOUBLE = 2.0  # from here on nobody asks for percents
MANY = 10.0  # nor, from here on, for tenths


def amount(number: float) -> str:
    """1234567 -> "1.23 M"."""
    for unit in ("", " k", " M", " G", " T"):
        if abs(number) < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} P"


def size(count: float) -> str:
    """2048 -> "2 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def times_as_long(ratio: float) -> str:
    """1.0 -> "about as long", 1.12 -> "12% longer", 80.25 -> "80 times as long"."""
    if ratio <= ALIKE:
        return "about as long"
    if ratio < DOUBLE:
        return f"{max(ratio - 1, 0.01):.0%} longer"
    return f"{ratio:.1f} times as long" if ratio < MANY else f"{ratio:.0f} times as long"
