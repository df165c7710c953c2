"""Peers that a command starts are none of the user's: what the user has set for its own peer is not theirs."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from meshcee.errors import NotNowError
from peers.cli import local
from peers.cli.local import Children
from tests.mutation import breaks, changed

OWN = {"MESHCEE_IDENTITY": "/own.key", "MESHCEE_WHEN": "20:00-07:00", "MESHCEE_NAME": "anna", "MESHCEE_JOIN": "LINE"}
SAYS_ITS_TOKEN = (sys.executable, "-c", 'print(\'{"token": "TOKEN"}\')')


class Noting(Children):
    """Its children say their token and end; `given` is the environment of each."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.given: dict[str, dict[str, str]] = {}

    async def spawn(self, name: str, command: Sequence[str], **options: Any) -> asyncio.subprocess.Process:
        self.given[name] = {k: v for k, v in options["env"].items() if k.startswith("MESHCEE_")}
        return await super().spawn(name, SAYS_ITS_TOKEN, **options)


def story(home: Path) -> None:
    async def given() -> dict[str, dict[str, str]]:
        async with Noting(home) as children:
            await children.start_peers(2, threads=1)
            return children.given

    everybodys = {"MESHCEE_HOME": str(home), "MESHCEE_CONFIG": os.devnull, "MESHCEE_PARENT": str(os.getpid())}
    everybodys |= {"MESHCEE_LOG": "debug", "MESHCEE_DEVICE_PROCESS": "0"}
    assert asyncio.run(given()) == {"peer-0": everybodys, "peer-1": {**everybodys, "MESHCEE_JOIN": "TOKEN"}}


def test_children_have_none_of_the_users_options_but_the_log_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**OWN, "MESHCEE_LOG": "debug"}.items():
        monkeypatch.setenv(name, value)
    story(tmp_path)
    with changed(Children, 'if not k.startswith("MESHCEE_") or k == "MESHCEE_LOG"', 'if k != "MESHCEE_JOIN"'):
        assert breaks(lambda: story(tmp_path))


class Slow(Children):
    """Each of its children runs this program."""

    def __init__(self, home: Path, program: str) -> None:
        super().__init__(home)
        self._program = program

    async def spawn(self, name: str, command: Sequence[str], **options: Any) -> asyncio.subprocess.Process:
        return await super().spawn(name, (sys.executable, "-c", self._program), **options)


COMPUTES = """
import time
end = time.process_time() + 0.6
while time.process_time() < end: pass
print('{"token": "TOKEN"}', flush=True)
"""


async def test_a_peer_that_computes_is_waited_for_and_one_that_does_nothing_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "START_S", 0.3)
    async with Slow(tmp_path, COMPUTES) as children:
        assert await children.start_peers(1, threads=1) == "TOKEN"
    async with Slow(
        tmp_path, "import sys, time; print('stuck', file=sys.stderr, flush=True); time.sleep(60)"
    ) as children:
        with pytest.raises(NotNowError, match=r"(?s)peer-0 does not start.*stuck"):
            await children.start_peers(1, threads=1)


async def test_no_more_peers_start_at_once_than_there_are_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "cores", lambda: 3)
    folder = tmp_path / "starting"
    folder.mkdir()
    program = f"""
import os, tempfile, time
with tempfile.NamedTemporaryFile(dir={str(folder)!r}):
    time.sleep(0.2)
    print(len(os.listdir({str(folder)!r})), file=open({str(tmp_path / "counts")!r}, "a"))
print('{{"token": "TOKEN"}}', flush=True)
"""
    async with Slow(tmp_path, program) as children:
        await children.start_peers(9, threads=1)
    counts = [int(text) for text in (tmp_path / "counts").read_text().split()]
    assert len(counts) == 9
    assert max(counts) <= 3
