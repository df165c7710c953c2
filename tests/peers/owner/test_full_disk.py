"""A disk that fills up, or becomes read-only, while the owner trains: the run goes on, and catches up when there is room again."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from benchmarks import virtual_chaos
from benchmarks.virtual_chaos import STEPS, expected, job_of, quick_planning, stormy
from meshcee.errors import NotNowError, UsageError
from meshcee.events import Event
from meshcee.files import disk
from meshcee.files.home import Home, Run
from meshcee.job import Job
from peers.node.early import look_for
from peers.owner.epoch import Report
from peers.state.checkpoint import Checkpoint, CheckpointStore
from peers.state.policy import RETRY_S
from peers.state.saving import Saving
from tests.mutation import breaks, changed
from tests.rig.disks import RefusingDisk
from tests.rig.virtual_time import run

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here

BREAKS, MENDED = 4, 9  # steps


def trained(
    folder: Path, broken: RefusingDisk, error: int, *, mended_at: int | None = MENDED, kill: bool = False
) -> Run:
    """From step BREAKS on the disk refuses; until a step, or until two minutes behind the last."""

    async def story() -> str:
        async with stormy(0, folder) as storm, asyncio.timeout(3600):

            def hear(report: Report) -> None:
                if report.step == BREAKS:
                    broken.error = error
                    if kill:
                        storm.kill(storm.members()[1])
                elif report.step == mended_at:
                    broken.error = None
                elif mended_at is None and report.step == STEPS - 1:
                    asyncio.get_running_loop().call_later(120, setattr, broken, "error", None)

            return await virtual_chaos.train(storm, hear, job_with_checkpoints())

    with quick_planning(), disk.using(broken):
        assert run(story()) == "equal"
    return Home(folder).run("last")


def job_with_checkpoints() -> Job:
    return replace(job_of(), checkpoint_every=2)


def check(found: Run) -> None:
    """Everything that belongs to it is on the disk."""
    newest = CheckpointStore(found.checkpoints).find("", found.id)
    assert newest.next_step == STEPS
    newest.verify()
    assert [line["loss"] for line in found.reports()] == expected()[0]
    assert found.state == "done"
    assert [path.name for path in found.folder.rglob("*.part")] == []


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(("error", "kill"), [(errno.ENOSPC, False), (errno.EROFS, True)])
def test_a_run_outlives_its_disk_and_catches_up(tmp_path: Path, error: int, kill: bool) -> None:
    broken = RefusingDisk(tmp_path / "runs")
    with capture_logs() as logged:
        check(trained(tmp_path, broken, error, kill=kill))
    assert broken.refused > 2
    told = [entry for entry in logged if "cannot be written" in entry["event"]]
    assert "a checkpoint cannot be written, and will be tried again" in {entry["event"] for entry in told}
    assert all(str(tmp_path / "runs") in entry["disk"] and os.strerror(error) in entry["disk"] for entry in told)
    if error == errno.ENOSPC:
        assert any("bytes are needed" in entry["disk"] for entry in told)


@pytest.mark.slow
def test_weights_that_the_disk_refuses_at_the_end_are_waited_for_with_a_word_a_minute(tmp_path: Path) -> None:
    broken = RefusingDisk(tmp_path / "runs")
    with capture_logs() as logged:
        check(trained(tmp_path, broken, errno.ENOSPC, mended_at=None))
    told = [entry["event"] for entry in logged if entry["event"].startswith("a checkpoint cannot")]
    assert len(told) in (2, 3), "two minutes"
    assert broken.refused >= 120 / RETRY_S - 1


@pytest.mark.slow
def test_the_disk_of_all_peers_is_full_and_one_dies(tmp_path: Path) -> None:
    """Terms too: nobody claims, everybody goes on with what they believe."""
    check(trained(tmp_path, RefusingDisk(tmp_path), errno.ENOSPC, kill=True))


def away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member dies while the owner's disk does not even tell what it has, as one that is mounted from elsewhere."""
    broken = RefusingDisk(folder / "runs")
    tells = CheckpointStore.list_complete

    def told(self: CheckpointStore) -> list[Checkpoint]:
        if broken.error is not None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.folder))
        return tells(self)

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointStore, "list_complete", told)
        check(trained(folder, broken, errno.EIO, kill=True))


@pytest.mark.slow
def test_a_disk_that_cannot_be_read_ends_no_run_whose_state_peers_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with capture_logs() as logged:
        away(tmp_path / "1", monkeypatch)
    assert Event.CHECKPOINTS_UNREAD in {entry["event"] for entry in logged}
    with changed(CheckpointStore.newest, "except OSError", "except ZeroDivisionError"):
        assert breaks(lambda: away(tmp_path / "2", monkeypatch))


@pytest.mark.slow
def test_a_damaged_checkpoint_ends_no_run(tmp_path: Path) -> None:
    """Its owner lists all there are with each new one, and goes back to the newest when it misses a member."""

    async def story() -> str:
        async with stormy(0, tmp_path) as storm, asyncio.timeout(3600):

            def hear(report: Report) -> None:
                if report.step == BREAKS:
                    for manifest in (tmp_path / "runs").rglob("manifest.json"):
                        manifest.write_bytes(b"{")
                    storm.kill(storm.members()[1])

            return await virtual_chaos.train(storm, hear, job_with_checkpoints())

    with quick_planning():
        assert run(story()) == "equal"
    check(Home(tmp_path).run("last"))


def test_before_the_first_step_it_is_a_usage_error(tmp_path: Path) -> None:
    async def story() -> None:
        async with stormy(0, tmp_path) as storm, asyncio.timeout(3600):
            await virtual_chaos.train(storm)

    refusing = RefusingDisk(tmp_path / "runs", errno.ENOSPC)
    with quick_planning(), disk.using(refusing), pytest.raises(BaseExceptionGroup) as caught:
        run(story())
    assert caught.group_contains(UsageError, match=r"No space left on device.*MESHCEE_HOME")


def test_without_its_line_the_disk_ends_the_run(tmp_path: Path) -> None:
    with changed(Saving.run, "except* OSError as errors:", "except* ZeroDivisionError as errors:"):
        assert breaks(lambda: trained(tmp_path, RefusingDisk(tmp_path / "runs"), errno.ENOSPC))


# -- the real thing


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of a megabyte."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], timeout=30, check=True)


def test_a_file_system_that_is_full_takes_whole_files_or_none(small: Path) -> None:
    disk.write_whole(small / "terms", b"1")
    disk.append(small / "lines", b"one\n")
    ballast = small / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    for call, name in ((disk.write_whole, "terms"), (disk.write_once, "other"), (disk.append, "lines")):
        with pytest.raises(OSError, match="No space left on device") as caught:
            call(small / name, bytes(100_000))
        assert str(small / name) in disk.refusal(caught.value, 100_000)
        assert "100,000 bytes are needed, 0 are free" in disk.refusal(caught.value, 100_000)
        assert disk.is_refusal(caught.value)
    with pytest.raises(NotNowError, match="make room, or set MESHCEE_HOME"):
        look_for(None, Home(small), None)  # before a capture
    assert (small / "terms").read_bytes() == b"1"
    assert (small / "lines").read_bytes() == b"one\n"
    assert sorted(path.name for path in small.iterdir()) == ["ballast", "lines", "terms"]
    ballast.unlink()
    disk.write_whole(small / "terms", bytes(100_000))


def test_a_file_system_that_is_read_only_is_a_usage_error_before_anything_runs(small: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small], timeout=30, check=True)
    home = Home(small / "home")
    for call in (home.next_incarnation, lambda: home.new_run("job"), lambda: home.identity_file().__enter__()):
        with pytest.raises(UsageError, match=r"Read-only file system.*MESHCEE_HOME"):
            call()
