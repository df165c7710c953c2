"""A dataset's process: what it is asked, what it answers, and what is told when the user's code fails."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from meshcee.errors import PeerLostError, UsageError
from meshcee.sampling import batch_of, inputs_of
from peers.node.datasets import Dataset, Datasets, dataset, reader
from peers.node.datasets.dataset import Patience
from peers.node.datasets.packets import Ask
from peers.node.datasets.reader import Reads
from tests.rig.virtual_time import virtual_time

SCANS = """
import os, pathlib, subprocess, time, torch
from helper import SIZE

class Scans:
    def __len__(self):
        return 40

    def __getitem__(self, i):
        if i == 13:
            raise ValueError("patient 4711")
        if i == 14:
            os._exit(3)
        if i == 15:
            time.sleep(0.75)
        return {"image": torch.randn(SIZE, 2).t(), "age": i}, torch.tensor([i, i])

def make():
    print("opened")
    return Scans()

class Rows(Scans):
    def __getitem__(self, i):
        image, label = super().__getitem__(i)
        return {**image, "label": label}

rows = Rows

def fails():
    return open("/nowhere/at/all")

class Clock(list):
    def __getitem__(self, i):
        self.append(0)
        return float(len(self)), 0

def clock():
    return Clock([1, 2, 3])

def beside():
    with pathlib.Path(__file__).with_name("pids").open("a") as pids:
        print(subprocess.Popen(["sleep", "600"]).pid, file=pids)
    return Scans()

empty = list
stream = lambda: iter([1, 2])
nothing = None
"""
LAYOUT = {"x.image": (torch.float32, (2, 3)), "x.age": (torch.int64, ()), "y": (torch.int64, (2,))}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("SIZE = 3\n")
    (tmp_path / "scans.py").write_text(SCANS)
    return tmp_path / "scans.py"


@asynccontextmanager
async def opened(text: str) -> AsyncIterator[Dataset]:
    async with Datasets([text]) as found:
        (one,) = found.values()
        yield one


class Scans:
    def __getitem__(self, i: int) -> tuple[dict[str, object], torch.Tensor]:
        return {"image": torch.randn(3, 2).t(), "age": i}, torch.tensor([i, i])


@pytest.mark.slow
async def test_a_set_in_a_process_gives_the_bits_that_it_gives_here(file: Path) -> None:
    async with opened(f"scans={file}:make") as scans:
        assert scans.samples == 40
        wanted = inputs_of(batch_of(Scans(), [5, 5, 39], 7, 2))
        for _ in range(2):
            found = await scans.batch(7, 2, [5, 5, 39], LAYOUT)
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
            assert all(found[name].stride() == wanted[name].stride() for name in wanted)
            # What the user's code says stays in this peer's log.
            where = r"dataset 'scans'\[13\] of step 3 failed at .*scans.py:11: ValueError; the log of"
            with capture_logs() as logs, pytest.raises(UsageError, match=where) as told:
                await scans.batch(7, 2, [5, 13], LAYOUT)
            assert "4711" not in str(told.value)
            assert any("4711" in str(line) for line in logs)
            # It ends: so does the epoch, and the next one has another process.
            with pytest.raises(PeerLostError, match="the process that reads dataset 'scans' ended with status 3"):
                await scans.batch(7, 2, [14], LAYOUT)


@pytest.mark.slow
async def test_rows_that_are_dicts_are_read_alike_at_their_place(file: Path) -> None:
    async with opened(f"scans={file}:rows") as scans:
        wanted = inputs_of(batch_of(Scans(), [5, 39], 7, 2))
        wanted["x.label"] = wanted["y"]  # which a model may take too
        found = await scans.batch(7, 2, [5, 39], {**LAYOUT, "x.label": LAYOUT["y"]})
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.slow
async def test_a_late_answer_to_who_has_gone_is_never_another_ones_samples(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch ends while a sample is read, and that takes too long."""
    async with opened(f"scans={file}:beside") as scans:
        with monkeypatch.context() as quick:
            quick.setattr(dataset, "ANSWER_S", 0.5)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await scans.batch(7, 2, [15], LAYOUT)
            with pytest.raises(PeerLostError, match="the process that reads dataset 'scans'"):
                await scans.batch(7, 2, [5], LAYOUT)
        wanted = inputs_of(batch_of(Scans(), [5], 7, 2))
        found = await scans.batch(7, 2, [5], LAYOUT)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        # Whoever was cancelled while the next process opened the set has not looked at it: the next one does.
        scans.samples = 39
        with pytest.raises(UsageError, match="has 40 samples now, and had 39"):
            await scans.batch(7, 2, [5], LAYOUT)
    for pid in (file.parent / "pids").read_text().split():  # of processes that the user's code has started
        state = Path(f"/proc/{pid}/stat")
        async with asyncio.timeout(5.0):  # whoever is now its parent waits for it, or not
            while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@virtual_time
async def test_who_waits_for_a_set_is_told_after_seconds_and_then_once_a_minute() -> None:
    told: list[float] = []
    patience = Patience(told.append)

    async def read(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    assert await patience.wait(read(4.0)) == 4.0
    assert told == []
    assert await patience.wait(read(130.0)) == 130.0
    assert told == pytest.approx([5.0, 65.0, 125.0])
    for _ in range(4):  # each of them takes long, and a minute has one line
        await patience.wait(read(20.0))
    assert told[3:] == pytest.approx([15.0])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await patience.wait(read(20.0))


@pytest.fixture
def path_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.usefixtures("path_as_it_was")
def test_samples_of_another_kind_are_refused_with_both_kinds(file: Path) -> None:
    reads = Reads("scans", str(file), "make")
    kinds = (("x.image", "float32", (2, 3)), ("x.age", "int64", ()), ("y", "int64", (2,)))
    assert reads.inputs(7, 2, [5], kinds).keys() == LAYOUT.keys()
    for other in (kinds[:2], (*kinds[:2], ("y", "int64", (3,))), (*kinds[:2], ("y", "float32", (2,)))):
        answer, payloads = reader.answer(reads, Ask(7, 2, 1, other), [5])
        assert not payloads
        assert answer.brief.startswith(
            "samples of dataset 'scans' are x.age int64 (), x.image float32 (2, 3), y int64 (2,), and"
        )


@pytest.mark.usefixtures("path_as_it_was")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        ("fails", r"dataset 'scans': fails\(\) failed at .*scans.py:30: FileNotFoundError"),
        ("nothing", r"scans.py defines no function nothing"),
        ("clock", r"sample 0 is another one when it is read again"),
        ("empty", r"empty\(\) returns a set without samples"),
        ("stream", r"stream\(\) must return a set with len\(data\)"),
    ],
)
def test_a_function_that_gives_no_set_is_told_in_a_sentence(file: Path, make: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Reads("scans", str(file), make)


def test_a_flag_that_names_no_function_of_a_file_is_refused(tmp_path: Path) -> None:
    for text, why in (
        ("scans.py:make", "write NAME=FILE.py:FUNCTION"),
        ("scans=scans.py", "write NAME=FILE.py:FUNCTION"),
        (f"scans={tmp_path}/none.py:make", "there is no file"),
    ):
        with pytest.raises(UsageError, match=why):
            Datasets([text])
    (tmp_path / "a.py").touch()
    with pytest.raises(UsageError, match="each name once"):
        Datasets([f"a={tmp_path}/a.py:f", f"a={tmp_path}/a.py:g"])
