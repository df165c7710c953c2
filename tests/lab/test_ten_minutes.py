"""What the transcript of the ten-minute path keeps, and that its page has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import ten_minutes
from benchmarks.ten_minutes import PAGE, SECTION, SEEN_STEPS, Transcript, shortened, write


def test_nothing_that_lets_somebody_in_is_kept() -> None:
    ident = "12D3KooW" + "a" * 40 + "bcde"
    assert shortened(f"meshcee peer --join meshcee2.{'-_xy' * 50}") == f"meshcee peer --join meshcee2.{'-_xy' * 3}..."
    assert shortened(f"anna is up as {ident} on cpu.") == "anna is up as 12D3KooW...bcde on cpu."
    assert (
        shortened("the page: http://127.0.0.1:4/?token=a-_defgh_-12") == "the page: http://127.0.0.1:4/?token=a-_d..."
    )
    assert shortened("\x1b[1mbold\x1b[0m") == "bold"


def test_the_transcript_stands_between_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- transcript -->\nold\n<!-- end of transcript -->\nafter\n")
    monkeypatch.setattr(ten_minutes, "PAGE", page)
    told = Transcript(0.0, [(0.0, "anna", "$ meshcee peer"), (61.4, "ben", "is up")])
    for _ in range(2):
        write(told)
    assert page.read_text() == (
        "before\n<!-- transcript -->\n\n"
        + SECTION
        + "\n```text\n0:00  anna  $ meshcee peer\n1:01  ben   is up\n```\n\n"
        "<!-- end of transcript -->\nafter\n"
    )


def test_the_page_holds_a_run_that_was_seen_within_ten_minutes() -> None:
    (minute, step) = re.findall(
        r"^(\d+):\d\d  ben   \(on the page\) digits: step (\d+),", PAGE.read_text(), re.MULTILINE
    )[0]
    assert int(minute) < 10
    assert int(step) >= SEEN_STEPS
    for command in ("peer", "peer --join", "train", "ui"):
        assert re.search(rf"^\d+:\d\d  \w+ +\$ meshcee {command}", PAGE.read_text(), re.MULTILINE)
