"""The step and plan protocol, explored exhaustively within small bounds; and that the explorer finds what is wrong."""

from __future__ import annotations

import pytest

from tests.protocol.model import Model, Violation, explore


@pytest.mark.parametrize(
    ("steps", "terms", "deaths", "at_least"), [(3, 2, 0, 9_000), (1, 3, 0, 29_000), (2, 2, 1, 110_000)]
)
def test_no_reachable_state_violates_the_protocol(steps: int, terms: int, deaths: int, at_least: int) -> None:
    assert explore(Model(steps, terms, deaths)) >= at_least


@pytest.mark.slow
def test_three_coordinators_and_a_death() -> None:
    assert explore(Model(steps=1, terms=3, deaths=1)) >= 1_500_000


@pytest.mark.parametrize(
    "mistake", ["drops_on_timeout", "applies_before_commit", "deaf_to_fences", "offers_outlive_processes"]
)
def test_mistakes_are_found(mistake: str) -> None:
    with pytest.raises(Violation):
        explore(Model(steps=2, terms=2, deaths=int(mistake == "offers_outlive_processes"), **{mistake: True}))
