"""Of plans that are as good as equally fast, the one that stays so when its links are not quite as measured.

The idea: how a pipeline's F's and B's mesh depends on windows and messages as on the teeth of two wheels. Plans that the
simulator has within a percent of one another differ by ten once a line is a tenth slower. No mesh keeps to its figures
by a tenth. So the last choice, and the last change of windows, go by the mean period over several states of the network.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from meshcee.errors import PlanError
from meshcee.figures import Cluster
from meshcee.figures.workload import Workload
from meshcee.plan import Plan
from meshcee.simulator import Edge, Instance, build, period_s, quick_period_s

__all__ = ["NEARLY", "steadiest"]

# Times what messages hold lines for, and times what they take besides: plans count on nine tenths of a link, which has ten or less.
WEATHERS = ((1.0, 1.0), (0.9, 1.0), (1.1, 1.1), (1.25, 1.5))
SAGGED = (2.0, 1.0)  # what crosses fewer lines, or less of them, is less hurt
NEARLY = 1.025  # times the best period, on the network as measured: a plan that is no slower may be chosen
LOOK_EVENTS = 60  # events that a look at other windows counts for, besides those simulated


def steadiest(
    priced: Sequence[tuple[float, Plan]],
    cluster: Cluster,
    workload: Workload,
    *,
    limit_s: float,
    events: int,
    micros: int,
) -> tuple[float, Plan]:
    """The period and the plan, of these or of these with other windows; no slower than `limit_s` on the network as it is.

    priced   periods and plans, best first
    events   that may be simulated, or a little more
    micros   simulated of a step, at most; the rest is extrapolated
    """
    limit_s = max(priced[0][0], min(limit_s, NEARLY * priced[0][0]))
    look = _Look(cluster, workload, micros)
    plans = [plan for period, plan in priced if period <= limit_s]
    plan = min(plans, key=lambda plan: look.mean_s(plan, weathers=(*WEATHERS, SAGGED)))
    mean_s = look.mean_s(plan)
    found = [(mean_s, plan), *look.shaken(mean_s, plan, events)]
    for _, plan in sorted(found, key=lambda x: x[0]):
        if (period := period_s(plan, cluster, workload)) <= limit_s:
            return period, plan
    return priced[0]


class _Look:
    """Mean periods of plans on one network in all its states."""

    def __init__(self, cluster: Cluster, workload: Workload, micros: int) -> None:
        self._cluster, self._workload, self._micros = cluster, workload, micros
        self._events = 0

    def mean_s(
        self, plan: Plan, limit_s: float = math.inf, weathers: Sequence[tuple[float, float]] = WEATHERS
    ) -> float:
        """Above the limit, only that it is; infinite for what cannot run."""
        try:
            instance = build(plan, self._cluster, self._workload)
        except PlanError:
            return math.inf
        total = 0.0
        for held, besides in weathers:
            self._events += LOOK_EVENTS
            period, events = quick_period_s(_in(instance, held, besides), self._micros, len(weathers) * limit_s - total)
            self._events += events
            total += period
            if total > len(weathers) * limit_s:
                break
        return total / len(weathers)

    def shaken(self, mean_s: float, plan: Plan, events: int) -> list[tuple[float, Plan]]:
        """The plan with other windows, each better than the one before; from a seed."""
        chance = random.Random(0)
        better: list[tuple[float, Plan]] = []
        now_s = best_s = mean_s
        now = plan
        begun = self._events
        seen = {plan}
        while self._events - begun < events:
            self._events += LOOK_EVENTS
            other = _other_windows(now, chance)
            if other in seen:
                continue
            seen.add(other)
            other_s = self.mean_s(other, 1.002 * now_s)
            if other_s <= 1.002 * now_s:
                now_s, now = other_s, other
            if now_s < best_s:
                best_s = now_s
                better.append((now_s, now))
        return better


def _in(instance: Instance, held: float, besides: float) -> Instance:
    """The same on a network whose lines are held and whose latencies last so many times as long."""

    def stretched(edge: Edge) -> Edge:
        lines = tuple((line, held * seconds) for line, seconds in edge.lines)
        return replace(edge, latency_s=besides * edge.latency_s, lines=lines)

    nodes = [
        replace(
            node,
            forward=[stretched(edge) for edge in node.forward],
            back=[stretched(edge) for edge in node.back],
        )
        for node in instance.nodes
    ]
    return replace(instance, nodes=nodes)


def _other_windows(plan: Plan, chance: random.Random) -> Plan:
    """Of one stage, or of all up to one, a few more or fewer."""
    i = chance.randrange(len(plan.pipelines))
    stages = list(plan.pipelines[i].stages)
    last = chance.randrange(len(stages))
    for j in range(last + 1) if chance.random() < 0.5 else (last,):
        window = stages[j].window + chance.choice((-4, -2, -1, 1, 2, 4))
        stages[j] = replace(stages[j], window=max(1, min(stages[j].live_cap, window)))
    pipelines = list(plan.pipelines)
    pipelines[i] = replace(pipelines[i], stages=tuple(stages))
    return replace(plan, pipelines=tuple(pipelines))
