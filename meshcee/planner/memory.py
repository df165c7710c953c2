"""What a stage needs of its device's memory, in one place.

The idea: 16 bytes a trainable parameter, whatever the precision (fp32: weight, gradient and two moments; bf16: weight
and gradient at two bytes, master and moments at four), plus what every live micro-batch keeps from its F to its W.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshcee.config import FAR_COPIES, OTHERS_COPIES, OWN_COPIES
from meshcee.plan import Plan
from meshcee.profile import Cluster
from meshcee.workload import Workload

__all__ = [
    "STATE_FACTOR",
    "Shortage",
    "copies_factor",
    "needs",
    "shortages",
]

STATE_FACTOR = 4  # 16 bytes for each four of an fp32 parameter
COPY_SHARE = 0.75  # of a stage's state: not its gradients


def copies_factor(tiers: int) -> float:
    """What copies take at a member, times its own state, where stages are about equal: 1 tier for buddies, 2 for far ones too."""
    return COPY_SHARE * (OWN_COPIES + OTHERS_COPIES + 2 * FAR_COPIES * (tiers - 1)) if tiers else 0.0


@dataclass(frozen=True)
class Shortage:
    """A member that needs more than it has."""

    peer: str
    needed_bytes: int
    memory_bytes: int


def needs(plan: Plan, cluster: Cluster, workload: Workload) -> dict[str, int]:
    """Peer -> bytes when its live cap is reached."""
    return {
        m.peer: workload.stage_bytes(s.first, s.end, m.samples, min(s.live_cap, p.num_micro), s.recompute)
        + workload.sum_bytes(s.first, s.end, len(s.members) * len(plan.pipelines))
        for p in plan.pipelines
        for s in p.stages
        for m in s.members
    }


def shortages(plan: Plan, cluster: Cluster, workload: Workload) -> list[Shortage]:
    """Members whose memory the plan exceeds."""
    found = []
    for peer, needed in needs(plan, cluster, workload).items():
        device = cluster.devices.get(peer)
        if device is not None and needed > device.memory_bytes:
            found.append(Shortage(peer, needed, device.memory_bytes))
    return found
