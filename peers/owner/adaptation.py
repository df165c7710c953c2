"""A running job's own figures, and what they make it do: the adapter's rule on a live mesh.

The idea: every step tells, for free, how long its members computed and how fast its large frames crossed each link. What
has shifted for several steps on end takes the place of what the plan was made from. Devices that have come meanwhile
are put beside it. Plans are searched and priced under that, by the same code as the first one, and the work function
(meshcee/adapt/rule.py) says when to go over.

Devices that come while the job runs are profiled beside the training before they are put beside it (`Newcomers`). So are idle
ones, now and then: they may have been busy with other work when they were profiled first. While nothing changes, a longer search
(peers/planning/longer.py) looks for plans that the first one has missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import structlog

from meshcee.adapt import (
    LASTING_STEPS,
    SETTLING_STEPS,
    SHIFT,
    Adapter,
    Decision,
    Feeding,
    Joined,
    Paces,
    Pair,
    Profiled,
    Searched,
    Senses,
    Shift,
    as_shown,
    evened,
    together,
)
from meshcee.errors import MeshceeError, PlanError
from meshcee.events import Event
from meshcee.figures import BlockTimes, Cluster, JobCosts, LinkProfile, Measured
from meshcee.figures.workload import Workload
from meshcee.plan import Plan
from meshcee.planner import choose, most_micros, situation
from meshcee.simulator import period_s
from peers.measure import FRESH_S, sound
from peers.mesh_view import MeshView
from peers.owner.answers import Report
from peers.planning import PlanRequest
from peers.planning.longer import Longer

__all__ = ["Adaptation", "Change", "Newcomers"]

log = structlog.get_logger()

SELDOM_S = 3600.0  # between two profiles of idle devices that stay as they are; FRESH_S at first
LINKS_S = 20.0  # that a device may take to measure its links to the members; then it is planned with what there is

Ask = Callable[[Collection[str]], Awaitable[Mapping[str, BlockTimes]]]


class Newcomers:
    """One job's. `times` are all profiles so far, by peer; `ask` gets those of the devices that are idle now, but for some."""

    def __init__(self, agent: MeshView, ask: Ask, times: Mapping[str, BlockTimes], *, is_given: bool = False) -> None:
        """A plan that `is_given` by the user is left only where something has changed."""
        self.times = dict(times)
        self.longer = Longer(agent, is_wanted=not is_given)
        self._before: Mapping[str, BlockTimes] = {}  # these were asked for again
        self._agent = agent
        self._ask = ask
        self._known: dict[str, str] = {}  # peer -> which process of it
        self._know(times)
        self._seen_s: dict[str, float] = {}  # when each of the others was seen first
        self._asked: dict[str, str] = {}  # likewise
        self._asking: asyncio.Task[None] | None = None
        self._again_s = FRESH_S
        self._again_at_s = agent.monotonic() + FRESH_S

    def look(self, members: Collection[str], slow: Mapping[str, float]) -> list[Joined | Profiled]:
        """Devices that can be planned with since the last look, or otherwise than before. Called with every step.

        slow  peer -> how many times its profiled seconds it has been seen to compute
        """
        devices, here = self._agent.devices(members), self._instances()
        present = devices.keys()
        self._known = {p: known for p, known in self._known.items() if p in members or here.get(p) == known}
        self._know(set(members) - self._known.keys())
        now_s = self._agent.monotonic()
        self._seen_s = {p: self._seen_s.get(p, now_s) for p in present - self._known.keys()}
        hosts = {device.host for peer, device in devices.items() if peer in members and device.kind == "cpu"} - {""}
        # Beside a member on the same processor, a profile would disturb that member, and show a busy machine.
        beside = {p for p in self._known if p in devices and devices[p].kind == "cpu" and devices[p].host in hosts}
        idle = present - {*members} - beside
        if self._asking is None:
            found = self._due(members) if self._seen_s else set()
            if found or (idle and now_s >= self._again_at_s):
                self._asked, self._before = {peer: here[peer] for peer in found}, dict(self.times)
                self._asking = self._agent.spawn(self._profile(beside))
            return []
        if not self._asking.done():
            return []
        self._asking = None
        answered = {p: known for p, known in self._asked.items() if here.get(p) == known}  # not started anew since
        self._known |= answered
        joined = [Joined(peer) for peer in sorted(answered.keys() & present)]
        others = [Profiled(p) for p in sorted(idle - answered.keys()) if self._has_shifted(p, slow.get(p, 1.0))]
        self._again_s = FRESH_S if joined or others else min(2 * self._again_s, SELDOM_S)
        self._again_at_s = now_s + self._again_s
        return [*joined, *others]

    def _has_shifted(self, peer: str, slow: float) -> bool:
        """Whether it was profiled again, and computes otherwise than was known."""
        before, now = self._before.get(peer), self.times.get(peer)
        if now is None or now is before:
            return False
        return before is None or before.sizes != now.sizes or abs(now.total_s / (before.total_s * slow) - 1) >= SHIFT

    def lost(self, peers: Collection[str]) -> None:
        """These are members no more, and may come back: as another process, or as the same one."""
        self._known = {peer: known for peer, known in self._known.items() if peer not in peers}

    def _instances(self) -> dict[str, str]:
        """A process that is started anew has another one, and may never have been missed."""
        return {peer: record.instance for peer, record in self._agent.directory.peers.items()}

    def _know(self, peers: Collection[str]) -> None:
        here = self._instances()
        self._known |= {peer: here[peer] for peer in peers if peer in here}

    def _due(self, members: Collection[str]) -> set[str]:
        """Of those who are new: whose links to all members are known, or who has had long enough to measure them."""
        links, now_s = self._agent.links(members), self._agent.monotonic()
        return {
            peer
            for peer, since_s in self._seen_s.items()
            if now_s - since_s >= LINKS_S or all({(peer, m), (m, peer)} <= links.keys() for m in members)
        }

    async def _profile(self, without: Collection[str]) -> None:
        with contextlib.suppress(MeshceeError):  # its claimed speed stands in
            self.times |= await self._ask(without)
        if self._asked:
            log.info("devices have come while the job runs", peers=sorted(self._asked))

    def close(self) -> None:
        self.longer.close()
        if self._asking is not None:
            self._asking.cancel()


LATE = LASTING_STEPS // 2  # steps that a shift has been there before the one that tells it
PROBES_EVERY_S = 1.0  # between two looks at what others have probed
SOUND_STEPS, SOUND_S = 2, 3.0  # at least, between two times that peers are asked to probe links that have sagged
MOST_SOUNDED = 6  # links at a time
PROMPT_S = 0.2  # that a step's report waits for a look; a longer one goes on beside the steps
SEARCH_SHARE = 0.1  # of the time, at most, goes into searching
CHANGE_SHARE = 0.1  # of the time that is left, at most, may go into a change
RECENT = 1000  # steps whose seconds count for what one usually takes
SHOWN = 5  # alternatives, best first, in a line of the log


@dataclass
class Change:
    """Of the plan of a running job, because something else had changed."""

    step: int  # the last one under the old plan
    cause: tuple[str, ...]
    level: str  # as meshcee.adapt.rule.Level
    alternatives: int  # plans that were priced
    gain: float  # old step over new, as priced
    before_s: float  # a step under the old plan, after the cause
    after_s: float | None = None  # and under the new one, once it has run some steps


@dataclass(frozen=True)
class _Known:
    """What a look is about: the running plan, the other candidates, and what steps and probes have shown when it began.

    calm      the mesh before anything shifted under this plan, the job's costs, and seconds of a step then
    profiled  devices with new profiles: what older steps showed of them says nothing
    found     by a longer search
    """

    plan: Plan
    others: tuple[Plan, ...]
    request: PlanRequest
    mesh: Measured
    compute_s: Mapping[str, float]
    slow: Mapping[str, float]
    calm: tuple[Measured, JobCosts, float] | None
    recent_s: float
    profiled: Collection[str]
    cause: tuple[Shift, ...]
    searches: bool
    found: tuple[Plan, ...]


@dataclass(frozen=True)
class _Weather:
    """What a look has found: other plans, and seconds of a step by each plan's hash; nothing where no plan is possible."""

    found: list[Plan] = field(default_factory=list)
    seconds: Mapping[str, float] = field(default_factory=dict)
    took_s: float = 0.0

    def price(self, plan: Plan) -> float:
        return self.seconds[plan.hash()]


class _Looks:
    """One after another on a thread, beside the steps: a search may take longer than a step, whose report waits for none."""

    def __init__(self, check: Callable[[Plan, Mapping[str, str]], None], clock: Callable[[], float]) -> None:
        self._check = check
        self._clock = clock
        self._paces = Paces()  # the thread's own, as are
        self._most: dict[str, tuple[int, ...]] = {}  # by plan: micro-batches that its pipelines have memory for
        self.known: _Known | None = None  # of the look that is under way
        self._running: asyncio.Future[_Weather]

    def begin(self, known: _Known) -> None:
        self.known = known
        self._running = asyncio.get_running_loop().run_in_executor(None, self._look, known)

    async def end(self, within_s: float) -> _Weather | None:
        """What has come of it; None: it goes on."""
        done, _ = await asyncio.wait((self._running,), timeout=within_s)
        if not done:
            return None
        self.known = None
        return self._running.result()

    def as_seen(self, mesh: Measured, slow: Mapping[str, float]) -> Measured:
        """With the paces that looks have found; called when none is under way."""
        return self._paces.applied(mesh, slow)

    def _look(self, known: _Known) -> _Weather:
        """Price everything anew under the present figures, and, if asked, search for what is better."""
        began_s = self._clock()
        job, mesh, plan = known.request.job, known.mesh, known.plan
        found = [*known.found]
        for peer in known.profiled:
            self._paces.forget(peer)
        try:
            with contextlib.suppress(PlanError):  # a member has gone
                self._paces.hear(plan, *situation(mesh, job), known.compute_s, known.slow)
                if (calm := known.calm) is not None:
                    then = self._paces.applied(calm[0], {})
                    self._paces.ran(plan, calm[2], self._evened_s(plan, *situation(then, calm[1]), then, calm[1]))
            mesh = self._paces.applied(mesh, known.slow)
            if known.searches:
                choice, cluster, workload = choose(mesh, job, known.request.stages)
                found += choice.candidates
            else:
                cluster, workload = situation(mesh, job)
        except PlanError as error:  # it runs, so go on
            log.info("no other plan", error=str(error))
            return _Weather(took_s=self._clock() - began_s)
        kinds = {p: device.kind for p, device in mesh.devices.items()}

        def price(one: Plan) -> float:
            try:
                seconds = self._evened_s(one, cluster, workload, mesh, job) * self._paces.share(one)
                if one is plan:  # figures that price it above its own steps are wrong, and no reason to leave it
                    seconds = min(seconds, known.recent_s)
                self._check(one, kinds)
                return seconds
            except PlanError:  # a peer of it has gone, or is of another kind than the job can do with
                return math.inf

        plans = {one.hash(): one for one in (*found, *known.others, plan)}
        return _Weather(found, {key: price(one) for key, one in plans.items()}, self._clock() - began_s)

    def _evened_s(self, plan: Plan, cluster: Cluster, workload: Workload, mesh: Measured, job: JobCosts) -> float:
        """The period of a plan, whose pipelines have come to the shares that their paces lead to."""
        seconds = period_s(plan, cluster, workload)
        if not plan.may_move_shares:
            return seconds
        if (most := self._most.get(plan.hash())) is None:
            most = self._most[plan.hash()] = most_micros(plan, mesh.devices, job)
        alone = (replace(plan, pipelines=(p,)) for p in plan.pipelines)
        paces = [period_s(one, cluster, workload) / one.pipelines[0].num_micro for one in alone]
        return min(seconds, period_s(evened(plan, paces, most), cluster, workload))


class Adaptation:
    """One job's: make it when its plan begins, call `hear` with every step, `moved` when another plan begins.

    What it changes is written to `changes`. `check` raises PlanError for a plan that cannot run on such kinds of devices.
    """

    def __init__(
        self,
        agent: MeshView,
        request: PlanRequest,
        plan: Plan,
        changes: list[Change],
        newcomers: Newcomers,
        check: Callable[[Plan, Mapping[str, str]], None],
    ) -> None:
        self._agent = agent
        self._changes = changes
        self._newcomers = newcomers
        newcomers.longer.changed()  # this plan was made in a hurry, or for other members
        self._request = replace(request, job=replace(request.job, micro_batch=plan.micro_batch))
        self._senses = Senses.of(agent.links(plan.peers))
        self._feeding = Feeding(request.feeds, request.job.data_s * request.job.batch_size)
        self._looks = _Looks(check, agent.monotonic)
        self._profiled: set[str] = set()  # since the last look
        self._plan = plan
        self._change: Change | None = None  # to the next plan or the running one, until its steps tell what it gained
        self._adapter: Adapter | None = None  # none is needed while nothing has changed
        self._shifts: list[Shift] = []
        self._is_news = False  # whether anything was told since the last look
        self._steps = self._late_steps = (
            0  # that the adapter has not observed: under the weather of a look, and of the next one
        )
        self._search_at_s = self._probes_at_s = self._sound_at_s = -math.inf
        self._cluster: Cluster | None = None
        self._crossed: set[Pair] = set()  # by the last step
        self._probed_at: dict[Pair, float] = {}  # of the last figure that was heard, by the clock of records
        self._shifted_at = -math.inf  # when a link last shifted, by the clock of records
        self._cause: list[Shift] = []  # of the last search
        self._vetoed: Plan | None = None  # would pay, but not before the job ends
        self._begin(None)

    def _begin(self, since_s: float | None) -> None:
        self._began_at, self._began_s = self._agent.clock(), since_s or self._agent.monotonic()
        self._pauses = 2 if since_s is None else 1  # with none seen, an end is taken to last as long
        self._steps_s: deque[float] = deque(maxlen=RECENT)  # of the running plan
        self._begun = self._measured(), self._request.job  # under which it begins
        self._calm_s: float | None = None  # a step of it until something shifted
        self._shifted = False
        self._changing_s = 0.0  # what ending an epoch and beginning another takes

    def moved(self, plan: Plan, since_s: float | None = None) -> bool:
        """This plan begins; False when it is not the one that was chosen here. `since_s`: when the last step was reported."""
        if self._adapter is None or self._adapter.plan is not plan:
            return False
        self._plan = plan
        if self._change is not None:
            self._changes.append(self._change)
        self._begin(since_s)
        self._senses.restart()
        self._feeding.restart()
        return True

    def learnt(self, request: PlanRequest) -> PlanRequest:
        """The same question, with what steps have shown of how fast members are fed and samples are read."""
        job = replace(request.job, data_s=self._request.job.data_s)
        return replace(request, job=job, feeds=dict(self._feeding.links))

    @property
    def _recent_s(self) -> float:
        """That a step has taken lately."""
        return median([*self._steps_s][-LASTING_STEPS:])

    async def hear(self, report: Report, can_move: bool) -> Plan | None:
        """A plan to go over to at the end of the next step, if that pays before the job ends, and state can move; None: stay."""
        if not self._steps_s:
            self._changing_s = self._pauses * max(0.0, self._agent.monotonic() - self._began_s - report.step_s)
        self._steps_s.append(report.step_s)
        recent_s = self._recent_s
        if len(self._steps_s) == LASTING_STEPS and self._pauses == 1:
            # Moments that came behind its micro-batches held the first one up.
            self._changing_s += max(0.0, self._steps_s[0] - recent_s)
        if self._change is not None and len(self._steps_s) > LASTING_STEPS:
            change, self._change = self._change, None
            change.after_s = recent_s
            log.info(Event.PLAN_CHANGED, gain=round(change.before_s / recent_s, 2), step_s=round(recent_s, 3))
        left_s = (report.steps - report.step - 1) * recent_s
        try:
            decision = await self._decide(report, left_s)
        except MeshceeError as error:  # the job runs; a mesh that cannot be judged is no reason to end it
            log.warning("no other plan was looked for", error=str(error))
            return None
        if decision is None or self._adapter is None:
            return None
        pays = left_s * (1 - 1 / decision.gain) > decision.moving_s
        if not can_move or not pays:
            self._adapter.stay()
            if can_move and decision.plan is not self._vetoed:
                self._vetoed = decision.plan
                log.info(Event.PLAN_STAYS_TO_THE_END, **self._told(decision))
            return None
        told = self._told(decision)
        considered = len(decision.step_s)
        self._change = Change(report.step, told["cause"], told["level"], considered, decision.gain, recent_s)
        log.warning(Event.PLAN_CHANGES, **told)
        return decision.plan

    def _told(self, decision: Decision) -> dict[str, Any]:
        """Of a decision, for the log: its cause, what it gains, and what a step takes now and would under other plans."""
        names = self._agent.names()
        others = sorted(seconds for p, seconds in enumerate(decision.step_s) if p != decision.before)
        return {
            "cause": tuple(shift.text(names) for shift in together(self._cause)),
            "level": decision.level.name.lower(),
            "gain": round(decision.gain, 2),
            "takes_s": round(decision.moving_s, 1),
            "step_s": round(decision.step_s[decision.before], 3),
            "alternatives": len(others),
            "alternatives_s": [round(seconds, 3) for seconds in others[:SHOWN]],
        }

    async def _decide(self, report: Report, left_s: float) -> Decision | None:
        observed, steps = report.observed, 1
        feeding, costs = self._feeding, self._request.job
        told = [*self._senses.hear(observed), *feeding.hear(observed.fed, report.step_s, observed.data_s)]
        if feeding.data_s != costs.data_s * costs.batch_size:
            self._request = replace(self._request, job=replace(costs, data_s=feeding.data_s / costs.batch_size))
        self._crossed = set(observed.rates)
        if self._cluster is None:
            self._place(self._agent.measured(self._plan.peers))
        self._sound(report.step)
        if self._agent.monotonic() >= self._probes_at_s:
            self._probes_at_s = self._agent.monotonic() + PROBES_EVERY_S
            links = self._agent.links(self._plan.peers).items()
            idle = {pair: link for pair, link in links if self._is_free(pair)}
            fresh = {p: k for p, k in idle.items() if k.measured_at > self._probed_at.get(p, self._began_at)}
            self._probed_at |= {p: k.measured_at for p, k in fresh.items()}
            told += self._senses.probed({p: k.bandwidth_bytes_per_s for p, k in fresh.items()})
        if told:
            self._shifted_at = self._agent.clock()
            steps += LATE
            calm_s = [*self._steps_s][1:-LASTING_STEPS]  # what is told of now began LASTING_STEPS steps ago at most
            if not self._shifted and len(calm_s) >= LASTING_STEPS:
                self._calm_s = median(calm_s)
            self._shifted = True
        joined = self._newcomers.look(self._plan.peers, self._senses.slow)
        for shift in joined:
            self._senses.forget(shift.peer)
            self._profiled.add(shift.peer)
        self._shifts += (told := [*told, *joined])
        self._is_news = self._is_news or bool(told)
        self._search_longer(bool(told), left_s)
        if self._looks.known is not None and self._is_news:
            self._late_steps += steps  # the look that is under way knows nothing of their weather
        else:
            self._steps += steps
        if self._looks.known is None and not self._begin_look(left_s):
            return self._observed(None)
        known = self._looks.known
        assert known is not None
        try:
            weather = await self._looks.end(max(PROMPT_S, SEARCH_SHARE * self._recent_s))
        except MeshceeError:
            self._ask_again(known)
            raise
        if weather is None:
            return None
        if known.searches:
            self._search_at_s = self._agent.monotonic() + weather.took_s / SEARCH_SHARE
        if known.plan is not self._plan:  # which has changed meanwhile
            self._ask_again(known)
            return self._observed(None)
        self._cause = list(known.cause)
        self._hear_weather(weather)
        return self._observed(weather)

    def _search_longer(self, is_news: bool, left_s: float) -> None:
        """While nothing is new; and again after what is."""
        longer = self._newcomers.longer
        if is_news:
            longer.changed()
        elif len(self._steps_s) > LASTING_STEPS and self._looks.known is None and not self._shifts:
            longer.look(self._as_seen, self._request, self._plan, left_s)

    def _as_seen(self) -> Measured:
        """The mesh, its devices as fast as steps have shown them."""
        return self._looks.as_seen(self._measured(), self._senses.slow)

    def _ask_again(self, known: _Known) -> None:
        """Nothing has come of this look, so what made it necessary is open."""
        self._shifts[:0] = known.cause if known.searches else ()
        self._profiled |= {*known.profiled}
        self._is_news = True

    def _begin_look(self, left_s: float) -> bool:
        """Whether there is reason for one."""
        pays = self._changing_s < CHANGE_SHARE * left_s
        searches = bool(self._shifts) and pays and self._agent.monotonic() >= self._search_at_s
        found = self._newcomers.longer.take() if pays else ()
        if not searches and not found and (not self._is_news or self._adapter is None):
            return False
        calm = None if self._calm_s is None else (*self._begun, self._calm_s)
        known = _Known(
            self._plan,
            tuple(self._adapter.plans) if self._adapter is not None else (),
            self._request,
            self._measured(),
            self._senses.compute_s,
            dict(self._senses.slow),
            calm,
            self._recent_s,
            self._profiled,
            (*self._shifts, *[Searched()] * bool(found)),
            searches,
            found,
        )
        self._profiled, self._calm_s, self._is_news = set(), None, False
        if searches:
            self._shifts = []
        self._looks.begin(known)
        return True

    def _hear_weather(self, weather: _Weather) -> None:
        if not weather.seconds:
            return
        if self._adapter is None:
            # Settling is reckoned in steps before the change of weather. What the beginning of an epoch took beyond that
            # went into moving state.
            predicted = self._plan.predicted
            undisturbed_s = predicted.step_s if predicted is not None else weather.price(self._plan)
            settle_s = SETTLING_STEPS * undisturbed_s
            self._adapter = Adapter(
                self._plan, weather.price, lambda a, b: max(0.0, self._changing_s - settle_s), settle_s=settle_s
            )
        self._adapter.weather(weather.price, weather.found)

    def _observed(self, looked: _Weather | None) -> Decision | None:
        """What the steps since the last time lead to, under the weather that is known."""
        steps, self._steps, self._late_steps = self._steps, self._late_steps, 0
        if self._adapter is None:
            return None
        decision = self._adapter.observe(steps)
        if decision.plan is not self._plan:
            return decision
        if looked is not None:
            log.info(Event.PLAN_STAYS, **self._told(decision))
        return None

    def _place(self, mesh: Measured) -> None:
        self._cluster, _ = situation(mesh, self._request.job)

    def _line(self, pair: Pair) -> tuple[str, str] | None:
        """What a link shares with others, where its ends are in two regions."""
        return self._cluster.shared_line(*pair) if self._cluster is not None else None

    def _is_free(self, pair: Pair) -> bool:
        """Whether a probe of this link shows all that it has: no step crosses it, nor another one on the same line."""
        line = self._line(pair)
        return pair not in self._crossed and (line is None or line not in map(self._line, self._crossed))

    def _doubtful(self) -> list[Pair]:
        """Links that only a probe can tell of: of those that share a line one, as they would share what it has."""
        found: list[Pair] = []
        for pair in sorted(filter(self._is_free, self._senses.doubtful | {*self._agent.parted()})):
            if (line := self._line(pair)) is None or line not in map(self._line, found):
                found.append(pair)
        return found

    def _sound(self, step: int) -> None:
        """Have links measured that no step crosses and that have sagged, or have recovered lately and may sag again."""
        doubtful, now_s = self._doubtful(), self._agent.monotonic()
        if doubtful and step % SOUND_STEPS == 0 and now_s >= self._sound_at_s:
            self._sound_at_s = now_s + SOUND_S
            self._agent.spawn(sound(self._agent, doubtful[:MOST_SOUNDED]))  # the report of this step waits for nobody

    def _measured(self) -> Measured:
        """What is known of the mesh, with what this job has seen of it in the place of older figures."""
        mesh = self._agent.measured(self._plan.peers)
        times = {p: t for p, t in self._newcomers.times.items() if p in mesh.devices}
        return replace(mesh, links=self._links(mesh), times=times, feeds=dict(self._feeding.links))

    def _links(self, mesh: Measured) -> dict[Pair, LinkProfile]:
        """Steps and soundings show some links. The others that share a line with them go the same way, and have sagged as much,
        unless they were probed since."""
        self._place(mesh)
        seen = self._crossed | set(self._doubtful())
        shares: dict[tuple[str | None, str | None], list[float]] = defaultdict(list)
        for pair in seen:
            if (line := self._line(pair)) is not None:
                shares[line].append(self._senses.share(pair))
        links = {}
        for pair, link in mesh.links.items():
            line = self._line(pair)
            if pair not in seen and line in shares and link.measured_at < self._shifted_at:
                rate = median(shares[line]) * self._senses.best(pair, link.bandwidth_bytes_per_s)
                self._senses.assume(pair, rate)
            links[pair] = as_shown(link, self._senses.rates[pair]) if pair in self._senses.rates else link
        return links
