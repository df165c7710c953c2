"""Peers that a command starts are none of the user's: what the user has set for its own peer is not theirs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import meshcee
from meshcee.errors import MeshceeError, NotNowError
from peers.cli.children import Children
from peers.cli.children import children as local
from peers.cli.children.copies import Copies
from tests.mutation import breaks, changed

OWN = {"MESHCEE_IDENTITY": "/own.key", "MESHCEE_WHEN": "20:00-07:00", "MESHCEE_NAME": "anna", "MESHCEE_JOIN": "LINE"}
SAYS_ITS_TOKEN = (sys.executable, "-c", 'print(\'{"token": "TOKEN"}\')')


class Noting(Children):
    """Its children say their token and end; `given` is the environment of each."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.given: dict[str, dict[str, str]] = {}

    async def spawn(self, name: str, command: Sequence[str], **options: Any) -> Any:
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

    async def spawn(self, name: str, command: Sequence[str], **options: Any) -> Any:
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


# -- copies --------------------------------------------------------------------------------------------------------------

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each peer imports for itself")
SECRET = "a token that nobody else may hold"


class Open(Children):
    """Its peers start meshes without a key, and hold a secret."""

    async def spawn(self, name: str, command: Sequence[str], *, env: Mapping[str, str], stderr: int) -> Any:
        command = [*command, "--open", "--no-lan"]
        return await super().spawn(name, command, env={**env, "SECRET": SECRET}, stderr=stderr)


def holds(pid: int, text: str) -> bool:
    """Whether the memory of this process has this text anywhere."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            first, last = (int(place, 16) for place in line.split()[0].split("-"))
            if line.split()[1].startswith("rw") and last < 1 << 63:
                memory.seek(first)
                with suppress(OSError):
                    if text.encode() in memory.read(last - first):
                        return True
    return False


@linux
async def test_a_peer_is_a_copy_and_what_checks_its_graphs_never_held_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("MKL", "OPENBLAS"):  # whose threads a copy would not have, and wait for
        monkeypatch.setenv(f"{library}_NUM_THREADS", "4")
    async with Open(tmp_path) as children:
        await children.start_peers(1, threads=1)
        peer = psutil.Process(children.processes["peer-0"].pid)
        source = peer.parent()
        assert source is not None
        assert source.ppid() == os.getpid()
        assert source.num_threads() == 1
        assert peer.environ() == source.environ()  # that of its start: what it was told later stands elsewhere
        checkers = [each for each in peer.children() if each.cmdline() == peer.cmdline()]
        assert len(checkers) == 1
        assert holds(peer.pid, SECRET)
        assert not any(holds(each.pid, SECRET) for each in (source, *checkers, *checkers[0].children()))
        ours = [source, *source.children(recursive=True)]
    _, left = psutil.wait_procs(ours, timeout=10)
    assert not left


@linux
async def test_a_copy_ends_as_any_process_does_and_none_outlives_the_source(tmp_path: Path) -> None:
    with (tmp_path / "errors").open("wb") as errors:
        copies = Copies(os.environ)
        how: dict[str, Any] = {"env": {**os.environ, "MESHCEE_HOME": str(tmp_path)}, "stderr": errors.fileno()}
        try:
            shown = await copies.copy("version", ["--version"], **how)
            assert (await shown.stdout.read()).decode() == f"meshcee {meshcee.__version__}\n"
            assert await shown.wait() == 0
            wrong = await copies.copy("wrong", ["peer", "--jion", "x"], **how)
            assert await wrong.wait() == 2
            assert "--join" in (tmp_path / "errors").read_text()
            peer_options = ["--json", "--open", "--no-lan", "--device", "cpu"]
            first, second, third = [
                await copies.copy(
                    name,
                    ["peer", *peer_options],
                    env={**os.environ, "MESHCEE_HOME": str(tmp_path / name)},
                    stderr=errors.fileno(),
                )
                for name in ("first", "second", "third")
            ]
            first.kill()
            assert await first.wait() == -signal.SIGKILL
            assert b'"token"' in await second.stdout.readline()
            assert psutil.Process(second.pid).name() == "meshcee second"
            second.terminate()
            assert await second.wait() == 0
            assert b'"token"' in await third.stdout.readline()
            assert third.returncode is None
            peer = psutil.Process(third.pid)
            parent = peer.parent()
            assert parent is not None
            parent.kill()
            assert await third.wait() == -signal.SIGKILL
            await asyncio.to_thread(peer.wait, 10)
            with pytest.raises(MeshceeError, match="fourth could not be started"):
                await copies.copy("fourth", ["--version"], **how)
        finally:
            await copies.end()
