"""Two terminals on one network: the first machine shows a code, the second is asked for it, and says what it has joined."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from peers.node.nearby import announced, browse, fresh_label
from tests.mesh.harness import environment

IN_TIME_S = 90.0


class Terminal:
    """A command at a terminal of its own."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self._master = process, master
        self.text = ""

    def until(self, pattern: str) -> re.Match[str]:
        """What it prints next that looks so."""
        deadline_s = time.monotonic() + IN_TIME_S
        while (found := re.search(pattern, self.text)) is None:
            assert time.monotonic() < deadline_s, self.text[-3000:]
            if select.select([self._master], [], [], 0.5)[0]:
                try:
                    self.text += os.read(self._master, 65536).decode(errors="replace")
                except OSError as error:  # its end was closed
                    raise AssertionError(self.text[-3000:]) from error
        self.text = self.text[found.end() :]
        return found

    def type(self, text: str) -> None:
        os.write(self._master, f"{text}\n".encode())


@contextmanager
def terminal(home: Path, *arguments: str, **variables: str) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "meshcee", *arguments]
    env = environment(home, COLUMNS="500", TERM="dumb", **variables)
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True)
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        os.close(master)


async def carries_multicast() -> bool:
    label = fresh_label()
    async with announced(label, 4711) as is_told:
        return is_told and label in [one.label for one in await browse(3.0)]


@pytest.mark.slow
async def test_a_second_terminal_is_asked_for_the_code_and_says_what_it_has_joined(tmp_path: Path) -> None:
    if not await carries_multicast():
        pytest.skip("no network of this machine carries multicast DNS")
    common = ("--threads", "1", "--device", "cpu")
    with terminal(tmp_path / "one", "peer", "--name", "first", *common) as first:
        first.until("None shows a code here")
        first.until("first is up")
        found = first.until(r"on this network, and: (\d{4}-\d{4})  \(mesh (\w+)")
        with terminal(tmp_path / "two", "peer", "--name", "second", *common) as second:
            second.until(rf"A mesh is here: {found[2]}")
            second.until("Code ")
            second.type(found[1][:-1] + str((int(found[1][-1]) + 1) % 10))
            second.until("that is not the code that the first machine shows: 2 more can be tried")
            second.type(found[1])
            second.until("The code was right")
            second.until(
                r"joined the mesh of first: 1 peer there besides this one, coordinator first, .*reached by 1 of 1"
            )
            following = first.until(r"The next one: (\d{4}-\d{4})")
            assert following[1] != found[1]
        line = tmp_path / "two" / "joined.line"
        assert line.stat().st_mode & 0o077 == 0
        with terminal(tmp_path / "two", "peer", "--name", "second", *common) as second:  # later, nobody is asked
            second.until("Joining the mesh of the last time")
            second.until("second is up")
