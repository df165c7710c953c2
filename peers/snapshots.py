"""The owner's side of snapshots: ask every stage for one, read them in chunks, write them as one checkpoint.

The idea: a request goes down the streams between two steps; everything after it happens beside the training, chunk by
chunk, each stage at its own pace. A checkpoint counts once every stage's files are on the disk and the steps before it
have been reported, so that none can be lost between the two.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog

from meshcee.capture import Capture
from meshcee.errors import ProtocolError
from meshcee.tensor_files import Layout, nbytes_of
from peers import messages
from peers.cadence import AHEAD, CHUNK_BYTES, Stride
from peers.checkpoint import Checkpoint, Draft, Writer
from peers.kept import Kept
from peers.messages import need
from peers.offer import Offer
from peers.snapshot import FILES, parse_header
from peers.transport.base import Frame

__all__ = ["Snapshots"]

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
