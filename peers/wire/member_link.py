"""What the owner keeps for each member: its offer, its stream, what is on its way to it and what has come of its state.

The idea: of those that hold the same blocks one sends its state, the others only digests: they must have the same bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from meshcee.errors import ProtocolError
from meshcee.files.tensor_files import Layout
from peers.transport import Frame, Stream
from peers.wire import messages
from peers.wire.offer import Offer
from peers.wire.outbox import Outbox
from peers.wire.weights import StateReceiver, digests_in

__all__ = ["Link", "ReplicaReceiver", "check_replicas"]


class Link:
    """The stream to one member. `closing`: its end is expected."""

    def __init__(self, offer: Offer, stream: Stream) -> None:
        self.offer = offer
        self.place = offer.place
        self.leads = offer.place.leads  # of those that hold the same blocks, the one that sends the state
        self.peer_id = offer.peer_id
        self.stream = stream
        self.outbox = Outbox(stream, limit_frames=64)
        self.receiver = StateReceiver(offer.changed_state)
        self.collected = asyncio.Event()
        self.closing = False

    def ask(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            self.outbox.post(frame)


class ReplicaReceiver(StateReceiver):
    """Only the digests of a member's state, by name, to be compared with those of the member that leads what it holds."""

    def __init__(self, layout: Layout) -> None:
        super().__init__({})
        self._layout = layout

    def take(self, frame: Frame) -> bool:
        if frame.kind != messages.STATE_END:
            raise ProtocolError(f"expected the digests of weights, got a frame of kind {frame.kind!r}")
        self.digests, _ = digests_in(frame, (self._layout, {}))
        return True


def check_replicas(links: Sequence[Link], describe: Callable[[str], str]) -> None:
    """Raise ProtocolError where a member has ended with other bits than the one that leads what it holds."""
    leading: dict[str, list[Link]] = {}  # of a tied parameter, the leaders of two stages
    for link in links:
        for name in link.receiver.digests if link.leads else ():
            leading.setdefault(name, []).append(link)
    for link in links:
        for name, digest in link.receiver.digests.items() if not link.leads else ():
            if digest not in {leader.receiver.digests[name] for leader in leading[name]}:
                raise ProtocolError(
                    f"peer {describe(link.peer_id)} ends with other weights than {describe(leading[name][0].peer_id)}, which "
                    f"holds {name!r} too; use one version of torch and one kind of device for blocks that several peers hold"
                )
