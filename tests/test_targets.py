"""Bytes of others, changed at random, are read or refused: by an error that is an answer, in bounded time and memory.

`python -m benchmarks.fuzz` tries the same for as long as one likes.
"""

from __future__ import annotations

import pytest

from tests.rig.targets import TARGETS, Target, attempt, case

CASES = 300  # of a target whose reading is quick


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_what_is_changed_at_random_is_read_or_refused(target: Target) -> None:
    assert [attempt(target, value) for value in target.valid()] == [(False, "")] * len(target.valid())
    outcomes = {number: attempt(target, case(target, number)) for number in range(round(CASES * target.share))}
    assert {number: wrong for number, (_, wrong) in outcomes.items() if wrong} == {}
    refused = sum(was_refused for was_refused, _ in outcomes.values())
    assert not target.refusals or refused > len(outcomes) / 10, "the changes do not reach what is read"
