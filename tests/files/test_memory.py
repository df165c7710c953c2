"""What the collector passes over while a run lasts."""

from __future__ import annotations

import gc
import weakref

import pytest

from meshcee.files.memory import settled


class Run:
    """It refers to itself, so only the collector frees it."""

    def __init__(self) -> None:
        self.me = self


pytestmark = pytest.mark.usefixtures("thawed")


def test_what_an_earlier_run_has_left_is_not_kept_as_long_as_the_next_one() -> None:
    gc.disable()
    try:
        left = weakref.ref(Run())
        assert left() is not None
        with settled():
            assert left() is None
            of_this_one = weakref.ref(Run())
            gc.collect()
            assert of_this_one() is None
    finally:
        gc.enable()


def test_a_run_inside_another_thaws_nothing() -> None:
    with settled():
        count = gc.get_freeze_count()
        with settled():
            pass
        assert gc.get_freeze_count() == count > 0
    assert gc.get_freeze_count() == 0
