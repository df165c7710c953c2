"""An owner's journal on its way: when readers hear of it, who is waited for, and what comes of one that has grown too long."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from meshcee.config import Timeouts
from meshcee.errors import ProtocolError
from meshcee.events import Event
from meshcee.files.home import Home, Run
from peers.state import journal as journal_module
from peers.state import shelf
from peers.state.journal import Journal, Mirror
from peers.state.shelf import CHUNK_BYTES, COPIES, REPORTS, Seal, Shelf
from peers.transport.base import Frame, Stream
from peers.transport.stream import FramedStream
from peers.wire import messages
from tests.mutation import breaks, changed
from tests.peers.state.test_shelf import JOB, Mesh, files_of, held_bytes, on_a_mesh

KEPT_S = 40.0
BEAT_S, SILENT_S = Timeouts().beat_s, Timeouts().silent_s


def run_of(folder: Path, steps: int = 4) -> Run:
    ran = Home(folder / "chief").new_run("x")
    for name, data in files_of(steps).items():
        (ran.folder / name).write_bytes(data)
    return ran


def begun(mesh: Mesh, ran: Run) -> Journal:
    journal = Journal(mesh.chief)
    journal.begin(JOB, ran, 1, mock.Mock(peers=(mesh.a.peer_id,)), resumed=False)
    return journal


async def follows(mesh: Mesh) -> Stream:
    """A standby that answers the first seal and nothing else."""
    stream = await mesh.heir.transport.open(mesh.chief.peer_id, "follow", mesh.chief.transport.addresses)
    await stream.send(Frame(messages.FOLLOW, {"job": JOB}))
    while (await stream.recv()).kind != messages.SEALED:
        pass
    await stream.send(Frame(messages.KEPT, {"kept": True}))
    return stream


def test_what_is_asked_for_is_told_before_the_next_beat(tmp_path: Path) -> None:
    async def test(mesh: Mesh) -> None:
        ran = run_of(tmp_path)
        journal = begun(mesh, ran)
        await asyncio.sleep(5 * BEAT_S + 0.1)
        (ran.folder / COPIES).write_bytes(b'{"copies": [1]}')
        asked = journal.ask()
        assert not journal.heard(asked)
        await asyncio.sleep(BEAT_S / 10)
        assert journal.heard(asked)
        assert mesh.a.shelf.sealed[ran.id].files[COPIES] == b'{"copies": [1]}'
        await journal.end()

    def story() -> None:
        on_a_mesh(tmp_path, test)

    story()
    with changed(Journal, "self._readers.asked <= asked", "True"):
        assert breaks(story)


def test_a_reader_that_does_not_answer_is_waited_for_once_and_not_for_long(tmp_path: Path) -> None:
    async def test(mesh: Mesh) -> None:
        ran = run_of(tmp_path)
        journal = begun(mesh, ran)
        await asyncio.sleep(1)
        stream = await follows(mesh)
        await asyncio.sleep(1)
        (ran.folder / COPIES).write_bytes(b'{"copies": [1]}')
        asked = journal.ask()
        await asyncio.sleep(SILENT_S - 1)
        assert not journal.heard(asked)
        await asyncio.sleep(2)
        assert journal.heard(asked)
        (ran.folder / COPIES).write_bytes(b'{"copies": [2]}')
        asked = journal.ask()
        await asyncio.sleep(2 * BEAT_S)
        assert journal.heard(asked), "the shelf has answered, and who is behind is not waited for again"
        stream.abort()
        await journal.end()

    on_a_mesh(tmp_path, test)


def grows(ran: Run, count: int) -> None:
    """By so many bytes that cannot be packed."""
    noise = random.Random(ran.report_file.stat().st_size).randbytes(count)
    with ran.report_file.open("ab") as file:
        file.write(noise)


@pytest.fixture
def sent() -> Iterator[list[int]]:
    """The bytes of files that are sent."""
    found: list[int] = []
    send = FramedStream.send

    async def counted(self: FramedStream, frame: Frame) -> None:
        if frame.kind == messages.FILE:
            found.append(sum(map(len, frame.payloads)))
        await send(self, frame)

    with mock.patch.object(FramedStream, "send", counted):
        yield found


@pytest.mark.slow
def test_a_journal_that_outgrows_a_shelf_is_sent_once_and_its_last_seal_stays(tmp_path: Path, sent: list[int]) -> None:
    async def test(mesh: Mesh) -> None:
        ran = run_of(tmp_path)
        journal = begun(mesh, ran)
        await asyncio.sleep(5)
        grows(ran, 2 * CHUNK_BYTES)
        await asyncio.sleep(5)
        fits = mesh.a.shelf.journals[ran.id]
        assert fits.standing[1] == ran.report_file.stat().st_size
        for _ in range(60):
            grows(ran, CHUNK_BYTES // 8)
            await asyncio.sleep(1)
        assert sum(sent) < 5 * CHUNK_BYTES
        kept = mesh.a.shelf.sealed[ran.id]
        assert kept.is_live
        assert kept.seal.standing[1] >= fits.standing[1]
        assert held_bytes(mesh.a) <= shelf.MOST_BYTES
        mesh.here.network.cut(mesh.a.peer_id, mesh.chief.peer_id)  # and the owner sends it all again
        await asyncio.sleep(5)
        mesh.here.network.heal()
        await asyncio.sleep(30)
        assert sum(sent) < 20 * CHUNK_BYTES
        assert mesh.a.shelf.sealed[ran.id].seal == kept.seal
        assert mesh.a.shelf.sealed[ran.id].is_live
        await asyncio.sleep(2 * KEPT_S)
        assert ran.id in mesh.a.shelf.journals, "its owner is there"
        await journal.end()
        assert mesh.a.shelf.journals == {}

    def story() -> None:
        sent.clear()
        with mock.patch.object(journal_module.log, "warning") as warned:
            on_a_mesh(tmp_path, test)
        assert [call.args for call in warned.mock_calls] == [(Event.JOURNAL_OUTGROWN,)]

    with mock.patch.object(shelf, "MOST_BYTES", 4 * CHUNK_BYTES), mock.patch.object(shelf, "KEPT_S", KEPT_S):
        story()
        with changed(Shelf, " and run != for_run", ""):
            assert breaks(story)
        with changed(Shelf, "kept.journal, kept.until_s = journal, math.inf", "pass"):
            assert breaks(story)


def test_what_is_sent_again_takes_no_room_twice(tmp_path: Path) -> None:
    async def test(mesh: Mesh) -> None:
        ran = run_of(tmp_path)
        grows(ran, 5 * CHUNK_BYTES // 2)
        journal = begun(mesh, ran)
        await asyncio.sleep(5)
        mesh.here.network.cut(mesh.a.peer_id, mesh.chief.peer_id)
        await asyncio.sleep(5)
        mesh.here.network.heal()
        grows(ran, CHUNK_BYTES // 4)
        await asyncio.sleep(20)
        assert mesh.a.shelf.journals[ran.id].standing[1] == ran.report_file.stat().st_size
        await journal.end()

    def story() -> None:
        on_a_mesh(tmp_path, test)

    with mock.patch.object(shelf, "MOST_BYTES", 5 * CHUNK_BYTES):
        story()
        with changed(shelf.Reports, "packed = before._packed[k]", "pass"):
            assert breaks(story)


@pytest.mark.slow
def test_a_shelf_that_takes_all_and_seals_nothing_is_tried_ever_less_often(tmp_path: Path) -> None:
    tries: list[None] = []

    def refuses(*what: object) -> None:
        tries.append(None)
        raise ProtocolError("not here")

    async def test(mesh: Mesh) -> None:
        journal = begun(mesh, run_of(tmp_path))
        await asyncio.sleep(250)
        assert 3 <= len(tries) <= 5
        await journal.end()

    with mock.patch.object(Seal, "read", refuses):
        on_a_mesh(tmp_path, test)


def test_an_owner_that_dies_as_it_sends_its_reports_again_leaves_a_standby_those_it_had(tmp_path: Path) -> None:
    files = files_of(60_000)
    size = len(files[REPORTS])

    def part(at: int, end: int) -> Frame:
        data = files[REPORTS][at:end]
        return Frame(messages.FILE, {"run": "r", "name": REPORTS, "at": at, "size": size}, [data])

    def story() -> None:
        home = Home(tmp_path / "home")
        mirror = Mirror(home, "owner", lambda info: None)
        mirror.take(part(0, size))
        mirror = Mirror(home, "owner", lambda info: None)  # started once more
        for at in range(0, size, CHUNK_BYTES):
            mirror.take(part(at, at + CHUNK_BYTES))
            assert home.run("r").report_file.read_bytes() == files[REPORTS]
            assert mirror.standing[1] == size
        assert [path.name for path in home.run("r").folder.iterdir()] == [REPORTS]
        shorter = files[REPORTS][: size // 2]  # of another owner, which knew less when it took over
        mirror.take(Frame(messages.FILE, {"run": "r", "name": REPORTS, "at": 0, "size": len(shorter)}, [shorter]))
        assert home.run("r").report_file.read_bytes() == shorter
        assert mirror.standing[1] == len(shorter)

    story()
    with changed(Mirror, "min(size, self._reports_bytes)", "0"):
        assert breaks(story)
