"""`meshcee init` writes job files that run: two steps on two peers are those of the plain loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import meshcee
from meshcee.errors import UsageError
from peers.cli.main import app
from peers.cli.session import KINDS, load_job, write_job


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_was_written_trains_as_in_the_plain_loop(tmp_path: Path, kind: str) -> None:
    if kind == "huggingface":
        pytest.importorskip("transformers")
    file = tmp_path / "mine.py"
    told = CliRunner().invoke(app, ["init", kind, str(file)])
    assert told.exit_code == 0, told.output
    assert f"meshcee train {file}" in " ".join(told.output.split())
    assert "meshcee train mine.py --local" in file.read_text()
    job = load_job(file)
    assert job.name == kind
    job = replace(job, steps=2, micro_batch_size=job.batch_size // 4)  # and an evaluation, where the kind has one
    result, expected = meshcee.train(job, local=2, stages=2), meshcee.plain(job)
    assert result.losses == expected.losses
    assert all(torch.equal(tensor, expected.state_dict[name]) for name, tensor in result.state_dict.items())


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text("mine")
    with pytest.raises(UsageError, match="already"):
        write_job("text", file)
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("sound", "job.py", "text, images"),
        ("text", "job.txt", "Python file"),
        ("text", "sub/job.py", "no folder .*sub for job.py"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, kind: str, name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        write_job(kind, tmp_path / name)
