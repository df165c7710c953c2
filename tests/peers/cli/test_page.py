"""The page as one file: it ships, it loads nothing, and what strangers write stays text."""

from __future__ import annotations

import json
import re

import pytest

from meshcee.picture import Painter, Picture
from peers.cli.ui import self_contained
from peers.cli.ui.page import FILES, MODULES, read_file
from tests.picture.test_picture import plan, report, status

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'"


@pytest.mark.smoke
def test_all_files_of_the_page_ship() -> None:
    assert all(read_file(name) for name in (*FILES, "uPlot.LICENSE"))


def hostile_picture() -> Picture:
    painter = Painter()
    told = status("a", "b", links=[("a", "b", 0.01)])
    for peer in told["peers"]:
        peer["name"] = peer["software"] = peer["region"] = peer["outside"] = peer["kernels"] = HOSTILE
    painter.look(told, 1.0)
    painter.begin(
        "r", {"name": HOSTILE, "names": {"a": HOSTILE, "b": HOSTILE}, "plan": plan("a", "b").to_json(), "steps": 9}
    )
    painter.hear(report(0, limit=HOSTILE, metrics={HOSTILE: 1.0}))
    painter.hear(report(1, limit=HOSTILE, metrics={HOSTILE: 2.0}))
    painter.tell({"at": 1.0, "kind": HOSTILE, "text": HOSTILE, "step": 1})
    painter.end("failed", {"error": HOSTILE})
    return painter.picture(2.0)


def test_one_file_holds_hostile_names_as_data() -> None:
    text = self_contained(hostile_picture(), HOSTILE)
    scripts = re.findall(r"<script[^>]*>", text)
    assert scripts == ['<script type="application/json" id="picture">', "<script>", "<script>"]
    assert "<img" not in text
    assert "alert(1)</script>" not in text
    (data,) = re.findall(r'id="picture">(.*?)</script>', text)
    assert Picture.from_json(json.loads(data)["picture"]) == hostile_picture()
    assert "script-src 'sha256-" in text
    assert "unsafe" not in text
    assert not re.search(r'(src|href)="(?!data:|#|\?)', text)


def test_the_page_makes_no_markup_of_texts_and_its_modules_share_a_scope() -> None:
    """In one file they stand one behind the other: a name that two of them had would end the script."""
    names: list[str] = []
    for name in MODULES:
        text = read_file(name)
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "http://",
            "https://",
        ):
            assert word not in text.replace("http://www.w3.org/2000/svg", ""), (name, word)
        assert all(
            re.fullmatch(r'import \{[^}]+\} from "\./[a-z]+\.js";', line)
            for line in text.splitlines()
            if line.startswith("import")
        )
        names += re.findall(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", text, flags=re.MULTILINE)
    assert sorted(names) == sorted(set(names))
    assert "innerHTML" not in read_file("uplot.js")
