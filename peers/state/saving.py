"""One epoch's checkpoints, and the weights that it ends with: the owner reads the copies of all stages.

The idea: a checkpoint is a reader of copies as a keeper is. It wants tensors by the hash of their bits, from the member that made
the copy or whoever else holds it. One tensor of each stage is in memory at a time, and goes to the file when it is checked. Where
the owner keeps nothing, the weights at the end come to its memory in the same way.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import structlog
import torch

from meshcee.capture import Capture
from meshcee.errors import leaves
from meshcee.files import Trouble
from meshcee.files.tensor_files import Layout, byte_view, head_of
from peers.state.fetch import Fetch, Reader, Shape
from peers.state.manifest import CopySet, StageCopy
from peers.state.policy import Cadence
from peers.wire import Link, Offer

if TYPE_CHECKING:
    from peers.state.checkpoint import Checkpoint, CheckpointStore, Draft, Writer

__all__ = ["Saving", "StageFiles"]

log = structlog.get_logger()

WHAT = "a checkpoint"
BLOCK_BYTES = 4096


class StageFiles:
    """The two files of a stage, filled from front to back with tensors that are given by digest. It writes in threads."""

    def __init__(self, draft: Draft, offer: Offer, stage: StageCopy) -> None:
        self.wanted: dict[str, Shape] = {}  # by digest, in the order of the files
        self._left: deque[tuple[Writer, deque[tuple[str, torch.dtype]]]] = deque()
        for kind, digests, layout, file in zip(
            ("model", "optimizer"),
            (stage.weights, stage.optimizer),
            offer.layouts,
            (offer.changed_state, offer.expected_optimizer),
            strict=True,
        ):
            header, starts, _ = head_of({name: file[name] for name in digests})
            for name in starts:
                self.wanted.setdefault(digests[name], layout[name])
            writer = draft.create(f"{kind}-{offer.index}.safetensors", header)
            self._left.append((writer, deque((digests[name], file[name][0]) for name in starts)))
        self._uses = Counter(digest for _, left in self._left for digest, _ in left)
        self._here: dict[str, torch.Tensor] = {}  # equal tensors, as counts of steps are, come once
        self._go_on()

    @property
    def is_whole(self) -> bool:
        """Whether all is written, and nothing is left in memory."""
        return not self._left and not self._here

    def give(self, digest: str, tensor: torch.Tensor) -> None:
        self._here[digest] = tensor
        self._go_on()

    def _go_on(self) -> None:
        while self._left:
            writer, left = self._left[0]
            while left:
                digest, dtype = left[0]
                if (tensor := self._here.get(digest)) is None:
                    return
                if tensor.numel():
                    writer.write(byte_view(tensor.to(dtype)))
                self._uses[digest] -= 1
                if not self._uses[digest]:
                    del self._here[digest]
                left.popleft()
            writer.close()
            self._left.popleft()


class Saving:
    """Of an epoch that begins at step `start`. At most one checkpoint is under way. Without a store none is ever due."""

    def __init__(
        self,
        store: CheckpointStore | None,
        cadence: Cadence,
        trouble: Trouble,
        links: Sequence[Link],
        captured: Capture,
        start: int,
        reader: Reader,
    ) -> None:
        self._store, self._cadence, self._trouble, self._reader = store, cadence, trouble, reader
        cadence.start(start, _now_s())
        self._links = [link for link in links if link.leads]
        layouts = [(link.offer.changed_state, link.offer.expected_optimizer) for link in self._links]
        changed = {name for weights, _ in layouts for name in weights}
        self._state: Mapping[str, torch.Tensor] = captured.state
        self._frozen = {name: known for name, known in captured.plain_layout.items() if name not in changed}
        self._bytes = sum(map(_on_disk, (*(layout for pair in layouts for layout in pair), self._frozen)))
        self._step: int | None = None  # of the one that is under way
        self._described = asyncio.Queue[CopySet]()
        self._fetches: dict[str, Fetch] = {}  # by who leads the stage
        self._reported = start  # steps before this one have been reported
        self._news = asyncio.Event()
        self._hurry_after = math.inf  # so many reported steps nothing is trained: links are ours
        self.settled = asyncio.Event()  # while none is under way
        self.settled.set()
        self.latest: Checkpoint | None = None  # of this epoch
        self.weights: dict[str, torch.Tensor] = {}  # that it has ended with and no disk has; and averages of them
        self.done = -1  # the step that was saved last

    @property
    def moved_bytes(self) -> int:
        """That have come of the last one."""
        return sum(fetch.moved_bytes for fetch in self._fetches.values())

    # -- asking --------------------------------------------------------------------------------------------------------

    @property
    def can_save(self) -> bool:
        return self._store is not None

    def give_up(self) -> None:
        """A disk that refuses: what is asked for from now on comes to memory."""
        self._store = None

    def is_due(self, next_step: int) -> bool:
        return self._store is not None and self.settled.is_set() and self._cadence.is_due(next_step, _now_s())

    def begin(self, next_step: int) -> None:
        """Members are about to be asked for copies of this step; no checkpoint is under way."""
        self._cadence.begun(next_step, _now_s())
        self._step, self._hurry_after = next_step, math.inf
        self.settled.clear()

    @property
    def reading(self) -> list[int]:
        """The step whose copies are read, if any."""
        return [] if self._step is None else [self._step]

    @property
    def unread(self) -> list[str]:
        """Members of whose stages not all of the last copy came, which was no disk's fault."""
        return [peer for peer, fetch in self._fetches.items() if fetch.missing]

    def take_up(self, copied: CopySet) -> None:
        """All members have described these copies: read them, if they are to be saved."""
        if copied.next_step == self._step:
            self._described.put_nowait(copied)

    def reported(self, step: int) -> None:
        """This step has been reported, with everything that belongs to it."""
        self._reported = step + 1
        self._news.set()
        self._hurry_if_over()

    def hurry_after(self, steps: int) -> None:
        """Once so many steps have been reported nothing is trained: no rests from then on, until the next checkpoint is begun."""
        self._hurry_after = steps
        self._hurry_if_over()

    def _hurry_if_over(self) -> None:
        if self._reported >= self._hurry_after:
            for fetch in self._fetches.values():
                fetch.hurry()

    # -- reading and writing -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Save what has been described, until cancelled."""
        while True:
            copied = await self._described.get()
            self._fetches = {}
            try:
                saving = self._to_memory(copied) if self._store is None else self._to_disk(copied, self._store)
                saved = await saving
            except* OSError as errors:
                self._fetches = {}
                self._cadence.refused(_now_s())  # training goes on; the next one is tried before long
                self._trouble.tell(WHAT, leaves(errors)[0], self._bytes)  # type: ignore[arg-type]
            else:
                if saved:
                    self.done = copied.next_step
                else:
                    self._cadence.refused(_now_s())
                    log.info("a checkpoint is given up: nobody has all of its copies", next_step=copied.next_step)
            self._step = None
            self.settled.set()

    async def _to_disk(self, copied: CopySet, store: CheckpointStore) -> bool:
        began_s = _now_s()
        draft = await asyncio.to_thread(store.draft, copied.next_step)
        finishes = False
        try:
            async with asyncio.TaskGroup() as group:
                stages = [group.create_task(self._write(link, copied, draft)) for link in self._links]
            if not all(stage.result() for stage in stages):
                return False
            while copied.next_step > self._reported:
                self._news.clear()
                await self._news.wait()
            finishes = True  # or leaves nothing, whatever happens to the epoch
            plan = self._links[0].offer.plan.to_json()
            self.latest = await asyncio.to_thread(draft.finish, self._state, self._frozen, plan=plan)
        finally:
            if not finishes:
                draft.discard()
        self._trouble.over(WHAT)
        read_s, made_s = max(fetch.read_s for fetch in self._fetches.values()), _now_s() - began_s
        self._cadence.ended(read_s=read_s, made_s=made_s)
        log.debug("checkpoint", next_step=copied.next_step, read_s=round(read_s, 3), made_s=round(made_s, 3))
        return True

    async def _write(self, link: Link, copied: CopySet, draft: Draft) -> bool:
        """One stage; whether all of it has come."""
        stage = copied.stages[link.place.number]
        files = await asyncio.to_thread(StageFiles, draft, link.offer, stage)
        return await self.read(link, stage, Fetch(files.wanted, self._reader, gently=True, give=files.give))

    async def _to_memory(self, copied: CopySet) -> bool:
        fetches = []
        async with asyncio.TaskGroup() as group:
            for link in self._links:
                stage, (layout, kept) = copied.stages[link.place.number], link.offer.layouts
                wanted = {digest: layout[name] for name, digest in stage.weights.items()}
                wanted |= {digest: kept[name] for name, digest in stage.averages.items()}
                fetches.append((link, stage, fetch := Fetch(wanted, self._reader)))
                group.create_task(self.read(link, stage, fetch))
        if any(fetch.missing for _, _, fetch in fetches):
            return False
        for link, stage, fetch in fetches:
            for name, digest in stage.weights.items():  # equal tensors have come once
                self.weights[name] = fetch.found[digest].to(link.offer.changed_state[name][0], copy=True)
            for name, digest in stage.averages.items():
                self.weights[name] = fetch.found[digest].clone()
        return True

    async def read(self, link: Link, stage: StageCopy, fetch: Fetch) -> bool:
        """From who leads the stage or from others who hold it; whether all of it has come. A stream may break: then once more."""
        self._fetches[link.peer_id] = fetch
        self._hurry_if_over()
        for peer in (link.peer_id, *sorted(stage.holders - {link.peer_id}), link.peer_id):
            await fetch.run([peer])
        return not fetch.missing


def _on_disk(layout: Layout) -> int:
    """Bytes of a file of these tensors, in whole blocks of usual size."""
    header, _, nbytes = head_of(layout)
    return math.ceil((len(header) + nbytes) / BLOCK_BYTES) * BLOCK_BYTES


def _now_s() -> float:
    return asyncio.get_running_loop().time()
