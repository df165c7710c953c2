"""A run's journal on another machine: what a standby must have to go on with the run when its owner is gone.

The idea: `train --resume` needs three small files of a run's folder: what the run is, its reports, and where copies of its
state are. So a standby reads these files as they grow, like `tail -f`, into a folder of its own. Taking over is then no more
than resuming. The state itself stays with the peers that hold copies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from meshcee import disk
from meshcee.config import Timeouts
from meshcee.errors import ProtocolError, UsageError
from peers import messages
from peers.home import Home, Run
from peers.ledger import FILE as LEDGER
from peers.messages import need
from peers.pulse import unless_silent
from peers.strict_json import dumps
from peers.transport.base import Frame, Stream, StreamClosed, Transport

__all__ = ["Journal", "Mirror"]

FILES = INFO, REPORTS, COPIES = "run.json", "reports.jsonl", LEDGER
CHUNK_BYTES = 1 << 20
MOST_BYTES = 256 << 20  # of a file that is replaced whole: a digest of each tensor, a few times
MOST_ID_CHARACTERS = 100


class Journal:
    """The owner's end, one for each agent that trains: serves the stream `follow`."""

    def __init__(self, transport: Transport, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._job = ""
        self._run: Run | None = None
        self._ended = False
        self._followers = 0
        self._changed = asyncio.Condition()
        transport.serve("follow", self._serve)

    def begin(self, job: str, run: Run) -> None:
        """This run of this job is going on; followers are told of it at their next look, every `beat_s`."""
        self._job, self._run, self._ended = job, run, False

    async def end(self) -> None:
        """The run is over: every follower hears so, as long as that takes no longer than shutdown_s."""
        self._ended = True
        await self._notify()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeouts.shutdown_s), self._changed:
                await self._changed.wait_for(lambda: not self._followers)

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
        sent: dict[str, tuple[int, int]] = {}
        while True:
            over = self._ended  # what is written before that is sent before the end is told of
            if self._run is not None and job == self._job:
                for name in FILES:
                    sent[name] = await self._send(stream, self._run, name, sent.get(name, (0, 0)))
            if over:
                await stream.send(Frame(messages.FOLLOWED))
                return
            await stream.send(Frame(messages.PONG))  # that we live, also where nothing has changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeouts.beat_s), self._changed:
                    await self._changed.wait_for(lambda: self._ended)

    async def _send(self, stream: Stream, run: Run, name: str, before: tuple[int, int]) -> tuple[int, int]:
        """What is new in a file since `before`, its version and size; what grows is sent on, what is replaced is sent whole."""
        path = run.folder / name
        try:
            found = os.stat(path)
        except OSError:
            return before
        version = found.st_ino if name == REPORTS else found.st_mtime_ns
        if (version, found.st_size) == before:
            return before
        grows = name == REPORTS and before[0] == version
        at, size = (before[1] if grows else 0), found.st_size
        file = await asyncio.to_thread(path.open, "rb")
        with file:
            while at < size or not size:
                data = await asyncio.to_thread(_read, file, at, min(CHUNK_BYTES, size - at))
                header = {"run": run.id, "name": name, "at": at, "size": size}
                await stream.send(Frame(messages.FILE, header, [data] if data else []))
                at += len(data)
                if not data:
                    break
        return version, at


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
            elif frame.kind != messages.PONG:
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

    def _folder(self, run_id: str) -> Run:
        if self._run is not None and self._run.id == run_id:
            return self._run
        if not run_id or len(run_id) > MOST_ID_CHARACTERS or not all(c.isalnum() or c in "-_" for c in run_id):
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
