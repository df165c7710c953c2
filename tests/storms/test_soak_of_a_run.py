"""A long run on the owner's side (benchmarks/soak.py), short: it stays small, and nothing keeps the event loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import soak
from benchmarks.virtual_chaos import quick_planning
from tests.rig.virtual_time import quiet, run

WIDTH = 256  # figures in a sample: a step is fed 8 KiB


@pytest.mark.usefixtures("thawed")
@pytest.mark.parametrize(
    ("steps", "epochs"),
    [(2_000, 4), pytest.param(100_000, 50, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_a_long_run_stays_small_and_keeps_nobody_waiting(tmp_path: Path, steps: int, epochs: int) -> None:
    with quick_planning(), quiet():
        seen = run(soak(tmp_path, steps, epochs, samples=1_000_000, width=WIDTH))
    assert (seen.steps, seen.epochs) == (steps, epochs)
    assert seen.pause_s < 0.2, seen.paused_by
    assert seen.growth[0] < 4096  # resident: 2 KiB while caches fill; what steps were fed would be 8 more
    assert seen.growth[1] < 10  # a loss in the result is one; a report, or what was fed, would be dozens
