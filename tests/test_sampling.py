"""Drawing: pure, complete, without repetition inside a data epoch."""

from __future__ import annotations

from meshcee.sampling import draw


def test_a_data_epoch_holds_every_sample_at_most_once_and_drops_the_incomplete_batch() -> None:
    drawn = [i for step in range(3) for i in draw(5, 10, 3, step)]
    assert len(drawn) == len(set(drawn)) == 9
    assert set(drawn) <= set(range(10))


def test_every_data_epoch_and_seed_has_its_own_order() -> None:
    first, second = ([i for s in range(4) for i in draw(5, 16, 4, s + 4 * e)] for e in range(2))
    assert sorted(first) == sorted(second) == list(range(16))
    assert first != second
    assert draw(6, 16, 4, 0) != draw(5, 16, 4, 0)


def test_any_step_can_be_drawn_again() -> None:
    assert draw(1, 100, 8, 57) == draw(1, 100, 8, 57)
