"""What the adaptation benchmark makes of its rows; the rows are made up."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.adaptation import DROPS, RECOVERS, Fixed, after, changes, most_in, rows, steady, svg, table
from benchmarks.rehearsal import POOR

GOOD_PLAN, POOR_PLAN = {1.0: 1.0, POOR: 4.0}, {1.0: 2.0, POOR: 2.0}


def data(switches: dict[str, list[int]]) -> dict[str, Any]:
    """Runs that begin with the good plan, and change to the other one and back at these steps."""
    made: dict[str, Any] = {}
    for wanted in rows():
        poor_first = wanted.name == "fresh, poor" or wanted.plan == "fresh, poor"
        plans = [POOR_PLAN if poor_first else GOOD_PLAN]
        steps_s = []
        for step, factor in enumerate(wanted.factors):
            if step in switches.get(wanted.name, ()):
                plans.append(GOOD_PLAN if plans[-1] is POOR_PLAN else POOR_PLAN)
            steps_s.append(plans[-1][factor])
        begun = [0, *switches.get(wanted.name, ())]
        made[wanted.name] = [
            {"factors": list(wanted.factors), "steps_s": steps_s[1:], "plans": [(k, {}) for k in begun]}
        ]
    return {"rows": made}


def test_steps_and_changes_are_counted_from_the_change_of_the_network() -> None:
    told = data({"adapter": [DROPS + 8, RECOVERS + 10]})
    found = told["rows"]["adapter"][0]
    assert Fixed.of(told) == Fixed(GOOD_PLAN, POOR_PLAN)
    assert after(found, DROPS) == (1.0, 2.0, 8)
    assert after(found, RECOVERS) == (2.0, 1.0, 10)
    assert changes(found) == [23, 80]
    assert set(steady(found, POOR)) == {4.0, 2.0}
    late = data({"adapter": [DROPS + 40]})["rows"]["adapter"][0]
    assert after(late, DROPS) == (1.0, 4.0, 40)
    assert after(data({})["rows"]["adapter"][0], DROPS)[2] is None


def test_most_changes_in_a_row_of_steps() -> None:
    assert most_in([], 50) == 0
    assert most_in([10, 60, 109], 50) == 2
    assert most_in([10, 60, 110], 50) == 1


def test_the_table_and_the_picture_say_what_was_measured() -> None:
    told = data({"adapter": [DROPS + 8, RECOVERS + 10], "flaps every 25": [33]})
    told["rows"]["replication"] = [{"steps_s": [1.1, 1.1]}, {"steps_s": [1.0, 1.0]}]
    drawn = table(told)
    assert "| drops to a quarter | 1.00 | 4.00 | 2.00 | 2.00 | 1.00 | 2.00 | 8 |" in drawn
    assert "| recovers | 2.00 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 10 |" in drawn
    flapped = next(line for line in drawn.splitlines() if line.startswith("| 25 |"))
    total_s, best_s = 23 * 1.0 + 8 * 4.0 + 17 * 2.0 + 25 * 2.0, 48 * 1.0 + 25 * 4.0
    assert flapped == f"| 25 | 73 | 33 | 1 | {total_s:.1f} | {min(best_s, 146.0):.1f} | {total_s / 146.0:.2f} | 1.06 |"
    assert "| median |  |  | 0.909 |" in drawn
    picture = ElementTree.fromstring(svg(told))
    assert len([part for part in picture.iter() if part.get("stroke") == "#d62728"]) == 3


def test_without_all_rows_there_is_no_table_yet() -> None:
    assert table({"rows": {"fresh, good": []}}) == ""


@pytest.mark.parametrize("wanted", rows(), ids=lambda r: r.name)
def test_every_row_begins_with_a_network_and_plans_come_from_rows_before(wanted: Any) -> None:
    names = [r.name for r in rows()]
    assert set(wanted.factors) <= {1.0, POOR}
    assert not wanted.plan or names.index(wanted.plan) < names.index(wanted.name)
