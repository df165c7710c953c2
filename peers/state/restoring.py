"""How a member comes by the state that its stage begins with: what it is sent, makes by recipe, or holds already.

The idea: the owner says what the bits must be; where they come from does not matter, and only what is nowhere nearer is
sent. Micro-batches need weights alone, so what the optimizer has kept may come from peers behind those of the first step.

Copies that are left of an epoch, with which the next one may begin, are lent by a member's `Lender`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import ChainMap, Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgpack
import structlog
import torch

from meshcee.config import Timeouts
from peers.state.fetch import Fetch, Reader, serve
from peers.state.store import CopyStore
from peers.transport import Frame, Stream, Transport
from peers.wire import Offer, StateReceiver, messages, unless_closed, while_moving

__all__ = ["Arrivals", "Lender", "Moments", "restore"]

log = structlog.get_logger()
TO_READ = 1 / 3  # of the time that a peer has to leave: for others to begin to read what they go on from
LOOK_S = 0.1  # between two looks whether they still do
FROZEN_S = 3600.0  # that what a job leaves frozen waits for another job


class Arrivals:
    """What has come of an offer: bytes, and tensors that are checked. It grows as long as the offer gets on."""

    def __init__(self, stream: Stream) -> None:
        self._streams = [stream]
        self._receivers: list[StateReceiver] = []

    def watch(self, stream: Stream) -> Stream:
        """Count what comes over this stream, too."""
        self._streams.append(stream)
        return stream

    def hold(self, *receivers: StateReceiver) -> None:
        self._receivers += receivers

    @property
    def moved(self) -> int:
        return self.moved_bytes + sum(len(receiver.digests) for receiver in self._receivers)

    @property
    def moved_bytes(self) -> int:
        return sum(stream.received_payload_bytes for stream in self._streams)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """What is checked already, for another try."""
        return ChainMap({}, *(receiver.state for receiver in self._receivers))


class Moments:
    """What a stage's optimizer has kept before the first step, with the peers that have what is not here."""

    def __init__(self, receiver: StateReceiver, copies: _Copies, taken: Arrivals, timeouts: Timeouts) -> None:
        self._taken = taken
        self._receiver = receiver
        self._copies = copies
        self._timeouts = timeouts

    @property
    def hash(self) -> str:
        """Of all of it, whether it is here or not."""
        return self._receiver.hash

    async def all(self) -> Mapping[str, torch.Tensor] | None:
        """It, by "<parameter>/<key>", once it is here and checked, to be had once; None when some of it is with no peer, or does
        not come in time."""
        fill = partial(self._copies.fill, self._receiver, gently=True)
        with contextlib.suppress(TimeoutError):
            await while_moving(fill, lambda: self._taken.moved_bytes, self._timeouts.offer_s, self._timeouts)
        if self._receiver.unequal:
            return None
        state, self._receiver.state = self._receiver.state, {}
        return state


async def restore(
    stream: Stream, offer: Offer, held: CopyStore, transport: Transport, timeouts: Timeouts, taken: Arrivals
) -> tuple[StateReceiver, Moments]:
    """The weights, whole and checked, and what the optimizer has kept (nothing when the job begins)."""
    copies = _Copies(offer, transport, timeouts, taken)
    late = bool(offer.sources)
    weights = StateReceiver(offer.expected_state, recipes=True, held=held.values)
    optimizer = StateReceiver(offer.expected_optimizer, partial=True, recipes=True, held=held.values, late=late)
    stream.max_payload_bytes = weights.max_payload_bytes
    receivers = (weights, optimizer) if offer.resumes else (weights,)
    taken.hold(*receivers)
    for receiver in receivers:
        await _receive(stream, receiver)
    held.offered, held.frozen = {}, {}  # what is not of use makes room for what comes
    if late:
        await unless_closed(partial(copies.fill, weights), stream, timeouts)
    asked = [set() if late and receiver is optimizer else receiver.unequal for receiver in receivers]
    if unequal := sum(map(len, asked)):
        log.info("weights that are not here, or come out differently, are sent", tensors=unequal)
        await stream.send(Frame(messages.AGAIN, {}, [msgpack.packb(sorted(names)) for names in asked]))
        for receiver in receivers:
            await _receive(stream, receiver)
    return weights, Moments(optimizer, copies, taken, timeouts)


class _Copies:
    """What peers hold of a stage's state."""

    def __init__(self, offer: Offer, transport: Transport, timeouts: Timeouts, taken: Arrivals) -> None:
        self._offer = offer
        self._reader = Reader(transport, offer.run, offer.addresses, timeouts, taken.watch)

    async def fill(self, receiver: StateReceiver, *, gently: bool = False) -> None:
        """Read what it lacks, from several at once; `gently` beside a step."""
        lacking = list(receiver.lacking.values())
        if not lacking:
            return
        uses = Counter(digest for digest, _ in lacking)  # equal tensors, as counts of steps are, come once

        def find(digest: str) -> torch.Tensor | None:
            uses[digest] -= 1
            tensor = fetch.found.get(digest)
            return tensor.clone() if tensor is not None and uses[digest] else tensor

        fetch = Fetch(dict(lacking), self._reader, gently=gently, urgent=True)
        await fetch.run(peer for peer in self._offer.sources if peer != self._offer.peer_id)
        receiver.fill(find)
        log.info("state from copies", tensors=len(fetch.found), missing=len(fetch.missing))


async def _receive(stream: Stream, receiver: StateReceiver) -> None:
    while (frame := await stream.recv()).kind == messages.PONG or not await asyncio.to_thread(receiver.take, frame):
        pass


class Lender:
    """Serves the stream `copies`."""

    def __init__(self, transport: Transport, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self.copies = CopyStore()
        self.of = ""  # the run
        self._keep_s = timeouts.regroup_s  # or longer, as the owner of that run says
        self._frozen: dict[str, list[torch.Tensor]] = {}  # by digest: what that run's stage here has as it came
        self._owner = ""  # of that run
        self._thawing: asyncio.TimerHandle | None = None
        self._forgetting: asyncio.TimerHandle | None = None
        self._readers = 0
        self._read_by_s = 0.0  # by the loop's clock
        transport.serve("copies", self._serve)

    def for_epoch(self, offer: Offer) -> CopyStore:
        """What is left of the last epoch of the same run, or frozen by another of the same owner; all else is forgotten."""
        for timer in (self._forgetting, self._thawing):
            if timer is not None:
                timer.cancel()
        self._forgetting = self._thawing = None
        frozen = self._frozen or self.copies.frozen  # of a try before
        if not offer.resumes or self.of != offer.run:
            offered = self.copies.offered if self.of == offer.run else {}
            self.copies = CopyStore()
            self.copies.offered = offered
        if frozen and (offer.run == self.of or offer.owner == self._owner):  # nobody else learns that it is here
            wanted = {(dtype, tuple(shape)) for dtype, shape in offer.frozen_state.values()}
            found = {d: [t for t in tensors if (t.dtype, tuple(t.shape)) in wanted] for d, tensors in frozen.items()}
            self.copies.frozen = {d: tensors for d, tensors in found.items() if tensors}
        self._frozen, self._owner = {}, offer.owner
        self.of, self.copies.goes_on = offer.run, True
        self.copies.begin()
        # Who looks for peers no longer may die: a standby takes its own time to find that out.
        self._keep_s = max(offer.terms.regroup_s, self._timeouts.regroup_s)
        return self.copies

    def freeze(self, offer: Offer, state: Mapping[str, torch.Tensor], digests: Mapping[str, str]) -> None:
        """Keep of a stage's state what training does not change, under the digests by which another offer may name it."""
        found: dict[str, list[torch.Tensor]] = {}
        for name, (dtype, _) in offer.frozen_state.items():
            if state[name].dtype == dtype:  # else it is rounded for this job
                found.setdefault(digests[name], []).append(state[name])
        self._frozen = found

    def keep(self, offered: Mapping[str, torch.Tensor]) -> None:
        """What has come of an offer that led nowhere, in the place of what is kept of an earlier one."""
        if offered:
            self.copies.offered = dict(offered)

    def over(self) -> None:
        """No epoch is running here; after an offer that was refused nothing changes."""
        loop = asyncio.get_running_loop()
        self._read_by_s = loop.time() + TO_READ * self._timeouts.leave_s if self.copies.goes_on else 0.0
        if self._forgetting is None:
            self._forgetting = loop.call_later(self._keep_s, self._forget)
        if self._thawing is None:
            self._thawing = loop.call_later(FROZEN_S, self._thaw)

    def _thaw(self) -> None:
        """Keep nothing for another job."""
        self._frozen = self.copies.frozen = {}

    async def until_read(self) -> None:
        """Whoever leaves lends what another epoch begins with until that has had the time to begin, and has read it."""
        while self._readers or asyncio.get_running_loop().time() < self._read_by_s:  # noqa: ASYNC110 - readers are many
            await asyncio.sleep(LOOK_S)

    def _forget(self) -> None:
        self._forgetting = None
        if self._readers:
            self.over()
        else:
            self.copies = CopyStore()

    async def _serve(self, stream: Stream) -> None:
        """For whoever has a stage of the same run to restore, or to keep."""
        self._readers += 1
        try:
            await serve(stream, self._find, self._timeouts)
        finally:
            self._readers -= 1
            if self._forgetting is not None:
                self._forgetting.cancel()
                self._forgetting = None
                self.over()

    def _find(self, header: Mapping[str, Any], digest: str) -> torch.Tensor | None:
        same = self.of == messages.run_of(header)
        return self.copies.find(digest) if same else None
