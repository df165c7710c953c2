"""Journals of runs that other machines own, in the memory of this peer: for a standby that comes when the owner is gone.

The idea: an owner sends its journal to a few peers, and seals it whenever some of it is new. The seal says of what size
and digest each file is by then, signed. So who passes a journal on need not be believed, and of two journals everybody
can tell which is newer. That a run is over is signed too, and remembered: a peer that was cut off then still keeps its journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgpack
from msgspec import Meta

from dht import verify
from meshcee.config import Timeouts
from meshcee.errors import NotPermittedError, ProtocolError
from meshcee.fields import Finite, Ordinal, read, refuse_unprintable, unpack
from peers.transport import Frame, Stream, StreamClosed, Transport
from peers.wire import messages, need, unless_silent

__all__ = ["CHUNK_BYTES", "COPIES", "FILES", "INFO", "MOST_BYTES", "MOST_RUNS", "REPORTS", "Over", "Seal", "Shelf"]

FILES = INFO, REPORTS, COPIES = "run.json", "reports.jsonl", "copies.json"
CHUNK_BYTES = 1 << 20
MOST_BYTES = 64 << 20  # that a peer keeps of all runs; reports are packed, to about a fifth
MOST_RUNS = 8
MOST_SEAL_BYTES = 4096
MOST_FILE_BYTES = 1 << 32
MOST_NAME_CHARACTERS = 100  # of a run, and of a job as records tell it
MOST_OVER = 16  # runs of which a peer remembers that they are over
KEPT_S = 3600.0  # after the owner's last word
REMEMBERED_S = 2 * KEPT_S  # longer than anybody keeps the journal of a run that is over
_ABOUT = "a journal's seal"

_File = tuple[
    Literal["run.json", "reports.jsonl", "copies.json"],
    Annotated[int, Meta(ge=0, le=MOST_FILE_BYTES)],
    Annotated[bytes, Meta(min_length=32, max_length=32)],
]
_RunName = Annotated[str, Meta(max_length=MOST_NAME_CHARACTERS)]


@dataclass(frozen=True)
class _Sealed:
    """What is signed, as it crosses the network."""

    job: _RunName
    run: _RunName
    incarnation: Ordinal
    at: Finite
    files: Annotated[tuple[_File, ...], Meta(max_length=len(FILES))]


@dataclass(frozen=True)
class Seal:
    """What an owner says of its run's journal at one time."""

    owner: str
    job: str
    run: str
    incarnation: int
    sealed_at: float  # by the owner's clock
    files: Mapping[str, tuple[int, bytes]]  # name -> size and SHA-256

    @property
    def standing(self) -> tuple[int, int]:
        """As of a mirror."""
        return self.incarnation, self.files[REPORTS][0]

    @property
    def order(self) -> tuple[int, str, int, float]:
        """Of two journals of a run the one with more is newer."""
        return self.incarnation, self.owner, self.files[REPORTS][0], self.sealed_at

    def signed(self, sign: Callable[[bytes], bytes]) -> bytes:
        files = [[name, size, digest] for name, (size, digest) in sorted(self.files.items())]
        body = {"job": self.job, "run": self.run, "incarnation": self.incarnation, "at": self.sealed_at, "files": files}
        return _signed(JOURNAL, self.owner, body, sign)

    @classmethod
    def read(cls, data: bytes, owner: str | None = None) -> Seal:
        """What `signed` gave, of this owner if one is given. ProtocolError or NotPermittedError for anything else."""
        signer, body = _read(JOURNAL, data, _Sealed, owner)
        files: dict[str, tuple[int, bytes]] = {name: (size, digest) for name, size, digest in body.files}
        if not {INFO, REPORTS} <= files.keys():
            raise ProtocolError(f"{_ABOUT} lacks a file")
        return cls(signer, body.job, body.run, body.incarnation, body.at, files)


@dataclass(frozen=True)
class _Ended:
    """That a run is over, as it crosses the network."""

    job: _RunName
    run: _RunName
    incarnation: Ordinal


@dataclass(frozen=True)
class Over:
    """An owner's word that its run is over."""

    owner: str
    job: str
    run: str
    incarnation: int

    @property
    def order(self) -> tuple[int, str]:
        return self.incarnation, self.owner

    def ends(self, seal: Seal) -> bool:
        """Whether a journal with this seal is of no use any more: nobody has gone on with the run since."""
        return seal.run == self.run and (seal.incarnation, seal.owner) <= self.order

    def signed(self, sign: Callable[[bytes], bytes]) -> bytes:
        return _signed(_END, self.owner, {"job": self.job, "run": self.run, "incarnation": self.incarnation}, sign)

    @classmethod
    def read(cls, data: bytes, owner: str | None = None) -> Over:
        """What `signed` gave, of this owner if one is given. ProtocolError or NotPermittedError for anything else."""
        signer, body = _read(_END, data, _Ended, owner)
        return cls(signer, body.job, body.run, body.incarnation)


JOURNAL, _END = "meshcee journal 1", "meshcee end of a journal 1"
B = TypeVar("B", _Sealed, _Ended)


def _signed(kind: str, owner: str, body: Mapping[str, Any], sign: Callable[[bytes], bytes]) -> bytes:
    packed = bytes(msgpack.packb(body))
    return bytes(msgpack.packb([owner, packed, sign(covered(kind, owner, packed))]))


def _read(kind: str, data: bytes, body: type[B], owner: str | None) -> tuple[str, B]:
    """Who signed this, and what."""
    signer, packed, signature = read(unpack(data, MOST_SEAL_BYTES, _ABOUT), tuple[str, bytes, bytes], _ABOUT)
    if owner is not None and signer != owner:
        raise NotPermittedError(f"{_ABOUT} is not of the peer that sent it")
    if not verify(signer, covered(kind, signer, packed), signature):
        raise NotPermittedError(f"{_ABOUT} was not signed by {signer}")
    found: B = read(unpack(packed, MOST_SEAL_BYTES, _ABOUT), body, _ABOUT)
    refuse_unprintable(found, _ABOUT)
    if not found.run or not all(c.isalnum() or c in "-_" for c in found.run):
        raise ProtocolError(f"{_ABOUT} is of a run whose name is none")
    return signer, found


def covered(kind: str, owner: str, packed: bytes) -> bytes:
    return bytes(msgpack.packb([kind, owner, packed]))


class Reports:
    """Lines that only grow, packed but for the last."""

    def __init__(self) -> None:
        self._packed: list[bytes] = []
        self.tail = bytearray()
        self.size = 0

    def add(self, data: bytes, before: Reports | None = None) -> None:
        """`before`: what is here of the same run; where these are the same, they are here once."""
        self.tail += data
        self.size += len(data)
        while len(self.tail) >= CHUNK_BYTES:
            packed, k = zlib.compress(self.tail[:CHUNK_BYTES], 1), len(self._packed)
            if before is not None and before._packed[k : k + 1] == [packed]:
                packed = before._packed[k]
            self._packed.append(packed)
            del self.tail[:CHUNK_BYTES]

    def sizes(self) -> dict[int, int]:
        """Bytes of each part by its identity."""
        return {id(packed): len(packed) for packed in self._packed} | {id(self): len(self.tail)}

    def chunks(self, size: int) -> Iterator[bytes]:
        """The first `size` bytes as they are now, though more come meanwhile."""
        count, tail = divmod(size, CHUNK_BYTES)
        packed, last = self._packed[: count + 1], bytes(self.tail)
        yield from map(zlib.decompress, packed[:count])
        if tail:
            yield (zlib.decompress(packed[count]) if count < len(packed) else last)[:tail]


class _Journal:
    """What has come of one over a stream of its owner's."""

    def __init__(self) -> None:
        self.run = ""
        self.files: dict[str, bytes] = {}  # as their last versions were
        self.reports = Reports()
        self.is_too_long = False  # for this peer: of what comes nothing is kept any more
        self._coming: dict[str, bytearray] = {}

    def sizes(self) -> dict[int, int]:
        """Bytes of each part by its identity: what is sealed may be what is here still."""
        return {id(data): len(data) for data in (*self.files.values(), *self._coming.values())} | self.reports.sizes()

    def take(self, frame: Frame, room: int, before: Reports | None = None) -> None:
        """`room`: how many bytes more may be held; `before`: reports of this run that are sealed. Raises ProtocolError for what is
        no next part of a journal.
        """
        header, data = frame.header, b"".join(bytes(payload) for payload in frame.payloads)
        name, at, size = need(header, "name", str), need(header, "at", int), need(header, "size", int)
        run = need(header, "run", str)
        if name not in FILES or not 0 <= at <= at + len(data) <= size or self.run not in ("", run):
            raise ProtocolError("an owner sent a file that no journal has")
        self.run = run
        if (size - at if name != REPORTS else len(data)) > room:
            self.is_too_long = True
            self.files, self.reports, self._coming = {}, Reports(), {}  # what was sealed is held by who has the seal
        if self.is_too_long:
            return
        if name == REPORTS:
            if at == 0 and self.reports.size:
                self.reports = Reports()
            if at != self.reports.size:
                raise ProtocolError("an owner left out some of its reports")
            self.reports.add(data, before)
            return
        coming = self._coming.setdefault(name, bytearray())
        if at == 0:
            coming.clear()
        if at != len(coming):
            raise ProtocolError(f"an owner left out some of {name}")
        coming += data
        if len(coming) == size:
            self.files[name] = bytes(self._coming.pop(name))


@dataclass
class KeptJournal:
    """A journal up to its last seal."""

    seal: Seal
    data: bytes  # the seal as it was signed
    journal: _Journal
    files: Mapping[str, bytes]
    reports: Reports
    until_s: float = math.inf  # while its owner's stream is open

    @property
    def is_live(self) -> bool:
        return self.until_s == math.inf

    def sizes(self) -> dict[int, int]:
        """As of a journal."""
        return {id(data): len(data) for data in self.files.values()} | self.reports.sizes()

    def chunks(self, name: str) -> Iterator[bytes]:
        size = self.seal.files[name][0]
        if name == REPORTS:
            return self.reports.chunks(size)
        return (self.files[name][at : at + CHUNK_BYTES] for at in range(0, size, CHUNK_BYTES))


class Shelf:
    """Serves the streams `journal`, of owners, and `shelf`, of standbys."""

    def __init__(self, transport: Transport, timeouts: Timeouts, monotonic: Callable[[], float]) -> None:
        self._timeouts = timeouts
        self._monotonic = monotonic
        self.arriving: list[_Journal] = []
        self.sealed: dict[str, KeptJournal] = {}  # by run, oldest first
        self._over: dict[str, tuple[Over, bytes, float]] = {}  # by run, oldest first: as it was signed, and until when
        transport.serve("journal", self._keep)
        transport.serve("shelf", self._show)

    @property
    def journals(self) -> dict[str, Seal]:
        """By run."""
        self._sweep()
        return {run: kept.seal for run, kept in self.sealed.items()}

    def _sweep(self) -> None:
        for run in [run for run, kept in self.sealed.items() if kept.until_s <= self._monotonic()]:
            del self.sealed[run]
        for run in [run for run, (_, _, until_s) in self._over.items() if until_s <= self._monotonic()]:
            del self._over[run]

    def of(self, job: str) -> tuple[list[KeptJournal], list[bytes]]:
        """The journals of this job that are here, and the words that runs of this job are over, as they were signed."""
        self._sweep()
        over = [data for word, data, _ in self._over.values() if word.job == job]
        return [kept for kept in self.sealed.values() if kept.seal.job == job], over

    def _room(self, for_run: str) -> int:
        """What may still be held; journals whose owner is gone make room for one of another run that grows, oldest first."""
        self._sweep()
        while True:
            parts = [of.sizes() for of in self.arriving] + [of.sizes() for of in self.sealed.values()]
            held = {which: size for part in parts for which, size in part.items()}
            room = MOST_BYTES - sum(held.values())
            gone = next((run for run, kept in self.sealed.items() if not kept.is_live and run != for_run), None)
            if room >= CHUNK_BYTES or gone is None:
                return room
            del self.sealed[gone]

    # -- of owners -----------------------------------------------------------------------------------------------------

    async def _keep(self, stream: Stream) -> None:
        stream.max_payload_bytes = CHUNK_BYTES
        journal = _Journal()
        self.arriving.append(journal)
        if len(self.arriving) > MOST_RUNS:
            self.arriving.remove(journal)
            raise ProtocolError(f"this peer keeps {MOST_RUNS} journals already")
        try:
            with contextlib.suppress(StreamClosed):
                while await self._take(stream, journal):
                    pass
        finally:
            self.arriving.remove(journal)
            for kept in self.sealed.values():
                if kept.journal is journal:
                    kept.until_s = self._monotonic() + KEPT_S

    async def _take(self, stream: Stream, journal: _Journal) -> bool:
        """The next frame; whether there may be another."""
        frame = await unless_silent(stream.recv, stream, self._timeouts)
        if frame.kind == messages.FILE:
            run = need(frame.header, "run", str)
            kept = self.sealed.get(run)
            journal.take(frame, self._room(run), kept.reports if kept is not None else None)
            if journal.is_too_long and kept is not None and kept.seal.owner == stream.peer_id:
                # It stays the newest that there will be, as long as its owner is there.
                kept.journal, kept.until_s = journal, math.inf
        elif frame.kind == messages.SEALED:
            if not journal.is_too_long:
                self._put(Seal.read(b"".join(map(bytes, frame.payloads)), stream.peer_id), frame, journal)
            await stream.send(Frame(messages.KEPT, {"kept": not journal.is_too_long}))
        elif frame.kind == messages.FOLLOWED:
            data = b"".join(map(bytes, frame.payloads))
            self._forget(Over.read(data, stream.peer_id), data)
            return False
        elif frame.kind != messages.PONG:
            raise ProtocolError(f"an owner sent a frame of kind {frame.kind!r}, which has no meaning to a shelf")
        return True

    def _put(self, seal: Seal, frame: Frame, journal: _Journal) -> None:
        had = {name: len(data) for name, data in journal.files.items()} | {REPORTS: journal.reports.size}
        if seal.run != journal.run or any(had.get(name, -1) != size for name, (size, _) in seal.files.items()):
            raise ProtocolError("an owner sealed a journal that it has not sent")
        before = self.sealed.get(seal.run)
        if before is not None and before.seal.order > seal.order:
            raise NotPermittedError(f"run {seal.run} has been gone on with since, by {before.seal.owner}")
        if seal.run in self._over and self._over[seal.run][0].ends(seal):
            raise NotPermittedError(f"run {seal.run} is over")
        self._over.pop(seal.run, None)
        self.sealed.pop(seal.run, None)
        while len(self.sealed) >= MOST_RUNS:
            over = (run for run, kept in self.sealed.items() if not kept.is_live)
            del self.sealed[next(over, next(iter(self.sealed)))]
        data = b"".join(map(bytes, frame.payloads))
        self.sealed[seal.run] = KeptJournal(seal, data, journal, dict(journal.files), journal.reports)

    def _forget(self, word: Over, data: bytes) -> None:
        """The run is over, and others than this peer may have missed that."""
        kept, before = self.sealed.get(word.run), self._over.get(word.run)
        if kept is not None and not word.ends(kept.seal):
            return
        self.sealed.pop(word.run, None)
        if before is None or before[0].order < word.order:
            self._over.pop(word.run, None)
            while len(self._over) >= MOST_OVER:
                del self._over[next(iter(self._over))]
            self._over[word.run] = word, data, self._monotonic() + REMEMBERED_S

    # -- of standbys -----------------------------------------------------------------------------------------------------

    async def _show(self, stream: Stream) -> None:
        """SEEK: the seals that are here of a job, then the words of runs that are over; PULL: the files of a seal."""
        stream.max_payload_bytes = 0
        async with asyncio.timeout(self._timeouts.join_s):
            frame = await stream.recv()
        if frame.kind != messages.SEEK:
            raise ProtocolError(f"expected a standby, got a frame of kind {frame.kind!r}")
        job = need(frame.header, "job", str)
        here, over = self.of(job)
        found = {kept.seal.run: kept for kept in here}
        live = [kept.is_live for kept in here]
        await stream.send(Frame(messages.FOUND, {"live": live}, [*(kept.data for kept in here), *over]))
        with contextlib.suppress(StreamClosed):
            async with asyncio.timeout(self._timeouts.join_s):
                frame = await stream.recv()
            kept = found.get(need(frame.header, "run", str)) if frame.kind == messages.PULL else None
            if kept is None:
                raise ProtocolError("a standby asked for a journal that it was not told of")
            for name, (size, _) in kept.seal.files.items():
                await self._send(stream, kept, name, size)
            await stream.send(Frame(messages.FOLLOWED))

    async def _send(self, stream: Stream, kept: KeptJournal, name: str, size: int) -> None:
        at = 0
        for data in kept.chunks(name):
            header: dict[str, Any] = {"run": kept.seal.run, "name": name, "at": at, "size": size}
            async with asyncio.timeout(self._timeouts.join_s):  # a reader that has stalled
                await stream.send(Frame(messages.FILE, header, [data]))
            at += len(data)
