"""Figures in words: a unit, four digits at most, and a phrase for how much longer something takes."""

from __future__ import annotations

import pytest

from meshcee.figures.amounts import amount, size, times_as_long


@pytest.mark.parametrize(
    ("ratio", "told"),
    [
        (0.9, "about as long"),
        (1.0, "about as long"),
        (1.004, "about as long"),
        (1.006, "1% longer"),
        (1.12, "12% longer"),
        (1.99, "99% longer"),
        (2.5, "2.5 times as long"),
        (80.251, "80 times as long"),
    ],
)
def test_how_much_longer_is_a_phrase(ratio: float, told: str) -> None:
    assert times_as_long(ratio) == told


def test_bytes_and_counts_have_units() -> None:
    assert [size(n) for n in (0, 1023, 2048, 3 << 20, 8 << 30, 5 << 40)] == [
        "0 B", "1023 B", "2 KiB", "3 MiB", "8 GiB", "5 TiB",
    ]  # fmt: skip
    assert [amount(n) for n in (7, 1_234_567, 2.5e13)] == ["7", "1.23 M", "25 T"]
