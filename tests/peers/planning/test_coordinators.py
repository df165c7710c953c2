"""What does not depend on the coordinator: the running step, and which half of a mesh goes on. On virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from structlog.testing import capture_logs

from benchmarks.virtual_chaos import MICRO, Activations, Storm, captured_job, job_of, quick_planning, stormy, train
from meshcee.eager import plain
from meshcee.epochs.course import REPLANS
from meshcee.errors import NotPermittedError, PlanError, ProtocolError
from meshcee.events import Event
from meshcee.plan import Member, Plan
from peers.device.compute import Pace
from peers.mesh_view import MeshView
from peers.node.agent import Agent
from peers.owner.epoch import Report
from peers.planning import PlanRequest, coordinator
from tests.rig.mesh_fixture import even_plan
from tests.rig.virtual_time import quiet, run


def plan_of(storm: Storm, names: list[str]) -> Plan:
    """A stage for each of these, in this order."""
    peers = [storm.here.agents[name].peer_id for name in names]
    return even_plan(captured_job().train.num_blocks, len(peers), 8, MICRO, peers=peers)


def played(folder: Path, befall: Callable[[Storm], Awaitable[None]]) -> tuple[Activations, list[Mapping[str, Any]]]:
    """What happens to a quiet mesh: the plans that have run, and the log."""
    activations = Activations()

    async def story() -> None:
        async with stormy(0, folder) as storm, asyncio.timeout(600):
            await storm.agreed()
            await befall(storm)

    slow = mock.patch("benchmarks.virtual_chaos.PACE", Pace(4e3))  # an election takes two steps
    with quick_planning(), slow, capture_logs() as logged, activations.watched():
        run(story())
    assert activations.doubled == []
    return activations, logged


def goes_on_with_peers(logged: list[Mapping[str, Any]]) -> bool:
    """Whether it went back, to copies and never further."""
    backs = [entry for entry in logged if entry["event"] == Event.STATE_FOUND]
    return bool(backs) and all(back["with_peers"] and back["next_step"] > 0 for back in backs)


def changed(plan: Plan, **fields: Any) -> Plan:
    """With these in all stages."""
    return replace(
        plan,
        pipelines=tuple(replace(p, stages=tuple(replace(s, **fields) for s in p.stages)) for p in plan.pipelines),
    )


LIES: dict[str, Callable[[Plan], Plan]] = {
    "rounds": lambda plan: changed(plan, codec_out="int8", codec_back="int8"),
    "takes another batch": lambda plan: replace(plan, micro_batch=2 * plan.micro_batch),
    "has peers that nobody knows": lambda plan: changed(plan, members=(Member("12D3KooWnobody", plan.micro_batch),)),
    "computes with other threads": lambda plan: replace(plan, threads=plan.threads + 1),
}
FIRST = [
    (how, False) for how in ("sees no way", "is of another version", "has no memory", "forbids it", "hangs", *LIES)
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("how", "hurried"), [*FIRST, *((how, True) for how in ("is of another version", "hangs", "rounds"))]
)
def test_a_sick_or_dishonest_coordinator_does_not_end_a_run_for_which_the_owner_sees_a_way(
    tmp_path: Path, how: str, hurried: bool
) -> None:
    """To one whose clock has leapt ahead the others' records have expired: it sees one device. The first plan, or the next."""
    usual = coordinator.answer
    errors = {
        "sees no way": PlanError("2 stages were asked for and there are 1 devices"),
        "is of another version": ProtocolError("codec 'new' is unknown to this coordinator; upgrade it"),
        "has no memory": MemoryError(),
        "forbids it": NotPermittedError("this owner is here to compute"),
    }

    async def befall(storm: Storm) -> None:
        sick = storm.coordinator()

        async def answer(agent: MeshView, request: PlanRequest) -> tuple[Plan, tuple[str, ...]]:
            if agent.peer_id == storm.here.agents[sick or ""].peer_id and request.hurried == hurried:
                if how == "hangs":
                    await asyncio.Event().wait()
                if how in errors:
                    raise errors[how]
                plan, notes = await usual(agent, request)
                return LIES[how](plan), notes
            return await usual(agent, request)

        def hear(report: Report) -> None:
            if hurried and report.step == 4:
                storm.kill(next(name for name in storm.members() if name != sick))

        with mock.patch("peers.planning.coordinator.answer", answer):
            assert await train(storm, hear, job_of()) == "equal"

    activations, logged = played(tmp_path, befall)
    assert len(activations.plans) == 1 + hurried
    if not (hurried and how == "hangs"):  # then the owner does not wait for its word
        assert any(entry["event"] == Event.PLANNED_HERE for entry in logged)


@pytest.mark.slow
def test_the_running_step_needs_no_coordinator_and_the_next_plan_a_new_one(tmp_path: Path) -> None:
    """The one that dies holds no stage. Then a member dies, and who coordinates now plans from what the members hold."""
    leaders: list[str | None] = []

    async def befall(storm: Storm) -> None:
        first = storm.coordinator()
        assert first is not None
        members = [name for name in storm.lending if name != first]

        def hear(report: Report) -> None:
            if report.step == 2:
                storm.kill(first)
            elif report.step == 9:
                leaders.extend((first, storm.coordinator()))
                storm.kill(next(name for name in members if name != leaders[1]))

        job = replace(job_of(), checkpoint_every=1000)
        assert await train(storm, hear, job, plan=plan_of(storm, members)) == "equal"
        leaders.append(storm.here.agents[leaders[1] or ""].peer_id)

    activations, logged = played(tmp_path, befall)
    assert len(activations.plans) == 2, "one epoch until a member is lost"
    assert leaders[1] not in (None, leaders[0])
    assert [entry["term"][1] for entry in logged if entry["event"] == Event.PLANNED] == [leaders[2]]
    assert goes_on_with_peers(logged)


@pytest.mark.slow
@pytest.mark.parametrize("with_owner", [0, 1])
def test_of_two_halves_that_both_hold_every_stage_the_owners_goes_on(tmp_path: Path, with_owner: int) -> None:
    """Each of two members has its own stage and the other's copy; each half elects, one has the owner's log."""
    apart: list[str] = []

    async def befall(storm: Storm) -> None:
        here, names = storm.here, storm.lending
        away = 1 - with_owner

        def hear(report: Report) -> None:
            if report.step == 8:
                apart.extend(here.agents[name].peer_id for name in (names[away], names[2 + away]))
                storm.part((names[away], names[2 + away]))

        job = replace(job_of(), checkpoint_every=1000)
        assert await train(storm, hear, job, plan=plan_of(storm, names[:2])) == "equal"
        await asyncio.sleep(60)
        leaders = {name: here.agents[name].lease for name in (*names, "owner")}
        for side in (True, False):
            believed = {
                lease.peer_id if lease else None
                for name, lease in leaders.items()
                if (here.agents[name].peer_id in apart) == side
            }
            assert len(believed) == 1, "one coordinator on each side"
            assert (believed.pop() in apart) == side
        storm.heal()
        await storm.agreed()

    activations, logged = played(tmp_path, befall)
    assert len(activations.plans) == 2
    assert goes_on_with_peers(logged)


@pytest.mark.slow
@pytest.mark.parametrize(("knows_the_term", "changes"), [(True, 1), (False, REPLANS + 1)])
def test_plans_change_more_often_than_coordinators_may_without_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, knows_the_term: bool, changes: int
) -> None:
    """Before each change another term has begun. Who plans under it is not refused; who does not is refused, and asks again."""
    epochs: list[Plan] = []
    job = replace(job_of(), adapt=True, steps=9 * (changes + 1))

    async def story() -> list[float]:
        async with stormy(0, tmp_path) as storm, asyncio.timeout(6000):
            monkeypatch.setattr("peers.owner.adaptation.Adaptation", partial(Changing, storm, iter(range(changes))))
            if not knows_the_term:
                monkeypatch.setattr(Agent, "newest_term", (0, ""))
            told = storm.mesh.train(
                job, captured=captured_job(), stages=2, on_plan=lambda plan, names: epochs.append(plan)
            )
            losses = [report.loss async for report in told]
            await storm.agreed()
            return losses

    slow = mock.patch("benchmarks.virtual_chaos.PACE", Pace(4e2))  # an election takes less than a step
    with quiet(), quick_planning(), slow:
        assert run(story()) == plain(job, job.steps, MICRO).losses
    assert len(epochs) == 1 + changes * (1 if knows_the_term else 2)


NEWEST_TERM = Agent.newest_term.fget  # type: ignore[attr-defined]  # as it is, whatever a test makes agents believe


class Changing:
    """In the place of Adaptation: another term after the first step of each plan, and then another plan, so many times."""

    def __init__(self, storm: Storm, left: Iterator[int], agent: Agent, request: Any, plan: Plan, *more: Any) -> None:
        self._storm, self._left, self._plan = storm, left, plan
        self._changed: Plan | None = None

    def moved(self, plan: Plan, since_s: float | None) -> bool:
        self._plan, self._changed = plan, None
        return True

    def learnt(self, request: Any) -> Any:
        return request

    async def hear(self, report: Report, can_move: bool) -> Plan | None:
        if self._changed is None and next(self._left, None) is not None:
            before = NEWEST_TERM(self._storm.mesh.agent)
            for agent in self._storm.here.agents.values():
                agent.elector.accept((before[0] + 1, ""))  # so nobody believes in the lease that there is
            while NEWEST_TERM(self._storm.mesh.agent) <= (before[0] + 1, ""):
                await self._storm.mesh.agent.later_than((before[0] + 1, ""))
            await self._storm.agreed()
            first, last = self._storm.members()
            self._changed = plan_of(self._storm, [last, first])
            return self._changed
        return None
