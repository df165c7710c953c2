"""What the owner keeps for each member: its offer, its stream, what is on its way to it and what has come of its state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from meshcee.errors import ProtocolError
from peers.offer import Offer
from peers.outbox import Outbox
from peers.state_frames import StateReceiver
from peers.transport.base import Frame, Stream

__all__ = ["Link", "check_replicas"]


class Link:
    """The stream to one member. `closing`: its end is expected."""

    def __init__(self, offer: Offer, stream: Stream) -> None:
        self.offer = offer
        self.place = offer.place
        self.leads = offer.peer_id == offer.place.leader  # of its group, the one that sends the state
        self.peer_id = offer.peer_id
        self.stream = stream
        self.outbox = Outbox(stream, limit_frames=64)
        self.receiver = StateReceiver(offer.changed_state)
        self.collected = asyncio.Event()
        self.closing = False

    def ask(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            self.outbox.post(frame)


def check_replicas(links: Sequence[Link], describe: Callable[[str], str]) -> None:
    """Raise ProtocolError where a member of a group has collected another state than its leader."""
    hashes = {link.peer_id: link.receiver.hash for link in links}
    for link in links:
        if hashes[link.peer_id] != hashes[link.place.leader]:
            raise ProtocolError(
                f"peer {describe(link.peer_id)} ends with other weights than {describe(link.place.leader)}, which holds the "
                "same stage; use one version of torch and one kind of device in a group"
            )
