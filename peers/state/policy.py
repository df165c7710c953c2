"""Who keeps whose copies, and how often: copies get a share of links and devices, and nothing more.

The idea: training comes first, so copies get a share of the time, not a priority of bytes that a link would not know. A stage has a
keeper nearby, and a far one where a region that is lost as a whole would take both.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshcee.figures import DeviceProfile, JobCosts, Measured
from meshcee.plan import Plan

__all__ = [
    "AHEAD",
    "CHUNK_BYTES",
    "RETRY_S",
    "Cadence",
    "FarCadence",
    "Keepers",
    "Stride",
    "far_keepers",
    "keepers_with_room",
    "near_keepers",
]

AHEAD = 4  # chunks asked for and not yet here, from each stage
CHUNK_BYTES = 512 << 10  # a loss waits for at most a few of these on its way to the owner
LEAST_BYTES = 16 << 10
SLOW_S = 0.1  # that a chunk may take: the step's own tensors wait behind it
RETRY_S = 10.0  # what a disk has refused is tried again
LONGEST_REST_S = 60.0  # who serves a reader waits no longer than `Timeouts.offer_s`


@dataclass
class Cadence:
    """When the next snapshot, or copy for keepers, is due: every `every` steps, or as often as costs at most a share of the time.

    A loss costs the steps since the last snapshot, so they are as frequent as they may be. `SHARE` bounds which part of the
    time links are used for them (a slow link rests between two chunks, a fast one between two snapshots). `MAKING`
    bounds which part one is being read and brought to the disk. How long the steps before it take does not count.
    """

    every: int = 0
    SHARE = 0.05
    MAKING = 0.5
    LEAST_S = 0.25
    _began_s: float = float("-inf")
    _made_s: float = 0.0
    _read_s: float = 0.0
    _last_step: int = 0
    _complete: tuple[int, float] | None = None  # the step of the last complete one, and when it was begun
    _retry_s: float | None = None  # when to try again what the disk has refused

    def start(self, next_step: int, now_s: float) -> None:
        """An epoch begins at this step. What the epochs before it have completed counts, but nothing that their end cut short: a
        run that keeps losing members, or changing plans, would otherwise go back ever further.
        """
        self._complete = self._complete or (next_step, now_s)
        step, self._began_s = self._complete
        self._last_step = min(step, next_step)

    def is_due(self, next_step: int, now_s: float) -> bool:
        if self._retry_s is not None:
            return now_s >= self._retry_s
        if self.every:
            return next_step // self.every > self._last_step // self.every
        rest_s = max(self.LEAST_S, self._read_s / self.SHARE, self._made_s / self.MAKING)
        return now_s - self._began_s >= rest_s

    def begun(self, next_step: int, now_s: float) -> None:
        self._last_step, self._began_s, self._retry_s = next_step, now_s, None

    def refused(self, now_s: float) -> None:
        """The disk has not taken it: another one is due before long, whatever the steps."""
        self._retry_s = now_s + RETRY_S

    def ended(self, *, read_s: float, made_s: float) -> None:
        """It is complete, `made_s` after the first stage had copied its state; reading one took at most `read_s`."""
        self._read_s, self._made_s = read_s, made_s
        self._complete = self._last_step, self._began_s


class FarCadence(Cadence):
    """Of copies in another region: rarer, and over links that steps and checkpoints need too."""

    SHARE = 0.02
    LEAST_S = 10.0


class Stride:
    """How much of a copy to ask a link for at once, and how long it then rests.

    What the least part took is the way there and back; what larger ones take beyond it, the link was in use. Parts grow
    while that is little. A link is fast when it carries whole chunks in SLOW_S. Another one gets parts that it carries in
    about SLOW_S, one at a time, and rests between them so that they are a `SHARE` of its time. Between regions (`far`) a fast
    link rests as well: what is read there is large and crosses what many share.
    """

    def __init__(self, *, far: bool = False) -> None:
        self._far = far
        self._share = FarCadence.SHARE if far else Cadence.SHARE
        self.bytes = LEAST_BYTES
        self.is_fast = False
        self.rest_s = 0.0
        self.used_s = 0.0  # that the last part's bytes took of the link
        self._quickest_s = math.inf
        self._byte_s = 0.0
        self._most = CHUNK_BYTES

    def took(self, part_s: float, count: int) -> None:
        """The last part, of so many bytes, from when the link had nothing else of ours."""
        self._quickest_s = min(self._quickest_s, part_s)
        if count > LEAST_BYTES:
            self._byte_s = (part_s - self._quickest_s) / (count - LEAST_BYTES)
        self.used_s = used_s = min(part_s, self._byte_s * count)
        if used_s > SLOW_S:
            self.bytes = self._most = max(LEAST_BYTES, self.bytes // 2)
        elif used_s < SLOW_S / 4:
            self._most = min(CHUNK_BYTES, 2 * self._most)  # it has become faster
        grows = used_s < SLOW_S / 2 and self.bytes < self._most
        if grows:
            self.bytes *= 2
        self.is_fast = self.bytes == CHUNK_BYTES and used_s < SLOW_S
        rests = not grows and (self._far or not self.is_fast)
        self.rest_s = min(used_s * (1 / self._share - 1), LONGEST_REST_S) if rests else 0.0


NEAR = 3.0  # a link that takes at most so many times as long as the quickest one is as good


class Keepers(NamedTuple):
    """By the member that holds the stage: its keeper, and its far one."""

    near: Mapping[str, str] = {}
    far: Mapping[str, str] = {}


def keepers_with_room(
    plan: Plan, mesh: Measured, devices: Mapping[str, DeviceProfile], job: JobCosts
) -> Keepers | None:
    """Of this plan, on these devices; None where they have no room for copies, far ones only where they have it for those."""
    from meshcee.planner import has_room_for_copies, regions_of

    if not has_room_for_copies(plan, devices, job):
        return None
    seconds = {k: link.latency_s + CHUNK_BYTES / link.bandwidth_bytes_per_s for k, link in mesh.links.items()}
    near = near_keepers(plan, seconds)
    regions = regions_of(replace(mesh, devices={**mesh.devices, **devices}), job)
    far = far_keepers(plan, seconds, regions, near)
    return Keepers(near, far if far and has_room_for_copies(plan, devices, job, tiers=2) else {})


def near_keepers(plan: Plan, seconds: Mapping[tuple[str, str], float]) -> dict[str, str]:
    """Who keeps the copies of each member that holds its blocks alone; members of a group, and pipelines, are copies of each
    other.

    `seconds` is what a chunk takes over each link that was measured, by sender and receiver. Nobody has a keeper when there
    is only one member.
    """
    load = dict.fromkeys(plan.peers, 0)
    found: dict[str, str] = {}
    for stage in plan.pipelines[0].stages if len(plan.pipelines) == 1 else ():
        others = [peer for peer in plan.peers if peer not in stage.peers]
        if len(stage.members) == 1 and others:
            found[stage.peers[0]] = _least_loaded(plan, stage.peers[0], others, seconds, load)
    return found


def far_keepers(
    plan: Plan, seconds: Mapping[tuple[str, str], float], regions: Mapping[str, str], near: Mapping[str, str]
) -> dict[str, str]:
    """Who keeps copies of each stage in another region than its members are in, by its first one. `regions`: of each peer.

    A stage of several pipelines has one where all holders of one of its blocks are in one region. Nobody does when there
    is one region, or when no block would be lost with its own.
    """
    load = dict.fromkeys(plan.peers, 0)
    found: dict[str, str] = {}
    needed = False
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    inside: list[set[str | None]] = [set() for _ in range(plan.num_blocks)]  # of each block, where its holders are
    for stage in stages:
        for block in inside[stage.first : stage.end]:
            block.update(regions.get(peer) for peer in stage.peers)
    for stage in stages:
        holder, blocks = stage.peers[0], inside[stage.first : stage.end]
        others = [peer for peer in plan.peers if regions.get(peer) != regions.get(holder)]
        if all(len(block) > 1 for block in blocks):  # holders outlive any region
            continue
        if not others:
            return {}
        if near.get(holder) in others:  # it has these bits already
            found[holder] = near[holder]
        else:
            needed = True
            found[holder] = _least_loaded(plan, holder, others, seconds, load)
        for block in blocks:
            block.add(regions.get(found[holder]))
    return found if needed else {}


def _least_loaded(
    plan: Plan, holder: str, others: Collection[str], seconds: Mapping[tuple[str, str], float], load: dict[str, int]
) -> str:
    """The one with least to keep among those that are near."""
    peers = plan.peers
    takes = {peer: seconds.get((holder, peer), math.inf) for peer in others}
    near = [peer for peer in others if takes[peer] <= NEAR * min(takes.values())]
    after = {peer: (peers.index(peer) - peers.index(holder)) % len(peers) for peer in near}
    keeper = min(near, key=lambda peer: (load[peer], takes[peer], after[peer]))
    load[keeper] += 1
    return keeper
