"""A run's journal on other machines: what a standby must have to go on with the run when its owner is gone.

The idea: `train --resume` needs three small files of a run's folder: what the run is, its reports, and where copies of its
state are. So a standby reads these files as they grow, like `tail -f`, into a folder of its own. Taking over is then no more
than resuming. The state itself stays with the peers that hold copies. Two members are sent the same, for a standby that is not
there yet (peers/shelf.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from meshcee import disk
from meshcee.config import Timeouts
from meshcee.errors import MeshceeError, ProtocolError, UsageError
from meshcee.plan import Plan
from peers import messages
from peers.home import Home, Run
from peers.mesh_view import MeshView
from peers.messages import need
from peers.pulse import unless_silent
from peers.shelf import CHUNK_BYTES, COPIES, FILES, INFO, MOST_NAME_CHARACTERS, REPORTS, Seal
from peers.strict_json import dumps
from peers.transport.base import Frame, Stream, StreamClosed

__all__ = ["Journal", "Mirror", "keepers"]

log = structlog.get_logger()

MOST_BYTES = 256 << 20  # of a file that is replaced whole: a digest of each tensor, a few times
KEEPERS = 2
AGAIN_S = 10.0  # between two tries to send a keeper the journal


def keepers(plan: Plan, hosts: Mapping[str, str], owner: str, host: str) -> tuple[str, ...]:
    """The members that keep this owner's journal: the plan's first, those of its own host last. `hosts`: of each peer, ""
    where it shares none.
    """
    others = [peer for peer in plan.peers if peer != owner]
    return tuple(sorted(others, key=lambda peer: bool(host) and hosts.get(peer) == host)[:KEEPERS])


@dataclass
class _Sent:
    """What a reader has of a file."""

    version: int = 0
    size: int = 0
    digest: Any = field(default_factory=hashlib.sha256)


class Journal:
    """The owner's end, one for each agent that trains: serves the stream `follow`, and opens `journal` to keepers."""

    def __init__(self, agent: MeshView) -> None:
        self._agent = agent
        self._timeouts = agent.timeouts
        self._job = ""
        self._run: Run | None = None
        self._incarnation = 0
        self._everywhere = False  # whether peers that we did not choose may keep it
        self._ended = False
        self._followers = 0
        self._changed = asyncio.Condition()
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._left: set[str] = set()  # that were keepers
        agent.transport.serve("follow", self._serve)

    def begin(self, job: str, run: Run, incarnation: int, plan: Plan, *, resumed: bool) -> None:
        """This run of this job is going on; followers are told of it at their next look, every `beat_s`, and this plan's keepers.

        `resumed`: an owner before this one may have chosen other keepers.
        """
        self._job, self._run, self._ended = job, run, False
        self._incarnation, self._everywhere = incarnation, resumed
        known = self._agent.directory.peers
        hosts = {peer: device.host for peer in plan.peers if peer in known and (device := known[peer].device)}
        chosen = keepers(plan, hosts, self._agent.peer_id, self._agent.host)
        for peer in self._keepers.keys() - set(chosen):
            self._keepers.pop(peer).cancel()
            self._left.add(peer)
        for peer in chosen:
            if peer not in self._keepers or self._keepers[peer].done():
                self._keepers[peer] = self._agent.beside(self._send_to(peer))
                self._left.discard(peer)

    async def end(self) -> None:
        """The run is over: every follower hears so, and whoever may keep it, as long as that takes no longer than shutdown_s."""
        self._ended = True
        await self._notify()
        try:
            async with asyncio.timeout(self._timeouts.shutdown_s), asyncio.TaskGroup() as group:
                for peer in self._others():
                    group.create_task(self._have_forgotten(peer))
                async with self._changed:
                    await self._changed.wait_for(lambda: not self._followers)
        except TimeoutError:
            log.info("not everybody has heard that the run is over")
        finally:
            for task in self._keepers.values():
                task.cancel()
            self._keepers.clear()

    def _others(self) -> set[str]:
        """Who may keep the journal and is not sent it any more."""
        if self._run is None:
            return set()
        everybody = self._agent.directory.peers.keys()
        found = set(everybody) if self._everywhere else self._left & everybody
        return found - self._keepers.keys() - {self._agent.peer_id}

    async def _open(self, peer: str) -> Stream:
        where = self._agent.addresses_of([peer]).get(peer, ())
        return await self._agent.transport.open(peer, "journal", where)

    async def _have_forgotten(self, peer: str) -> None:
        with contextlib.suppress(MeshceeError, StreamClosed, TimeoutError):
            stream = await self._open(peer)
            await stream.send(self._over())
            await stream.aclose()

    async def _send_to(self, peer: str) -> None:
        """Have this peer keep the journal until the run is over."""
        while not self._ended:
            try:
                stream = await self._open(peer)
                self._followers += 1
                try:
                    await self._tell(stream, self._job)
                    await stream.aclose()
                finally:
                    self._followers -= 1
                    stream.abort()
                    await self._notify()
                return
            except (MeshceeError, StreamClosed, TimeoutError, OSError) as error:
                log.info("a peer does not keep the run's journal", peer=peer, error=str(error))
            await asyncio.sleep(AGAIN_S)

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
                await self._tell(stream, job)
        finally:
            self._followers -= 1
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _tell(self, stream: Stream, job: str) -> None:
        sent: dict[str, _Sent] = {}
        while True:
            over = self._ended  # what is written before that is sent before the end is told of
            if self._run is not None and job == self._job:
                news = [await self._send(stream, self._run, name, sent) for name in FILES]
                if any(news):
                    await stream.send(Frame(messages.SEALED, {}, [self._seal(self._run, sent)]))
            if over:
                await stream.send(self._over())
                return
            await stream.send(Frame(messages.PONG))  # that we live, also where nothing has changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeouts.beat_s), self._changed:
                    await self._changed.wait_for(lambda: self._ended)

    def _over(self) -> Frame:
        return Frame(messages.FOLLOWED, {"run": self._run.id if self._run else "", "incarnation": self._incarnation})

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
            file = await asyncio.to_thread(path.open, "rb")
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


def _read(file: Any, at: int, count: int) -> bytes:
    file.seek(at)
    data: bytes = file.read(count)
    return data


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

    @property
    def run(self) -> Run | None:
        """The run, once what it is and its reports so far are here."""
        return self._run if self._run is not None and (self._run.folder / INFO).exists() else None

    async def follow(self, stream: Stream, job: str, timeouts: Timeouts) -> None:
        """Read until the run is over; StreamClosed when its owner is gone."""
        stream.max_payload_bytes = CHUNK_BYTES
        self._coming.clear()
        await stream.send(Frame(messages.FOLLOW, {"job": job}))
        while True:
            frame = await unless_silent(stream.recv, stream, timeouts)
            if frame.kind == messages.FOLLOWED:
                return
            if frame.kind == messages.FILE:
                await asyncio.to_thread(self._take, frame)
            elif frame.kind not in (messages.PONG, messages.SEALED):  # its stream proves who sent it
                raise ProtocolError(f"the owner sent a frame of kind {frame.kind!r}, which has no meaning to a standby")

    def _take(self, frame: Frame) -> None:
        header, data = frame.header, b"".join(bytes(payload) for payload in frame.payloads)
        name, at, size = need(header, "name", str), need(header, "at", int), need(header, "size", int)
        if name not in FILES or not 0 <= at <= at + len(data) <= size:
            raise ProtocolError("the owner sent a file that a standby does not keep")
        run = self._folder(need(header, "run", str))
        if name == REPORTS:
            path = run.folder / REPORTS
            if at not in (0, self._reports_bytes):
                raise ProtocolError("the owner left out some of the run's reports")
            if at == 0:
                disk.write_whole(path, data)
            else:
                disk.append(path, data)
            self._reports_bytes = at + len(data)
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

    @property
    def standing(self) -> tuple[int, int]:
        """Of two journals of a run, which is newer: the owner's incarnation, and how many bytes it has reported."""
        return (int(self._run.info.get("incarnation", 0)), self._reports_bytes) if self._run is not None else (0, 0)

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
        self._reports_bytes = seal.files[REPORTS][0]

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
        self._run, self._reports_bytes = run, 0
        return run

    def _own(self, data: bytes) -> bytes:
        """What the run is, without the owner's process, which is none of this machine."""
        try:
            info: Mapping[str, Any] = json.loads(data)
            kept = {key: value for key, value in info.items() if key != "pid"}
        except (ValueError, AttributeError, RecursionError) as error:
            raise ProtocolError("the owner sent a run that is not JSON") from error
        self._check(info)
        return dumps({**kept, "owner": self._owner}).encode()
