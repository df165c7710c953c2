"""What a plan would do on a cluster, before anyone rents a machine.

The idea: discrete events over numbers, with few written rules (docs/simulator.md). The period of consecutive steps is
what a plan is judged by: with no barrier between steps, the first one tells little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshcee.errors import PlanError
from meshcee.figures import Cluster
from meshcee.figures.scenario import LinkChange
from meshcee.figures.workload import Workload
from meshcee.plan import Plan
from meshcee.simulator.engine import Outcome, Span, run
from meshcee.simulator.instance import Instance, build
from meshcee.simulator.weather import Weather

__all__ = ["Instance", "Span", "Timeline", "bound_s", "build", "period_s", "quick_period_s", "simulate", "slowest_s"]


@dataclass(frozen=True)
class Timeline:
    """What was simulated."""

    instance: Instance
    outcome: Outcome

    @property
    def period_s(self) -> float:
        """Of consecutive steps, after the first."""
        return max(_period(self.outcome), self.instance.feed_s)

    @property
    def waits_for_owner(self) -> bool:
        """Whether reading or sending a step's samples takes the owner longer than the members take for the step."""
        return bool(self.outcome.applied_s) and self.instance.feed_s > _period(self.outcome)

    @property
    def slowed(self) -> float:
        """How many times as long the steps take as the members alone would, since these wait for the owner; 1 or more."""
        return self.instance.feed_s / max(_period(self.outcome), 1e-12) if self.waits_for_owner else 1.0

    @property
    def step_s(self) -> list[float]:
        """Seconds from each step's application everywhere to the next one's; none is shorter than what its owner takes."""
        ends = [0.0, *self.outcome.applied_s]
        return [max(b - a, self.instance.feed_s) for a, b in pairwise(ends)]

    def utilisation(self) -> dict[str, float]:
        """Share of the time that each member computes, optimizer included."""
        total = max(self.outcome.end_s * self.slowed, 1e-12)
        return {n.peer: busy / total for n, busy in zip(self.instance.nodes, self.outcome.busy_s)}


def _period(outcome: Outcome) -> float:
    ends = outcome.applied_s
    if not ends:
        raise PlanError("the step never ends: a device that it needs is dead")
    return ends[0] if len(ends) == 1 else (ends[-1] - ends[0]) / (len(ends) - 1)


def simulate(
    plan: Plan,
    cluster: Cluster,
    workload: Workload,
    *,
    steps: int = 3,
    record: bool = False,
    trace: Sequence[LinkChange] = (),
    failures: Mapping[str, float] | None = None,
    forward_first: bool = False,
) -> Timeline:
    """Run `steps` steps of the plan.

    failures       peer -> second of its death; what waits for it then waits for ever, and fewer steps are in the result
    forward_first  every F of a step before its first B (GPipe)
    """
    instance = build(plan, cluster, workload, forward_first=forward_first)
    weather = Weather(trace, instance.lines, instance.bandwidths) if trace else None
    dead = {n: at for n, node in enumerate(instance.nodes) if (at := (failures or {}).get(node.peer)) is not None}
    return Timeline(instance, run(instance, steps, record=record, weather=weather, dead_at_s=dead))


def period_s(plan: Plan, cluster: Cluster, workload: Workload, *, forward_first: bool = False) -> float:
    """The period of three consecutive steps, simulated whole; of one step where the next ones must repeat it."""
    instance = build(plan, cluster, workload, forward_first=forward_first)
    outcome = run(instance, 3, steady=True)
    return max(_period(outcome) if outcome.period_s is None else outcome.period_s, instance.feed_s)


def quick_period_s(instance: Instance, most: int, limit_s: float = math.inf) -> tuple[float, int]:
    """The period with about `most` micro-batches simulated, the others at the pace of the slowest device or line.

    limit_s  where the period must turn out longer, the simulation ends early, and a bound above the limit is returned
    Returns also the number of events that this took.

    That pace is what every further micro-batch costs once the pipeline is full, unless memory or windows hold it back.
    So this may be too optimistic, and whoever decides simulates the finalists whole. (The rate inside one step would mislead
    more: while a pipeline drains, B's come faster.)
    """
    full = instance.nodes[0].num_micro
    equal = len({n.num_micro for n in instance.nodes}) == 1
    long = max(most, 2 * instance.nodes[0].window + 8)
    if not equal or full <= long + long // 4:
        long = full
    rest_s = (full - long) * slowest_s(instance)
    alone = len({n.pipeline for n in instance.nodes}) == 1
    least_s = limit_s - rest_s if alone else math.inf
    outcome = run(instance, 2, num_micro=long if equal else None, steady=True, limit_s=least_s)
    period = (_period(outcome) if outcome.period_s is None else outcome.period_s) + rest_s
    return max(period, instance.feed_s), outcome.events


def slowest_s(instance: Instance) -> float:
    """Seconds of one micro-batch on the busiest device, host or line: no period per micro-batch is shorter."""
    return max(*_work(instance, {}), 0.0)


def bound_s(instance: Instance) -> float:
    """Seconds of a step on the busiest device, host or line: no period of many steps is shorter.

    (The period of three can be, by the little that a device runs ahead of the others.)
    """
    return max(*_work(instance, {n: node.num_micro for n, node in enumerate(instance.nodes)}), instance.feed_s)


def _work(instance: Instance, micros: Mapping[int, int]) -> list[float]:
    """Seconds of every device, host and line; with `micros` (node -> micro-batches) of a step, else of one micro-batch."""
    lines = [0.0] * len(instance.lines)
    nodes = []
    hosts = [0.0] * instance.hosts
    for n, node in enumerate(instance.nodes):
        count = micros.get(n, 1)
        nodes.append(count * (node.f_s + node.b_s + node.w_s) + (node.optimizer_s if micros else 0.0))
        if node.host >= 0:
            hosts[node.host] += nodes[-1] * node.load
        for edge in (*node.forward, *node.back):
            for line, held_s in edge.lines:
                lines[line] += count * held_s
    for ring in instance.rings if micros else ():
        for hop in ring.hops:
            for line, held_s in hop:
                lines[line] += held_s
    return lines + nodes + hosts
