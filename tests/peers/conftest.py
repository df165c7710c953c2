"""What tests of whole meshes share: a job is captured once, and processes start at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rig import captures, warm


@pytest.fixture(autouse=True)
def _captures_are_remembered() -> Iterator[None]:
    with captures.remembered():
        yield


@pytest.fixture
def warm_programs() -> Iterator[None]:
    """What peers start in a Python of its own is a copy of one that has imported torch. Not for a test of how that starts."""
    with warm.warm_programs(warm.CHECKS, warm.DEVICE, warm.DATASETS):
        yield
