"""What tests of the Trainer share: a tiny model is captured once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rig import captures


@pytest.fixture(autouse=True)
def _captures_are_remembered() -> Iterator[None]:
    with captures.remembered():
        yield
