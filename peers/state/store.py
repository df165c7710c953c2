"""A stage's state between two steps, as safetensors that others read range by range: both ends.

The idea: a member copies its stage at the boundary and trains on. The copy is then read like a file, chunk by chunk, at the
reader's pace, so that neither the pipeline nor anybody's memory feels it. What travels is the file that the owner keeps:
parameters and buffers under the model's own names, the optimizer's state under "<parameter>/<key>". The owner asks every stage
for one, reads them in chunks and writes them as one checkpoint (`Snapshots`).
"""

from __future__ import annotations

import asyncio
import bisect
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import structlog
import torch
from msgspec import Meta

from meshcee.capture import Capture
from meshcee.errors import ProtocolError
from meshcee.fields import Count, ShortText, read
from meshcee.files import loads
from meshcee.files.tensor_files import DTYPES, Layout, byte_view, head_of, nbytes_of
from meshcee.stage import StageRunner
from peers.state.checkpoint import Checkpoint, Draft, Writer
from peers.state.kept import Kept
from peers.state.policy import AHEAD, CHUNK_BYTES, Stride
from peers.transport import Frame
from peers.wire import Offer, digest_of, messages, need

__all__ = ["CORES", "FILES", "Held", "Image", "Snapshots", "by_parameter", "parse_header"]

FILES = ("model", "optimizer")
CORES = os.cpu_count() or 1  # of which hashing takes one from the device, where that is the processor


class Image:
    """A safetensors file in memory: a header, and tensors that are not copied."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        self.header, starts, self.data_bytes = head_of(layout)
        filled = [(start, byte_view(tensors[name])) for name, start in starts.items() if tensors[name].numel()]
        self._starts = [start for start, _ in filled]
        self._pieces = [view for _, view in filled]

    def read(self, start: int, count: int) -> bytes:
        """`count` bytes of the data behind the header, from `start`."""
        if not 0 <= start <= start + count <= self.data_bytes:
            raise ProtocolError(f"bytes {start} to {start + count} of a snapshot of {self.data_bytes} were asked for")
        found = []
        i = max(bisect.bisect_right(self._starts, start) - 1, 0)
        while count > 0:
            offset = start - self._starts[i]
            part = self._pieces[i][offset : offset + count]
            found.append(part)
            start, count, i = start + len(part), count - len(part), i + 1
        return b"".join(found)


@dataclass(frozen=True)
class Entry:
    """Of one tensor in the header of a safetensors file."""

    dtype: ShortText
    shape: Annotated[tuple[Count, ...], Meta(max_length=64)]
    data_offsets: tuple[Count, Count]


Entries = dict[str, Entry]


def parse_header(data: bytes | memoryview, expected: Layout, *, partial: bool) -> int:
    """Check a header against what it must describe; how many bytes follow it. `partial`: entries may be missing."""
    raw = bytes(data)
    try:
        told = read(loads(raw[8:]), dict[str, Any], "a header")
        if int.from_bytes(raw[:8], "little") != len(raw) - 8:
            raise ValueError("its length is wrong")
        told.pop("__metadata__", None)
        entries = read(told, Entries, "a header")
        spans = []
        for name, entry in entries.items():
            if name not in expected:
                raise ValueError(f"{name!r} was not expected")
            dtype, shape = expected[name]
            if DTYPES.get(entry.dtype) != dtype or entry.shape != shape:
                raise ValueError(f"{name!r} is {entry.dtype} {list(entry.shape)}, not {dtype} {list(shape)}")
            first, end = entry.data_offsets
            if end != first + dtype.itemsize * math.prod(shape):
                raise ValueError(f"{name!r} has another size")
            spans.append((first, end))
        at = 0
        for first, end in sorted(spans):
            if first != at:
                raise ValueError("its tensors do not follow one another")
            at = end
        if not partial and entries.keys() != expected.keys():
            raise ValueError(f"{min(expected.keys() - entries.keys())!r} is missing")
    except (ValueError, ProtocolError) as error:
        raise ProtocolError(f"this is not the header of the snapshot that was asked for: {error}") from error
    return at


def by_parameter(flat: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The optimizer's state as `load_optimizer_state` takes it."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for entry, value in flat.items():
        name, _, key = entry.rpartition("/")
        found.setdefault(name, {})[key] = value
    return found


@dataclass
class _Copy:
    """Of a stage before a step, ours or one that we keep for its holder."""

    next_step: int
    tensors: Mapping[str, torch.Tensor]  # weights, and the optimizer's state
    images: tuple[Image, ...] = ()  # as FILES; of our own
    by_digest: Mapping[str, torch.Tensor] = field(default_factory=dict)  # once the digests are known
    took_s: float = 0.0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Held:
    """The copies that a member holds: of its own stage, and of others whose keeper it is; as many as may be needed again.

    They outlive the epoch: when the next one goes on from such a copy, what this member needs of it is here already.
    """

    def __init__(self) -> None:
        self._copies: list[_Copy] = []  # of our own stage, oldest first
        self._others: dict[
            tuple[str, bool], list[_Copy]
        ] = {}  # (its holder, whether we are its far keeper) -> oldest first
        self.offered: dict[str, torch.Tensor] = {}  # of an offer that led nowhere
        self._frozen: dict[str, torch.Tensor] = {}  # what training does not change, not copied

    def take(self, next_step: int, runner: StageRunner, since: int = 0, besides: Collection[int] = ()) -> Frame:
        """Copy the stage as it stands before `next_step`; what to tell the owner. Runs on the compute thread.

        Copies before step `since` are forgotten, but for those of the steps `besides`: somebody is reading them, or they go
        with copies in other regions.
        """
        began_s = time.perf_counter()
        state = runner.state_dict()
        model = {name: _copy(state[name]) for name in (*runner.spec.trainable, *runner.spec.mutated)}
        optimizer = {
            f"{name}/{key}": _copy(value)
            for name, kept in runner.optimizer_state().items()
            for key, value in kept.items()
            if isinstance(value, torch.Tensor)
        }
        copy = _Copy(next_step, model | optimizer, (Image(model), Image(optimizer)))
        self._copies = [*_needed(self._copies, next_step, since, besides), copy]
        self._frozen = {n: t.detach() for n, t in state.items() if n not in model and t.device.type == "cpu"}
        copy.took_s = time.perf_counter() - began_s
        return Frame(messages.SNAPSHOT, {"next_step": next_step}, [image.header for image in copy.images])

    def digest(self, next_step: int, layout: Layout) -> tuple[dict[str, str], float]:
        """The digests of our own copy, and the device's seconds that it took. Raises ProtocolError when it is not held.

        `layout` has the types in which others expect it. From now on `find` gives its tensors. Takes a second for a
        gigabyte, so it runs in a thread.
        """
        copy = next((c for c in self._copies if c.next_step == next_step), None)
        if copy is None:
            raise ProtocolError(f"no copy after {next_step} steps is held here")
        began_s = time.perf_counter()
        tensors = {name: tensor.to(layout[name][0]) for name, tensor in copy.tensors.items()}
        digests = {name: digest_of(tensor) for name, tensor in tensors.items()}
        copy.tensors, copy.by_digest = tensors, {digest: tensors[name] for name, digest in digests.items()}
        return digests, copy.took_s + (time.perf_counter() - began_s) / CORES

    def make_room(
        self, source: str, next_step: int, since: int, besides: Collection[int] = (), *, far: bool = False
    ) -> None:
        """Forget copies of others that are needed no more, before one of this step from `source`: near ones before `since`,
        far ones that are not of the steps `besides`. Far ones come late, and say nothing of near ones.
        """
        for (other, is_far), copies in list(self._others.items()):
            again = other == source and is_far == far
            if is_far:
                copies = [c for c in copies if c.next_step in besides and not (again and c.next_step == next_step)]
            elif not far:
                copies = _needed(copies, next_step + (not again), since)
            self._others[other, is_far] = copies
            if not copies:
                del self._others[other, is_far]

    @property
    def others_bytes(self) -> int:
        return sum(copy.nbytes for copies in self._others.values() for copy in copies)

    def keep(
        self,
        source: str,
        next_step: int,
        digests: Mapping[str, str],
        found: Mapping[str, torch.Tensor],
        *,
        far: bool = False,
    ) -> None:
        """A copy of another member's stage: digests by name, tensors by digest."""
        tensors = {name: found[digest] for name, digest in digests.items()}
        self._others.setdefault((source, far), []).append(_Copy(next_step, tensors, by_digest=found))

    def _all(self) -> Iterator[_Copy]:
        """Newest first, our own before others'."""
        yield from reversed(self._copies)
        for copies in list(self._others.values()):
            yield from reversed(copies)

    def find(self, digest: str) -> torch.Tensor | None:
        return next((copy.by_digest[digest] for copy in self._all() if digest in copy.by_digest), None)

    def values(self, name: str) -> Iterator[torch.Tensor]:
        """What is here under a name of the model, or "<parameter>/<key>" of the optimizer; newest first."""
        for tensors in (*(copy.tensors for copy in self._all()), self._frozen, self.offered):
            if name in tensors:
                yield tensors[name]

    def read(self, header: Mapping[str, Any]) -> Frame:
        """The answer to a PULL. Raises ProtocolError for what is not held."""
        next_step, file, start, count = (need(header, name, int) for name in ("next_step", "file", "start", "count"))
        copy = next((c for c in self._copies if c.next_step == next_step), None)
        if copy is None or not 0 <= file < len(FILES):
            raise ProtocolError(f"no snapshot after {next_step} steps is held here")
        if not 0 < count <= CHUNK_BYTES:
            raise ProtocolError(f"{count} bytes of a snapshot were asked for at once")
        data = copy.images[file].read(start, count)
        return Frame(messages.PART, {"next_step": next_step, "file": file, "start": start}, [data])


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _needed(copies: Sequence[_Copy], next_step: int, since: int, besides: Collection[int] = ()) -> list[_Copy]:
    """Of the copies before this step; a lost epoch may have gone further."""
    return [c for c in copies if c.next_step < next_step and (c.next_step >= since or c.next_step in besides)]


log = structlog.get_logger()

WHAT = "a checkpoint"


@dataclass
class _Stage:
    """What one stage has to send, and how much of it is here."""

    layouts: tuple[Layout, Layout]  # as FILES
    writers: list[Writer] = field(default_factory=list)
    left: list[tuple[int, int, int]] = field(
        default_factory=list
    )  # (file, start, end) not yet asked for, the next one last
    awaited: list[tuple[int, int, int]] = field(default_factory=list)  # (file, start, count)
    begun_s: float | None = None  # when it announced them
    turn_s: float = 0.0  # since when the oldest awaited part has had the link to itself
    read_s: float = 0.0  # that all parts took
    done: bool = False  # its files are on the disk; the last thing that a thread sets
    closed: bool = False  # the epoch is over
    lock: threading.Lock = field(default_factory=threading.Lock)  # a thread may outlive its epoch


class Snapshots:
    """One epoch's snapshots. `take` runs in threads, one call at a time for each stage; the rest in the event loop."""

    def __init__(self, kept: Kept, offers: Sequence[Offer], captured: Capture, start: int = 0) -> None:
        assert kept.store is not None
        self._store, self._cadence, self._trouble = kept.store, kept.cadence, kept.trouble
        self._cadence.start(start, _now_s())
        self._layouts = [(offer.changed_state, offer.expected_optimizer) for offer in offers]
        changed = {name for offer in offers for name in offer.changed_state}
        self._state = captured.state
        self._frozen = {name: known for name, known in captured.layout.items() if name not in changed}
        self._plan = offers[0].plan.to_json()
        self._bytes = sum(nbytes_of(layout) for pair in self._layouts for layout in pair) + nbytes_of(self._frozen)
        self._draft: Draft | None = None
        self._stages: list[_Stage] = []
        self._strides = [Stride() for _ in offers]  # of the links to the stages
        self._reported = start  # steps before this one have been reported
        self._news = asyncio.Event()
        self._free = asyncio.Event()
        self._free.set()
        self._hurry_after = math.inf  # so many reported steps nothing is trained: links are ours
        self._resting: dict[int, tuple[asyncio.TimerHandle, Callable[[], None]]] = {}  # stage -> when and how to go on
        self.latest: Checkpoint | None = None  # of this epoch

    # -- asking --------------------------------------------------------------------------------------------------------

    def is_due(self, next_step: int) -> bool:
        return self._free.is_set() and self._cadence.is_due(next_step, _now_s())

    async def begin(self, next_step: int) -> bool:
        """Every stage is about to be asked for one, in the order of its steps; waits for one that is still under way.

        False if the disk refuses it a place.
        """
        await self._free.wait()
        self._cadence.begun(next_step, _now_s())
        try:
            draft = await asyncio.to_thread(self._store.draft, next_step)
        except OSError as error:
            self._refused(error)
            return False
        self._free.clear()
        self._draft = draft
        self._stages = [_Stage(layouts) for layouts in self._layouts]
        return True

    def _refused(self, error: OSError) -> None:
        """Training goes on; the next one is tried before long."""
        self._cadence.refused(_now_s())
        self._trouble.tell(WHAT, error, self._bytes)

    @property
    def reading(self) -> list[int]:
        """The step of the one that is under way, if any."""
        return [] if self._draft is None else [self._draft.next_step]

    # -- hearing -------------------------------------------------------------------------------------------------------

    def take(self, index: int, frame: Frame) -> list[Frame]:
        """A stage has announced its snapshot, or sent a part: write it; what to ask it for next."""
        draft = self._draft
        if draft is None or need(frame.header, "next_step", int) != draft.next_step:
            raise ProtocolError("it sent a snapshot that nobody asked for")
        stage = self._stages[index]
        with stage.lock:
            return [] if stage.closed else self._take(index, stage, draft, frame)

    def _take(self, index: int, stage: _Stage, draft: Draft, frame: Frame) -> list[Frame]:
        if frame.kind == messages.SNAPSHOT:
            self._announced(index, stage, draft, frame)
        else:
            self._strides[index].took(*self._part(stage, draft, frame))
        if not stage.awaited:
            stage.turn_s = time.monotonic() + self.rest_s(index)
        asked = []
        stride = self._strides[index]
        if draft.refused is not None:  # what has been asked for still comes, and is dropped
            stage.left.clear()
        while stage.left and len(stage.awaited) < (AHEAD if stride.is_fast or self._hurries else 1):
            file, start, end = stage.left.pop()
            count = min(end - start, CHUNK_BYTES if self._hurries else stride.bytes)
            if start + count < end:
                stage.left.append((file, start + count, end))
            stage.awaited.append((file, start, count))
            header = {"next_step": draft.next_step, "file": file, "start": start, "count": count}
            asked.append(Frame(messages.PULL, header))
        if not stage.awaited:
            for writer in stage.writers:
                draft.to_disk(writer.close)
            stage.done = True
        return asked

    def rest_s(self, index: int) -> float:
        """How long to wait before what `take` has returned is asked for."""
        return 0.0 if self._hurries else self._strides[index].rest_s

    def go_on(self, index: int, asked: list[Frame], ask: Callable[[list[Frame]], None]) -> None:
        """Ask for what `take` has returned, if anything, once the link has rested."""
        if not asked:  # other parts are awaited, and a rest may be on
            return
        if (rest_s := self.rest_s(index)) > 0:
            timer = asyncio.get_running_loop().call_later(rest_s, self._rested, index)
            self._resting[index] = timer, partial(ask, asked)
        else:
            ask(asked)

    def _rested(self, index: int) -> None:
        timer, ask = self._resting.pop(index)
        timer.cancel()
        ask()

    def hurry_after(self, steps: int) -> None:
        """Once so many steps have been reported nothing is trained any more: no rests from then on."""
        self._hurry_after = steps
        self._hurry_if_over()

    @property
    def _hurries(self) -> bool:
        return self._reported >= self._hurry_after

    def _hurry_if_over(self) -> None:
        if self._hurries:
            for index in list(self._resting):
                self._rested(index)

    def _announced(self, index: int, stage: _Stage, draft: Draft, frame: Frame) -> None:
        if stage.begun_s is not None or len(frame.payloads) != len(FILES):
            raise ProtocolError("it announced a snapshot twice, or not as two files")
        stage.begun_s = time.monotonic()
        for file, (name, header) in enumerate(zip(FILES, frame.payloads)):
            size = parse_header(memoryview(header), stage.layouts[file], partial=name == "optimizer")
            if size:
                stage.left.insert(0, (file, 0, size))
            draft.to_disk(partial(self._open, stage, draft, f"{name}-{index}.safetensors", memoryview(header)))

    @staticmethod
    def _open(stage: _Stage, draft: Draft, name: str, header: memoryview) -> None:
        stage.writers.append(draft.create(name, header))

    def _part(self, stage: _Stage, draft: Draft, frame: Frame) -> tuple[float, int]:
        """Write it; the seconds that it took, and its bytes."""
        key = (need(frame.header, "file", int), need(frame.header, "start", int))
        # Streams are ordered, so parts come as they were asked for, and are written one behind the other.
        if not stage.awaited or stage.awaited[0][:2] != key or len(frame.payloads) != 1:
            raise ProtocolError("it sent a part of a snapshot that is not awaited")
        file, _, count = stage.awaited[0]
        data = memoryview(frame.payloads[0])
        if data.nbytes != count:
            raise ProtocolError("it sent a part of a snapshot of the wrong size")
        draft.to_disk(lambda: stage.writers[file].write(data))
        del stage.awaited[0]
        now_s = time.monotonic()
        part_s, stage.turn_s = max(0.0, now_s - stage.turn_s), now_s
        stage.read_s += part_s
        return part_s, count

    def heard(self) -> None:
        """`take` has returned."""
        if all(stage.done for stage in self._stages):
            self._news.set()

    def reported(self, step: int) -> None:
        """This step has been reported, with everything that belongs to it."""
        self._reported = step + 1
        self._hurry_if_over()
        self._news.set()

    # -- completing ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Complete what has arrived, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            draft = self._draft
            if draft is None or not all(s.done for s in self._stages):
                continue
            if draft.refused is None and draft.next_step > self._reported:
                continue
            self._draft = None  # from here on it is completed, whatever happens to the epoch
            await self._complete(draft)
            self._free.set()

    async def _complete(self, draft: Draft) -> None:
        try:
            if draft.refused is not None:
                raise draft.refused
            self.latest = await asyncio.to_thread(draft.finish, self._state, self._frozen, plan=self._plan)
        except OSError as error:
            for writer in (w for stage in self._stages for w in stage.writers):
                writer.abort()
            await asyncio.to_thread(draft.discard)
            self._refused(error)
            return
        self._trouble.over(WHAT)
        read_s = max(stage.read_s for stage in self._stages)
        made_s = time.monotonic() - min(stage.begun_s or math.inf for stage in self._stages)
        self._cadence.ended(read_s=read_s, made_s=made_s)
        log.debug("checkpoint", next_step=draft.next_step, read_s=round(read_s, 3), made_s=round(made_s, 3))

    @property
    def settled(self) -> asyncio.Event:
        """Set while no snapshot is under way."""
        return self._free

    def close(self) -> None:
        """The epoch is over: what is not complete is dropped."""
        for timer, _ in self._resting.values():
            timer.cancel()
        if self._draft is not None:
            for stage in self._stages:
                with stage.lock:
                    stage.closed = True
                    for writer in stage.writers:
                        writer.abort()
            self._draft.discard()
            self._draft = None


def _now_s() -> float:
    return asyncio.get_running_loop().time()
