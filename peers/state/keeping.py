"""What an epoch keeps of its state: copies with keepers, often; checkpoints on the owner's disk, when they may.

The idea: both begin at the same place, between two steps, with one request down every stream. So a member copies its stage
once for both. One number tells it which older copies may still be needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from meshcee.capture import Capture
from peers.state.checkpoint import Checkpoint
from peers.state.copying import Copying
from peers.state.kept import Kept
from peers.state.manifest import CopySet
from peers.state.policy import CHUNK_BYTES, RETRY_S
from peers.state.store import Snapshots
from peers.transport import Frame
from peers.wire import Link, Offer, messages

__all__ = ["Keeping"]


class Keeping:
    """Of one epoch that begins at step `start`. `snapshots` and `copying` are None where there is no such tier."""

    def __init__(self, kept: Kept, links: Sequence[Link], captured: Capture, start: int) -> None:
        self._links = links
        handed = kept.copies is not None and kept.copies.were_handed
        self._start = 0 if handed else start  # what was handed over dies with any of its makers
        self._base = kept.base if isinstance(kept.base, Checkpoint) else None
        self._saved = -1 if isinstance(kept.base, CopySet) else start  # the step whose state need not be written
        self._end = -1  # the step whose state the disk must have before all is over
        leaders = [link for link in links if link.leads]
        self.snapshots: Snapshots | None = None
        self.copying: Copying | None = None
        if kept.store is not None:
            self.snapshots = Snapshots(kept, [link.offer for link in leaders], captured, start)
        if kept.copies is not None:
            self.copying = Copying(kept.copies, links, kept.keepers, start)
        keep = bool(kept.keepers.near) or any(link.place.has_replicas for link in links)
        self._rely = handed or isinstance(kept.base, CopySet) or (self.copying is not None and keep)
        for link in links:
            link.stream.max_payload_bytes = max(link.stream.max_payload_bytes, _largest_payload_bytes(link.offer))

    async def at(self, next_step: int) -> None:
        """Before this step is fed: ask for what is due."""
        durable = self.snapshots is not None and self.snapshots.is_due(next_step)
        keeper = self.copying is not None and self.copying.is_due(next_step)
        if self.copying is not None and self.copying.is_first_to_copy:
            durable = durable and keeper  # members have room for one copy beside those that they may go back to
        await self._ask(next_step, durable=durable, keeper=keeper)

    async def end(self, next_step: int, *, hand_over: bool = False) -> bool:
        """Nothing is trained from here on: bring what the disk has not to it, so that the weights are never lost.

        `hand_over`: another plan goes on at once, so copies with the members are enough; whether they are made, which takes
        room for them. `copying.handed_over` is set when they are.
        """
        if hand_over and self.copying is not None and self.copying.can_hand_over:
            await self._ask(next_step, durable=False, keeper=True, hand_over=True)
            return True
        if self.snapshots is not None and next_step > self._saved:
            self._end = next_step
            self.snapshots.hurry_after(next_step)
            await self._ask(next_step, durable=True, keeper=False)
        return False

    async def again(self) -> bool:
        """Behind `end`: what the disk has refused is asked for once more; False when it has everything."""
        if self._end <= (self.latest.next_step if self.latest is not None else -1):
            return False
        await asyncio.sleep(RETRY_S)
        await self._ask(self._end, durable=True, keeper=False)
        return True

    async def _ask(self, next_step: int, *, durable: bool, keeper: bool, hand_over: bool = False) -> None:
        if not durable and not keeper:
            return
        since, besides = self._since(next_step), self.snapshots.reading if self.snapshots is not None else []
        if self.copying is not None:
            self.copying.forget_before(since, self.latest.next_step if self.latest is not None else 0)
            besides = besides + self.copying.besides
        if durable and self.snapshots is not None:
            durable = await self.snapshots.begin(next_step)
        if keeper and self.copying is not None:
            begin = self.copying.hand_over if hand_over else self.copying.begin
            begin(next_step)
        if not durable and not keeper:
            return
        header = {"next_step": next_step, "keeper": keeper, "since": since, "besides": besides}
        for link in self._links:
            if keeper or (durable and link.leads):
                await link.outbox.put(Frame(messages.SNAPSHOT, {**header, "durable": durable and link.leads}))

    def _since(self, next_step: int) -> int:
        """The step of the newest state that members hold and this epoch could go back to; this one where they hold none."""
        if not self._rely:
            return next_step
        latest = self.latest.next_step if self.latest is not None else 0
        return max(self._start, latest, self.copying.since if self.copying is not None else 0)

    async def hear(self, link: Link, frame: Frame) -> bool:
        """Take a member's frame, if it is about copies; whether it is."""
        if self.copying is not None and frame.kind in (messages.COPIED, messages.KEPT):
            self.copying.hear(link, frame)
        elif self.snapshots is not None and link.leads and frame.kind in (messages.SNAPSHOT, messages.PART):
            stage = link.offer.index
            asked = await asyncio.to_thread(self.snapshots.take, stage, frame)
            self.snapshots.go_on(stage, asked, link.ask)
            self.snapshots.heard()
        else:
            return False
        return True

    def reported(self, step: int) -> None:
        """This step has been reported, with everything that belongs to it."""
        if self.snapshots is not None:
            self.snapshots.reported(step)
        if self.copying is not None:
            self.copying.reported = step + 1

    @property
    def latest(self) -> Checkpoint | None:
        """The last checkpoint, of this epoch or that it began with."""
        return (self.snapshots.latest if self.snapshots is not None else None) or self._base

    async def run(self) -> None:
        """Complete what has arrived, until cancelled."""
        if self.snapshots is not None:
            await self.snapshots.run()

    def close(self) -> None:
        """The epoch is over: what is not complete is dropped."""
        if self.snapshots is not None:
            self.snapshots.close()


def _largest_payload_bytes(offer: Offer) -> int:
    """The largest that a member may send of its copies: a chunk, or the header of a file, or names with digests."""
    layouts = offer.changed_state, offer.expected_optimizer
    return max(CHUNK_BYTES, *(256 + sum(len(n) * 6 + 256 for n in layout) for layout in layouts))
