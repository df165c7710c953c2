"""Output that nobody reads: the event loop goes on, what was written waits, and what was too much is counted."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshcee.files.steady import MOST_WAITING

TALK = """
import asyncio, sys
from meshcee.files.steady import steady_output
from peers.cli.session import run_async

async def talk(path, lines):
    for line in range(lines):
        print(f'{{"line": {line}}}' if sys.argv[3] == "json" else f"line {line} " + "x" * 90)
        if line % 100 == 0:
            print("a log", file=sys.stderr)
            await asyncio.sleep(0)
    with open(path, "w") as file:
        file.write("the loop went on")
    if sys.argv[3] == "stays":
        await asyncio.sleep(60)

steady_output()
run_async(talk(sys.argv[1], int(sys.argv[2])))
print("the end")
"""
LINES = 200


@contextlib.contextmanager
def talking(
    place: Path, lines: int, how: str = "plain", *, out: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", TALK, str(place / "done"), str(lines), how]
    with subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def has_gone_on(place: Path) -> None:
    until = time.monotonic() + 30
    while not (place / "done").exists():
        assert time.monotonic() < until, "the loop stands still"
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["plain", "json"])
def test_a_pipe_that_is_read_late_has_every_line(tmp_path: Path, how: str) -> None:
    lines = 5_000
    with talking(tmp_path, lines, how) as process:
        has_gone_on(tmp_path)
        out, _ = process.communicate(timeout=30)
        told = out.decode().splitlines()
        assert len(told) == lines + 1
        assert told[-1] == "the end"
        assert process.returncode == 0


def test_what_is_too_much_is_counted_and_the_line_says_why(tmp_path: Path) -> None:
    lines = 3 * MOST_WAITING // 100
    with talking(tmp_path, lines) as process:
        has_gone_on(tmp_path)
        out, _ = process.communicate(timeout=30)
        told = out.decode().splitlines()
        assert told[-1] == "the end"
        said = [
            line for line in told if line.startswith("meshcee:")
        ]  # more than one where the pipe took a little meanwhile
        missing = [int(line.split()[1]) for line in said]
        why = "lines are missing here: nobody read what was written before"
        assert said == [f"meshcee: {count} {why}" for count in missing]
        assert sum(missing) > 0
        assert len(told) - 1 - len(said) + sum(missing) == lines
        assert process.returncode == 0


def test_ctrl_c_ends_a_command_that_nobody_reads(tmp_path: Path) -> None:
    with talking(tmp_path, 5_000, "stays") as process:
        has_gone_on(tmp_path)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130


def test_a_reader_that_goes_ends_the_command(tmp_path: Path) -> None:
    with talking(tmp_path, 100_000) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=30) == 1


def test_a_terminal_that_is_stopped_stops_nothing(tmp_path: Path) -> None:
    """A terminal takes nothing after Ctrl-S, and whoever writes to it waits for Ctrl-Q."""
    ours, its = pty.openpty()
    with open(ours, "r+b", buffering=0) as screen, open(its, "wb", buffering=0) as terminal:
        screen.write(b"\x13")
        time.sleep(0.1)
        with talking(tmp_path, LINES, out=terminal.fileno()) as process:
            has_gone_on(tmp_path)
            screen.write(b"\x11")
            seen = b""
            while b"the end" not in seen:
                seen += os.read(ours, 1 << 16)
            assert sum(line.startswith(b"line ") for line in seen.splitlines()) == LINES
            assert process.wait(timeout=10) == 0
