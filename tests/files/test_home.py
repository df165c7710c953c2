"""The folder of this machine: who owns a run, what is left of one that died, and what a disk that refuses becomes."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from dht import Identity, MeshKey
from meshcee.errors import NotNowError, UsageError
from meshcee.files import disk
from meshcee.files.home import Home, Run
from meshcee.files.tensor_files import save
from meshcee.files.trouble import Trouble
from peers.cli.ui.wishes import ask_to_stop
from peers.owner.folder import Diary
from tests.rig.disks import RefusingDisk


def begun(home: Home) -> Diary:
    diary = Diary(home.new_run("job"), Trouble())
    diary.begin(name="job")
    return diary


def line(step: int) -> dict[str, object]:
    return {"step": step, "loss": 1.0 / (step + 1), "metrics": {"accuracy": 0.5}}


def test_a_run_is_held_by_a_living_process_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process's start is told by the wall clock: a step of it made a living run look dead, and another owner took it."""
    diary = begun(Home(tmp_path))
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: 12345.0)
    found = Home(tmp_path).run("last")
    assert found.state == "running"
    assert found.process == psutil.Process()
    with pytest.raises(UsageError, match="is still running; stop it with"):
        Diary(found, Trouble())
    diary.close()
    assert found.state == "died"
    assert found.process is None
    Diary(found, Trouble()).close()


def test_a_run_is_its_new_owners_before_it_is_described_anew(tmp_path: Path) -> None:
    """A run that was resumed waited in a queue, and `run stop` sent its signal to whoever had the dead owner's number now."""
    run = Home(tmp_path).new_run("job")
    (run.folder / "owner.lock").write_text("1")
    (run.folder / "run.json").write_text('{"pid": 1}')
    diary = Diary(run, Trouble())
    assert run.process == psutil.Process()
    diary.close()


def test_the_last_run_is_the_one_that_was_begun_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are times of a clock that goes back, and number 10 of a second stands before number 2."""
    home, hour = Home(tmp_path), ["20261025-0259"]
    monkeypatch.setattr(time, "strftime", lambda shape: f"{hour[0]}00")
    (tmp_path / "runs" / "20261025-025900-older").mkdir(parents=True)
    made = [home.new_run("job") for _ in range(12)]
    hour[0] = "20261025-0200"
    made.append(home.new_run("job"))
    assert home.run("last") == made[-1]
    assert [run.id for run in home.runs()] == [*(run.id for run in reversed(made)), "20261025-025900-older"]
    assert home.run("20261025-0200") == made[-1]


def test_a_number_of_another_container_names_no_process_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have a process 1: `run stop` in a container beside the run's sent the signal to itself."""
    run, signals = Home(tmp_path).new_run("job"), list[int]()
    monkeypatch.setattr(psutil.Process, "send_signal", lambda process, number: signals.append(number))
    with run.hold():
        lock = run.folder / "owner.lock"
        pid, there = lock.read_text().split()
        for other in (there.replace("/", "/9"), f"9{there}"):
            lock.write_text(f"{pid} {other}")
            assert run.state == "running"
            assert run.process is None
            with pytest.raises(UsageError, match="another container"):
                ask_to_stop(run)
        assert signals == []
        lock.write_text(pid)  # of an owner that knows nothing of that
        assert run.process == psutil.Process()


@pytest.mark.parametrize(
    ("said", "place"),
    [
        ('{"micro_batch": "4"}', "micro_batch"),
        ('{"devices": [["cpu"]]}', r"devices\[0\]"),
        ('{"incarnation": -1}', "incarnation"),
    ],
)
def test_a_description_that_makes_no_sense_is_one_sentence(tmp_path: Path, said: str, place: str) -> None:
    run = Home(tmp_path).new_run("job")
    assert run.about.job is None
    (run.folder / "run.json").write_text(said)
    with pytest.raises(UsageError, match=rf"run.json: {place}: .*checkpoint export"):
        _ = run.about


@pytest.mark.parametrize(
    "torn",
    [
        b'{"step": 3, "loss": 0.2, "metrics": {"accuracy": 0.5}',
        b'{"step": 3, "lo',
        b"\0\0\0\0}",
        b"[3]\n",
        b"{}\n",
        b'{"step": true, "loss": 0.2}\n',
        b'{"step": -1, "loss": 0.2}\n',
        b'{"step": 3, "loss": "0.2"}\n',
        b'{"step": 3, "loss": 0.2, "metrics": []}\n',
    ],
)
def test_a_torn_line_is_none_and_what_comes_next_stands_alone(tmp_path: Path, torn: bytes) -> None:
    diary = begun(Home(tmp_path))
    for step in range(3):
        diary.report(line(step))
    diary.close()
    with diary.run.report_file.open("ab") as file:
        file.write(torn)
    assert [told["step"] for told in diary.run.reports()] == [0, 1, 2]
    again = Diary(diary.run, Trouble())
    again.begin()
    again.report(line(3))
    again.close()
    assert diary.run.reports() == [line(step) for step in range(4)]


def test_a_step_that_was_taken_back_is_no_report_until_it_is_told_again(tmp_path: Path) -> None:
    diary = begun(Home(tmp_path))
    for step in range(3):
        diary.report(line(step))
    diary.take_back([1, 2])
    diary.report(line(1))
    diary.close()
    assert diary.run.reports() == [line(0), line(1)]


@pytest.mark.parametrize("lost", [(), (1,), (2, 3), (1, 3)])
def test_who_takes_a_step_back_takes_back_all_later_ones_though_their_lines_are_lost(
    tmp_path: Path, lost: tuple[int, ...]
) -> None:
    """A power cut loses any of them: a step between two that were taken back was held against the right one."""
    diary = begun(Home(tmp_path))
    for step in range(4):
        diary.report(line(step))
    assert diary.run.counts_to == math.inf
    back = [step for step in (1, 2, 3) if step not in lost]
    diary.take_back(back)
    assert diary.run.reports() == [line(step) for step in range(back[0])]
    assert diary.run.counts_to == back[0]
    diary.report(line(back[0]))
    assert diary.run.counts_to == back[0] + 1
    diary.close()


def test_a_line_that_the_disk_refused_is_brought_to_it_later(tmp_path: Path) -> None:
    now_s = 0.0
    diary = Diary(Home(tmp_path).new_run("job"), Trouble(lambda: now_s))
    diary.begin(name="job")
    broken = RefusingDisk(tmp_path)
    with disk.using(broken):
        diary.report(line(0))
        broken.error = errno.ENOSPC
        for step in (1, 2):
            diary.report(line(step))
        diary.note(steps=7)
        with pytest.raises(OSError, match=r"No space left on device.*reports"):
            diary.sync()
        assert [told["step"] for told in diary.run.reports()] == [0]
        assert diary.run.report_file.read_bytes().endswith(b"}\n"), "half a line that found room is taken back"
        broken.error, now_s = None, 60.0
        diary.report(line(3))
        diary.sync()
    assert diary.run.reports() == [line(step) for step in range(4)]
    assert diary.run.info["steps"] == 7
    diary.close()


def test_a_run_ends_though_its_result_cannot_be_written(tmp_path: Path) -> None:
    diary = begun(Home(tmp_path))
    with disk.using(RefusingDisk(tmp_path, errno.EROFS)):
        diary.end("done")
    diary.close()
    assert diary.run.state == "died"


def test_two_owners_at_once_have_two_incarnations(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: Home(tmp_path).next_incarnation(), range(40)))
    assert sorted(found) == list(range(1, 41))


def test_two_runs_of_one_second_have_two_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: Home(tmp_path).new_run("job"), range(8)))
    assert len({run.id for run in found}) == 8


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_before_anything_runs_a_disk_that_refuses_is_the_users_to_mend(tmp_path: Path, error: int) -> None:
    home = Home(tmp_path / "home")
    with disk.using(RefusingDisk(tmp_path, error)):
        for call in (home.next_incarnation, lambda: home.new_run("job"), lambda: home.identity_file().__enter__()):
            with pytest.raises(UsageError, match=rf"{home.folder}.*: {os.strerror(error)}.*MESHCEE_HOME") as caught:
                call()
            check_kind(caught.value, error)


def check_kind(caught: UsageError, error: int) -> None:
    """A full disk is no wrong word, so a service tries again; nobody looks for permissions there, nor for room elsewhere."""
    full = error == errno.ENOSPC
    assert (type(caught), caught.exit_code) == ((NotNowError, 3) if full else (UsageError, 2))
    assert ("make room" in str(caught), "permissions" in str(caught)) == (full, not full)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_secrets_of_a_first_peer_fail_alike(tmp_path: Path, error: int) -> None:
    with disk.using(RefusingDisk(tmp_path, error)):
        for call in (Identity.load_or_create, MeshKey.load_or_create):
            with pytest.raises(UsageError, match=f"{tmp_path}.*{os.strerror(error)}") as caught:
                call(tmp_path / "key")
            check_kind(caught.value, error)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_files_that_a_user_names_fail_alike(tmp_path: Path, error: int) -> None:
    place = tmp_path / "out.safetensors"
    with disk.using(RefusingDisk(tmp_path, error)):
        for call in (
            lambda: disk.publish(place, b"x"),
            lambda: disk.check_place(place, "--out"),
            lambda: save(place, {"a": torch.zeros(1)}),
        ):
            with pytest.raises(UsageError, match=os.strerror(error)) as caught:
                call()
            assert caught.value.exit_code == (3 if error == errno.ENOSPC else 2)
            assert ("make room" in str(caught.value)) == (error == errno.ENOSPC)


def test_a_home_that_is_no_folder_is_a_usage_error(tmp_path: Path) -> None:
    """The real disk."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Not a directory"):
        Home(tmp_path / "file" / "home").next_incarnation()


def test_a_description_that_cannot_be_read_is_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("[1]")
    (tmp_path / "result.json").write_text('{"state"')
    assert (Run(tmp_path).info, Run(tmp_path).result, Run(tmp_path).state) == ({}, {}, "died")
    (tmp_path / "result.json").write_text(json.dumps({"state": "done"}))
    assert Run(tmp_path).state == "done"


def test_a_file_in_its_place_is_named_with_what_to_set(tmp_path: Path) -> None:
    place = tmp_path / "home"
    place.write_text("")
    with pytest.raises(UsageError, match=r"home is a file, .* set MESHCEE_HOME"):
        Home(place)
    with pytest.raises(UsageError, match=r"File name too long.* set MESHCEE_HOME"):
        Home(tmp_path / ("x" * 300))
