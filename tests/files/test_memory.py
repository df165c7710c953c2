"""What the collector passes over while a run lasts, and what goes back to the system when it is freed."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest

from meshcee.files import memory
from meshcee.files.memory import large_apart, settled


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


def test_large_tensors_stay_apart_until_the_last_who_asked_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture inside a run ended that for the run, whose owner then grew by a third of its model."""
    told: list[int] = []
    trimmed: list[int] = []
    libc = SimpleNamespace(mallopt=lambda what, count: told.append(count), malloc_trim=trimmed.append)
    monkeypatch.setattr(memory, "ctypes", SimpleNamespace(CDLL=lambda name: libc))
    monkeypatch.setattr(memory.sys, "platform", "linux")
    with large_apart():
        with large_apart():
            pass
        assert set(told) == {1 << 20}
        assert not trimmed
    assert told[-1] > 1 << 20
    assert trimmed == [0]


def test_a_run_inside_another_thaws_nothing() -> None:
    with settled():
        count = gc.get_freeze_count()
        with settled():
            pass
        assert gc.get_freeze_count() == count > 0
    assert gc.get_freeze_count() == 0
