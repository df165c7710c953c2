"""Bytes of others, changed at random, are read or refused: by an error that is an answer, in bounded time and memory.

`python -m benchmarks.fuzz` tries the same for as long as one likes, and `benchmarks.fuzz_guided` lets coverage choose.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.fuzz_guided import Fed, Tally, value_of
from meshcee.errors import ProtocolError
from tests.rig.targets import TARGETS, Target, attempt, case

CASES = 300  # of a target whose reading is quick


@pytest.mark.cases(3)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_what_is_changed_at_random_is_read_or_refused(target: Target) -> None:
    assert [attempt(target, value) for value in target.valid()] == [(False, "")] * len(target.valid())
    outcomes = {number: attempt(target, case(target, number)) for number in range(round(CASES * target.share))}
    assert {number: wrong for number, (_, wrong) in outcomes.items() if wrong} == {}
    refused = sum(was_refused for was_refused, _ in outcomes.values())
    assert not target.refusals or refused > len(outcomes) / 10, "the changes do not reach what is read"


def test_draws_are_of_the_bytes_and_go_on_when_these_are_used_up() -> None:
    data = bytes(range(7))
    assert (Fed(data).getrandbits(8), Fed(data).getrandbits(12), Fed(data).random()) == (0, 0x10, 0x100 / 65536)
    drawn = [Fed(data).sample(range(1000), 50) for _ in range(2)]
    assert drawn[0] == drawn[1] != Fed(data[1:]).sample(range(1000), 50)


def test_an_input_that_goes_wrong_is_kept_and_repeats(tmp_path: Path) -> None:
    def reading(value: bytes) -> None:
        if b"~" in value:
            raise KeyError("a bug")
        raise ProtocolError("no")

    target = Target("texts", lambda: [b"some text"], reading)
    tally = Tally([target], tmp_path)
    chance = random.Random(0)
    for _ in range(300):
        tally.one(bytes([0]) + chance.randbytes(100))
    assert tally.inputs["texts"] == 300 > tally.refused["texts"] > 0
    (said, kept), *others = tally.wrong.items()
    assert "KeyError" in said
    assert others == []
    assert b"~" in value_of(target, _after_the_share(Path(kept).read_bytes()))


def _after_the_share(data: bytes) -> Fed:
    draw = Fed(data[1:])
    draw.random()
    return draw
