"""How a run finds its way back: a roll call, a look at who is there, and a plan of the coordinator's or of the owner's own.

The idea: what to do is decided in meshcee/epochs/course.py; here is how its questions about the mesh are asked. The owner asks the
members themselves, not their records, which outlive them by seconds. The coordinator is asked for the plan like before.
If it is gone too, or silent, the owner plans by the same rules from the same records under the last term. Every member
can refuse that term if it knows a newer one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from meshcee.epochs import moves
from meshcee.errors import JoinError, MeshceeError, PeerLostError, PlanError
from meshcee.events import Event
from peers.mesh_view import MeshView, named
from peers.planning import Planned, PlanRequest, plan_here, request_plan
from peers.transport import StreamClosed
from peers.wire import Failures

if TYPE_CHECKING:
    from peers.state.checkpoint import Checkpoint

__all__ = ["Recovery", "Stopwatch", "found_or_not", "how_to_go_on", "losses", "proposed"]

log = structlog.get_logger()

ANSWER_S = 1.5  # to a roll call; a handshake takes a few round trips
SILENT_S = 0.3  # at least, for who was silent before
COORDINATOR_S = 5.0  # for a new plan, before the owner makes it


async def roll_call(agent: MeshView, peers: Iterable[str], silent: Collection[str] = ()) -> set[str]:
    """Those who answer, now: a process that is gone, stopped or cut off does not.

    Nothing has come from the `silent` ones for long: they are given as long again as the others took, and no more.
    """
    began_s = asyncio.get_running_loop().time()

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
        if others := [task for peer_id, task in tasks.items() if peer_id not in silent]:
            await asyncio.wait(others)
            took_s = asyncio.get_running_loop().time() - began_s
            await asyncio.wait(tasks.values(), timeout=max(took_s, SILENT_S))
            for task in tasks.values():
                task.cancel()
    return {peer_id for peer_id, task in tasks.items() if not task.cancelled() and task.result()}


class Stopwatch:
    """How long a recovery takes, told in one line of the log when the first new step is done.

    `seconds` since the loss was noticed, until: `called` (the roll is), `planned`, `ready` (all members hold their stages),
    `first step` (of those to be computed again), `new step`.
    """

    def __init__(self) -> None:
        self._noticed_s: float | None = None  # while no recovery is under way
        self._seconds: dict[str, float] = {}
        self._again = 0  # steps that were computed again

    def notice(self, at_s: float | None) -> None:
        """A member was lost at this time of the loop's clock; on the way back from another loss, that one counts."""
        self._seconds.clear()
        if self._noticed_s is None:
            self._noticed_s, self._again = at_s, 0

    def mark(self, moment: str, at_s: float | None = None) -> None:
        """It is now, or was at this time of the loop's clock."""
        if self._noticed_s is not None:
            at_s = asyncio.get_running_loop().time() if at_s is None else at_s
            self._seconds[moment] = round(at_s - self._noticed_s, 3)

    def hear(self, step: int, *, new: bool, ready_s: float | None) -> None:
        """A step is done; `ready_s` is when its epoch's members were ready."""
        if self._noticed_s is None:
            return
        if "first step" not in self._seconds:
            self.mark("ready", ready_s)
            self.mark("first step")
        if not new:
            self._again += 1
            return
        self.mark("new step")
        log.warning(Event.RUN_GOES_ON, step=step, steps_again=self._again, seconds=dict(self._seconds))
        self._noticed_s = None


def losses(failures: Failures, wrong_from: int | None = None) -> moves.Losses:
    """What an epoch's failures say of its members."""
    blamed = next((peer for peer, _ in failures.blamed.most_common(1)), None)
    return moves.Losses(
        failures.noticed_s,
        frozenset(failures.stuck),
        tuple(failures.faults),
        frozenset(failures.parted),
        blamed,
        frozenset(failures.apart),
        wrong_from,
        frozenset(failures.silent),
        failures.busy,
    )


def proposed(planned: Planned) -> moves.Proposal:
    return moves.Proposal(tuple(planned.plan.peers), planned.term, planned)


def how_to_go_on(error: MeshceeError, first: str, waited_s: float, run_id: str | None, saved: Checkpoint | None) -> str:
    """Why a run ends, and what to do: this first, then go on. `run_id` names its folder, `saved` is the newest on the disk."""
    why = "it happened again and again" if isinstance(error, PeerLostError) else f"after {waited_s:.0f} s: {error}"
    if run_id is None:
        return f"{why}; {first} and run the command again"
    where = f"the state after {saved.next_step} steps is in {saved.folder}: " if saved is not None else ""
    return f"{why}; {where}{first}, then go on with `meshcee train JOB.py --resume {run_id}`"


async def found_or_not(planning: Awaitable[Planned]) -> moves.Found | moves.NoPlan:
    """What comes of the question for a plan."""
    try:
        return moves.Found(proposed(await planning))
    except (PlanError, JoinError) as error:
        log.debug("no plan yet", error=str(error))
        return moves.NoPlan(error)


class Recovery:
    """The mesh as one job's owner asks it between two epochs."""

    def __init__(self, agent: MeshView) -> None:
        self._agent = agent

    async def call(self, members: Iterable[str], silent: Collection[str] = ()) -> moves.Called:
        here = await roll_call(self._agent, members, silent)
        return moves.Called(frozenset(here), self._agent.clock())

    def around(self, missed: Iterable[str], members: Collection[str]) -> moves.Around:
        """Of who was missed: when each that may take part again has announced itself."""
        known, failed = self._agent.directory.peers, self._agent.failed()
        announced = {p: known[p].sent_at for p in missed if p in known and not known[p].leaving and p not in failed}
        return moves.Around(announced, frozenset(self._agent.devices(members)), self._agent.clock())

    async def see(self, members: Collection[str]) -> moves.Seen | moves.Unseen:
        """Until the records of all of these are known here; whoever's is not in time is missed."""
        try:
            await self._agent.wait_for_peers(members)
        except JoinError as error:
            unseen = frozenset(members) - self._agent.directory.peers.keys()
            return moves.Unseen(error, unseen, self._agent.clock())
        return moves.Seen()

    def tell_lost(self, lost: moves.TellLost, before: Mapping[str, str]) -> None:
        """`before`: names of peers that may have left since."""
        names = {**before, **self._agent.names()}
        log.warning(
            Event.MEMBER_LOST,
            error=str(lost.error),
            gone=[names.get(p, p) for p in lost.gone],
            failed=[names.get(p, p) for p in lost.failed],
            left=[names.get(p, p) for p in lost.left],
            parted=[[names.get(p, p) for p in pair] for pair in lost.parted],
        )

    def tell_leaving(self, leaving: moves.TellLeaving) -> None:
        names = self._agent.names()
        who = [names.get(p, p) for p in leaving.who]
        if leaving.error is None:
            log.warning("members leave: the job goes on without them", who=who)
            return
        why = named(str(leaving.error), names)
        log.warning(Event.MEMBERS_NEEDED, who=who, why=why)

    async def plan(self, request: PlanRequest) -> Planned:
        """Of as many stages as were asked for, or as there are peers for, or of any number."""
        if request.stages is None:
            return await self._ask(request)
        count = len(self._agent.devices(request.free, request.without))
        try:
            found = await self._ask(replace(request, stages=max(1, min(request.stages, count))))
        except PlanError:
            found = await self._ask(replace(request, stages=None))
        stages = max(len(pipeline.stages) for pipeline in found.plan.pipelines)
        if stages != request.stages:
            log.warning(Event.STAGES_GIVEN_UP, asked=request.stages, stages=stages, peers=count)
        return found

    async def _ask(self, request: PlanRequest) -> Planned:
        request = replace(request, parted=self._agent.parted(), hurried=True)
        lease = self._agent.lease
        if lease is not None and lease.peer_id not in request.without:
            with contextlib.suppress(TimeoutError, JoinError):
                # A part of the time that there is: whatever keeps the coordinator, the owner still gets to plan itself.
                async with asyncio.timeout(min(COORDINATOR_S, self._agent.timeouts.regroup_s / 3)):
                    return await request_plan(self._agent, request)
        return await plan_here(self._agent, request, self._agent.newest_term)
