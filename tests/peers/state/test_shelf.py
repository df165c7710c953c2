"""Journals that peers keep of runs of other machines: what they take of an owner, and a standby of them. On virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import msgpack
import pytest

from benchmarks.virtual_chaos import now
from dht.signing import Identity
from meshcee.config import Timeouts
from meshcee.errors import MeshceeError, NotPermittedError, ProtocolError
from meshcee.files.home import Home
from peers.node.agent import Agent
from peers.node.early import JoinOptions
from peers.node.in_process import InProcess
from peers.state import shelf
from peers.state.journal import Found, Journal, Mirror, seek, shelves, take
from peers.state.shelf import CHUNK_BYTES, COPIES, INFO, MOST_RUNS, REPORTS, Over, Seal
from peers.transport.base import Frame, Stream, StreamClosed
from peers.transport.memory import MemoryNetwork
from peers.wire import messages
from tests.rig.virtual_time import quiet, run

JOB, RUN = "words", "r-1"
Files = Mapping[str, bytes]


def files_of(steps: int, incarnation: int = 1) -> Files:
    lines = b"".join(json.dumps({"step": i, "loss": 1 / (i + 1)}).encode() + b"\n" for i in range(steps))
    return {INFO: json.dumps({"incarnation": incarnation}).encode(), REPORTS: lines, COPIES: b'{"copies": []}'}


def seal_of(owner: Identity, files: Files, incarnation: int = 1, run_id: str = RUN, at: float = 0.0) -> bytes:
    sealed = {name: (len(data), hashlib.sha256(data).digest()) for name, data in files.items()}
    return Seal(owner.peer_id, JOB, run_id, incarnation, at, sealed).signed(owner.sign)


def frames_of(files: Files, run_id: str = RUN) -> list[Frame]:
    return [
        Frame(messages.FILE, {"run": run_id, "name": name, "at": at, "size": len(data)}, [data[at : at + CHUNK_BYTES]])
        for name, data in files.items()
        for at in range(0, len(data), CHUNK_BYTES)
    ]


class Mesh:
    """Two shelves, one owner and a standby's machine."""

    def __init__(self, here: InProcess, folder: Path) -> None:
        self.here = here
        self.home = Home(folder / "heir")
        self.owner = Identity.generate()

    async def begin(self) -> None:
        for name in ("a", "b", "heir"):
            await self.here.start(name, lends=False)
        await self.here.start("owner", lends=False, identity=self.owner)
        self.a, self.b, self.heir, self.chief = (self.here.agents[n] for n in ("a", "b", "heir", "owner"))
        for agent in self.here.agents.values():
            await agent.wait_for_peers([other.peer_id for other in self.here.agents.values()])

    async def send(self, to: Agent, frames: list[Frame], by: Agent | None = None) -> Stream:
        stream = await (by or self.chief).transport.open(to.peer_id, "journal", to.transport.addresses)
        with contextlib.suppress(StreamClosed):  # refused already
            for frame in frames:
                await stream.send(frame)
        await asyncio.sleep(1)
        return stream

    async def keep(self, to: Agent, files: Files, incarnation: int = 1, at: float = 0.0) -> Stream:
        seal = Frame(messages.SEALED, {}, [seal_of(self.owner, files, incarnation, at=at)])
        stream = await self.send(to, [*frames_of(files), seal])
        assert RUN in to.shelf.journals
        return stream

    async def sought(self, job: str = JOB) -> list[Found]:
        return (await seek(self.heir, self.heir.shelf, job))[0]

    async def ended(self, to: Agent, incarnation: int = 1) -> None:
        over = Over(self.owner.peer_id, JOB, RUN, incarnation)
        await self.send(to, [Frame(messages.FOLLOWED, {}, [over.signed(self.owner.sign)])])

    async def taken(self) -> tuple[Seal | None, Mirror]:
        mirror = Mirror(self.home, "", lambda info: None)
        return await take(self.heir, self.heir.shelf, self.home, mirror, await self.sought()), mirror

    def reports(self) -> int:
        return len(self.home.run(RUN).reports())


def on_a_mesh(folder: Path, test: Callable[[Mesh], Awaitable[None]]) -> None:
    async def play() -> None:
        async with InProcess(JoinOptions(), MemoryNetwork(), clock=now, monotonic=now) as here:
            mesh = Mesh(here, folder)
            await mesh.begin()
            await test(mesh)

    with quiet():
        run(play())


def test_a_standby_takes_the_newest_of_what_peers_keep(tmp_path: Path) -> None:
    async def test(mesh: Mesh) -> None:
        await mesh.keep(mesh.a, files_of(9), incarnation=1, at=50.0)
        await mesh.keep(
            mesh.b, files_of(5, 2), incarnation=2
        )  # of a later start of its owner, whatever the clocks said
        seal, _ = await mesh.taken()
        assert seal is not None
        assert (seal.incarnation, mesh.reports()) == (2, 5)
        await mesh.keep(mesh.a, files_of(6, 2), incarnation=2)
        await mesh.taken()
        assert mesh.reports() == 6
        run_info = mesh.home.run(RUN).info
        assert (run_info["owner"], run_info["incarnation"]) == (mesh.owner.peer_id, 2)
        assert [f.is_live for f in await mesh.sought()] == [True, True]
        assert await mesh.sought("another job") == []

    on_a_mesh(tmp_path, test)


def test_a_journal_that_is_not_what_its_owner_sealed_is_passed_over_for_an_older_one(tmp_path: Path) -> None:
    async def test(mesh: Mesh) -> None:
        await mesh.keep(mesh.a, files_of(9))
        await mesh.keep(mesh.b, files_of(5))
        kept = mesh.a.shelf.sealed[RUN]
        kept.reports.tail[3:6] = b"999"  # what a peer that lies would send
        await mesh.taken()
        assert mesh.reports() == 5
        mesh.b.shelf.sealed[RUN].files = {INFO: b"{}", COPIES: b"{}"}
        assert (await mesh.taken())[0] is None
        assert mesh.reports() == 5
        assert [entry.name for entry in mesh.home.folder.iterdir()] == ["runs"]  # nothing is left lying about

    on_a_mesh(tmp_path, test)


def test_reports_are_packed_and_come_out_as_they_went_in(tmp_path: Path) -> None:
    files = {**files_of(60_000), INFO: b'{"incarnation": 1}'}
    assert len(files[REPORTS]) > 2 * CHUNK_BYTES

    async def test(mesh: Mesh) -> None:
        stream = await mesh.keep(mesh.a, files)
        assert sum(mesh.a.shelf.sealed[RUN].sizes().values()) < len(files[REPORTS]) / 2 + CHUNK_BYTES
        more = files[REPORTS] + b'{"step": 60000, "loss": 1.0}\n'
        at = len(files[REPORTS])
        header = {"run": RUN, "name": REPORTS, "at": at, "size": len(more)}
        await stream.send(Frame(messages.FILE, header, [more[at:]]))
        await asyncio.sleep(1)
        await mesh.taken()
        assert mesh.reports() == 60_000  # what is not sealed does not count
        await stream.send(Frame(messages.SEALED, {}, [seal_of(mesh.owner, {**files, REPORTS: more})]))
        await asyncio.sleep(1)
        await mesh.taken()
        assert (mesh.home.run(RUN).report_file).read_bytes() == more

    on_a_mesh(tmp_path, test)


def test_a_run_that_is_over_is_forgotten_and_one_whose_owner_died_is_kept_for_a_while(tmp_path: Path) -> None:
    async def test(mesh: Mesh) -> None:
        stream = await mesh.keep(mesh.a, files_of(3), incarnation=2)
        stream.abort()
        await asyncio.sleep(1)
        assert [f.is_live for f in await mesh.sought()] == [False]
        await mesh.ended(mesh.a, incarnation=1)  # an owner before that one
        assert RUN in mesh.a.shelf.journals
        await mesh.ended(mesh.a, incarnation=2)
        assert RUN not in mesh.a.shelf.journals
        with mock.patch.object(shelf, "KEPT_S", 60.0):
            (await mesh.keep(mesh.a, files_of(3), incarnation=3)).abort()
            await asyncio.sleep(50)
            assert RUN in mesh.a.shelf.journals
            await asyncio.sleep(20)
            assert mesh.a.shelf.journals == {}

    on_a_mesh(tmp_path, test)


def header(name: str = REPORTS, at: int = 0, size: int = 1, run_id: str = RUN) -> dict[str, Any]:
    return {"run": run_id, "name": name, "at": at, "size": size}


NO_OWNER_SENDS = [
    [Frame(messages.FILE, header("../../x"), [b"x"])],
    [Frame(messages.FILE, header(at=-1), [b"x"])],
    [Frame(messages.FILE, header(at=7, size=8), [b"x"])],  # the beginning is missing
    [Frame(messages.FILE, header(size=0), [b"x"])],
    [Frame(messages.FILE, header(), [b"x"]), Frame(messages.FILE, header(run_id="r-2"), [b"x"])],
    [Frame(messages.FILE, {**header(), "size": "1"}, [b"x"])],
    [Frame(messages.STEP)],
    [Frame(messages.SEALED, {}, [b"no seal"])],
    [Frame(messages.FILE, header(size=CHUNK_BYTES + 1), [bytes(CHUNK_BYTES + 1)])],
]


def test_what_no_owner_sends_is_refused_and_not_kept(tmp_path: Path) -> None:
    async def test(mesh: Mesh) -> None:
        for frames in NO_OWNER_SENDS:
            stream = await mesh.send(mesh.a, frames)
            with pytest.raises(StreamClosed):
                await stream.recv()
            assert mesh.a.shelf.journals == {}
            assert mesh.a.shelf.arriving == []

    on_a_mesh(tmp_path, test)


def test_an_owner_seals_its_own_journal_and_what_it_has_sent(tmp_path: Path) -> None:
    files = files_of(3)

    async def test(mesh: Mesh) -> None:
        right = seal_of(mesh.owner, files)
        for seal, by in [(right, mesh.b), (seal_of(mesh.owner, files_of(4)), mesh.chief)]:
            stream = await mesh.send(mesh.a, [*frames_of(files), Frame(messages.SEALED, {}, [seal])], by)
            with pytest.raises(StreamClosed):
                await stream.recv()
        assert mesh.a.shelf.journals == {}
        await mesh.keep(mesh.a, files_of(3, 2), incarnation=2)
        stream = await mesh.send(mesh.a, [*frames_of(files), Frame(messages.SEALED, {}, [right])])
        with pytest.raises(StreamClosed):  # it has been gone on with since
            await stream.recv()
        assert mesh.a.shelf.journals[RUN].incarnation == 2

    on_a_mesh(tmp_path, test)


def held_bytes(peer: Agent) -> int:
    found = [of.sizes() for of in (*peer.shelf.arriving, *peer.shelf.sealed.values())]
    return sum({which: size for sizes in found for which, size in sizes.items()}.values())


def test_a_peer_keeps_so_many_bytes_and_journals(tmp_path: Path) -> None:
    async def test(mesh: Mesh) -> None:
        noise = bytes(CHUNK_BYTES)
        with mock.patch.object(shelf, "MOST_BYTES", 3 * CHUNK_BYTES):
            whole = {**files_of(1), INFO: 2 * noise}
            (await mesh.keep(mesh.a, whole)).abort()
            await asyncio.sleep(1)
            for run_id, kept in (
                ("r-2", True),
                ("r-3", False),
            ):  # one whose owner is gone makes room, and another does not
                seal = Frame(messages.SEALED, {}, [seal_of(mesh.owner, whole, run_id=run_id)])
                stream = await mesh.send(mesh.a, [*frames_of(whole, run_id), seal])
                assert (await stream.recv()).header == {"kept": kept}
                assert held_bytes(mesh.a) <= 3 * CHUNK_BYTES
                assert mesh.a.shelf.journals.keys() == {"r-2"}
        streams = [await mesh.send(mesh.b, []) for _ in range(MOST_RUNS + 1)]
        with pytest.raises(StreamClosed):
            await streams[-1].recv()
        assert len(mesh.b.shelf.arriving) == MOST_RUNS

    on_a_mesh(tmp_path, test)


def test_what_was_sealed_counts_though_its_owner_begins_anew(tmp_path: Path) -> None:
    async def test(mesh: Mesh) -> None:
        noise = random.Random(0).randbytes(CHUNK_BYTES)
        files = {**files_of(1), REPORTS: 2 * noise}
        with mock.patch.object(shelf, "MOST_BYTES", 4 * CHUNK_BYTES):
            stream = await mesh.keep(mesh.a, files)
            assert (await stream.recv()).header == {"kept": True}
            anew = {**files, REPORTS: 3 * noise[::-1]}
            for frame in [*frames_of(anew), Frame(messages.SEALED, {}, [seal_of(mesh.owner, anew)])]:
                await stream.send(frame)
            assert (await stream.recv()).header == {"kept": False}
            assert held_bytes(mesh.a) <= 4 * CHUNK_BYTES
            await mesh.taken()
            assert mesh.home.run(RUN).report_file.read_bytes() == files[REPORTS]

    on_a_mesh(tmp_path, test)


def test_a_file_of_more_than_half_of_the_room_is_kept(tmp_path: Path) -> None:
    async def test(mesh: Mesh) -> None:
        with mock.patch.object(shelf, "MOST_BYTES", 4 * CHUNK_BYTES):
            await mesh.keep(mesh.a, {**files_of(1), COPIES: bytes(3 * CHUNK_BYTES)})

    on_a_mesh(tmp_path, test)


def broken(**other: Any) -> bytes:
    me = Identity.generate()
    files = [[INFO, 1, bytes(32)], [REPORTS, 1, bytes(32)]]
    body = msgpack.packb({"job": JOB, "run": RUN, "incarnation": 1, "at": 0.0, "files": files, **other})
    return bytes(msgpack.packb([me.peer_id, body, me.sign(shelf.covered(shelf.JOURNAL, me.peer_id, body))]))


@pytest.mark.parametrize(
    "other",
    [
        {"run": "../r"},
        {"run": ""},
        {"run": "r" * 101},
        {"job": "\x1b[2J"},
        {"incarnation": 0},
        {"incarnation": 1 << 60},
        {"at": float("nan")},
        {"files": []},
        {"files": [[INFO, 1, bytes(32)], ["x", 1, bytes(32)]]},
        {"files": [[INFO, -1, bytes(32)], [REPORTS, 1, bytes(32)]]},
        {"files": [[INFO, 1, bytes(31)], [REPORTS, 1, bytes(32)]]},
        {"files": [[INFO, 1 << 40, bytes(32)], [REPORTS, 1, bytes(32)]]},
        {"files": [7, 7]},
    ],
)
def test_a_seal_that_is_malformed_is_refused_even_if_it_is_signed(other: dict[str, Any]) -> None:
    assert Seal.read(broken()).run == RUN
    with pytest.raises(ProtocolError):
        Seal.read(broken(**other))


def test_a_seal_counts_only_if_its_owner_has_signed_it() -> None:
    me = Identity.generate()
    seal = seal_of(me, files_of(2))
    assert Seal.read(seal, me.peer_id).owner == me.peer_id
    owner, body, signature = msgpack.unpackb(seal)
    for forged in (
        [owner, body.replace(JOB.encode(), b"wurds"), signature],
        [Identity.generate().peer_id, body, signature],
        [owner, body, bytes(64)],
    ):
        with pytest.raises(NotPermittedError):
            Seal.read(msgpack.packb(forged))
    for wrong in (b"", msgpack.packb([owner, body]), msgpack.packb(["x", body, signature]), bytes(1 << 20)):
        with pytest.raises(MeshceeError):
            Seal.read(wrong)


def test_shelves_are_the_plans_first_members_on_other_machines() -> None:
    plan = mock.Mock(peers=("p0", "p1", "p2", "p3"))
    assert shelves(plan, {}, "owner", "here") == ("p0", "p1")
    assert shelves(plan, {"p0": "here", "p1": "there", "p3": "there"}, "owner", "here") == ("p1", "p2")
    assert shelves(plan, dict.fromkeys(plan.peers, "here"), "p0", "here") == ("p1", "p2")
    assert shelves(plan, {"p0": "", "p1": ""}, "owner", "") == ("p0", "p1")


def test_an_owner_that_ends_tells_whoever_may_keep_its_journal(tmp_path: Path) -> None:
    """Also those that its last plan did without."""

    async def test(mesh: Mesh) -> None:
        journal = Journal(mesh.chief)
        ran = Home(tmp_path / "chief").new_run("x")
        for name, data in files_of(4).items():
            (ran.folder / name).write_bytes(data)
        for shelf_peer in (mesh.a, mesh.b):
            plan = mock.Mock(peers=(shelf_peer.peer_id,))
            journal.begin(JOB, ran, 1, plan, resumed=False)
            await asyncio.sleep(5)
            assert shelf_peer.shelf.journals[ran.id].standing == (1, len(files_of(4)[REPORTS]))
        with ran.report_file.open("ab") as file:
            file.write(b'{"step": 4, "loss": 1}\n')
        await asyncio.sleep(5)
        told = [agent.shelf.journals[ran.id].standing[1] for agent in (mesh.a, mesh.b)]
        assert told == [len(files_of(4)[REPORTS]), len(files_of(4)[REPORTS]) + 23]  # the second alone still hears of it
        await journal.end()
        assert mesh.a.shelf.journals == mesh.b.shelf.journals == {}

    on_a_mesh(tmp_path, test)


async def test_whenever_a_journal_is_cancelled_it_leaves_no_file_open(tmp_path: Path) -> None:
    """A file that nobody closed is a warning when Python frees it, and a warning fails a test here."""
    ran = Home(tmp_path).new_run("x")
    ran.report_file.write_bytes(files_of(4)[REPORTS])
    me = Identity.generate()
    agent = mock.Mock(timeouts=Timeouts(), peer_id=me.peer_id, sign=me.sign, clock=lambda: 0.0)
    agent.directory.peers = {}
    journal = Journal(agent)
    journal.begin(JOB, ran, 1, mock.Mock(peers=()), resumed=False)
    (_, serve), _ = agent.transport.serve.call_args
    stream = mock.AsyncMock(spec=Stream)
    for after in range(200):
        stream.recv.side_effect = [Frame(messages.FOLLOW, {"job": JOB}), Frame(messages.KEPT, {"kept": True})]
        serving = asyncio.create_task(serve(stream))
        for _ in range(1 + after % 20):
            await asyncio.sleep(0)
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    gc.collect()
    assert stream.send.await_count > 0


def test_what_a_keeper_that_was_cut_off_has_of_a_run_that_is_over_is_known_to_be_of_no_use(tmp_path: Path) -> None:
    async def test(mesh: Mesh) -> None:
        journal = Journal(mesh.chief)
        ran = Home(tmp_path / "chief").new_run("x")
        for name, data in files_of(4).items():
            (ran.folder / name).write_bytes(data)
        journal.begin(JOB, ran, 1, mock.Mock(peers=(mesh.a.peer_id,)), resumed=False)
        await asyncio.sleep(5)
        assert [f.seal.run for f in await mesh.sought()] == [ran.id]
        for one, other in ((mesh.a, mesh.chief), (mesh.chief, mesh.a)):
            mesh.here.network.cut(one.peer_id, other.peer_id)
        await journal.end()
        mesh.here.crash("owner")
        mesh.here.network.heal()
        await asyncio.sleep(60)
        assert ran.id in mesh.a.shelf.journals
        assert await mesh.sought() == []
        gone_on = Seal.read(seal_of(mesh.owner, files_of(4), incarnation=2, run_id=ran.id))
        _, (over, *_) = await seek(mesh.heir, mesh.heir.shelf, JOB)
        assert over.ends(mesh.a.shelf.journals[ran.id])
        assert not over.ends(gone_on)

    on_a_mesh(tmp_path, test)


def test_the_end_of_a_run_is_remembered_for_longer_than_its_journal_is_kept(tmp_path: Path) -> None:
    async def test(mesh: Mesh) -> None:
        assert shelf.REMEMBERED_S > shelf.KEPT_S + 60
        with mock.patch.object(shelf, "REMEMBERED_S", 60.0):
            await mesh.ended(mesh.b)
        late = [*frames_of(files_of(3)), Frame(messages.SEALED, {}, [seal_of(mesh.owner, files_of(3))])]
        await mesh.send(mesh.b, late)  # of before the end, on a slow way
        assert mesh.b.shelf.journals == {}
        await asyncio.sleep(40)
        assert len((await seek(mesh.heir, mesh.heir.shelf, JOB))[1]) == 1
        await asyncio.sleep(20)
        assert (await seek(mesh.heir, mesh.heir.shelf, JOB))[1] == []
        for number in range(shelf.MOST_OVER + 5):
            over = Over(mesh.owner.peer_id, JOB, f"r-{number}", 1)
            await mesh.send(mesh.b, [Frame(messages.FOLLOWED, {}, [over.signed(mesh.owner.sign)])])
        assert len(mesh.b.shelf.of(JOB)[1]) == shelf.MOST_OVER

    on_a_mesh(tmp_path, test)


def test_only_an_owner_says_in_its_name_that_a_run_is_over(tmp_path: Path) -> None:
    async def test(mesh: Mesh) -> None:
        await mesh.keep(mesh.a, files_of(3))
        forged = Over(mesh.owner.peer_id, JOB, RUN, 9).signed(mesh.b.sign)
        seal = seal_of(mesh.owner, files_of(3))  # signed, and no word of an end
        for data in (forged, seal, b""):
            with pytest.raises(MeshceeError):
                Over.read(data)
            await mesh.send(mesh.a, [Frame(messages.FOLLOWED, {}, [data])])
        await mesh.send(
            mesh.a,
            [Frame(messages.FOLLOWED, {}, [Over(mesh.owner.peer_id, JOB, RUN, 9).signed(mesh.owner.sign)])],
            by=mesh.b,
        )
        assert RUN in mesh.a.shelf.journals

    on_a_mesh(tmp_path, test)


def test_a_standby_takes_what_lies_on_its_own_shelf(tmp_path: Path) -> None:
    async def test(mesh: Mesh) -> None:
        await mesh.keep(mesh.a, files_of(3))
        await mesh.keep(mesh.heir, files_of(7))
        seal, _ = await mesh.taken()
        assert seal is not None
        assert mesh.reports() == 7
        assert mesh.home.run(RUN).report_file.read_bytes() == files_of(7)[REPORTS]
        mesh.heir.shelf.sealed[RUN].reports.tail[3:6] = b"999"
        await mesh.keep(mesh.a, files_of(5), incarnation=2)
        await mesh.taken()
        assert mesh.reports() == 5

    on_a_mesh(tmp_path, test)
