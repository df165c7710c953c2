"""How fast devices and plans turn out to be at work, held against what was expected of them.

The idea: a profile is a few seconds of a device that does nothing else, and off by some percent. Plans that are that
near to one another would be chosen between by chance. Every step tells for free how long its members really computed,
so from then on a price goes by that. So does the price of a plan that has run in less than the simulator expects, as it
may where a link is nearly full. When its weather is back, it is known to be better than what is only expected to be as
good.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import median_low

from meshcee.figures import Cluster, Measured
from meshcee.figures.workload import Workload
from meshcee.plan import Plan
from meshcee.simulator import build

__all__ = ["Paces"]

TELLING = 0.2  # of an average block: a stage that computes less shows what a call costs, and nothing of its device


class Paces:
    """One job's. What is known of a device outlives the plans in which it has shown it."""

    def __init__(self) -> None:
        self._off: dict[str, float] = {}  # times the seconds of its profile
        self._ran: dict[str, float] = {}  # plan, by its hash -> its step over the price, at most 1

    def hear(
        self,
        plan: Plan,
        cluster: Cluster,
        workload: Workload,
        compute_s: Mapping[str, float],
        slow: Mapping[str, float],
    ) -> None:
        """How long a step of this plan takes its members to compute, under a workload made from profiles as they are.

        slow  peer -> how much slower it has become meanwhile, which is no fault of its profile
        Raises PlanError for a plan that is none of this mesh.
        """
        for node in build(plan, cluster, workload).nodes:
            kind = workload.times[cluster.devices[node.peer].kind]
            block_s = kind.stage(0, workload.num_blocks, kind.largest).total_s / workload.num_blocks
            stage_s = kind.stage(node.first, node.end, kind.largest).total_s
            profiled_s = node.num_micro * (node.f_s + node.b_s + node.w_s)
            if node.peer in compute_s and profiled_s > 0 and stage_s >= TELLING * block_s:
                off = compute_s[node.peer] / profiled_s / slow.get(node.peer, 1.0)
                if 0 < off < math.inf:  # members may say what they like
                    self._off[node.peer] = off

    def forget(self, peer: str) -> None:
        """It was profiled anew, so it has another profile to be off from."""
        self._off.pop(peer, None)

    def ran(self, plan: Plan, step_s: float, priced_s: float) -> None:
        """So long took a step of it, in the weather and with the paces under which it was priced at that."""
        self._ran[plan.hash()] = min(1.0, step_s / priced_s)

    def share(self, plan: Plan) -> float:
        """Of the simulator's period, what a step of this plan takes; 1 for one that has not run, or was slower than expected."""
        return self._ran.get(plan.hash(), 1.0)

    def applied(self, mesh: Measured, slow: Mapping[str, float]) -> Measured:
        """The same mesh with its devices' times as steps show them.

        Who has not worked yet is taken to be off as most others are. (Claims of devices without a profile are scaled by what
        profiles are over claims, in `believed_speeds`.)
        """
        usual = median_low(self._off.values()) if self._off else 1.0
        times = {p: t.scaled(self._off.get(p, usual) * slow.get(p, 1.0)) for p, t in mesh.times.items()}
        return replace(mesh, times=times)
