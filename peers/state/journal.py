"""A run's journal on other machines: what a standby must have to go on with the run when its owner is gone.

The idea: `train --resume` needs three small files of a run's folder: what the run is, its reports, and where copies of its
state are. So a standby reads these files as they grow, like `tail -f`, into a folder of its own. Taking over is then no more
than resuming. The state itself stays with the peers that hold copies. Two members are sent the same, for a standby that is not
there yet (peers/state/shelf.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import structlog

from meshcee.config import Timeouts
from meshcee.errors import MeshceeError, NotPermittedError, ProtocolError, UsageError
from meshcee.events import Event
from meshcee.files import Trouble, disk, dumps, loads
from meshcee.files.home import Home, Run
from meshcee.plan import Plan
from peers.mesh_view import MeshView
from peers.state.manifest import CopySet
from peers.state.shelf import (
    CHUNK_BYTES,
    COPIES,
    FILES,
    INFO,
    MOST_NAME_CHARACTERS,
    MOST_OVER,
    MOST_RUNS,
    MOST_SEAL_BYTES,
    REPORTS,
    Over,
    Seal,
    Shelf,
)
from peers.transport import Frame, Stream, StreamClosed
from peers.wire import messages, need, unless_silent

__all__ = ["Found", "Journal", "Ledger", "Mirror", "noted", "seek", "shelves", "take"]

log = structlog.get_logger()

MOST_BYTES = 256 << 20  # of a file that is replaced whole: a digest of each tensor, a few times
AGAIN = f".{REPORTS}.part"  # in the folder of a run that is followed: its reports, as they are sent once more
KEEPERS = 2
AGAIN_S = 10.0  # between two tries to send a shelf the journal
SHARE = 0.25  # of the time that rounds may take where copies wait for them: what is new is small
LONGEST_AGAIN_S = 640.0  # the same where all is sent and nothing comes of it: twice as long each time


def shelves(plan: Plan, hosts: Mapping[str, str], owner: str, host: str) -> tuple[str, ...]:
    """The members that keep this owner's journal: the plan's first, those of its own host last. `hosts`: of each peer, ""
    where it shares none.
    """
    others = [peer for peer in plan.peers if peer != owner]
    return tuple(sorted(others, key=lambda peer: bool(host) and hosts.get(peer) == host)[:KEEPERS])


@dataclass(eq=False)
class _Reader:
    """Who is sent the journal: what it was sent, and at which of the owner's questions it last had all that there was."""

    sent: dict[str, _Sent] = field(default_factory=dict)
    answered: int | None = None  # None: it has not caught up, and nobody waits for it
    keeps: bool = True  # it has room
    has_answered: bool = False  # once at least


@dataclass
class _Sent:
    """What a reader has of a file."""

    version: int = 0
    size: int = 0
    digest: Any = field(default_factory=hashlib.sha256)


class _Readers:
    """All who are sent the journal, and how often the owner has asked that they have all that there is."""

    def __init__(self, patience_s: float) -> None:
        self.all: set[_Reader] = set()
        self.asked = 0
        self._asked_s = 0.0
        self._patience_s = patience_s
        self._has_warned = False

    def ask(self, now_s: float) -> int:
        self.asked, self._asked_s = self.asked + 1, now_s
        return self.asked

    def heard(self, number: int, now_s: float) -> bool:
        """Whether all who had caught up have answered since. Who has not for too long is waited for no longer."""
        behind = [of for of in self.all if of.answered is not None and of.answered < number]
        if behind and now_s - self._asked_s > self._patience_s:
            for of in behind:
                of.answered = None
            behind = []
        return not behind

    def outgrown(self, reader: _Reader, peer: str) -> None:
        """Of the first one that has no room for the journal the user is told."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(Event.JOURNAL_OUTGROWN, peer=peer, bytes=sum(of.size for of in reader.sent.values()))


class Journal:
    """The owner's end, one for each agent that trains: serves the stream `follow`, and opens `journal` to shelves."""

    def __init__(self, agent: MeshView) -> None:
        self._agent = agent
        self._timeouts = agent.timeouts
        self._job = ""
        self._run: Run | None = None
        self._incarnation = 0
        self._everywhere = False  # whether peers that we did not choose may keep it
        self._ended = False
        self._followers = 0
        self._readers = _Readers(agent.timeouts.silent_s)
        self._changed = asyncio.Event()  # another one after each change
        self._shelves: dict[str, asyncio.Task[None]] = {}
        self._left: set[str] = set()  # that were shelves
        self._hearing: set[str] = set()  # shelves with an open stream
        self._members: tuple[str, ...] = ()  # of the newest plan
        agent.transport.serve("follow", self._serve)

    def begin(self, job: str, run: Run, incarnation: int, plan: Plan, *, resumed: bool) -> None:
        """This run of this job is going on; followers are told of it at their next look, every `beat_s`, and this plan's shelves.

        `resumed`: an owner before this one may have chosen other shelves.
        """
        self._job, self._run, self._ended = job, run, False
        self._incarnation, self._everywhere = incarnation, resumed
        self._members, known = plan.peers, self._agent.directory.peers
        hosts = {peer: device.host for peer in plan.peers if peer in known and (device := known[peer].device)}
        chosen = shelves(plan, hosts, self._agent.peer_id, self._agent.host)
        for peer in self._shelves.keys() - set(chosen):
            self._shelves.pop(peer).cancel()
            self._left.add(peer)
        for peer in chosen:
            if peer not in self._shelves or self._shelves[peer].done():
                self._shelves[peer] = self._agent.spawn(self._send_to(peer))
                self._left.discard(peer)

    async def end(self) -> None:
        """The run is over: every follower hears so, and whoever may keep it, as long as that takes no longer than shutdown_s."""
        self._ended = True
        self._notify()
        try:
            async with asyncio.timeout(self._timeouts.shutdown_s), asyncio.TaskGroup() as group:
                for peer in self._others():
                    group.create_task(self._have_forgotten(peer))
                while self._followers:
                    await self._changed.wait()
        except TimeoutError:
            log.info("not everybody has heard that the run is over")
        finally:
            for task in self._shelves.values():
                task.cancel()
            self._shelves.clear()

    def ask(self) -> int:
        """Whoever keeps the journal is to have all that is written by now, before long. By this number `heard` knows of it."""
        number = self._readers.ask(asyncio.get_running_loop().time())
        self._notify()
        return number

    def heard(self, number: int) -> bool:
        """Whether all who keep the journal have it since, but those who have not answered for silent_s."""
        return self._readers.heard(number, asyncio.get_running_loop().time())

    def _others(self) -> set[str]:
        """Who may keep the journal and does not hear of its end by itself.

        And a few who remember the end for those who are cut off just now. Members come first: they had part in the last step.
        """
        if self._run is None:
            return set()
        everybody = self._agent.directory.peers.keys() - {self._agent.peer_id}
        found = set(everybody) if self._everywhere else (self._left | self._shelves.keys()) & everybody
        beside = [p for p in (*self._members, *sorted(everybody)) if p in everybody and p not in self._shelves]
        return (found | set(list(dict.fromkeys(beside))[:KEEPERS])) - self._hearing

    async def _open(self, peer: str) -> Stream:
        where = self._agent.addresses_of([peer]).get(peer, ())
        return await self._agent.transport.open(peer, "journal", where)

    async def _have_forgotten(self, peer: str) -> None:
        with contextlib.suppress(MeshceeError, StreamClosed, TimeoutError):
            stream = await self._open(peer)
            try:
                await stream.send(self._over())
                await stream.aclose()
            finally:
                stream.abort()

    async def _send_to(self, peer: str) -> None:
        """Have this peer keep the journal until the run is over."""
        pause_s = AGAIN_S
        while not self._ended:
            reader: _Reader | None = None
            try:
                stream = await self._open(peer)
                reader = _Reader()
                self._followers += 1
                self._hearing.add(peer)
                try:
                    await self._tell(stream, self._job, reader)
                    await stream.aclose()
                finally:
                    self._followers -= 1
                    self._hearing.discard(peer)
                    stream.abort()
                    self._notify()
                return
            except (MeshceeError, StreamClosed, TimeoutError, OSError) as error:
                log.info("a peer does not keep the run's journal", peer=peer, error=str(error))
            in_vain = reader is not None and not reader.has_answered
            pause_s = min(2 * pause_s, LONGEST_AGAIN_S) if in_vain else AGAIN_S
            await asyncio.sleep(pause_s)

    async def _serve(self, stream: Stream) -> None:
        stream.max_payload_bytes = 0
        async with asyncio.timeout(self._timeouts.join_s):
            frame = await stream.recv()
        if frame.kind != messages.FOLLOW:
            raise ProtocolError(f"expected a standby, got a frame of kind {frame.kind!r}")
        job = need(frame.header, "job", str)
        self._followers += 1
        try:
            with contextlib.suppress(StreamClosed):
                await self._tell(stream, job, _Reader())
        finally:
            self._followers -= 1
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _tell(self, stream: Stream, job: str, reader: _Reader) -> None:
        """All that there is, and what comes: at once where copies wait for that, as far as this costs little, else at each beat."""
        loop, beat_s = asyncio.get_running_loop(), self._timeouts.beat_s
        self._readers.all.add(reader)
        try:
            while True:
                over = self._ended  # what is written before that is sent before the end is told of
                asked, began_s = self._readers.asked, loop.time()
                if self._run is not None and job == self._job and reader.keeps:
                    await self._bring(stream, self._run, reader)
                    reader.answered = asked if reader.keeps else None
                if over:
                    await stream.send(self._over())
                    return
                await stream.send(Frame(messages.PONG))  # that we live, also where nothing has changed
                rest_s = min((loop.time() - began_s) / SHARE, beat_s)
                await self._wait(rest_s)
                await self._wait(beat_s - rest_s, asked)
        finally:
            self._readers.all.discard(reader)

    async def _wait(self, limit_s: float, asked: float = math.inf) -> None:
        """Until the run is over, or somebody asks once more than so often."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not self._ended and self._readers.asked <= asked:
                    await self._changed.wait()

    async def _bring(self, stream: Stream, run: Run, reader: _Reader) -> None:
        """What is new, and its seal; the other side answers that."""
        news = [await self._send(stream, run, name, reader.sent) for name in FILES]
        if not any(news):
            return
        await stream.send(Frame(messages.SEALED, {}, [self._seal(run, reader.sent)]))
        frame = await stream.recv()
        if frame.kind != messages.KEPT:
            raise ProtocolError(f"a keeper of the journal sent a frame of kind {frame.kind!r}, which answers no seal")
        reader.keeps, reader.has_answered = need(frame.header, "kept", bool), True
        if not reader.keeps:
            self._readers.outgrown(reader, stream.peer_id)

    def _over(self) -> Frame:
        if self._run is None:
            return Frame(messages.FOLLOWED)
        me = self._agent
        over = Over(me.peer_id, self._job[:MOST_NAME_CHARACTERS], self._run.id, self._incarnation)
        return Frame(messages.FOLLOWED, {}, [over.signed(me.sign)])

    def _seal(self, run: Run, sent: Mapping[str, _Sent]) -> bytes:
        files = {name: (of.size, of.digest.digest()) for name, of in sent.items()}
        me, job = self._agent, self._job[:MOST_NAME_CHARACTERS]
        return Seal(me.peer_id, job, run.id, self._incarnation, me.clock(), files).signed(me.sign)

    async def _send(self, stream: Stream, run: Run, name: str, sent: dict[str, _Sent]) -> bool:
        """What is new in a file: what grows is sent on, what is replaced is sent whole. Whether there was any."""
        path = run.folder / name
        before = sent.get(name)
        try:
            if before is not None and _version(name, os.stat(path)) == (before.version, before.size):
                return False
            file = path.open("rb")  # quick as the look above; a thread would leave it open where this is cancelled
        except OSError:
            return False
        with file:
            version, size = _version(name, os.fstat(file.fileno()))  # of what is open: the path may be another's by now
            grows = name == REPORTS and before is not None and before.version == version and before.size <= size
            now = before if grows and before is not None else _Sent(version)
            while now.size < size or not size:
                data = await asyncio.to_thread(_read, file, now.size, min(CHUNK_BYTES, size - now.size))
                header = {"run": run.id, "name": name, "at": now.size, "size": size}
                await stream.send(Frame(messages.FILE, header, [data] if data else []))
                now.size += len(data)
                now.digest.update(data)
                if not data:
                    break
        sent[name] = now
        return True


def _version(name: str, found: os.stat_result) -> tuple[int, int]:
    """Of a file, with its size."""
    return found.st_ino if name == REPORTS else found.st_mtime_ns, found.st_size


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read(file: BinaryIO, at: int, count: int) -> bytes:
    file.seek(at)
    return file.read(count)


class Mirror:
    """The standby's end: a run's files in a folder of this machine's `home`, as its owner writes them.

    `check` is given what the run is, and raises where this machine could not go on with it.
    """

    def __init__(self, home: Home, owner: str, check: Callable[[Mapping[str, Any]], None]) -> None:
        self._home = home
        self._owner = owner
        self._check = check
        self._run: Run | None = None
        self._coming: dict[str, bytearray] = {}  # files that are not whole yet
        self._reports_bytes = 0
        self._again_bytes: int | None = None  # of reports that are sent once more, beside those that are here

    @property
    def run(self) -> Run | None:
        """The run, once what it is and its reports so far are here."""
        return self._run if self._run is not None and (self._run.folder / INFO).exists() else None

    async def follow(self, stream: Stream, job: str, timeouts: Timeouts, caught_up: Callable[[], None]) -> None:
        """Read until the run is over; StreamClosed when its owner is gone. `caught_up`: all that it has written so far is here."""
        stream.max_payload_bytes = CHUNK_BYTES
        self._coming.clear()
        await stream.send(Frame(messages.FOLLOW, {"job": job}))
        while True:
            frame = await unless_silent(stream.recv, stream, timeouts)
            if frame.kind == messages.FOLLOWED:
                return
            if frame.kind == messages.FILE:
                await asyncio.to_thread(self.take, frame)
            elif frame.kind == messages.SEALED:  # its stream proves who sent it
                caught_up()
                await stream.send(Frame(messages.KEPT, {"kept": True}))
            elif frame.kind != messages.PONG:
                raise ProtocolError(f"the owner sent a frame of kind {frame.kind!r}, which has no meaning to a standby")

    def take(self, frame: Frame) -> None:
        header, data = frame.header, b"".join(bytes(payload) for payload in frame.payloads)
        name, at, size = need(header, "name", str), need(header, "at", int), need(header, "size", int)
        if name not in FILES or not 0 <= at <= at + len(data) <= size:
            raise ProtocolError("the owner sent a file that a standby does not keep")
        run = self._folder(need(header, "run", str))
        if name == REPORTS:
            self._take_reports(run.folder, data, at, size)
            return
        coming = self._coming.setdefault(name, bytearray())
        if at == 0:
            coming.clear()
        if at != len(coming) or size > MOST_BYTES:
            raise ProtocolError(f"the owner left out some of {name}, or it has more than {MOST_BYTES} bytes")
        coming += data
        if len(coming) == size:
            whole = bytes(self._coming.pop(name))
            disk.write_whole(run.folder / name, self._own(whole) if name == INFO else whole)

    def _take_reports(self, folder: Path, data: bytes, at: int, size: int) -> None:
        """Those that are sent once more wait beside the others until they are as long, or all: the owner may die meanwhile."""
        path, beside = folder / REPORTS, folder / AGAIN
        if at == 0:
            self._again_bytes = 0
            disk.write_whole(beside, b"")
        if at != (self._reports_bytes if self._again_bytes is None else self._again_bytes):
            raise ProtocolError("the owner left out some of the run's reports")
        disk.append(path if self._again_bytes is None else beside, data)
        if self._again_bytes is None:
            self._reports_bytes += len(data)
            return
        self._again_bytes += len(data)
        if self._again_bytes >= min(size, self._reports_bytes):
            disk.sync_file(beside)
            disk.move(beside, path)
            self._reports_bytes, self._again_bytes = self._again_bytes, None

    @property
    def standing(self) -> tuple[int, int]:
        """Of two journals of a run, which is newer: the owner's incarnation, and how many bytes it has reported."""
        return (self._run.about.incarnation, self._reports_bytes) if self._run is not None else (0, 0)

    def adopt(self, seal: Seal, folder: Path) -> None:
        """The files in `folder`, which are what the seal says, take the place of what is here."""
        self._owner = seal.owner
        info = self._own((folder / INFO).read_bytes())
        run = self._folder(seal.run)
        for name in (REPORTS, COPIES):
            if name in seal.files:
                disk.sync_file(folder / name)
                disk.move(folder / name, run.folder / name)
        disk.write_whole(run.folder / INFO, info)
        disk.remove(run.folder / AGAIN)
        self._reports_bytes, self._again_bytes = seal.files[REPORTS][0], None

    def _folder(self, run_id: str) -> Run:
        if self._run is not None and self._run.id == run_id:
            return self._run
        if not run_id or len(run_id) > MOST_NAME_CHARACTERS or not all(c.isalnum() or c in "-_" for c in run_id):
            raise ProtocolError("the owner sent a run whose name is none")
        run = Run(self._home.folder / "runs" / run_id)
        if run.state == "running":
            raise UsageError(
                f"run {run_id} runs on this machine: a standby keeps a run of another machine; if this one dies, "
                f"`--resume {run_id}` goes on with it"
            )
        disk.make_folder(run.folder)
        self._run, self._reports_bytes, self._again_bytes = run, _size(run.report_file), None
        return run

    def _own(self, data: bytes) -> bytes:
        """What the run is, and whose."""
        try:
            info: Mapping[str, Any] = {**loads(data), "owner": self._owner}
        except (ValueError, TypeError) as error:
            raise ProtocolError("the owner sent a run that is not JSON") from error
        self._check(info)
        return dumps(info).encode()


AT_ONCE = 16  # peers that are asked
ANSWERS_WITHIN_S = 4.0
FAILURES = MeshceeError, StreamClosed, TimeoutError


class Found(NamedTuple):
    """A journal that a peer keeps."""

    seal: Seal
    peer: str
    is_live: bool  # whether that peer still hears its owner


async def seek(agent: MeshView, own: Shelf, job: str) -> tuple[list[Found], list[Over]]:
    """Journals of this job, at all peers and on this one's own shelf; newest first within a run, and runs by their last word.
    What some keep of a run that another knows to be over is left out; and such words."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def ask(peer: str) -> tuple[list[Found], list[Over]]:
        try:
            async with limit, asyncio.timeout(ANSWERS_WITHIN_S), _shelf(agent, peer, job) as (_, found, over):
                return found, over
        except FAILURES as error:
            log.debug("a peer does not say which journals it keeps", peer=peer, error=str(error))
            return [], []

    others = sorted(agent.directory.peers.keys() - {agent.peer_id})
    answers = [_own(agent, own, job), *await asyncio.gather(*map(ask, others))]
    over = [word for _, words in answers for word in words]
    found = [f for some, _ in answers for f in some if not any(word.ends(f.seal) for word in over)]
    last = {seal.run: max(f.seal.sealed_at for f in found if f.seal.run == seal.run) for seal, _, _ in found}
    return sorted(found, key=lambda f: (last[f.seal.run], f.seal.run, f.seal.order), reverse=True), over


def _own(agent: MeshView, own: Shelf, job: str) -> tuple[list[Found], list[Over]]:
    here, over = own.of(job[:MOST_NAME_CHARACTERS])
    return [Found(kept.seal, agent.peer_id, kept.is_live) for kept in here], list(map(Over.read, over))


async def take(agent: MeshView, own: Shelf, home: Home, mirror: Mirror, found: Sequence[Found]) -> Seal | None:
    """Let the mirror have the first of these that its shelf gives whole; its seal."""
    for one in found:
        with _folder(home) as folder:
            try:
                seal = await _fill(folder, agent, own, one)
            except FAILURES as error:
                log.warning("a journal that a peer keeps is not taken", peer=one.peer, error=str(error))
                continue
            await asyncio.to_thread(mirror.adopt, seal, folder)
            return seal
    return None


@contextlib.contextmanager
def _folder(home: Home) -> Iterator[Path]:
    disk.make_folder(home.folder)
    with tempfile.TemporaryDirectory(prefix="journal-", dir=home.folder) as folder:
        yield Path(folder)


@contextlib.asynccontextmanager
async def _shelf(agent: MeshView, peer: str, job: str) -> AsyncIterator[tuple[Stream, list[Found], list[Over]]]:
    """A stream to what this peer keeps of the job, what that is, and which runs it knows to be over."""
    stream = await agent.transport.open(peer, "shelf", agent.addresses_of([peer]).get(peer, ()))
    try:
        stream.max_payload_bytes = (MOST_RUNS + MOST_OVER) * MOST_SEAL_BYTES
        await stream.send(Frame(messages.SEEK, {"job": job[:MOST_NAME_CHARACTERS]}))
        frame = await stream.recv()
        live = need(frame.header, "live", list[bool])
        if frame.kind != messages.FOUND or len(live) > len(frame.payloads):
            raise ProtocolError("it did not say which journals it keeps")
        seals = [Seal.read(bytes(data)) for data in frame.payloads[: len(live)]]
        over = [Over.read(bytes(data)) for data in frame.payloads[len(live) :]]
        if ({of.job for of in seals} | {of.job for of in over}) - {job[:MOST_NAME_CHARACTERS]}:
            raise ProtocolError("it has journals of another job")
        yield stream, [Found(seal, peer, is_live) for seal, is_live in zip(seals, live)], over
    finally:
        stream.abort()


async def _fill(folder: Path, agent: MeshView, own: Shelf, wanted: Found) -> Seal:
    """With its files as they are by now, checked; their seal. ProtocolError where they are not what it says."""
    async with contextlib.AsyncExitStack() as stack:
        if wanted.peer == agent.peer_id:
            seal, parts = _here(own, wanted.seal)
        else:
            seal, parts = await _there(agent, wanted, stack)
        sizes, digests = dict.fromkeys(seal.files, 0), {name: hashlib.sha256() for name in seal.files}
        for name in seal.files:
            disk.append(folder / name, b"")
        async for name, data in parts:
            if name not in sizes or not 0 < len(data) <= seal.files[name][0] - sizes[name]:
                raise ProtocolError("it sent more than the seal says")
            await asyncio.to_thread(disk.append, folder / name, data)
            sizes[name] += len(data)
            digests[name].update(data)
    if {n: (sizes[n], digests[n].digest()) for n in sizes} != dict(seal.files):
        raise ProtocolError("its files are not what their owner has sealed")
    return seal


def _here(own: Shelf, wanted: Seal) -> tuple[Seal, AsyncIterator[tuple[str, bytes]]]:
    """The seal and the parts of its files as this peer itself keeps them."""
    kept = next((kept for kept in own.of(wanted.job)[0] if kept.seal.run == wanted.run), None)
    if kept is None:
        raise NotPermittedError("it has none any more")
    seal, journal = kept.seal, kept

    async def parts() -> AsyncIterator[tuple[str, bytes]]:
        for name in seal.files:
            for data in journal.chunks(name):
                yield name, data

    return seal, parts()


async def _there(
    agent: MeshView, wanted: Found, stack: contextlib.AsyncExitStack
) -> tuple[Seal, AsyncIterator[tuple[str, bytes]]]:
    """The seal and the parts of its files as another peer sends them."""
    limit_s = agent.timeouts.join_s
    async with asyncio.timeout(limit_s):
        stream, found, _ = await stack.enter_async_context(_shelf(agent, wanted.peer, wanted.seal.job))
        seal = next((f.seal for f in found if f.seal.run == wanted.seal.run), None)
        if seal is None or seal.order < wanted.seal.order:
            raise NotPermittedError("it has none any more, or an older one")
        if any(size > MOST_BYTES for name, (size, _) in seal.files.items() if name != REPORTS):
            raise ProtocolError(f"it has a file of more than {MOST_BYTES} bytes")
        await stream.send(Frame(messages.PULL, {"run": seal.run}))
    stream.max_payload_bytes = CHUNK_BYTES

    async def parts() -> AsyncIterator[tuple[str, bytes]]:
        while True:
            async with asyncio.timeout(limit_s):
                frame = await stream.recv()
            if frame.kind == messages.FOLLOWED:
                return
            if frame.kind != messages.FILE:
                raise ProtocolError("its files are not what their owner has sealed")
            yield need(frame.header, "name", str), b"".join(map(bytes, frame.payloads))

    return seal, parts()


WHAT = "the list of copies that peers hold"


class Ledger:
    """One run's. `note` is called with every new copy; the newest is written, one at a time, in a thread. The run's journal brings
    it to others.
    """

    def __init__(self, agent: MeshView, trouble: Trouble, journal: Journal) -> None:
        self.run = ""  # the name by which members know it
        self.folder: Path | None = None  # of the run; without one nothing is written
        self.rely: Callable[[], None] = lambda: None  # brings to the disk the reports of the steps before these copies
        self._agent = agent
        self._trouble = trouble
        self._journal = journal
        self._untold: CopySet | None = None  # is to be told once it is written
        self._next: dict[str, Any] | None = None
        self._writing: asyncio.Task[None] | None = None

    def note(self, found: Sequence[CopySet]) -> None:
        self._next = {"run": self.run, "copies": [copied.to_json() for copied in found]}
        if self.folder is not None and not self._is_writing:
            self._writing = self._agent.spawn(self._write(self.folder))

    @property
    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def has_told(self, copied: CopySet) -> bool:
        """As a manifest's `is_told`. What the disk has refused passes for told: the run goes on."""
        if not copied.asked and self._is_writing:
            self._untold = copied
        elif not copied.asked:
            copied.asked = self._journal.ask()
        return copied.asked > 0 and self._journal.heard(copied.asked)

    async def _write(self, folder: Path) -> None:
        while (what := self._next) is not None:
            self._next = None
            data = dumps(what).encode()
            try:
                await asyncio.to_thread(self._put, folder / COPIES, data)
            except OSError as error:  # the run goes on; only a resumed one would go back further
                self._trouble.tell(WHAT, error, len(data))
            else:
                self._trouble.over(WHAT)
        if self._untold is not None:
            self._untold.asked, self._untold = self._journal.ask(), None

    def _put(self, path: Path, data: bytes) -> None:
        self.rely()
        disk.write_whole(path, data)


def noted(folder: Path, run: str, after: int, done: int) -> list[CopySet]:
    """Of steps beyond `after`, up to `done`; none of another run, as members know whose copies they keep."""
    try:
        data = loads((folder / COPIES).read_text())
        found = [CopySet.from_json(copied) for copied in data["copies"]] if data["run"] == run else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return [copied for copied in found if after < copied.next_step <= done]
