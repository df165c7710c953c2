"""Real peers are killed, paused, cut off and replaced by a seed's schedule, and the losses are those of the plain loop."""

from __future__ import annotations

import pytest

from benchmarks.chaos import one


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_no_step_is_lost_or_told_of_twice(seed: int) -> None:
    result = await one(seed, steps=40, blows=4)
    assert result["outcome"] == "equal", result
