"""The power is cut at any moment, and what was not brought to the disk is lost, each write and each name for itself.

The idea: a disk notes what has reached the platter. Before every change to it, folders are made as they might be found after a
power cut, and each must keep what was promised by then. So for every file that owners and members rely on.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from dht.signing import Identity, MeshKey
from dht.terms import TermFile, Terms
from meshcee.files import disk
from meshcee.files.home import Home
from meshcee.files.tensor_files import save
from meshcee.files.trouble import Trouble
from meshcee.sampling.fed import Fed
from peers.owner.diary import Diary
from peers.state import checkpoint
from peers.state.checkpoint import CheckpointStore, Draft
from peers.state.manifest import noted
from peers.state.shelf import COPIES
from tests.mutation import breaks, changed
from tests.peers.state.test_killed_writer import FIXED, NoPlatter, check, drafted
from tests.rig.disks import Platter

Work = Callable[[Path], Iterator[Callable[[Path], None]]]  # yields what must hold of a folder from then on


def survives(tmp_path: Path, work: Work, most: int = 8) -> int:
    """Do the work, and look at what is left of it by a power cut before each change and at the end; the number of looks."""
    numbers, folder = count(), tmp_path / "real"
    folder.mkdir()
    places = (tmp_path / f"cut-{n}" for n in count())
    with Platter(folder) as platter:
        holds: Callable[[Path], None] = lambda found: None  # noqa: E731

        def look() -> None:
            with disk.using(NoPlatter()):
                for found in platter.after(partial(next, places), next(numbers), most):
                    holds(found)
                    shutil.rmtree(found)

        platter.on_change = look
        with disk.using(platter):
            for promise in work(folder):
                holds = promise
        look()
    return next(numbers)


def terms(folder: Path) -> Iterator[Callable[[Path], None]]:
    file = TermFile(folder / "identities" / "0.terms")

    def at_least(least: Terms, most: Terms, found: Path) -> None:
        kept = TermFile(found / "identities" / "0.terms").load()
        assert least.counter <= kept.counter <= most.counter
        assert least.accepted <= kept.accepted

    for n in range(4):
        yield partial(at_least, Terms(n, (n, "a")) if n else Terms(), Terms(n + 1, (n + 1, "a")))
        file.save(Terms(n + 1, (n + 1, "a")))
    yield partial(at_least, Terms(4, (4, "a")), Terms(4, (4, "a")))


def secrets(folder: Path) -> Iterator[Callable[[Path], None]]:
    def same(peer: str | None, key: MeshKey | None, found: Path) -> None:
        assert peer in (None, Identity.load_or_create(found / "home" / "0.key").peer_id)
        assert key in (None, MeshKey.load_or_create(found / "home" / "mesh.key"))

    yield partial(same, None, None)
    peer = Identity.load_or_create(folder / "home" / "0.key").peer_id
    yield partial(same, peer, None)
    yield partial(same, peer, MeshKey.load_or_create(folder / "home" / "mesh.key"))


def incarnations(folder: Path) -> Iterator[Callable[[Path], None]]:
    def higher(than: int, found: Path) -> None:
        assert Home(found / "home").next_incarnation() > than

    last = 0
    for _ in range(4):
        yield partial(higher, last)
        last = Home(folder / "home").next_incarnation()
    yield partial(higher, last)


def weights(folder: Path) -> Iterator[Callable[[Path], None]]:
    def whole(least: float, found: Path) -> None:
        if least or (found / "out.safetensors").exists():
            kept = safetensors.torch.load_file(found / "out.safetensors")
            assert float(kept["w"][0]) >= least
            assert torch.equal(kept["w"], kept["w"][:1].expand(5))

    for n in (0.0, 1.0):
        yield partial(whole, n)
        save(folder / "out.safetensors", {"w": torch.full((5,), n + 1)})
    yield partial(whole, 2.0)


def ledger(folder: Path) -> Iterator[Callable[[Path], None]]:
    def newest(least: int, found: Path) -> None:
        kept = [copied.next_step for copied in noted(found, "run", 0, 99)]
        assert (kept or [0])[0] >= least

    for n in range(3):
        yield partial(newest, n)
        text = f'{{"run": "run", "copies": [{{"next_step": {n + 1}, "stages": []}}]}}'
        disk.write_whole(folder / COPIES, text.encode())
    yield partial(newest, 3)


def fed(folder: Path) -> Iterator[Callable[[Path], None]]:
    def again(step: int, found: Path) -> None:
        kept = Fed(found / "fed", lambda step: True, lambda: 0)
        for known in range(step):
            assert float(kept.batches(known, list)[0]["x"][0]) == known

    kept = Fed(folder / "fed", lambda step: False, lambda: 0)
    for step in range(3):
        yield partial(again, step)
        kept.batches(step, partial(_samples, step))
    yield partial(again, 3)


def _samples(step: int) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.full((2,), float(step))}]


def line(step: int) -> dict[str, Any]:
    return {"step": step, "loss": step / 7, "metrics": {"accuracy": 0.5}}


def a_run(folder: Path) -> Iterator[Callable[[Path], None]]:
    """Reports, checkpoints that rely on them, a step that is gone back to, and the end."""

    def goes_on(least: int, state: str, found: Path) -> None:
        runs = Home(found / "home").runs()
        if not runs:
            assert not least
            return
        run = runs[0]
        told = run.reports()
        assert told == [line(step) for step in sorted({entry["step"] for entry in told})]
        kept = CheckpointStore(run.checkpoints).complete()
        for one in kept:
            check(one)
        assert max((one.next_step for one in kept), default=0) >= least
        assert {one["step"] for one in told} >= set(range(kept[0].next_step if kept else 0))
        assert run.state in ("died", "done")
        assert state in ("", run.state)
        if least:
            assert run.info["name"] == "job"
        diary = Diary(run, Trouble())  # and somebody goes on with it
        diary.begin(name="job")
        following = next(step for step in count() if step not in {entry["step"] for entry in told})
        diary.report(line(following))
        diary.close()
        assert run.state == "died"
        assert line(following) in run.reports()

    yield partial(goes_on, 0, "")
    diary = Diary(Home(folder / "home").new_run("job"), Trouble())
    diary.begin(name="job")
    store = CheckpointStore(diary.run.checkpoints, {"micro_batch": 6}, diary.sync)
    least = 0
    for step in range(6):
        diary.report(line(step))
        if step % 2:
            drafted(store, step + 1).finish(FIXED, {"fixed": (torch.float32, (3,))}, plan={})
            least = step + 1
            yield partial(goes_on, least, "")
    diary.note(plan={})
    yield partial(goes_on, 4, "")
    store.forget_after(4)
    diary.end("done")
    diary.close()
    yield partial(goes_on, 4, "done")


WORK = [terms, secrets, incarnations, weights, ledger, fed]


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_what_was_promised_survives_a_power_cut(tmp_path: Path, work: Work) -> None:
    assert survives(tmp_path, work, most=24) > 8


def test_a_run_survives_a_power_cut(tmp_path: Path) -> None:
    assert survives(tmp_path, a_run) > 100


@pytest.mark.parametrize(
    ("work", "function", "there", "instead"),
    [
        (terms, disk.File.close, "_disk.fsync(self._handle)", "pass"),
        (incarnations, disk.write_whole, "sync_folder(path.parent)", "pass"),
        (secrets, disk.write_once, "sync_folder(path.parent)", "pass"),
        (secrets, disk.new_folder, "sync_folder(path.parent)", "pass"),
        (a_run, Draft, "self._store.rely()", "pass"),
        (a_run, Draft, "disk.sync_folder(self._store.folder)", "pass"),
        (a_run, checkpoint, "disk.sync_folder(folder.parent)", "pass"),
    ],
)
def test_without_its_line_something_is_lost(
    tmp_path: Path, work: Work, function: Callable[..., Any], there: str, instead: str
) -> None:
    with changed(function, there, instead):
        assert breaks(partial(survives, tmp_path, work))
