"""benchmarks/scale.py with ten peers: all agree, and no change costs a peer more messages than the logarithm allows."""

from __future__ import annotations

import pytest

from benchmarks.scale import STAGES, measure, table


@pytest.mark.slow
def test_ten_peers_find_one_another_elect_hear_and_agree() -> None:
    found = measure([10])
    assert len(table(found)) == 1
    (mesh,) = found["meshes"]
    assert mesh["start"]["elected_s"] < 10
    assert mesh["elect"]["elected_s"] < 20
    assert mesh["join"]["knows_s"] < 2
    for part in ("join", "change"):
        assert 0 < mesh[part]["messages"]["most"] <= mesh[part]["messages_at_most"]
    assert mesh["change"]["all_s"] < 3
    assert mesh["plan"]["members"] == STAGES
    assert mesh["plan"]["left_out"] == 10 - STAGES
    assert mesh["plan"]["messages_to_a_member"] == 1
    assert mesh["plan"]["acknowledged_s"] > mesh["plan"]["planned_s"] > 0
