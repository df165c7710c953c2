"""Going on without a member that is gone or asks to go: who is left, when to try again, and when to give up.

The idea: the owner asks the members themselves, not their records, which outlive them by seconds. Who does not answer is
left out at once, until it has announced itself anew and answers; who answers is free for the next plan, whatever its
record still says. Who answers and has failed is left out for a time, unless there is no plan without it. Where all answer
and none has failed, two of them have lost each other: the next plan does without the link between them, until a probe has
crossed it. The coordinator is asked for the plan like before; if it is gone too, or silent, the owner plans by the same
rules from the same records under the last term, which every member can refuse if it knows a newer one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable
from dataclasses import replace

import structlog

from meshcee.errors import JoinError, MeshceeError, PeerLostError, PlanError
from peers.mesh_view import MeshView, named
from peers.planning import Planned, PlanRequest, answer, request_plan
from peers.transport import StreamClosed
from peers.wire import Failures, Suspects, unless_late

__all__ = ["Recovery", "roll_call"]

log = structlog.get_logger()

ANSWER_S = 1.5  # to a roll call; a handshake takes a few round trips
COORDINATOR_S = 5.0  # for a new plan, before the owner makes it
FRUITLESS = 6  # recoveries in a row after which no new step was done
LONGEST_PAUSE_S = 8.0


async def roll_call(agent: MeshView, peers: Iterable[str]) -> set[str]:
    """Those who answer, now: a process that is gone, stopped or cut off does not."""

    async def answers(peer_id: str) -> bool:
        try:
            async with asyncio.timeout(ANSWER_S):
                stream = await agent.transport.open(peer_id, "join", agent.addresses_of([peer_id]).get(peer_id, ()))
        except (MeshceeError, StreamClosed, TimeoutError):
            return False
        stream.abort()
        return True

    async with asyncio.TaskGroup() as group:
        tasks = {peer_id: group.create_task(answers(peer_id)) for peer_id in set(peers)}
    return {peer_id for peer_id, task in tasks.items() if task.result()}


class Course:
    """How a recovery went, told in one line of the log when the first new step is done.

    `seconds` since the loss was noticed, until: `called` (the roll is), `planned`, `ready` (all members hold their stages),
    `first step` (of those to be computed again), `new step`.
    """

    def __init__(self, noticed_s: float) -> None:
        self._noticed_s = noticed_s
        self.seconds: dict[str, float] = {}
        self.again = 0  # steps that were computed again

    def mark(self, moment: str, at_s: float | None = None) -> None:
        """It is now, or was at this time of the loop's clock."""
        at_s = asyncio.get_running_loop().time() if at_s is None else at_s
        self.seconds[moment] = round(at_s - self._noticed_s, 3)


class Recovery:
    """One for each job. `gone` maps a peer to when it was missed, by our clock."""

    def __init__(self, agent: MeshView) -> None:
        self._agent = agent
        self._fruitless = 0
        self._done = -1  # steps that were done when the last member was lost
        self.count = 0
        self.gone: dict[str, float] = {}
        self.free: tuple[str, ...] = ()
        self._parted: tuple[frozenset[str], frozenset[str]] | None = None  # who wanted to leave, the other devices
        self._course: Course | None = None  # of the recovery under way
        self._suspects = Suspects()
        self._failed: set[str] = set()  # who ever answered, and failed
        self._answering: set[str] = set()  # who did when it was left out

    @property
    def mute(self) -> set[str]:
        """Of those who are gone, whose copies are gone too: who answers and fails at its own work can still give what it holds."""
        return self.gone.keys() - self._answering

    def notice(self, at_s: float | None) -> None:
        """A member was lost at this time of the loop's clock; on the way back from another loss, that one counts."""
        if self._course is not None:
            self._course.seconds.clear()
        elif at_s is not None:
            self._course = Course(at_s)

    async def take_over(self, members: Collection[str]) -> None:
        """Of another owner's members, those who answer are free for the next plan, whatever they still do for that owner."""
        self.free = tuple(sorted(await roll_call(self._agent, members)))

    def hear(self, step: int, *, new: bool, ready_s: float | None) -> None:
        """A step is done; `ready_s` is when its epoch's members were ready."""
        course = self._course
        if course is None:
            return
        if "first step" not in course.seconds:
            course.mark("ready", ready_s)
            course.mark("first step")
        if not new:
            course.again += 1
            return
        course.mark("new step")
        log.warning("the run goes on", step=step, steps_again=course.again, seconds=course.seconds)
        self._course = None

    def _mark(self, moment: str) -> None:
        if self._course is not None:
            self._course.mark(moment)

    async def after(self, lost: PeerLostError, members: Iterable[str], failures: Failures, done: int) -> None:
        """Find out who is left; raises `lost` when going on again and again leads nowhere, or what peers have failed alike at."""
        self.count += 1
        failed = failures.stuck | self._suspects.hear(failures.faults)
        found = failed - self._failed  # who is left out from now on: that leads somewhere, as often as there are peers
        self._failed |= failed
        self._fruitless = self._fruitless + 1 if done == self._done and not found else 0
        self._done = done
        if self._fruitless >= FRUITLESS:
            raise lost
        if self._fruitless > 1:
            await asyncio.sleep(min(0.5 * 2**self._fruitless, LONGEST_PAUSE_S))
        members = set(members)
        here = await roll_call(self._agent, members)
        self._mark("called")
        now = self._agent.clock()
        missed = members - here
        parted = failures.parted if not missed else set()  # who is missed explains what others have lost
        self._agent.part(parted)
        if self._fruitless and not missed:
            missed = {
                peer_id for peer_id, _ in failures.blamed.most_common(1)
            }  # it answers us, but others keep losing it
        self._agent.shun(failed)
        self._answering = (self._answering | (failed & here)) - (missed - failed)
        missed |= failed
        self.gone.update(dict.fromkeys(missed, now))
        self.free = tuple(sorted(members - missed))
        names = self._agent.names()
        log.warning(
            "a member was lost",
            error=str(lost),
            gone=[names.get(p, p) for p in sorted(missed - failed)],
            failed=[names.get(p, p) for p in sorted(failed)],
            left=[names.get(p, p) for p in self.free],
            parted=[[names.get(p, p) for p in pair] for pair in sorted(parted) if pair[0] < pair[1]],
        )

    def leave_out(self, leaving: Iterable[str], members: Iterable[str]) -> None:
        """Of these members some have asked to leave: plan without them from now on."""
        self.count += 1
        self.gone.update(dict.fromkeys(leaving, self._agent.clock()))
        self.free = tuple(sorted(set(members) - self.gone.keys()))

    async def part(self, leaving: Collection[str], members: Collection[str], request: PlanRequest) -> Planned | None:
        """A plan without members that have asked to leave, made while they still compute; None while there is none.

        It is looked for again only when other devices are there, or another member wants to leave.
        """
        await self._welcome_back()
        seen = frozenset(leaving), frozenset(self._agent.devices(members, {*leaving, *self.gone}))
        if seen == self._parted:
            return None
        self._parted = seen
        self.leave_out(leaving, members)
        names = self._agent.names()
        who = [names.get(p, p) for p in sorted(leaving)]
        try:
            planned = await self._plan_once(replace(request, free=self.free, without=tuple(sorted(self.gone))))
            await self._see(planned)
        except (PlanError, JoinError) as error:
            why = named(str(error), names)
            log.warning(
                "members want to leave and the job cannot go on without them: start more peers", who=who, why=why
            )
            return None
        log.warning("members leave: the job goes on without them", who=who)
        return planned

    async def plan(self, request: PlanRequest) -> Planned:
        """A plan for who is left and who has come; waits regroup_s for peers who can hold the job.

        Raises the last PlanError or JoinError when none came.
        """
        last: MeshceeError = JoinError("nobody planned in time")

        async def found() -> Planned:
            nonlocal last
            while True:
                await self._welcome_back()
                asked = replace(request, free=self.free, without=tuple(sorted(self.gone)))
                try:
                    planned = await self._plan_once(asked)
                    await self._see(planned)
                    self._mark("planned")
                    return planned
                except (PlanError, JoinError) as error:
                    log.debug("no plan yet", error=str(error))
                    last = error
                if isinstance(last, PlanError) and self._agent.forgive():
                    continue
                await self._agent.directory.wait_for_change()

        try:
            return await unless_late(found, self._agent.timeouts.regroup_s, self._agent.timeouts)
        except TimeoutError:
            raise last from None

    async def _see(self, planned: Planned) -> None:
        """Until the records of all its members are known here; whoever's is not in time is missed. JoinError then."""
        try:
            await self._agent.wait_for_peers(planned.plan.peers)
        except JoinError:
            unseen = set(planned.plan.peers) - self._agent.directory.peers.keys()
            self.gone.update(dict.fromkeys(unseen, self._agent.clock()))
            raise

    async def _plan_once(self, request: PlanRequest) -> Planned:
        """Of as many stages as were asked for, or as there are peers for, or of any number."""
        if request.stages is not None:
            count = len(self._agent.devices(request.free, request.without))
            with contextlib.suppress(PlanError):
                return await self._ask(replace(request, stages=max(1, min(request.stages, count))))
        return await self._ask(replace(request, stages=None))

    async def _ask(self, request: PlanRequest) -> Planned:
        request = replace(request, parted=self._agent.parted())
        lease = self._agent.lease
        if lease is not None and lease.peer_id not in self.gone:
            with contextlib.suppress(TimeoutError, JoinError):
                # A part of the time that there is: whatever keeps the coordinator, the owner still gets to plan itself.
                async with asyncio.timeout(min(COORDINATOR_S, self._agent.timeouts.regroup_s / 3)):
                    return await request_plan(self._agent, request)
        term = self._agent.newest_term
        plan, notes = await answer(self._agent, request)
        return Planned(plan, term, notes)

    async def _welcome_back(self) -> None:
        """Who was missed and has announced itself since may take part again, if it answers."""
        known = self._agent.directory.peers
        shunned = self._agent.shunned()
        back = [
            p
            for p, missed_at in self.gone.items()
            if p in known and known[p].sent_at > missed_at and not known[p].leaving and p not in shunned
        ]
        for peer_id in await roll_call(self._agent, back):
            del self.gone[peer_id]
