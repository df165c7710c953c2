"""A disk that is full under the log itself, or under what a command prints: lines are lost and counted, and nothing ends."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import structlog

import meshcee
from meshcee.files import Trouble
from meshcee.files.steady import steady_output
from peers.cli.session import Screen, configure_logging
from peers.cli.view import LineView, view_for
from tests.rig.job_file import JOB

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/a")


class SmallDisk(io.RawIOBase):
    """A file on a disk with room for so many bytes; None: as many as there are."""

    def __init__(self, room: int | None = 0) -> None:
        self.room = room
        self.error = errno.ENOSPC
        self.held = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.room == 0:
            raise OSError(self.error, os.strerror(self.error))
        taken = bytes(data)[: self.room]
        if self.room is not None:
            self.room -= len(taken)
        self.held += taken
        return len(taken)

    @property
    def lines(self) -> list[str]:
        return self.held.decode().splitlines()


@contextlib.contextmanager
def small(*, buffered: bool) -> Iterator[SmallDisk]:
    """What standard output and standard error of a command go to."""
    disk, before, streams = SmallDisk(), structlog.get_config(), (sys.stdout, sys.stderr)
    try:
        for name in ("stdout", "stderr"):
            if buffered:
                stream = io.TextIOWrapper(io.BufferedWriter(disk), line_buffering=name == "stderr")
            else:
                stream = io.TextIOWrapper(disk, write_through=True)  # type: ignore[type-var]
            setattr(sys, name, stream)
        steady_output()
        steady_output()
        yield disk
    finally:
        disk.room = None
        sys.stdout, sys.stderr = streams
        structlog.configure(**before)


EITHER = pytest.mark.parametrize("buffered", [False, True])


@EITHER
@pytest.mark.parametrize("as_json", [False, True])
def test_a_log_on_a_full_disk_loses_lines_and_says_how_many(buffered: bool, as_json: bool) -> None:
    with small(buffered=buffered) as disk:
        configure_logging(as_json=as_json)
        log = structlog.get_logger()
        Trouble().tell("the checkpoint", FULL, 4096)
        for i in range(300):
            log.info(f"line {i} " + "x" * i)
        assert disk.held == b""
        disk.room = None
        log.warning("there is room")
        log.warning("and more")
        told, first, second = disk.lines
        said = "301 lines are missing here: No space left on device"
        assert (json.loads(told) == {"note": said}) if as_json else (told == f"meshcee: {said}")
        assert "there is room" in first
        assert "and more" in second


@EITHER
def test_lines_that_are_there_are_whole(buffered: bool) -> None:
    with small(buffered=buffered) as disk:
        disk.room = 15
        for text in ("first", "second" * 3, "third" * 5000):
            print(text, flush=True)
        disk.room = None
        print("fourth" * 5000, flush=True)
        assert disk.lines == [
            "first",
            "secondsec",
            "meshcee: 2 lines are missing here: No space left on device",
            "fourth" * 5000,
        ]


@EITHER
def test_what_a_run_shows_may_be_lost(buffered: bool) -> None:
    with small(buffered=buffered) as disk:
        for as_json in (False, True):
            view_for(as_json=as_json).note("captured")
        assert disk.held == b""


@EITHER
def test_a_closed_pipe_ends_a_command_as_ever(buffered: bool) -> None:
    with small(buffered=buffered) as disk:
        disk.error = errno.EPIPE
        with pytest.raises(BrokenPipeError):
            print("x", flush=True)
        disk.room = None


@pytest.mark.parametrize(("encoding", "errors"), [("latin-1", "strict"), ("ascii", "surrogateescape")])
def test_a_letter_that_the_output_has_not_is_spelled_out(
    encoding: str, errors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member's name could end an owner's run."""
    disk = SmallDisk(None)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(disk), encoding=encoding, errors=errors))
    steady_output()
    LineView(Screen()).note("captured 模型")
    print("…", flush=True)
    assert disk.lines == ["captured \\u6a21\\u578b", "\\u2026"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_training_outlives_full_disks_under_its_log_and_its_output(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(f'print("a word of the user\'s")\n{JOB}')
    command = [sys.executable, "-m", "meshcee", "train", "job.py", "--local", "2", "--out", "out.safetensors"]
    environment = {**os.environ, "MESHCEE_HOME": str(tmp_path / "home"), "MESHCEE_LOG": "info"}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=full, stderr=full, timeout=240, check=False
        )
    assert done.returncode == 0
    assert safetensors.torch.load_file(tmp_path / "out.safetensors")


async def test_a_script_goes_on_when_a_warning_of_meshcee_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings are lines of Python's own logging there, whose handlers let no refused line through."""
    before = structlog.get_config()
    structlog.reset_defaults()
    disk = SmallDisk()
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler(io.TextIOWrapper(disk, write_through=True))])  # type: ignore[type-var]
    try:
        async with meshcee.join(local=1, measures=False):
            Trouble().tell("the checkpoint", FULL, 4096)
            disk.room = None
            Trouble().tell("the diary", FULL, 4096)
    finally:
        structlog.configure(**before)
    assert "the diary cannot be written" in disk.held.decode()
    assert "the checkpoint" not in disk.held.decode()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(("words", "code"), [(["plan", "--testbed", "cee-small", "--json"], 3), (["--version"], 3)])
def test_a_command_whose_output_is_lost_says_so_and_does_not_end_well(words: list[str], code: int) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "meshcee", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert "standard output cannot be written: No space left on device; lost lines: 1" in done.stderr
