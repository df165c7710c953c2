"""Who keeps whose copies: a buddy nearby, and a far one where a region that is lost as a whole would take both.

The idea: both are chosen alike, once for an epoch, from what was measured: among those that are near, the one with least to
keep. Far ones are near to the holder too, as far as other regions are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from meshcee.measured import JobCosts, Measured
from meshcee.plan import Plan
from meshcee.planner.live import has_room_for_copies, regions_of
from meshcee.profile import DeviceProfile
from peers.cadence import CHUNK_BYTES

__all__ = ["Buddies", "buddies", "buddies_with_room", "far_buddies"]

NEAR = 3.0  # a link that takes at most so many times as long as the quickest one is as good


class Buddies(NamedTuple):
    """By the member that holds the stage: its buddy, and its far one."""

    near: Mapping[str, str] = {}
    far: Mapping[str, str] = {}


def buddies_with_room(
    plan: Plan, mesh: Measured, devices: Mapping[str, DeviceProfile], job: JobCosts
) -> Buddies | None:
    """Of this plan, on these devices; None where they have no room for copies, far ones only where they have it for those."""
    if not has_room_for_copies(plan, devices, job):
        return None
    seconds = {k: link.latency_s + CHUNK_BYTES / link.bandwidth_bytes_per_s for k, link in mesh.links.items()}
    near = buddies(plan, seconds)
    regions = regions_of(replace(mesh, devices={**mesh.devices, **devices}), job)
    far = far_buddies(plan, seconds, regions, near)
    return Buddies(near, far if far and has_room_for_copies(plan, devices, job, tiers=2) else {})


def buddies(plan: Plan, seconds: Mapping[tuple[str, str], float]) -> dict[str, str]:
    """Who keeps the copies of each member that holds its blocks alone; members of a group, and pipelines, are copies of each
    other.

    `seconds` is what a chunk takes over each link that was measured, by sender and receiver. Nobody has a buddy when there
    is only one member.
    """
    load = dict.fromkeys(plan.peers, 0)
    found: dict[str, str] = {}
    for stage in plan.pipelines[0].stages if len(plan.pipelines) == 1 else ():
        others = [peer for peer in plan.peers if peer not in stage.peers]
        if len(stage.members) == 1 and others:
            found[stage.peers[0]] = _least_loaded(plan, stage.peers[0], others, seconds, load)
    return found


def far_buddies(
    plan: Plan, seconds: Mapping[tuple[str, str], float], regions: Mapping[str, str], near: Mapping[str, str]
) -> dict[str, str]:
    """Who keeps copies of each stage in another region than its members are in, by its first one. `regions`: of each peer.

    Nobody does when there is one region, or when no stage would be lost with its own; or has pipelines, which are in other
    regions as a rule.
    """
    load = dict.fromkeys(plan.peers, 0)
    found: dict[str, str] = {}
    needed = False
    for stage in plan.pipelines[0].stages if len(plan.pipelines) == 1 else ():
        holder, inside = stage.peers[0], {regions.get(peer) for peer in stage.peers}
        others = [peer for peer in plan.peers if regions.get(peer) not in inside]
        if len(inside) > 1:  # its own members outlive any region
            continue
        if not others:
            return {}
        if near.get(holder) in others:  # it has these bits already
            found[holder] = near[holder]
        else:
            needed = True
            found[holder] = _least_loaded(plan, holder, others, seconds, load)
    return found if needed else {}


def _least_loaded(
    plan: Plan, holder: str, others: Collection[str], seconds: Mapping[tuple[str, str], float], load: dict[str, int]
) -> str:
    """The one with least to keep among those that are near."""
    peers = plan.peers
    takes = {peer: seconds.get((holder, peer), math.inf) for peer in others}
    near = [peer for peer in others if takes[peer] <= NEAR * min(takes.values())]
    after = {peer: (peers.index(peer) - peers.index(holder)) % len(peers) for peer in near}
    buddy = min(near, key=lambda peer: (load[peer], takes[peer], after[peer]))
    load[buddy] += 1
    return buddy
