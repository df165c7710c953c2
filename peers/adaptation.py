"""A running job's own figures, and what they make it do: the adapter's rule on a live mesh.

The idea: every step tells, for free, how long its members computed and how fast its large frames crossed each link. What
has shifted for several steps on end is put in the place of what the plan was made from; plans are searched and priced
under that, by the same code as the first one, and the work function (meshcee/adapter.py) says when to go over.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from statistics import median

import structlog

from meshcee.adapter import Adapter, Decision
from meshcee.errors import MeshceeError, PlanError
from meshcee.plan import Plan
from meshcee.planner.live import Measured, choose
from meshcee.simulator import period_s
from peers.agent import Agent
from peers.coordinator import PlanRequest
from peers.senses import HELD, Senses
from peers.view import named
from peers.walk import Report

__all__ = ["Adaptation", "Change"]

log = structlog.get_logger()

PROBES_EVERY_S = 5.0  # between two looks at what others have probed
SEARCH_SHARE = 0.1  # of the time, at most, goes into searching
CHANGE_SHARE = 0.1  # of the time that is left, at most, may go into a change
RUNNERS_UP = 2  # kept of each search


@dataclass
class Change:
    """Of the plan of a running job, because something else had changed."""

    step: int  # the last one under the old plan
    cause: tuple[str, ...]
    level: str  # as meshcee.adapter.Level
    alternatives: int  # plans that were priced
    gain: float  # old step over new, as priced
    before_s: float  # a step under the old plan, after the cause
    after_s: float | None = None  # and under the new one, once it has run some steps


class Adaptation:
    """One job's: make it when its plan begins, call `hear` with every step, `moved` when another plan begins.

    What it changes is written to `changes`.
    """

    def __init__(self, agent: Agent, request: PlanRequest, plan: Plan, changes: list[Change]) -> None:
        self._agent = agent
        self._changes = changes
        self._request = replace(request, job=replace(request.job, micro_batch=plan.micro_batch))
        self._senses = Senses({pair: link.bandwidth_bytes_per_s for pair, link in agent.links(plan.peers).items()})
        self._plan = plan
        self._adapter: Adapter | None = None  # none is needed while nothing has changed
        self._shifts: list[str] = []
        self._search_at_s = self._probes_at_s = -math.inf
        self._cause: list[str] = []  # of the last search
        self._begin()

    def _begin(self) -> None:
        self._began_at, self._began_s = self._agent.clock(), self._agent.monotonic()
        self._steps_s: list[float] = []  # of the running plan
        self._changing_s = 0.0  # what ending an epoch and beginning another takes

    def moved(self, plan: Plan) -> bool:
        """This plan begins; False when it is not the one that was chosen here."""
        if self._adapter is None or self._adapter.plan is not plan:
            return False
        self._plan = plan
        self._begin()
        self._senses.restart()
        return True

    async def hear(self, report: Report) -> Plan | None:
        """A plan to go over to at the end of the next step, if that pays before the job ends; None: stay."""
        if not self._steps_s:
            self._changing_s = 2 * max(0.0, self._agent.monotonic() - self._began_s - report.step_s)
        self._steps_s.append(report.step_s)
        recent_s = median(self._steps_s[-HELD:])
        if self._changes and self._changes[-1].after_s is None and len(self._steps_s) > HELD:
            change = self._changes[-1]
            change.after_s = recent_s
            log.info("since the plan changed", gain=round(change.before_s / recent_s, 2), step_s=round(recent_s, 3))
        left_s = (report.steps - report.step - 1) * recent_s
        try:
            decision = await self._decide(report, left_s)
        except MeshceeError as error:  # the job runs; a mesh that cannot be judged is no reason to end it
            log.warning("no other plan was looked for", error=str(error))
            return None
        if decision is None or left_s * (1 - 1 / decision.gain) <= decision.moving_s:
            return None
        names = self._agent.names()
        cause = tuple(named(text, names) for text in self._cause)
        level, priced = decision.level.name.lower(), len(decision.step_s)
        self._changes.append(Change(report.step, cause, level, priced, decision.gain, recent_s))
        gain, takes_s = round(decision.gain, 2), round(decision.moving_s, 1)
        log.warning("the plan changes", cause=cause, level=level, gain=gain, takes_s=takes_s, alternatives=priced - 1)
        return decision.plan

    async def _decide(self, report: Report, left_s: float) -> Decision | None:
        observed = report.observed
        self._shifts += self._senses.hear(observed)
        if self._agent.monotonic() >= self._probes_at_s:
            self._probes_at_s = self._agent.monotonic() + PROBES_EVERY_S
            links = self._agent.links(self._plan.peers).items()
            idle = {pair: link for pair, link in links if pair not in observed.rates}
            fresh = {p: k.bandwidth_bytes_per_s for p, k in idle.items() if k.measured_at > self._began_at}
            self._shifts += self._senses.probed(fresh)
        pays = self._changing_s < CHANGE_SHARE * left_s
        if self._shifts and pays and self._agent.monotonic() >= self._search_at_s:
            self._cause, self._shifts = self._shifts, []
            mesh = self._measured()
            began_s = self._agent.monotonic()
            await asyncio.to_thread(self._look, mesh, self._changing_s)
            now_s = self._agent.monotonic()
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
            if (link := links.get(pair)) is not None:  # how busy it is now makes it no other region's
                low, high = link.bandwidth_range_bytes_per_s or (link.bandwidth_bytes_per_s,) * 2
                links[pair] = replace(
                    link, bandwidth_bytes_per_s=rate, bandwidth_range_bytes_per_s=(min(low, rate), max(high, rate))
                )
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
