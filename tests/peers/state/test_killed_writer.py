"""An owner is killed at any moment of its work on checkpoints: what is found then is whole, and nothing else is left for long.

The idea: operations on files are counted, and from one on none happens any more, as after SIGKILL; of what is being written only
half arrives. Every one of them is tried.
"""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from meshcee.errors import CheckpointError
from meshcee.files import disk
from meshcee.files.disk import Disk
from meshcee.files.tensor_files import byte_view, head_of
from peers.state.checkpoint import BEFORE, MOST_COMPLETE, Checkpoint, CheckpointStore, Draft
from tests.mutation import breaks, changed
from tests.peers.state.test_checkpoint import captured_job, job_of
from tests.rig.disks import Killed, KilledDisk, RefusingDisk

ABOUT = {"micro_batch": 6}
FIXED = {"fixed": torch.ones(3)}


class NoPlatter(Disk):
    """What is killed here is a process, not the machine."""

    def fsync(self, handle: int) -> None:
        pass


def store_in(folder: Path, before: CheckpointStore | None = None) -> CheckpointStore:
    return CheckpointStore.of(folder, job_of(), captured_job(), 6, before=before)


def drafted(store: CheckpointStore, step: int) -> Draft:
    draft = store.draft(step)
    for kind, name in (("model", "w"), ("optimizer", "w/m")):
        tensor = torch.full((5,), float(step))
        writer = draft.create(f"{kind}-0.safetensors", head_of({name: (tensor.dtype, (5,))})[0])
        writer.write(byte_view(tensor))
        writer.close()
    return draft


def write(store: CheckpointStore, step: int) -> Checkpoint:
    return drafted(store, step).finish(FIXED, {"fixed": (torch.float32, (3,))}, plan={})


def check(found: Checkpoint) -> None:
    """It is whole, and that of its step."""
    found.verify()
    assert torch.equal(found.weights(["w"])["w"], torch.full((5,), float(found.next_step)))
    assert torch.equal(found.optimizer(["w"])["w/m"], torch.full((5,), float(found.next_step)))
    assert torch.equal(found.weights(["fixed"])["fixed"], FIXED["fixed"])


def rewrite(store: CheckpointStore) -> None:
    write(store, 6)


def write_next(store: CheckpointStore) -> None:
    write(store, 9)


def discard(store: CheckpointStore) -> None:
    drafted(store, 9).discard()


def go_on_from_the_first(store: CheckpointStore) -> None:
    store.forget_after(3)


def found_after_kills(folder: Path, work: Callable[[CheckpointStore], None]) -> list[int]:
    """Of which step the newest checkpoint was after each kill, and last after none. A run goes on from all of them."""
    with disk.using(NoPlatter()):
        for step in (3, 6):
            write(store_in(folder / "whole"), step)
        found: list[int] = []
        for at in range(200):
            here = folder / str(at)
            shutil.copytree(folder / "whole", here)
            store = CheckpointStore(here, ABOUT)
            try:
                with disk.using(KilledDisk(at)):
                    work(store)
                killed = False
            except Killed:
                killed = True
            for listed in CheckpointStore(here).complete():
                check(listed)
            newest = CheckpointStore(here).find("", "run")
            found.append(newest.next_step)
            goes_on(here, newest)
            if not killed:
                return found
    raise AssertionError("it never ends")


def goes_on(folder: Path, newest: Checkpoint) -> None:
    store = store_in(folder)
    store.forget_after(newest.next_step)
    assert len(list(folder.iterdir())) == len(store.complete()), "nothing is left of who was killed"
    check(write(store, newest.next_step + 3))
    assert [c.next_step for c in store.complete()] == [newest.next_step + 3, newest.next_step]
    assert len(list(folder.iterdir())) == MOST_COMPLETE


@pytest.mark.parametrize(
    ("work", "operations", "steps"),
    [
        (write_next, 25, [6, 9]),
        (rewrite, 25, [6]),
        (discard, 10, [6]),
        (go_on_from_the_first, 6, [6, 3]),
    ],
)
def test_whenever_its_owner_is_killed_a_run_goes_on_from_a_whole_checkpoint(
    tmp_path: Path, work: Callable[[CheckpointStore], None], operations: int, steps: list[int]
) -> None:
    found = found_after_kills(tmp_path, work)
    assert len(found) > operations
    assert [b for a, b in zip([None, *found], found) if a != b] == steps


def test_of_one_step_the_checkpoint_that_was_written_last_counts(tmp_path: Path) -> None:
    """As an owner leaves them that is killed before it has removed the other."""
    written = write(store_in(tmp_path), 6).folder
    shutil.copytree(written, written.with_name(written.name + BEFORE))
    listed = store_in(tmp_path).complete()
    assert [c.next_step for c in listed] == [6, 6]
    assert listed[0].folder == written
    assert [c.folder for c in (write(store_in(tmp_path), 6), *store_in(tmp_path).complete())] == [written] * 2


def test_what_a_killed_owner_left_is_cleared_away_even_if_the_next_one_is_killed_at_that(tmp_path: Path) -> None:
    for at in range(4):
        folder = tmp_path / str(at)
        with disk.using(NoPlatter()):
            check(write(store_in(folder), 6))
            with pytest.raises(Killed), disk.using(KilledDisk(12)):
                write(CheckpointStore(folder, ABOUT), 9)
            assert len(list(folder.iterdir())) == 2
            with pytest.raises(Killed), disk.using(KilledDisk(at)):
                store_in(folder)
            goes_on(folder, CheckpointStore(folder).find("", "run"))


@pytest.mark.parametrize(
    ("work", "function", "line", "instead"),
    [
        (write_next, Draft.__init__, 'f".step-', 'f"step-'),
        (rewrite, Draft, "disk.move(place, before)", "disk.remove_tree(place)"),
        (go_on_from_the_first, CheckpointStore.forget_after, "_remove(later.folder)", "disk.remove_tree(later.folder)"),
    ],
)
def test_without_its_line_half_a_checkpoint_is_found(
    tmp_path: Path, work: Callable[[CheckpointStore], None], function: Callable[..., Any], line: str, instead: str
) -> None:
    with changed(function, line, instead):
        assert breaks(partial(found_after_kills, tmp_path, work))


def test_a_checkpoint_that_is_being_completed_when_its_epoch_ends_is_completed_first(tmp_path: Path) -> None:
    store, reached, goes = store_in(tmp_path), threading.Event(), threading.Event()
    draft = drafted(store, 3)

    class Waits(Disk):
        def fsync(self, handle: int) -> None:
            reached.set()
            assert goes.wait(30)

    with disk.using(Waits()), ThreadPoolExecutor(2) as threads:
        completing = threads.submit(draft.finish, {}, {}, plan={})
        assert reached.wait(30)
        following = store_in(tmp_path, before=store)
        listed = threads.submit(following.complete)
        assert not listed.done()
        goes.set()
        assert [c.next_step for c in listed.result(30)] == [completing.result(30).next_step] == [3]
    listed.result()[0].verify()
    assert [c.next_step for c in following.made] == [3], "it is told of, though its epoch is over"


def test_the_place_in_the_data_is_asked_for_before_anybody_must_wait(tmp_path: Path) -> None:
    """It may read the data, which may take long or not return."""
    store = store_in(tmp_path)
    held: list[bool] = []

    def place(step: int) -> dict[str, int]:
        held.append(store.lock.locked())
        return {"position": step * 4}

    store.place = place
    found = write(store, 3)
    assert held == [False]
    assert found.manifest["data"] == {"position": 12}


def test_what_a_full_disk_refuses_at_the_last_leaves_nothing_though_its_epoch_is_over(tmp_path: Path) -> None:
    """Whoever had begun it waits no more: the draft stayed, on the disk that had no room."""
    full = RefusingDisk(tmp_path)
    with disk.using(full):
        draft = drafted(store_in(tmp_path), 3)
        full.error = errno.ENOSPC
        with pytest.raises(OSError, match="No space"):
            draft.finish(FIXED, {}, plan={})
    assert list(tmp_path.iterdir()) == []


def test_what_is_taken_back_counts_no_more_though_the_disk_still_has_it(tmp_path: Path) -> None:
    """An audit takes steps back while the disk cannot be written; the disk's error ended the run."""

    class ReadOnly(NoPlatter):
        def rename(self, old: Path, new: Path) -> None:
            raise OSError(errno.EROFS, "Read-only file system", str(old))

    with disk.using(NoPlatter()):
        store = store_in(tmp_path)
        for step in (3, 6):
            write(store, step)
        with disk.using(ReadOnly()):
            with pytest.raises(OSError, match="Read-only"):
                store.forget_after(3)  # whoever resumes a run has to be able to
            store.take_back(3)
            assert [c.next_step for c in store.complete()] == [c.next_step for c in store.made] == [3]
        assert [c.next_step for c in CheckpointStore(tmp_path).complete()] == [
            6,
            3,
        ]  # what cannot be written is forgotten
        again = store_in(tmp_path, before=store)
        check(write(again, 6))
        assert [c.next_step for c in again.complete()] == [6, 3]
        assert len(list(tmp_path.iterdir())) == 2


def test_what_is_written_while_its_steps_are_taken_back_never_counts(tmp_path: Path) -> None:
    """A thread outlives its epoch: where it waited for the place in the data, a liar's state became the newest checkpoint."""
    store = store_in(tmp_path)
    write(store, 3)
    draft = drafted(store, 6)
    with disk.using(NoPlatter()):
        store_in(tmp_path, before=store).take_back(3)
        with pytest.raises(CheckpointError, match="taken back"):
            draft.finish(FIXED, {"fixed": (torch.float32, (3,))}, plan={})
    assert [c.next_step for c in store.complete()] == [3]
    assert len(list(tmp_path.iterdir())) == 1
