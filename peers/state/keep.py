"""A member's part in copies that outlive it: hash its own for a keeper, and be the keeper of others.

The idea: the pipeline waits for none of this. A copy is hashed in a thread and its digests go to the owner. The owner asks
the keeper, which reads the bits from the holder, gently, checks them, and says that it has them. A far keeper does the same,
beside it and more slowly. Whatever fails costs only this copy.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from meshcee.config import FAR_COPIES, OWN_COPIES, Timeouts
from meshcee.errors import ProtocolError
from meshcee.files.tensor_files import nbytes_of
from peers.state.fetch import Fetch, Reader, Shape
from peers.state.store import CopyStore
from peers.transport import Frame, Transport
from peers.wire import Offer, Outbox, besides_in, digests_in, digests_of, messages, need

__all__ = ["Keeper"]

MOST_WAITING = 256


class Keeper:
    """Of one session. `copied` and `ask` only note what is to be done; `run` does it, each kind in its order."""

    def __init__(
        self, offer: Offer, held: CopyStore, transport: Transport, timeouts: Timeouts, memory_bytes: int
    ) -> None:
        self.copies = held
        self._offer = offer
        self._reader = Reader(transport, offer.run, offer.addresses, timeouts)
        self._memory_bytes = memory_bytes
        self._layouts: dict[str, tuple[dict[str, Shape], dict[str, Shape]]] = {}  # of others' stages
        self._made: asyncio.Queue[int | Frame] = asyncio.Queue(MOST_WAITING)  # our own, near, far
        self._near: asyncio.Queue[int | Frame] = asyncio.Queue(MOST_WAITING)
        self._far: asyncio.Queue[int | Frame] = asyncio.Queue(MOST_WAITING)
        self._coming_bytes = 0  # of copies that are being read
        self.hashes = False  # now

    def copied(self, next_step: int) -> None:
        """The stage has been copied."""
        self._note(self._made, next_step)

    def ask(self, frame: Frame) -> None:
        """The owner's KEEP."""
        self._note(self._far if need(frame.header, "far", bool) else self._near, frame)

    def _note(self, waiting: asyncio.Queue[int | Frame], what: int | Frame) -> None:
        try:
            waiting.put_nowait(what)
        except asyncio.QueueFull:
            raise ProtocolError(f"more than {MOST_WAITING} copies are asked for at once") from None

    async def run(self, outbox: Outbox) -> None:
        """Until cancelled; what there is to say goes to the owner."""
        async with asyncio.TaskGroup() as group:
            for waiting in (self._made, self._near, self._far):
                group.create_task(self._work(waiting, outbox))

    async def _work(self, waiting: asyncio.Queue[int | Frame], outbox: Outbox) -> None:
        while True:
            what = await waiting.get()
            await outbox.put(await (self._describe(what) if isinstance(what, int) else self._keep(what)))

    async def _describe(self, next_step: int) -> Frame:
        weights, optimizer = self._offer.layouts
        self.hashes = True
        try:
            digests, took_s = await asyncio.to_thread(self.copies.digest, next_step, weights | optimizer)
        finally:
            self.hashes = False
        payloads = digests_of({n: digests[n] for n in weights}, {n: d for n, d in digests.items() if n in optimizer})
        return Frame(messages.COPIED, {"next_step": next_step, "took_s": took_s}, payloads)

    async def _keep(self, frame: Frame) -> Frame:
        """Read the copy that the owner describes from the member that made it, as far as it is not here."""
        next_step, source = need(frame.header, "next_step", int), need(frame.header, "source", str)
        far = need(frame.header, "far", bool)
        if source not in self._offer.plan.peers or source == self._offer.peer_id:
            raise ProtocolError(f"peer {source} has no stage that could be kept here")
        if source not in self._layouts:
            offer = replace(self._offer, peer_id=source)
            self._layouts[source] = await asyncio.to_thread(lambda: offer.layouts)
        weights, optimizer = digests_in(frame, self._layouts[source])
        digests, layout = {**weights, **optimizer}, self._layouts[source][0] | self._layouts[source][1]
        self.copies.make_room(source, next_step, need(frame.header, "since", int), besides_in(frame.header), far=far)
        size = nbytes_of(layout)
        missing = max(0, self.copies.others_bytes + self._coming_bytes + size - self._spare_bytes(far=far))
        here = {d: tensor for d in digests.values() if (tensor := self.copies.find(d)) is not None}
        fetch = Fetch(
            {digest: layout[name] for name, digest in digests.items() if digest not in here},
            self._reader,
            gently=True,
            far=far,
        )
        if not missing:
            self._coming_bytes += size
            await fetch.run([source])
            self._coming_bytes -= size
        if kept := not missing and not fetch.missing:
            self.copies.keep(source, next_step, digests, here | fetch.found, far=far)
        header = {"next_step": next_step, "source": source, "far": far, "kept": kept, "read_s": fetch.read_s}
        return Frame(messages.KEPT, {**header, "missing_bytes": missing})

    def _spare_bytes(self, *, far: bool) -> int:
        """What this member's own stage, its gradients, its optimizer and its copies leave of its memory."""
        weights, optimizer = map(nbytes_of, self._offer.layouts)
        copies = OWN_COPIES + (FAR_COPIES if far else 0)
        return self._memory_bytes - self._offer.state_bytes - weights - optimizer - copies * (weights + optimizer)
