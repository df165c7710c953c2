"""How a member comes by the state that its stage begins with: what it is sent, makes by recipe, or holds already.

The idea: the owner says what the bits must be; where they come from does not matter, and only what is nowhere nearer is
sent.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial

import msgpack
import structlog
import torch

from meshcee.config import Timeouts
from peers import messages
from peers.fetch import Fetch
from peers.offer import Offer
from peers.pulse import unless_closed
from peers.snapshot import Held
from peers.state_frames import StateReceiver
from peers.transport.base import Frame, Stream, Transport

__all__ = ["restore"]

log = structlog.get_logger()


async def restore(
    stream: Stream, offer: Offer, held: Held, transport: Transport, timeouts: Timeouts
) -> tuple[StateReceiver, StateReceiver]:
    """The weights, and what the optimizer has kept (nothing when the job begins), whole and checked."""
    weights = StateReceiver(offer.expected_state, recipes=True, held=held.values)
    optimizer = StateReceiver(offer.expected_optimizer, partial=True, recipes=True, held=held.values)
    stream.max_payload_bytes = weights.max_payload_bytes
    receivers = (weights, optimizer) if offer.resumes else (weights,)
    for receiver in receivers:
        await _receive(stream, receiver)
    if offer.sources and any(r.unequal for r in receivers):
        copies = partial(_from_copies, receivers, offer, stream.peer_id, transport, timeouts)
        await unless_closed(copies, stream, timeouts)
    if unequal := sum(len(r.unequal) for r in receivers):
        log.info("weights that are not here, or come out differently, are sent", tensors=unequal)
        await stream.send(Frame(messages.AGAIN, {}, [msgpack.packb(sorted(r.unequal)) for r in receivers]))
        for receiver in receivers:
            await _receive(stream, receiver)
    return weights, optimizer


async def _from_copies(
    receivers: Sequence[StateReceiver], offer: Offer, owner: str, transport: Transport, timeouts: Timeouts
) -> None:
    """What peers hold of it, from several at once."""
    lacking = [entry for receiver in receivers for entry in receiver.lacking.values()]
    uses = Counter(digest for digest, _ in lacking)  # equal tensors, as counts of steps are, come once

    async def open_stream(peer: str) -> Stream:
        return await transport.open(peer, "copies", offer.addresses.get(peer, ()))

    def find(digest: str) -> torch.Tensor | None:
        uses[digest] -= 1
        tensor = fetch.found.get(digest)
        return tensor.clone() if tensor is not None and uses[digest] else tensor

    fetch = Fetch(dict(lacking), open_stream, {"owner": owner, "job": offer.job}, timeouts)
    await fetch.run(peer for peer in offer.sources if peer != offer.peer_id)
    for receiver in receivers:
        receiver.fill(find)
    log.info("state from copies", tensors=len(fetch.found), missing=len(fetch.missing))


async def _receive(stream: Stream, receiver: StateReceiver) -> None:
    while not await asyncio.to_thread(receiver.take, await stream.recv()):
        pass
