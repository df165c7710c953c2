"""Who supplies samples that stay at their place, and over which links: a plan of such a job is priced with these.

The idea: peers say in their records which sets they have, and publish the links that they have measured. The supplier's links stand
where the owner's own would, as the owner then sends indices alone. Inputs and targets go the same way, so both are priced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial

from dht import PeerRecord
from meshcee.figures import AT_HAND, LinkProfile
from meshcee.job import At
from peers.mesh_view import MeshView
from peers.wire import unless_late

__all__ = ["having", "links_from", "supplied_over", "who_supplies"]


def having(agent: MeshView, at: At, lost: Mapping[str, float]) -> dict[str, int]:
    """Peers that are meant and have a set of the name, with its number of samples; of who was lost, those who came back since."""

    def is_there(peer: str, record: PeerRecord) -> bool:
        is_meant = at.where in (peer, record.name, record.region)
        return is_meant and not record.leaving and record.sent_at > lost.get(peer, 0.0)

    found = {p: dict(r.datasets or ()) for p, r in agent.directory.peers.items() if is_there(p, r)}
    return {peer: sets[at.name] for peer, sets in found.items() if at.name in sets}


def who_supplies(agent: MeshView, at: At, lost: Mapping[str, float], now: str = "") -> str | None:
    """The peer that is to supply: who does now, as long as that peer is there. None where nobody has as many samples."""
    right = sorted(peer for peer, samples in having(agent, at, lost).items() if samples == at.samples)
    return now if now in right else right[0] if right else None


def links_from(agent: MeshView, peer: str | None) -> dict[str, LinkProfile]:
    """As this peer has measured them; the planner takes those to devices that it may plan with."""
    record = agent.directory.links.get(peer or "")
    return {**dict(record.links), record.peer_id: AT_HAND} if record is not None else {}


async def supplied_over(agent: MeshView, at: At, limit_s: float) -> dict[str, LinkProfile]:
    """The same of whoever is to supply, once links to all idle devices are known. For so long at most: a plan can do without."""

    def are_known() -> bool:
        peer = who_supplies(agent, at, {})
        return peer is not None and agent.devices().keys() - {peer} <= links_from(agent, peer).keys()

    with contextlib.suppress(TimeoutError):
        await unless_late(partial(agent.directory.wait_for, are_known), limit_s, agent.timeouts)
    return links_from(agent, who_supplies(agent, at, {}))
