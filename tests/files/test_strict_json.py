"""What --json prints is JSON, also when a figure is not a number."""

import json
import math
from pathlib import Path

import pytest

from meshcee.files.strict_json import dumps
from peers.cli.view import JsonView
from peers.owner.epoch import Report


def strictly(text: str) -> object:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_what_is_not_finite_becomes_null() -> None:
    value = {"a": [math.nan, 1.5, (math.inf, -math.inf)], "b": {"c": math.nan, "d": "NaN", "e": True, "f": 1 << 70}}
    assert strictly(dumps(value)) == {
        "a": [None, 1.5, [None, None]],
        "b": {"c": None, "d": "NaN", "e": True, "f": 1 << 70},
    }


def test_a_report_whose_figures_are_not_numbers_is_a_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    JsonView().report(Report(3, 5, math.inf, 0.1, 10.0, 0.2, "compute", norm=math.nan, metrics={"accuracy": math.nan}))
    line = strictly(capsys.readouterr().out)
    assert isinstance(line, dict)
    assert line["report"]["loss"] is None
    assert line["report"]["metrics"] == {"accuracy": None}


def test_nothing_in_peers_writes_json_in_another_way() -> None:
    files = (Path(__file__).parents[2] / "peers").rglob("*.py")
    assert [f.name for f in files if "json.dumps(" in f.read_text() and f.name != "strict_json.py"] == []
