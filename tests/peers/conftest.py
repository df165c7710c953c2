"""What tests of whole meshes share: a plan soon, where any plan will do."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from meshcee.planner import Effort

QUICK = Effort(events=1_000, rows=10_000)


@pytest.fixture
def quick_planning() -> Iterator[None]:
    """A search takes up to half a second for each plan. Not for a test that judges the plan."""
    with mock.patch("meshcee.planner.live.EFFORT", QUICK), mock.patch("meshcee.planner.HURRIED", QUICK):
        yield
