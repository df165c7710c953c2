"""What tests of the Trainer share: a tiny model is captured once, and any plan will do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rig import captures


@pytest.fixture(autouse=True)
def _soon(quick_planning: None) -> Iterator[None]:
    with captures.remembered():
        yield
