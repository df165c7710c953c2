"""Tensors from peers that hold a copy of them, asked for by the hash of their bits: both ends of the stream "copies".

The idea: a digest names bits, whoever holds them and from whatever plan they are. So a keeper, a joiner and an owner that
saves a checkpoint read alike. They ask each source what it has, share the tensors out, read them chunk by chunk, and check
each against its digest. A source that dies or sends other bits is left out, and what it owed is shared out again among the
rest. One that has sent its share takes from the others what it would have sooner. What had arrived of a tensor stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog
import torch

from meshcee.config import Timeouts
from meshcee.errors import MeshceeError, ProtocolError
from meshcee.events import Event
from meshcee.fields import Count
from meshcee.files.tensor_files import byte_view
from peers.state.policy import AHEAD, CHUNK_BYTES, Stride
from peers.state.store import CORES
from peers.transport import Frame, Stream, StreamClosed, Transport
from peers.wire import DIGEST_BYTES, digest_of, messages, need, unless_silent, while_moving

__all__ = ["Fetch", "Reader", "Shape", "serve"]

log = structlog.get_logger()

MOST = 1 << 16  # tensors that one stream may ask for
MOST_RANGES = 1024  # in one PULL, for its header
LOOK_S = 1.0  # between two looks whether a source that has nothing to send may take from another
SLOW = 4.0  # a source that takes so many times as long loses what it is sending to one that has nothing to send

Range = tuple[int, int, int]  # which tensor, in the order of the SEEK; its first byte, how many
Shape = tuple[torch.dtype, tuple[int, ...]]


async def serve(
    stream: Stream, find: Callable[[Mapping[str, Any], str], torch.Tensor | None], timeouts: Timeouts
) -> None:
    """Answer one reader until it closes. `find` gives what is held under a digest, for the header of its SEEK. That is asked again
    for each part, so no reader keeps a copy here longer than its holder does; one that is gone ends the stream.

    Who knows a digest had the bits, or has it from the owner, or from the run's journal, which is for members with the role `own`.
    Nobody else learns anything here.
    """
    stream.max_payload_bytes = MOST * DIGEST_BYTES
    with contextlib.suppress(StreamClosed, TimeoutError):
        async with asyncio.timeout(timeouts.join_s):
            frame = await stream.recv()
        if frame.kind != messages.SEEK or len(frame.payloads) != 1 or len(frame.payloads[0]) % DIGEST_BYTES:
            raise ProtocolError(f"expected digests, got a frame of kind {frame.kind!r}")
        raw = bytes(frame.payloads[0])
        digests = [raw[i : i + DIGEST_BYTES].hex() for i in range(0, len(raw), DIGEST_BYTES)]
        stream.max_payload_bytes = 0

        def moved() -> tuple[int, int]:
            """What is under way stays in memory until it is read. A slow link moves; a reader that stalls does not."""
            return stream.sent_bytes, stream.received_bytes

        lend = partial(_lend, stream, digests, partial(find, frame.header))
        await while_moving(lend, moved, timeouts.offer_s, timeouts)


async def _lend(stream: Stream, digests: Sequence[str], find: Callable[[str], torch.Tensor | None]) -> None:
    await stream.send(Frame(messages.FOUND, {}, [bytes(find(digest) is not None for digest in digests)]))
    while True:
        await stream.send(Frame(messages.PART, {}, [_cut(digests, find, await stream.recv())]))


def _cut(digests: Sequence[str], find: Callable[[str], torch.Tensor | None], frame: Frame) -> bytes:
    """The bytes that a PULL asks for."""
    found, left = [], CHUNK_BYTES
    for which, first, count in need(frame.header, "ranges", list[tuple[Count, Count, Count]]):
        tensor = find(digests[which]) if which < len(digests) else None
        left -= count
        if tensor is None or first + count > tensor.nbytes or left < 0:
            raise ProtocolError("it asked for bytes that are not here, or for too many at once")
        found.append(byte_view(tensor)[first : first + count])
    return b"".join(found)


@dataclass
class _Tensor:
    """One that is wanted: where its bytes go, how many are here, and who sent them."""

    shape: Shape
    data: torch.Tensor | None = None  # allocated when its first bytes are asked for
    got: int = 0
    senders: set[str] = field(default_factory=set)

    @property
    def size(self) -> int:
        return self.shape[0].itemsize * math.prod(self.shape[1])


@dataclass
class _Source:
    """A peer, what it has, and what of that it is to send: each tensor is one source's."""

    stream: Stream | None = None  # none while there is nothing to send: nobody has to hold it open
    has: frozenset[str] = frozenset()
    owed: deque[str] = field(default_factory=deque)  # not asked for to their ends, in the order of `wanted`
    begun: dict[str, int] = field(default_factory=dict)  # not whole, and asked for up to this byte
    reading: asyncio.Task[None] | None = None
    is_taking: bool = False  # what it has sent is being checked
    moved_bytes: int = 0
    used_s: float = 0.0  # that its answers took
    waits_since_s: float | None = None  # for the next one

    @property
    def owes(self) -> set[str]:
        return {*self.owed, *self.begun}

    def waited_s(self, now_s: float) -> float:
        return self.used_s + (0.0 if self.waits_since_s is None else now_s - self.waits_since_s)

    def byte_s(self, now_s: float) -> float:
        """That it takes for a byte, as far as it has shown: who was never waited for counts as quick."""
        return self.waited_s(now_s) / (self.moved_bytes + CHUNK_BYTES)


class Reader:
    """How the copies of one run are reached: what a `Fetch` needs to know beside what is wanted."""

    def __init__(
        self,
        transport: Transport,
        run: str,
        addresses: Mapping[str, tuple[str, ...]],
        timeouts: Timeouts,
        watch: Callable[[Stream], Stream] = lambda stream: stream,
    ) -> None:
        self.about = {"run": run}
        self.timeouts = timeouts
        self.transport = transport
        self._addresses = addresses
        self._watch = watch  # told of each stream

    async def open(self, peer: str) -> Stream:
        return self._watch(await self.transport.open(peer, "copies", self._addresses.get(peer, ())))


class Fetch:
    """What is wanted, by digest. `found` holds what is here and checked; `run` may leave some that nobody has.

    `gently`: in parts that delay a step's tensors little, with rests between them on a link that the training needs.
    Rests are longer if that is `far`, and there are none if it is `urgent`. Else some whole chunks are under way from
    each source. `give` is called in a thread for each tensor that is checked, which is then not in `found`. What comes from
    one source comes in the order in which it is wanted.
    """

    def __init__(
        self,
        wanted: Mapping[str, Shape],
        reader: Reader,
        *,
        gently: bool = False,
        far: bool = False,
        urgent: bool = False,
        give: Callable[[str, torch.Tensor], None] | None = None,
    ) -> None:
        self.found: dict[str, torch.Tensor] = {}
        self.read_s = 0.0  # in which a link was used that had no rest since, or the device
        self.moved_bytes = 0
        self._left = {digest: _Tensor(shape) for digest, shape in wanted.items()}
        self._order = list(wanted)
        self._number = {digest: i for i, digest in enumerate(wanted)}
        self._reader = reader
        self._timeouts = reader.timeouts
        self._gently = gently
        self._far = far
        self._give = give or self.found.__setitem__
        self._urgent = asyncio.Event()
        if urgent:
            self._urgent.set()
        self._sources: dict[str, _Source] = {}

    @property
    def missing(self) -> set[str]:
        return set(self._left)

    def hurry(self) -> None:
        """From here on nothing is trained: links need no rest."""
        self._gently = False
        self._urgent.set()

    async def run(self, sources: Iterable[str]) -> None:
        """Read from these peers until all is here or nobody is left who has it; never raises for what they do."""
        if not self._left or len(self._left) > MOST:
            return
        try:
            async with asyncio.TaskGroup() as group:
                self._sources = {peer: _Source() for peer in sources}
                for peer, source in self._sources.items():
                    group.create_task(self._unless_lost(peer, partial(self._greet, peer, source)))
            async with asyncio.TaskGroup() as group:
                while self._shares():
                    for peer, source in self._sources.items():
                        if source.owed and source.reading is None:
                            work = self._unless_lost(peer, partial(self._read, peer, source))
                            source.reading = group.create_task(work)
                    reading = [source.reading for source in self._sources.values() if source.reading is not None]
                    look_s = LOOK_S if len(reading) < len(self._sources) else None
                    await asyncio.wait(reading, timeout=look_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for source in self._sources.values():
                self._hang_up(source)
            self._sources.clear()

    async def _unless_lost(self, peer: str, work: Callable[[], Awaitable[None]]) -> None:
        """A source that fails is a source no more."""
        try:
            await work()
        except (MeshceeError, StreamClosed, TimeoutError) as error:
            log.info(Event.SOURCE_LEFT_OUT, peer=peer, error=str(error))
            self._hang_up(self._sources.pop(peer))

    def _hang_up(self, source: _Source) -> None:
        if source.stream is not None:
            source.stream.abort()
        source.stream = None

    async def _greet(self, peer: str, source: _Source) -> None:
        source.stream = stream = await self._reader.open(peer)
        stream.max_payload_bytes = MOST
        await stream.send(Frame(messages.SEEK, self._reader.about, [b"".join(bytes.fromhex(d) for d in self._order)]))
        frame = await unless_silent(stream.recv, stream, self._timeouts)
        if frame.kind != messages.FOUND or len(frame.payloads) != 1 or len(frame.payloads[0]) != len(self._order):
            raise ProtocolError(f"expected what it has of {len(self._order)} tensors, got {frame.kind!r}")
        stream.max_payload_bytes = CHUNK_BYTES
        source.has = frozenset(d for d, here in zip(self._order, bytes(frame.payloads[0])) if here)
        source.owed = deque(digest for digest in source.owed if digest in source.has)  # it may have less than before

    def _shares(self) -> bool:
        """Say what each source is to send: large tensors first, each to the one of those who have it that has least to do. Who
        has nothing to do takes from others. Whether anything is to be sent.
        """
        sources = self._sources.values()
        nobodys = self._left.keys() - set().union(*(source.owes for source in sources))
        load = {peer: self._bytes_of(source.owes) for peer, source in self._sources.items()}
        more: dict[str, list[str]] = {peer: [] for peer in load}
        for digest in sorted(nobodys, key=lambda d: -self._left[d].size):
            have = [peer for peer, source in self._sources.items() if digest in source.has]
            if have:
                peer = min(have, key=load.__getitem__)
                more[peer].append(digest)
                load[peer] += self._bytes_of([digest])
        for peer, digests in more.items():
            self._owe(self._sources[peer], digests)
        now_s = asyncio.get_running_loop().time()
        for source in [source for source in sources if source.reading is None and not source.owes]:
            for other in sorted(sources, key=lambda o: -self._bytes_of(o.owes) * o.byte_s(now_s)):
                if not source.owes:
                    self._take_from(other, source, now_s)
        return any(source.owes for source in sources)

    def _bytes_of(self, digests: Iterable[str]) -> int:
        """That are still to come."""
        return sum(self._left[digest].size - self._left[digest].got for digest in digests)

    def _owe(self, source: _Source, digests: Iterable[str]) -> None:
        source.owed = deque(sorted({*source.owed, *digests}, key=self._number.__getitem__))

    def _take_from(self, other: _Source, idle: _Source, now_s: float) -> None:
        """The idle source takes the last tensors that another one was not asked for, as far as it would have them sooner. If there
        are none, and the other is much slower, it takes what that is sending: the other's stream ends.
        """
        mine, theirs, taken = 0, self._bytes_of(other.owes), set[str]()
        for digest in reversed(other.owed):
            size = self._bytes_of([digest])
            if digest not in idle.has or digest in other.begun:
                continue
            if (mine + size) * idle.byte_s(now_s) >= theirs * other.byte_s(now_s):
                break
            taken.add(digest)
            mine, theirs = mine + size, theirs - size
        other.owed = deque(digest for digest in other.owed if digest not in taken)
        self._owe(idle, taken)
        begun = other.begun.keys() & idle.has
        is_slow = other.waited_s(now_s) > LOOK_S and other.byte_s(now_s) > SLOW * idle.byte_s(now_s)
        if idle.owes or not begun or not is_slow or other.is_taking or other.reading is None:
            return
        self._owe(idle, begun)
        left, other.owed = other.owes - begun, deque()
        self._owe(other, left)
        other.begun.clear()
        other.used_s, other.waits_since_s = other.waited_s(now_s), None
        other.reading.cancel()

    async def _read(self, peer: str, source: _Source) -> None:
        """What the source owes, over one stream."""
        try:
            if source.stream is None:
                await self._greet(peer, source)
            await self._read_owed(peer, source)
        finally:
            self._hang_up(source)
            source.reading = None

    async def _read_owed(self, peer: str, source: _Source) -> None:
        stream, loop = source.stream, asyncio.get_running_loop()
        assert stream is not None
        stride, asked = Stride(far=self._far), deque[list[Range]]()
        while True:
            ahead = AHEAD if not self._gently or (self._urgent.is_set() and stride.is_fast) else 1
            while len(asked) < ahead and (ranges := self._request(source, stride)):
                asked.append(ranges)
                await stream.send(Frame(messages.PULL, {"ranges": ranges}))
            if not asked:
                return
            began_s = source.waits_since_s = loop.time()
            frame = await unless_silent(stream.recv, stream, self._timeouts)
            part_s = loop.time() - began_s
            source.waits_since_s, source.used_s = None, source.used_s + part_s
            ranges = asked.popleft()
            source.is_taking = True
            await self._take(peer, ranges, frame)
            source.is_taking = False
            source.moved_bytes += frame.payload_bytes
            used_s = part_s
            if self._gently:
                stride.took(part_s, sum(count for _, _, count in ranges))
                used_s = stride.used_s
            if stride.rest_s and not self._urgent.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(stride.rest_s):
                        await self._urgent.wait()
            else:
                self.read_s += used_s

    def _request(self, source: _Source, stride: Stride) -> list[Range]:
        """The next ranges of what the source owes, of at most a stride together; none if it was asked for everything."""
        ranges: list[Range] = []
        room = stride.bytes if self._gently else CHUNK_BYTES
        while source.owed and room and len(ranges) < MOST_RANGES:
            digest = source.owed[0]
            size, first = self._left[digest].size, source.begun.get(digest, self._left[digest].got)
            count = min(size - first, room)
            ranges.append((self._number[digest], first, count))
            source.begun[digest], room = first + count, room - count
            if first + count == size:
                source.owed.popleft()
        return ranges

    async def _take(self, peer: str, ranges: Sequence[Range], frame: Frame) -> None:
        """A PART: its bytes go to their places; tensors that are whole are checked."""
        if frame.kind != messages.PART or len(frame.payloads) != 1:
            raise ProtocolError(f"expected a part of a copy, got a frame of kind {frame.kind!r}")
        data = memoryview(frame.payloads[0]).cast("B")
        if len(data) != sum(count for _, _, count in ranges):
            raise ProtocolError("it sent a part of a copy of the wrong size")
        self.moved_bytes += len(data)
        whole = []
        for which, first, count in ranges:
            digest = self._order[which]
            wanted = self._left[digest]
            if wanted.data is None:
                wanted.data = torch.empty(wanted.shape[1], dtype=wanted.shape[0])
            if count:
                byte_view(wanted.data)[first : first + count] = data[:count]
                data = data[count:]
            wanted.senders.add(peer)
            wanted.got = first + count
            if wanted.got == wanted.size:
                whole.append(digest)
        other = await asyncio.to_thread(self._check, whole)
        for digest in whole:
            del self._sources[peer].begun[digest]
            if digest not in other:
                del self._left[digest]
        if any(self._left[digest].senders == {peer} for digest in other):
            self._begin_anew(other)
            raise ProtocolError("it sent other bits than those that were asked for")
        self._begin_anew(other)

    def _check(self, digests: Sequence[str]) -> list[str]:
        """Those whose bits are others; the rest is found. Hashing takes a second for a gigabyte: in a thread."""
        other, began_s = list[str](), time.perf_counter()
        checked = dict[str, torch.Tensor]()
        for digest in digests:
            data = self._left[digest].data
            assert data is not None
            if digest_of(data) == digest:
                checked[digest] = data
            else:
                other.append(digest)
        self.read_s += (time.perf_counter() - began_s) / CORES
        for digest, data in checked.items():
            self._give(digest, data)
        return other

    def _begin_anew(self, digests: Iterable[str]) -> None:
        for digest in digests:
            self._left[digest] = _Tensor(self._left[digest].shape)
