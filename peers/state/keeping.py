"""What an epoch keeps of its state: copies with keepers, often; checkpoints on the owner's disk, when they may.

The idea: both begin at the same place, between two steps, with one request down every stream. So a member copies its stage
once for both. One number tells it which older copies may still be needed.
"""

from __future__ import annotations

import asyncio
from collections import ChainMap
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import structlog
import torch

from meshcee.capture import Capture
from meshcee.config import OWN_COPIES
from meshcee.events import Event
from meshcee.files import Trouble
from meshcee.files.tensor_files import OnDemand
from meshcee.stage import AVERAGE
from peers.state.copying import Copying
from peers.state.fetch import Reader
from peers.state.manifest import CopySet, Manifest
from peers.state.policy import RETRY_S, Cadence, Keepers
from peers.state.saving import Saving
from peers.transport import Frame
from peers.wire import Link, Offer, messages

if TYPE_CHECKING:
    from peers.state.checkpoint import Checkpoint, CheckpointStore

__all__ = ["Beginning", "Keeping", "Supplies", "state_for"]

log = structlog.get_logger()

LOOK_S = 0.2  # at whether the user stops the run

Until = Callable[[asyncio.Event], Awaitable[object]]


@dataclass(frozen=True)
class Supplies:
    """What an epoch begins with, and where it keeps what it does.

    `base` is the state to go on from, on the disk or with peers (None: the model as it was captured). `store` is the
    place for checkpoints (None: there are none), `least` the number of steps that were reported before. They are done again even if
    the user stops the run. `holders` are peers that may still have what they trained before. `copies` is what is copied
    to keepers (None: nothing is), and `keepers` who keeps them. `trouble` is told what the disk refuses.
    """

    base: Checkpoint | CopySet | None = None
    store: CheckpointStore | None = None
    cadence: Cadence = field(default_factory=Cadence)
    least: int = 0
    holders: frozenset[str] = frozenset()
    copies: Manifest | None = None
    keepers: Keepers = field(default_factory=Keepers)
    trouble: Trouble = field(default_factory=Trouble)


class Keeping:
    """Of one epoch that begins at step `start`. `until` waits for members, as long as they get on."""

    def __init__(
        self, kept: Supplies, links: Sequence[Link], captured: Capture, start: int, reader: Reader, until: Until
    ) -> None:
        self._links, self._until = links, until
        handed = kept.copies is not None and kept.copies.were_handed
        self._start = start if kept.copies is None else kept.copies.since(start)
        self._base = None if isinstance(kept.base, CopySet) else kept.base
        self._saved = -1 if isinstance(kept.base, CopySet) else start  # the step whose state need not be written
        self._end = -1  # the step whose state the owner must have before all is over
        self.saving = Saving(kept.store, kept.cadence, kept.trouble, links, captured, start, reader)
        self.copying = Copying(kept.copies, links, kept.keepers, start)
        keep = bool(kept.keepers.near) or any(link.place.has_replicas for link in links)
        self._rely = handed or isinstance(kept.base, CopySet) or (kept.copies is not None and keep)
        for link in links:
            link.stream.max_payload_bytes = max(link.stream.max_payload_bytes, _largest_payload_bytes(link.offer))

    async def at(self, next_step: int, *, asked: bool = False) -> bool:
        """Before this step is fed: ask for what is due, or `asked` for by the user. False if members have no room for that now."""
        asked = asked and self.saving.can_save and (self._base is None or self._base.next_step != next_step)
        # Members have room for one copy beside those that they may go back to: behind a hand-over, for one that keepers have.
        first = self.copying.is_first_to_copy
        keep = self.copying.is_due(next_step) or (asked and first and self.copying.can_begin(next_step))
        save = (asked or self.saving.is_due(next_step)) and (keep or not first)
        await self.ask(next_step, keep=keep, save=save)
        return save or not asked

    async def end(self, next_step: int, *, hand_over: bool = False) -> bool:
        """Nothing is trained from here on: have the owner read what it has not, so that the weights are never lost.

        `hand_over`: another plan goes on at once, so copies with the members are enough; whether they are made, which takes
        room for them. `copying.handed_over` is set when they are.
        """
        if hand_over and self.copying.can_hand_over:
            await self.ask(next_step, hand_over=True)
            return True
        if next_step > self._saved:
            self._end = next_step
            await self.ask(next_step, save=True, last=True)
        return False

    @property
    def is_saved(self) -> bool:
        """Behind `end`: whether the owner has what was asked for there."""
        return self._end <= self.saving.done

    async def again(self, is_stopping: Callable[[], bool]) -> bool:
        """Behind `end`: what the disk has refused is asked for once more; False when it has everything.

        A user who stops the run waits for no disk: then the weights come to memory.
        """
        if self.is_saved:
            return False
        for _ in range(round(RETRY_S / LOOK_S)):
            if is_stopping():
                self.saving.give_up()
                log.warning(Event.ONLY_IN_MEMORY, next_step=self._end)
                break
            await asyncio.sleep(LOOK_S)
        await self.ask(self._end, save=True, last=True)
        return True

    async def hand_over_instead(self) -> bool:
        """Behind `end`: what the disk has refused, if anything, members hold for the next plan; as `end`'s `hand_over`."""
        if self.is_saved:
            return False
        if self.copying.can_hand_over:
            await self.ask(self._end, hand_over=True)
            return True
        return self.copying.hand_over_last()

    async def ask(
        self, next_step: int, *, keep: bool = False, save: bool = False, hand_over: bool = False, last: bool = False
    ) -> None:
        """Every member for a copy, if it is of use: for keepers, for the owner, for the next plan."""
        if not (keep or save or hand_over):
            return
        copying, since, besides = self.copying, self._since(next_step), self._besides(next_step)
        copying.forget_before(min(copying.needed, default=since))
        header = {"next_step": next_step, "since": since, "besides": besides}
        if save:
            self.saving.hurry_after(0)  # nothing is fed until it is done
            await self._until(self.saving.settled)
            self.saving.begin(next_step)
            if last:
                self.saving.hurry_after(next_step)
        asks = (copying.hand_over, hand_over), (copying.begin, keep), (copying.ask_last, last), (copying.ask, True)
        next(ask for ask, wanted in asks if wanted)(next_step)
        for link in self._links:
            await link.outbox.put(Frame(messages.COPY, header))

    def _since(self, next_step: int) -> int:
        """From which step on members keep whatever they hold: from none where copies are whole, or none could be gone back to."""
        if self.copying.needed or not self._rely:
            return next_step
        return max(self._start, self.latest.next_step if self.latest is not None else 0)

    def _besides(self, next_step: int) -> list[int]:
        """Of which steps before that they keep copies: of those that somebody may go back to, are being read, or are far ones.

        A checkpoint replaces none of these: it dies with its owner. Its own copies stay where there is room, so as not to come from
        the disk again.
        """
        copying, reading = self.copying, self.saving.reading
        own = {*copying.needed, *copying.making, *reading}
        if self.latest is not None and len(own | {next_step}) < OWN_COPIES:
            own.add(self.latest.next_step)
        return sorted({*own, *copying.far_steps})

    def hear(self, link: Link, frame: Frame) -> bool:
        """Take a member's frame, if it is about copies; whether it is."""
        if frame.kind not in (messages.COPIED, messages.KEPT):
            return False
        described = self.copying.hear(link, frame)
        if described is not None:
            self.saving.take_up(described)
        return True

    def reported(self, step: int) -> None:
        """This step has been reported, with everything that belongs to it."""
        self.saving.reported(step)
        self.copying.after(step)

    @property
    def latest(self) -> Checkpoint | None:
        """The last checkpoint, of this epoch or that it began with."""
        return self.saving.latest or self._base

    def weights(self) -> Mapping[str, torch.Tensor]:
        """That the epoch has ended with, as far as they were trained; those on the disk read when they are asked for."""
        on_disk = self.latest.weights(self.latest.names) if self.latest is not None else {}
        return ChainMap(self.saving.weights, on_disk)  # type: ignore[arg-type]

    def averages(self) -> Mapping[str, torch.Tensor]:
        """Of the trained ones among them, as far as the job has any."""
        here = {n.rpartition("/")[0]: t for n, t in self.saving.weights.items() if n.endswith(f"/{AVERAGE}")}
        return here or (self.latest.averages if self.latest is not None else {})


def _largest_payload_bytes(offer: Offer) -> int:
    """The largest that a member may send of its copies: names with digests."""
    return max(256 + sum(len(n) * 6 + 256 for n in layout) for layout in offer.layouts)


class Beginning(NamedTuple):
    """Some of what a member begins with: names, where their values are found, and the digests of those that are with peers."""

    names: Iterable[str]
    values: Mapping[str, torch.Tensor]
    digests: Mapping[str, str] = {}


def state_for(offer: Offer, captured: Capture, base: Checkpoint | CopySet | None) -> dict[str, Beginning]:
    """The weights that a member begins with, and, where a job goes on, what its optimizer has kept."""
    expected, values = offer.expected_state, captured.state
    if offer.terms.rounded:
        values = OnDemand(expected, lambda name: captured.state[name].to(expected[name][0]))
    if base is None:
        return {"state": Beginning(expected, values)}
    trainable = offer.specs[offer.index].trainable
    if isinstance(base, CopySet):
        weights, kept = base.digests(expected, trainable)
        return {"state": Beginning(expected, values, weights), "optimizer": Beginning(kept, {}, kept)}
    weights_on_disk = base.weights(expected)
    optimizer = base.optimizer(trainable)
    return {
        "state": Beginning(expected, OnDemand(expected, lambda name: weights_on_disk[name].to(expected[name][0]))),
        "optimizer": Beginning(optimizer, optimizer),
    }
