"""What the owner keeps for each member: its offer, its stream, what is on its way to it and what has come of its state.

The idea: of those that hold the same blocks one leads, whose state is read. All must have the same bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from meshcee.errors import ProtocolError
from peers.transport import Stream
from peers.wire.offer import Offer
from peers.wire.outbox import Outbox

__all__ = ["Link", "check_replicas"]


class Link:
    """The stream to one member. `closing`: its end is expected."""

    def __init__(self, offer: Offer, stream: Stream) -> None:
        self.offer = offer
        self.place = offer.place
        self.leads = offer.place.leads  # of those that hold the same blocks, the one whose state is read
        self.peer_id = offer.peer_id
        self.stream = stream
        self.outbox = Outbox(stream, limit_frames=64)
        self.digests: Mapping[str, str] = {}  # of the weights that it has ended with, once it has described them
        self.ended = asyncio.Event()  # it has applied all that it was asked for
        self.closing = False


def check_replicas(links: Sequence[Link], describe: Callable[[str], str]) -> None:
    """Raise ProtocolError where a member has ended with other bits than the one that leads what it holds."""
    leading: dict[str, list[Link]] = {}  # of a tied parameter, the leaders of two stages
    for link in links:
        for name in link.digests if link.leads else ():
            leading.setdefault(name, []).append(link)
    for link in links:
        for name, digest in link.digests.items() if not link.leads else ():
            if digest not in {leader.digests[name] for leader in leading[name]}:
                raise ProtocolError(
                    f"peer {describe(link.peer_id)} ends with other weights than {describe(leading[name][0].peer_id)}, which "
                    f"holds {name!r} too; use one version of torch and one kind of device for blocks that several peers hold"
                )
