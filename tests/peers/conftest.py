"""What tests of whole meshes share: a plan soon, where any plan will do."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from meshcee.planner import Effort
from tests.rig import captures, warm

QUICK = Effort(events=1_000, rows=10_000)


@pytest.fixture(autouse=True)
def _captures_are_remembered() -> Iterator[None]:
    with captures.remembered():
        yield


@pytest.fixture
def quick_planning() -> Iterator[None]:
    """A search takes up to half a second for each plan. Not for a test that judges the plan."""
    with mock.patch("meshcee.planner.live.EFFORT", QUICK), mock.patch("meshcee.planner.HURRIED", QUICK):
        yield


@pytest.fixture
def warm_programs() -> Iterator[None]:
    """What peers start in a Python of its own is a copy of one that has imported torch. Not for a test of how that starts."""
    with warm.warm_programs(warm.CHECKS, warm.DEVICE, warm.DATASETS):
        yield
