"""`meshcee capture`: the blocks in words, as JSON and as a page; a failure names the user's line."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meshcee.figures.profile import BlockCost
from meshcee.picture import Picture, picture_of_capture
from peers.cli.main import main
from peers.cli.ui import self_contained
from tests.peers.cli.test_page import HOSTILE

JOB = """
import torch
from torch import nn
import meshcee

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    def forward(self, x):
        BODY

job = meshcee.Job(
    name="<b>tiny",
    model=Net(),
    loss=lambda out, y: nn.functional.mse_loss(out.squeeze(-1), y),
    data=[(torch.full((4,), i / 8), torch.tensor(float(i % 2))) for i in range(8)],
    optimizer=meshcee.Optimizer("SGD", lr=0.1),
    batch_size=4,
    steps=1,
)
"""


def job_file(folder: Path, body: str = "return self.layers(x)") -> Path:
    path = folder / "job.py"
    path.write_text(JOB.replace("BODY", body))
    return path


class Resources(HTMLParser):
    """What a page loads, and the tags that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [f"{k}={v}" for k, v in attrs if k in ("src", "href", "xlink:href", "data", "action")]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["capture", *arguments])
    return int(ended.value.code or 0)


def test_the_figures_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(job_file(tmp_path)), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(b["parameter_bytes"] for b in found["blocks"]) == found["state_bytes"] == 4 * (5 * 16 + 17 * 16 + 17)
    assert sum(b["flops"] for b in found["blocks"]) == found["flops"] >= 2 * (4 * 16 + 16 * 16 + 16)
    assert len(found["blocks"]) > 1
    # What crosses a cut of this model is one vector, of 16 numbers or of the output's 1.
    assert {b["boundary_bytes"] for b in found["blocks"][:-1]} <= {4 * 16, 4 * 16 + 4, 4}
    assert found["random"] is False


def test_in_words_and_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html = tmp_path / "page.html"
    assert run(str(job_file(tmp_path)), "--html", str(html)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "blocks" in lines[0]
    assert lines[1].split()[:2] == ["block", "FLOPs"]
    title, blocks = drawn(html.read_text())
    assert title == "meshcee capture: <b>tiny"
    assert [str(k) for k in range(len(blocks))] == [line.split()[0] for line in lines[2 : 2 + len(blocks)]]
    assert sum(block.parameter_bytes for block in blocks) == 4 * (5 * 16 + 17 * 16 + 17)


def drawn(page: str) -> tuple[str, tuple[BlockCost, ...]]:
    """What a page shows that loads nothing, and has no element but its own."""
    found = Resources()
    found.feed(page)
    assert [one for one in found.loads if not one.startswith(("href=#", "href=?", "href=data:"))] == []
    assert not {"b", "img"} & set(found.tags)
    assert found.tags.count("script") == 3
    (data,) = re.findall(r'id="picture">(.*?)</script>', page)
    said = json.loads(data)
    return said["title"], Picture.from_json(said["picture"]).blocks


def test_names_from_the_model_are_data() -> None:
    cost = BlockCost(HOSTILE, 1.0, 4, 4, 4, 4, 4, (HOSTILE,))
    picture = picture_of_capture([cost, BlockCost("b" * 200, 0.0, 0, 0, 0, 0, 0)], 1.0)
    title, blocks = drawn(self_contained(picture, HOSTILE))
    assert title == blocks[0].name == HOSTILE
    assert blocks[0].flops == 1.0


def test_a_failure_names_the_users_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = job_file(tmp_path, "return self.layers(x) if x.sum() > 0 else self.layers(-x)")
    assert run(str(path)) == 4
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "x.sum()" in text)
    assert f"{path}:{line}" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(job_file(tmp_path)), "--html", str(tmp_path / "missing" / "page.html")) == 2
    assert "there is no folder" in capsys.readouterr().err
