"""The power is cut at any moment, and what was not brought to the disk is lost, each write and each name for itself.

The idea: a disk notes what has reached the platter. Before every change to it, folders are made as they might be found after a
power cut, and each must keep what was promised by then. So for every file that owners and members rely on.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import safetensors.torch
import torch

from dht.signing import Identity, MeshKey
from dht.terms import TermFile, Terms
from meshcee.callbacks import Control
from meshcee.files import disk, dumps, loads
from meshcee.files.home import Home
from meshcee.files.tensor_files import save
from meshcee.files.trouble import Trouble
from meshcee.sampling.fed import Fed
from peers.cli.ui.sources import FolderSource
from peers.mesh_view import MeshView
from peers.node.admission import Admin, Membership
from peers.node.founding import Founding
from peers.owner.epoch import Report
from peers.owner.folder import Diary
from peers.owner.job_run import Training
from peers.owner.result import Result
from peers.owner.story import Story
from peers.state import checkpoint
from peers.state.checkpoint import CheckpointStore, Draft
from peers.state.journal import Journal, Ledger, Mirror, noted
from peers.state.manifest import CopySet
from peers.state.shelf import COPIES, INFO, REPORTS, Seal
from peers.transport import Frame
from peers.wire import messages
from tests.mutation import breaks, changed
from tests.peers.node.test_members import office
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
    """Copies count if the steps before them were told of, so those are on the disk first."""

    def newest(least: int, found: Path) -> None:
        run = Home(found / "home").run("last")
        told = len(run.reports())
        assert told >= least
        assert [copied.next_step for copied in noted(run.folder, "run", 0, told)][-1:] >= [least][: least > 0]
        assert noted(run.folder, "run", told, 99) == []

    diary = Diary(Home(folder / "home").new_run("job"), Trouble())
    diary.begin(name="job")

    async def note(next_step: int) -> None:
        async with asyncio.TaskGroup() as group:
            one = Ledger(cast(MeshView, SimpleNamespace(spawn=group.create_task)), Trouble(), cast(Journal, None))
            one.run, one.folder, one.rely = "run", diary.run.folder, diary.sync
            one.note([CopySet(next_step, ())])

    for step in range(3):
        yield partial(newest, step)
        diary.report(line(step))
        asyncio.run(note(step + 1))
    yield partial(newest, 3)
    diary.close()


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


def taken_back(folder: Path) -> Iterator[Callable[[Path], None]]:
    """Steps from 4 on were a liar's, as was the state behind them; they are taken back, and told again."""

    def lie(step: int) -> dict[str, Any]:
        return {**line(step), "loss": -1.0}

    def goes_on(least: int, found: Path) -> None:
        """The state that a run goes on from, and the losses that it is held against, are both the liar's or neither is."""
        run = Home(found / "home").runs()[0]
        told = run.reports()
        steps = [entry["step"] for entry in told]
        assert steps == [*range(len(told))]
        newest = CheckpointStore.found(run).complete()[0]
        check(newest)
        assert 4 <= newest.next_step <= len(told)
        assert len(told) >= least
        assert told in ([line(step) for step in steps], [line(step) if step < 4 else lie(step) for step in steps])
        if newest.next_step == 4:
            assert told == [line(step) for step in steps], "computed again they have other losses"

    diary = Diary(Home(folder / "home").new_run("job"), Trouble())
    diary.begin(name="job")
    store = CheckpointStore(diary.run.checkpoints, {"micro_batch": 6}, diary.sync)
    for step in range(6):
        diary.report(line(step) if step < 4 else lie(step))
        if step in (3, 5):
            drafted(store, step + 1).finish(FIXED, {"fixed": (torch.float32, (3,))}, plan={})
    yield partial(goes_on, 4)
    diary.take_back([4, 5])
    store.take_back(4)
    for step in (4, 5):
        diary.report(line(step))
    drafted(store, 6).finish(FIXED, {"fixed": (torch.float32, (3,))}, plan={})
    yield partial(goes_on, 6)
    diary.close()


def founding(folder: Path) -> Iterator[Callable[[Path], None]]:
    """The first peer of a mesh is started twice."""

    def the_same(mesh: tuple[Any, ...], notes: int, found: Path) -> None:
        record = found / "home" / "mesh.founded.json"
        with Founding.of(Home(found / "home"), None, is_open=False) as again:
            assert mesh in ((), (again.key, again.root and again.root.peer_id))
            assert (again.identity is not None) >= (notes > 0)
            if again.identity is not None:
                kept = loads(record.read_text())
                assert again.identity == identity
                assert kept["mesh"] == again.key.fingerprint
                assert kept["listening"] == {"any": f"/ip4/127.0.0.1/tcp/{kept['token']}"}
                assert notes <= int(kept["token"]) <= notes + 1

    home, identity = Home(folder / "home"), folder / "home" / "identities" / "0.key"
    mesh: tuple[Any, ...] = ()
    for notes in range(2):
        yield partial(the_same, mesh, notes)
        with Founding.of(home, None, is_open=False) as first:
            mesh = first.key, first.root and first.root.peer_id
            yield partial(the_same, mesh, notes)
            first.note("any", f"/ip4/127.0.0.1/tcp/{notes + 1}", identity, str(notes + 1))
    yield partial(the_same, mesh, 2)


def admissions(folder: Path) -> Iterator[Callable[[Path], None]]:
    """Whom an admin has let in, and what these were given."""
    peers, root = [Identity.generate() for _ in range(3)], Identity.generate()

    def counted(let_in: int, found: Path) -> None:
        again = Admin(root, root.peer_id, bytes, root.peer_id, found / "admin" / "invites.json", time.time)
        has = [bool(again.invites_of(peer.peer_id)) for peer in peers]
        assert all(has[:let_in])
        assert not any(has[let_in + 1 :])
        for peer in peers[:let_in]:
            kept = Membership.read(found / peer.peer_id)
            assert kept is not None
            assert kept.holds(peer.peer_id, time.time())

    async def let_in(peer: Identity) -> None:
        async with office(folder / "admin" / "invites.json", root) as here:
            replace(await here.let_in(here.invite(), peer), file=folder / peer.peer_id).save()

    for n, peer in enumerate(peers):
        yield partial(counted, n)
        asyncio.run(let_in(peer))
    yield partial(counted, 3)


def mirror(folder: Path) -> Iterator[Callable[[Path], None]]:
    """A standby follows a run, has its newest journal from a peer, and takes over."""
    info = {"name": "job", "key": "key", "incarnation": 1}

    def goes_on(least: int, found: Path, *, durable: bool = False) -> None:
        for run in Home(found / "home").runs():
            told = run.reports()
            assert told == [line(step) for step in sorted({entry["step"] for entry in told})]
            assert len(told) >= (least if durable else 0)
            assert run.about.incarnation in (0, 1, 2)
            assert {copied.next_step for copied in noted(run.folder, "key", 0, len(told))} <= set(range(len(told) + 1))
            send(again := Mirror(Home(found / "home"), "owner", lambda info: None), 1)  # from the beginning
            assert again.run is not None
            assert again.run.reports() == [line(0)]
            assert again.run.info == {**info, "owner": "owner"}

    def frame(name: str, data: bytes, at: int = 0) -> Frame:
        return Frame(messages.FILE, {"run": "run", "name": name, "at": at, "size": at + len(data)}, [data])

    def send(to: Mirror, steps: int) -> None:
        to.take(frame(INFO, dumps(info).encode()))
        lines, at = [dumps(line(step)).encode() + b"\n" for step in range(steps)], 0
        for step, data in enumerate(lines):
            to.take(frame(REPORTS, data, at))
            at += len(data)
            to.take(frame(COPIES, copies(step + 1)))

    def copies(next_step: int) -> bytes:
        return dumps({"run": "key", "copies": [{"next_step": next_step, "stages": []}]}).encode()

    def journal(steps: int) -> Seal:
        files = {
            INFO: dumps({**info, "incarnation": 2}).encode(),
            REPORTS: b"".join(dumps(line(step)).encode() + b"\n" for step in range(steps)),
            COPIES: copies(steps),
        }
        for name, data in files.items():
            disk.append(folder / "journal" / name, data)
        return Seal("another", "job", "run", 2, 0.0, {name: (len(data), b"") for name, data in files.items()})

    def adopted(found: Path) -> None:
        run = Home(found / "home").run("run")
        assert run.about.incarnation == 2
        assert [copied.next_step for copied in noted(run.folder, "key", 0, 99)] == [4]
        goes_on(4, found, durable=True)

    yield partial(goes_on, 0)
    following = Mirror(Home(folder / "home"), "owner", lambda info: None)
    send(following, 2)
    disk.make_folder(folder / "journal")
    seal = journal(4)
    following.adopt(seal, folder / "journal")
    yield adopted
    diary = Diary(Home(folder / "home").run("run"), Trouble())
    diary.begin(name="job")
    diary.report(line(4))
    diary.sync()
    yield partial(goes_on, 5, durable=True)
    diary.close()


def story(folder: Path) -> Iterator[Callable[[Path], None]]:
    """Nobody relies on it: whoever reads it finds nothing that was not told, and what is told next."""
    home = Home(folder / "home")
    run = home.new_run("job")

    async def tell(home: Home, number: int) -> None:
        training = SimpleNamespace(result=Result(run=run.id, losses=[1.0] * number))
        one = Story(cast(MeshView, None), home, clock=lambda: float(number))
        telling = asyncio.get_running_loop().create_task(one.run(cast(Training, training)))
        await asyncio.sleep(0)
        one.hear(Report(number, 9, 1.0, 1.0, 12.0, 3.0, "links"))
        one.on_resume(Control(), [{}] * number)
        one.on_end(Control(), training.result, None)
        telling.cancel()
        await asyncio.wait([telling])

    def intact(told: int, found: Path) -> None:
        home = Home(found / "home")
        before = moments(home)
        assert set(before) <= set(range(told + 1))
        with ThreadPoolExecutor(1) as beside:  # the power may be cut inside of a loop
            beside.submit(asyncio.run, tell(home, 7)).result()
        assert moments(home) == [*before, 7, 7]

    def moments(home: Home) -> list[int]:
        """Whose events a reader finds."""
        painter = FolderSource(home.run(run.id)).read_all()
        return [int(moment.at) for moment in painter.picture(0.0).moments]

    for number in range(3):
        yield partial(intact, number)
        asyncio.run(tell(home, number))
    yield partial(intact, 3)


WORK = [terms, secrets, incarnations, weights, ledger, fed, taken_back, founding, admissions, mirror, story]


@pytest.mark.cases(4)
@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_what_was_promised_survives_a_power_cut(tmp_path: Path, work: Work) -> None:
    assert survives(tmp_path, work, most=24) > 8


def test_a_run_survives_a_power_cut(tmp_path: Path) -> None:
    assert survives(tmp_path, a_run) > 100


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("work", "function", "there", "instead"),
    [
        (terms, disk.File.close, "_disk.fsync(self._handle)", "pass"),
        (incarnations, disk.write_whole, "sync_folder(path.parent)", "pass"),
        (secrets, disk.write_once, "sync_folder(path.parent)", "pass"),
        (secrets, disk.new_folder, "sync_folder(path.parent)", "pass"),
        (a_run, Draft, "self._store.rely()", "pass"),
        (ledger, Ledger, "self.rely()", "pass"),
        (taken_back, CheckpointStore.let_go, "self.rely()", "pass"),
        (taken_back, CheckpointStore, " if f not in self.taken_back", ""),
        (a_run, Draft, "disk.sync_folder(self._store.folder)", "pass"),
        (a_run, checkpoint, "disk.sync_folder(folder.parent)", "pass"),
        (founding, Founding.note, "disk.write_whole(", "disk.append("),
        (admissions, Admin, "disk.write_whole, self._ledger", "disk.append, self._ledger"),
        (mirror, Mirror.adopt, "disk.sync_file(folder / name)", "pass"),
    ],
)
def test_without_its_line_something_is_lost(
    tmp_path: Path, work: Work, function: Callable[..., Any], there: str, instead: str
) -> None:
    with changed(function, there, instead):
        assert breaks(partial(survives, tmp_path, work))
