"""From one plan to another: which blocks change hands, and how long the network needs for them.

The idea: a new plan costs what is not already where it should be. Every new holder fetches from an old one; all fetch at
once, and whoever shares a line shares its bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from meshcee.figures.profile import Cluster
from meshcee.figures.workload import Workload
from meshcee.plan import Plan

__all__ = ["Move", "moves", "moving_s"]

MOVED_SHARE = 0.75  # of a block's state: weight and two moments of each parameter, not its gradient


@dataclass(frozen=True)
class Move:
    """One block to one new holder; `source` is None when no holder is left and it comes from the owner's checkpoint."""

    block: int
    source: str | None
    target: str


def moves(old: Plan, new: Plan, gone: Collection[str] = ()) -> list[Move]:
    """What must be sent before `new` can run where `old` ran; `gone` are peers that can send nothing."""
    before, after = _holders(old), _holders(new)
    found = []
    for block, targets in after.items():
        sources = [p for p in before.get(block, []) if p not in gone]
        for i, target in enumerate(t for t in targets if t not in sources):
            found.append(Move(block, sources[i % len(sources)] if sources else None, target))
    return found


def _holders(plan: Plan) -> dict[int, list[str]]:
    held: dict[int, list[str]] = {}
    for stage in (s for p in plan.pipelines for s in p.stages):
        for block in range(stage.first, stage.end):
            held.setdefault(block, []).extend(stage.peers)
    return held


def moving_s(planned: Iterable[Move], cluster: Cluster, workload: Workload, owner: str | None = None) -> float:
    """Seconds until the last block has arrived; infinite when something joins neither source nor owner to a target.

    `owner` names the device near which the checkpoint lies; without it, what only the owner has is not priced.
    """
    load_bytes: dict[tuple[str, str], float] = {}
    latency_s = 0.0
    for move in planned:
        source = move.source or owner
        if source is None or source == move.target:
            continue
        path = cluster.path(source, move.target)
        if path is None:
            return math.inf
        latency_s = max(latency_s, path.latency_s)
        for line in path.lines:
            load_bytes[line] = load_bytes.get(line, 0.0) + MOVED_SHARE * workload.state_bytes[move.block]
    return latency_s + max((size / cluster.bandwidth(line) for line, size in load_bytes.items()), default=0.0)
