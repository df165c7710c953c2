"""The adapter's rule against the best choice in hindsight, against thresholds and against staying put; simulated.

    python -m benchmarks.adapter [--testbeds cee-small three-cities] [--json FILE]

One link of a testbed changes its bandwidth over 400 steps, in eleven ways. Every strategy pays the simulated period of its plan
in each step, and for every change the time to move blocks plus two steps. Figures are total time over the optimum's, which
knows the future.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.measure import machine, row
from benchmarks.migration import moves, moving_s
from meshcee.adapt.rule import REST_STEPS, SETTLING_STEPS, WorkFunction
from meshcee.figures.profile import Cluster, LinkProfile
from meshcee.figures.scenario import load_scenario, packaged
from meshcee.figures.workload import Workload
from meshcee.plan import Plan
from meshcee.planner.search import plans
from meshcee.simulator import period_s

STEPS = 400
FACTORS = (1.0, 0.5, 0.25, 0.125)
LOW = 2  # the index in FACTORS that most networks sink to
KEPT = 3  # plans kept of each search
Network = Callable[[random.Random], list[int]]  # the index of the factor in each step


def _flap(period: int) -> Network:
    return lambda _: [LOW if step // period % 2 else 0 for step in range(STEPS)]


def _bursts(dice: random.Random) -> list[int]:
    found = [0] * STEPS
    for _ in range(12):
        begin, level = dice.randrange(STEPS), dice.randrange(1, len(FACTORS))
        for step in range(begin, min(STEPS, begin + dice.randrange(1, 12))):
            found[step] = level
    return found


def _markov(dice: random.Random) -> list[int]:
    level, found = 0, []
    for _ in range(STEPS):
        if dice.random() < 0.03:
            level = dice.randrange(len(FACTORS))
        found.append(level)
    return found


NETWORKS: dict[str, Network] = {
    "steady": lambda _: [0] * STEPS,
    "drops for good": lambda _: [0] * 100 + [LOW] * (STEPS - 100),
    "recovers": lambda _: [LOW] * 100 + [0] * (STEPS - 100),
    "short dip": lambda _: [0] * 100 + [LOW] * 8 + [0] * (STEPS - 108),
    "long dip": lambda _: [0] * 100 + [LOW] * 100 + [0] * (STEPS - 200),
    "flaps every 3": _flap(3),
    "flaps every 12": _flap(12),
    "flaps every 25": _flap(25),
    "drifts": lambda _: [round(1.5 - 1.5 * math.cos(2 * math.pi * s / STEPS)) for s in range(STEPS)],
    "bursts": _bursts,
    "Markov": _markov,
}

Prices = Sequence[Sequence[float]]


def total_s(choice: Sequence[int], step_s: Prices, moving: Prices) -> float:
    """Of being at `choice[k]` in step k; everybody begins at 0."""
    return sum(moving[a][b] for a, b in zip([0, *choice], choice)) + sum(t[p] for t, p in zip(step_s, choice))


def optimum_s(step_s: Prices, moving: Prices) -> float:
    """Whoever knows the future."""
    every = range(len(moving))
    best = list(moving[0])
    for k, prices in enumerate(step_s):
        if k:
            best = [min(best[q] + moving[q][p] for q in every) for p in every]
        best = [b + t for b, t in zip(best, prices)]
    return min(best)


def work_function(step_s: Prices, moving: Prices) -> list[int]:
    """Where the adapter would be in each step: it decides after the step that it has seen."""
    rule, choice = WorkFunction(0, moving, REST_STEPS), []
    for prices in step_s:
        choice.append(rule.current)
        rule.observe(prices)
    return choice


def thresholds(step_s: Prices, moving: Prices) -> list[int]:
    """Go to what has been 10 % better for five steps on end, and then stay for twenty."""
    current, better, rest, choice = 0, 0, 0, []
    for prices in step_s:
        choice.append(current)
        best = min(range(len(prices)), key=lambda p: prices[p])
        better = better + 1 if prices[best] < 0.9 * prices[current] else 0
        rest -= 1
        if better >= 5 and rest <= 0:
            current, better, rest = best, 0, 20
    return choice


def slowed(cluster: Cluster, between: tuple[str, str], factor: float) -> Cluster:
    """The same cluster with one pair of regions joined more thinly."""
    links = {
        (a[1:], b[1:]): LinkProfile(
            edge["latency"], edge["bandwidth"] * (factor if {a[1:], b[1:]} == set(between) else 1.0)
        )
        for a, b, edge in cluster.graph.edges(data=True)
        if a[0] == "@" == b[0]
    }
    return Cluster(cluster.devices.values(), inside_latency_s=cluster.inside_latency_s, between=links)


def busiest(plan: Plan, cluster: Cluster) -> tuple[str, str]:
    """The thinnest link between regions that the plan crosses."""
    crossed: list[tuple[float, tuple[str, str]]] = []
    for pipeline in plan.pipelines:
        for a, b in zip(pipeline.stages, pipeline.stages[1:]):
            path = cluster.path(a.peers[0], b.peers[0])
            ends = (cluster.devices[a.peers[0]].region, cluster.devices[b.peers[0]].region)
            if path is not None and ends[0] != ends[1]:
                crossed.append((path.bandwidth_bytes_per_s, ends))
    return min(crossed)[1]


def measure(name: str) -> dict[str, dict[str, float]]:
    """Ratios to the optimum on one testbed, by network and strategy, and how often the adapter moved."""
    scenario = load_scenario(packaged("testbeds.json"), name, packaged("gpu_profiles.json"))
    work: Workload = scenario.workload
    first = plans(scenario.cluster, work)
    link = busiest(first.best, scenario.cluster)
    clusters = [slowed(scenario.cluster, link, f) for f in FACTORS]
    found: dict[str, Plan] = {}
    for cluster in clusters:
        choice = plans(cluster, work, start=first.best)
        for plan in (choice.best, *choice.runners_up[: KEPT - 1]):
            found.setdefault(plan.hash(), plan)
    kept = sorted(found.values(), key=lambda p: period_s(p, clusters[0], work))
    periods = [[period_s(p, c, work) for p in kept] for c in clusters]
    settle_s = SETTLING_STEPS * periods[0][0]
    moving = [[0.0 if a is b else settle_s + moving_s(moves(a, b), clusters[0], work) for b in kept] for a in kept]
    results: dict[str, dict[str, float]] = {}
    for network, weather in NETWORKS.items():
        step_s = [periods[level] for level in weather(random.Random(0))]
        best = optimum_s(step_s, moving)
        ours = work_function(step_s, moving)
        results[network] = {
            "adapter": total_s(ours, step_s, moving) / best,
            "thresholds": total_s(thresholds(step_s, moving), step_s, moving) / best,
            "never": total_s([0] * STEPS, step_s, moving) / best,
            "moves": sum(a != b for a, b in pairwise(ours)),
        }
    return results


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--testbeds", nargs="+", default=["cee-small", "cee-medium", "three-cities"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {name: measure(name) for name in options.testbeds}
    strategies = ("adapter", "thresholds", "never")
    print(row("network", *strategies, "changes"))
    print(row(*["---"] * 5))
    for network in NETWORKS:
        over = [networks[network] for networks in results.values()]
        changes = " to ".join(f"{f([r['moves'] for r in over]):.0f}" for f in (min, max))
        print(row(network, *(f"{_mean([r[s] for r in over]):.2f}" for s in strategies), changes))
    every = [found for networks in results.values() for found in networks.values()]
    print(row("mean", *(f"{_mean([r[s] for r in every]):.2f}" for s in strategies), ""))
    print(row("worst", *(f"{max(r[s] for r in every):.2f}" for s in strategies), ""))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
