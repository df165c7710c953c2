"""What a stage takes at most is measured from when it is built, whatever the process held before."""

from __future__ import annotations

import pytest
import torch

from peers.device.memory import MemoryCount
from tests.rig.resident import growth

SIZE = 64 << 20


def test_the_most_that_was_taken_at_a_time_since_the_count_began() -> None:
    growth()  # skips where a process may not reset its peak
    count = MemoryCount(torch.device("cpu"))
    with count.here():
        assert count.most_bytes() is None, "nothing was begun"
        before = torch.zeros(SIZE, dtype=torch.uint8)
        count.begin()
        for _ in range(2):
            taken = torch.ones(2 * SIZE, dtype=torch.uint8)
            del taken
        most = count.most_bytes()
        assert most is not None
        assert 1.9 * SIZE < most < 2.5 * SIZE
        del before
        count.begin()
        most = count.most_bytes()
        assert most is not None
        assert most < SIZE / 2


def test_two_devices_in_one_process_are_told_apart_by_nobody() -> None:
    first, second = (MemoryCount(torch.device("cpu")) for _ in range(2))
    with first.here():
        first.begin()
        with second.here():
            assert first.most_bytes() is None
            assert second.most_bytes() is None


def test_nothing_is_said_where_the_kernel_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise PermissionError

    count = MemoryCount(torch.device("cpu"))
    with count.here():
        count.begin()
        monkeypatch.setattr("pathlib.Path.read_text", refuse)
        assert count.most_bytes() is None
