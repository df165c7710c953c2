"""Peers that a command starts are none of the user's: what the user has set for its own peer is not theirs."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

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
