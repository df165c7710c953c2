"""The owner's side of snapshots: ask every stage for one, read them in chunks, write them as one checkpoint.

The idea: a request goes down the streams between two steps; everything after it happens beside the training, chunk by
chunk, each stage at its own pace. A checkpoint counts once every stage's files are on the disk and the steps before it
have been reported, so that none can be lost between the two.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog
import torch

from meshcee.capture import Capture
from meshcee.errors import ProtocolError
from meshcee.tensor_files import Layout, OnDemand
from peers import messages
from peers.checkpoint import Checkpoint, CheckpointStore, Draft, Writer
from peers.messages import need
from peers.offer import Offer
from peers.snapshot import CHUNK_BYTES, FILES, parse_header
from peers.transport.base import Frame

__all__ = ["Cadence", "Kept", "Snapshots", "state_for"]

log = structlog.get_logger()

AHEAD = 4  # chunks asked for and not yet here, from each stage
SLOW_S = 0.1  # a chunk that takes longer came over a link that the training needs more: then one at a time, with rests


@dataclass
class Cadence:
    """When the next snapshot is due: every `every` steps, or as often as costs at most a share of the time.

    A loss costs the steps since the last snapshot, so they are as frequent as they may be. `SHARE` bounds which part of the
    time links are used for them (a slow link rests between two chunks, a fast one between two snapshots), `MAKING` which
    part one is being read and brought to the disk. How long the steps before it take does not count.
    """

    every: int = 0
    SHARE = 0.05
    MAKING = 0.5
    LEAST_S = 1.0
    _began_s: float = float("-inf")
    _made_s: float = 0.0
    _read_s: float = 0.0
    _last_step: int = 0

    def start(self, next_step: int, now_s: float) -> None:
        """An epoch begins at this step: its state is known."""
        self._last_step, self._began_s = next_step, now_s

    def is_due(self, next_step: int, now_s: float) -> bool:
        if self.every:
            return next_step // self.every > self._last_step // self.every
        rest_s = max(self.LEAST_S, self._read_s / self.SHARE, self._made_s / self.MAKING)
        return now_s - self._began_s >= rest_s

    def begun(self, next_step: int, now_s: float) -> None:
        self._last_step, self._began_s = next_step, now_s

    def ended(self, *, read_s: float, made_s: float) -> None:
        """It is complete, `made_s` after the first stage had copied its state; reading one took at most `read_s`."""
        self._read_s, self._made_s = read_s, made_s


@dataclass(frozen=True)
class Kept:
    """What an epoch begins with, and where it keeps what it does.

    `base` is the state to go on from (None: the model as it was captured), `store` the place for checkpoints (None: there
    are none), `least` the number of steps that were reported before: they are done again even if the user stops the run.
    `holders` are peers that may still have what they trained before.
    """

    base: Checkpoint | None = None
    store: CheckpointStore | None = None
    cadence: Cadence = field(default_factory=Cadence)
    least: int = 0
    holders: frozenset[str] = frozenset()


@dataclass
class _Stage:
    """What one stage has to send, and how much of it is here."""

    layouts: tuple[Layout, Layout]  # as FILES
    writers: list[Writer] = field(default_factory=list)
    left: list[tuple[int, int]] = field(default_factory=list)  # (file, start) not yet asked for
    awaited: list[tuple[int, int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    begun_s: float | None = None  # when it announced them
    turn_s: float = 0.0  # since when the oldest awaited part has had the link to itself
    part_s: float | None = None  # that the last part took
    read_s: float = 0.0  # that all parts took
    done: bool = False  # its files are on the disk; the last thing that a thread sets

    @property
    def is_fast(self) -> bool:
        return self.part_s is not None and self.part_s < SLOW_S


class Snapshots:
    """One epoch's snapshots. `take` runs in threads, one call at a time for each stage; the rest in the event loop."""

    def __init__(self, kept: Kept, offers: Sequence[Offer], captured: Capture, start: int = 0) -> None:
        assert kept.store is not None
        self._store, self._cadence = kept.store, kept.cadence
        self._cadence.start(start, _now_s())
        self._layouts = [(offer.changed_state, offer.expected_optimizer) for offer in offers]
        changed = {name for offer in offers for name in offer.changed_state}
        self._state = captured.state
        self._frozen = {name: known for name, known in captured.layout.items() if name not in changed}
        self._plan = offers[0].plan.to_json()
        self._draft: Draft | None = None
        self._stages: list[_Stage] = []
        self._reported = 0  # steps before this one have been reported
        self._news = asyncio.Event()
        self._free = asyncio.Event()
        self._free.set()
        self._hurry_after = math.inf  # so many reported steps nothing is trained: links are ours
        self._resting: dict[int, tuple[asyncio.TimerHandle, Callable[[], None]]] = {}  # stage -> when and how to go on
        self.latest: Checkpoint | None = None  # of this epoch

    def largest_payload_bytes(self, index: int) -> int:
        """The largest payload that a stage may send: a chunk, or a header."""
        return max(CHUNK_BYTES, *(256 + sum(len(n) * 6 + 256 for n in layout) for layout in self._layouts[index]))

    # -- asking --------------------------------------------------------------------------------------------------------

    def is_due(self, next_step: int) -> bool:
        return self._free.is_set() and self._cadence.is_due(next_step, _now_s())

    async def begin(self, next_step: int) -> Frame:
        """What to send to every stage, in the order of its steps; waits for a snapshot that is still under way."""
        await self._free.wait()
        self._free.clear()
        self._cadence.begun(next_step, _now_s())
        self._draft = await asyncio.to_thread(self._store.draft, next_step)
        self._stages = [_Stage(layouts) for layouts in self._layouts]
        return Frame(messages.SNAPSHOT, {"next_step": next_step})

    # -- hearing -------------------------------------------------------------------------------------------------------

    def take(self, index: int, frame: Frame) -> list[Frame]:
        """A stage has announced its snapshot, or sent a part: write it; what to ask it for next."""
        draft = self._draft
        if draft is None or need(frame.header, "next_step", int) != draft.next_step:
            raise ProtocolError("it sent a snapshot that nobody asked for")
        stage = self._stages[index]
        if frame.kind == messages.SNAPSHOT:
            self._announced(index, stage, draft, frame)
        else:
            self._part(stage, frame)
        if not stage.awaited:
            stage.turn_s = time.monotonic() + self.rest_s(index)
        asked = []
        while stage.left and len(stage.awaited) < (AHEAD if stage.is_fast or self._hurries else 1):
            file, start = stage.left.pop()
            stage.awaited.append((file, start))
            header = {"next_step": draft.next_step, "file": file, "start": start}
            asked.append(Frame(messages.PULL, header))
        if not stage.awaited:
            for writer in stage.writers:
                writer.close()
            stage.done = True
        return asked

    def rest_s(self, index: int) -> float:
        """How long to wait before what `take` has returned is asked for."""
        stage = self._stages[index]
        return 0.0 if self._hurries or stage.is_fast or stage.part_s is None else stage.part_s * (1 / Cadence.SHARE - 1)

    def go_on(self, index: int, ask: Callable[[], None]) -> None:
        """Ask for what `take` has returned, once the link has rested."""
        if (rest_s := self.rest_s(index)) > 0:
            timer = asyncio.get_running_loop().call_later(rest_s, self._rested, index)
            self._resting[index] = timer, ask
        else:
            ask()

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
            stage.sizes.append(size)
            stage.left += [(file, start) for start in range(0, size, CHUNK_BYTES)]
            stage.writers.append(draft.create(f"{name}-{index}.safetensors", memoryview(header)))
        stage.left.reverse()  # popped from the end

    def _part(self, stage: _Stage, frame: Frame) -> None:
        key = (need(frame.header, "file", int), need(frame.header, "start", int))
        # Streams are ordered, so parts come as they were asked for, and are written one behind the other.
        if not stage.awaited or stage.awaited[0] != key or len(frame.payloads) != 1:
            raise ProtocolError("it sent a part of a snapshot that is not awaited")
        file, start = key
        data = memoryview(frame.payloads[0])
        if data.nbytes != min(CHUNK_BYTES, stage.sizes[file] - start):
            raise ProtocolError("it sent a part of a snapshot of the wrong size")
        stage.writers[file].write(data)
        del stage.awaited[0]
        now_s = time.monotonic()
        stage.part_s, stage.turn_s = max(0.0, now_s - stage.turn_s), now_s
        stage.read_s += stage.part_s

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
            if draft is None or draft.next_step > self._reported or not all(s.done for s in self._stages):
                continue
            self._draft = None  # from here on it is completed, whatever happens to the epoch
            self.latest = await asyncio.to_thread(draft.finish, self._state, self._frozen, plan=self._plan)
            read_s = max(stage.read_s for stage in self._stages)
            made_s = time.monotonic() - min(stage.begun_s or math.inf for stage in self._stages)
            self._cadence.ended(read_s=read_s, made_s=made_s)
            log.debug("checkpoint", next_step=draft.next_step, read_s=round(read_s, 3), made_s=round(made_s, 3))
            self._free.set()

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
                for writer in stage.writers:
                    writer.abort()
            self._draft.discard()
            self._draft = None


def state_for(
    offer: Offer, captured: Capture, base: Checkpoint | None
) -> dict[str, tuple[Iterable[str], Mapping[str, torch.Tensor]]]:
    """What a member begins with, as names and where they are found: the weights, and, after a checkpoint, what its
    optimizer has kept."""
    expected = offer.expected_state
    if base is None:
        return {"state": (expected, captured.state)}
    weights = base.weights(expected)
    optimizer = base.optimizer(offer.specs[offer.index].trainable)
    return {
        "state": (expected, OnDemand(expected, lambda name: weights[name].to(expected[name][0]))),
        "optimizer": (optimizer, optimizer),
    }


def _now_s() -> float:
    return asyncio.get_running_loop().time()
