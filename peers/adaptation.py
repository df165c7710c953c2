"""A running job's own figures, and what they make it do: the adapter's rule on a live mesh.

The idea: every step tells, for free, how long its members computed and how fast its large frames crossed each link. What
has shifted for several steps on end is put in the place of what the plan was made from; plans are searched and priced
under that, by the same code as the first one, and the work function (meshcee/adapter.py) says when to go over.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import TypeVar

import structlog

from meshcee.adapter import Adapter, Decision
from meshcee.errors import PlanError
from meshcee.plan import Plan
from meshcee.planner.live import Measured, choose
from meshcee.simulator import period_s
from peers.agent import Agent
from peers.coordinator import PlanRequest
from peers.walk import Observed

__all__ = ["Adaptation", "Senses"]

log = structlog.get_logger()

HELD = 5  # steps that a shift must last
SHIFT = 0.2  # less is noise: of 5 steps' medians on a busy machine
FAST = 50e6  # bytes per second: above, a large frame takes so short that it shows the machine rather than the link
PROBED = 1.5  # times as much or as little, for a probe of a link that is not in use
PROBES_EVERY_S = 5.0  # between two looks at what others have probed
SEARCH_SHARE = 0.1  # of the time, at most, goes into searching
CHANGE_SHARE = 0.1  # of the time that is left, at most, may go into a change
RUNNERS_UP = 2  # kept of each search

Pair = tuple[str, str]
K = TypeVar("K")


class Senses:
    """What steps show, held against what the plan was made from.

    slow   peer -> how many times its profiled seconds it computes now, where that has shifted
    rates  (from, to) -> bytes per second now, where that has shifted and is less than FAST
    """

    def __init__(self, bandwidths: Mapping[Pair, float]) -> None:
        self.slow: dict[str, float] = {}
        self.rates: dict[Pair, float] = {}
        self._known = {pair: min(bandwidth, FAST) for pair, bandwidth in bandwidths.items()}
        self._usual_s: dict[str, float] = {}
        self._compute_s: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=HELD))
        self._rates: defaultdict[Pair, deque[float]] = defaultdict(lambda: deque(maxlen=HELD))
        self._warm = False

    def restart(self) -> None:
        """Another plan begins: members hold other blocks, and the first step warms up."""
        self._usual_s.clear()
        self._compute_s.clear()
        self._warm = False

    def hear(self, observed: Observed) -> list[str]:
        """One more step; what has shifted, in words with peer ids."""
        if not self._warm:
            self._warm = True
            return []
        shifts = []
        for peer, seconds in observed.compute_s.items():
            if (change := _shift(self._compute_s[peer], seconds, self._usual_s, peer)) is not None:
                self.slow[peer] = self.slow.get(peer, 1.0) * change
                shifts.append(f"{peer} takes {change:.2f} times as long to compute")
        for pair, rate in observed.rates.items():
            if (change := _shift(self._rates[pair], min(rate, FAST), self._known, pair)) is not None:
                self.rates[pair] = self._known[pair]
                if self._known[pair] >= FAST:
                    del self.rates[pair]  # what was probed says more
                shifts.append(_of_link(pair, change))
        return shifts

    def probed(self, bandwidths: Mapping[Pair, float]) -> list[str]:
        """What others have measured of links that no step crosses; what has shifted, in words with peer ids."""
        shifts = []
        for pair, bandwidth in bandwidths.items():
            before = self._known.setdefault(pair, min(bandwidth, FAST))
            change = min(bandwidth, FAST) / before
            if change >= PROBED or change <= 1 / PROBED:
                self._known[pair] = min(bandwidth, FAST)
                self.rates.pop(pair, None)
                shifts.append(_of_link(pair, change))
        return shifts


def _of_link(pair: Pair, change: float) -> str:
    return f"the link from {pair[0]} to {pair[1]} has {change:.2f} times its bandwidth"


def _shift(row: deque[float], value: float, known: dict[K, float], key: K) -> float | None:
    """How many times the known figure the last HELD are, if that is much; then it is known as that."""
    row.append(value)
    if len(row) < HELD:
        return None
    now = median(row)
    before = known.setdefault(key, now)
    if before <= 0 or abs(now / before - 1) < SHIFT:
        return None
    known[key] = now
    row.clear()
    return now / before


class Adaptation:
    """One job's. Call `hear` with every step, `moved` when another plan begins."""

    def __init__(self, agent: Agent, request: PlanRequest, plan: Plan) -> None:
        self._agent = agent
        self._request = replace(request, job=replace(request.job, micro_batch=plan.micro_batch))
        self._senses = Senses({pair: link.bandwidth_bytes_per_s for pair, link in agent.links(plan.peers).items()})
        self._plan = plan
        self._adapter: Adapter | None = None  # none is needed while nothing has changed
        self._shifts: list[str] = []
        self._search_at_s = self._probes_at_s = -math.inf
        self._began_at = time.time()
        self.cause: list[str] = []  # of the last search

    def moved(self, plan: Plan) -> bool:
        """This plan begins; False when it is not the one that was chosen here."""
        if self._adapter is None or self._adapter.plan is not plan:
            return False
        self._plan = plan
        self._began_at = time.time()
        self._senses.restart()
        return True

    async def hear(self, observed: Observed, changing_s: float, left_s: float) -> Decision | None:
        """A plan to go over to, or None.

        changing_s  what ending an epoch and beginning another takes
        left_s      until the job ends: near its end no change would pay
        """
        self._shifts += self._senses.hear(observed)
        if time.monotonic() >= self._probes_at_s:
            self._probes_at_s = time.monotonic() + PROBES_EVERY_S
            links = self._agent.links(self._plan.peers).items()
            idle = {pair: link for pair, link in links if pair not in observed.rates}
            fresh = {p: k.bandwidth_bytes_per_s for p, k in idle.items() if k.measured_at > self._began_at}
            self._shifts += self._senses.probed(fresh)
        pays = changing_s < CHANGE_SHARE * left_s
        if self._shifts and pays and time.monotonic() >= self._search_at_s:
            self.cause, self._shifts = self._shifts, []
            mesh = self._measured()
            began_s = time.monotonic()
            await asyncio.to_thread(self._look, mesh, changing_s)
            now_s = time.monotonic()
            self._search_at_s = now_s + (now_s - began_s) / SEARCH_SHARE
        if self._adapter is None:
            return None
        decision = self._adapter.observe()
        return decision if decision.plan is not self._plan else None

    def _measured(self) -> Measured:
        """What is known of the mesh, with what this job has seen of it in the place of older figures."""
        mesh = self._agent.measured(self._plan.peers)
        links = dict(mesh.links)
        for pair, rate in self._senses.rates.items():
            if pair in links:
                links[pair] = replace(links[pair], bandwidth_bytes_per_s=rate)
        slow = self._senses.slow
        times = {p: t.scaled(slow.get(p, 1.0)) for p, t in self._request.times.items() if p in mesh.devices}
        return replace(mesh, links=links, times=times)

    def _look(self, mesh: Measured, changing_s: float) -> None:
        """Search under the present figures, and price everything anew."""
        try:
            choice, cluster, workload = choose(mesh, self._request.job, self._request.stages)
        except PlanError as error:  # it runs, so go on
            log.info("no other plan", error=str(error))
            return

        def price(plan: Plan) -> float:
            try:
                return period_s(plan, cluster, workload)
            except PlanError:  # a peer of it has gone
                return math.inf

        if self._adapter is None:
            self._adapter = Adapter(self._plan, price, lambda a, b: changing_s)
        self._adapter.weather(price, [choice.best, *choice.runners_up[:RUNNERS_UP]])
