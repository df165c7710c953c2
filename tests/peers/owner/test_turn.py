"""Jobs of one mesh run one at a time, in the order in which they came."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import virtual_chaos
from benchmarks.virtual_chaos import quick_planning, stormy
from dht import RunRecord
from meshcee.config import Timeouts
from meshcee.errors import PlanError
from meshcee.files.home import Home
from meshcee.job import Job
from peers.node.mesh import Mesh
from peers.owner.epoch import Report
from peers.owner.turn import Turn
from tests.peers.owner.test_recovery import a_mesh, assert_undisturbed, captured_job, job_of
from tests.rig.virtual_time import virtual_time

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here


class Gated:
    """The weight of a micro-batch, which is its size, as without it; there while `gate` is set.

    Not samples: they are read under a lock of the process's generators, which all jobs of this test share.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, target: Any) -> float:
        assert self.gate.wait(30)
        return float(len(target))


class Polled:
    """A mesh as an owner in line polls it: peers at once, runs more rarely, unless it asks."""

    def __init__(self, first: RunRecord, others: dict[str, str]) -> None:
        self.peer_id, self.directory, self.timeouts = "me", self, Timeouts()
        self.runs, self.over = {first.peer_id: first}, set[str]()
        self._polls = iter((self.leave, self.expire))
        self.clock = self.monotonic = lambda: self.now_s
        self.now_s, self.said_over, self.names = 100.0, False, lambda: others

    def leave(self) -> None:
        self.runs, self.said_over = {}, True

    def expire(self) -> None:
        self.now_s += 3600

    async def wait_for_change(self) -> None:
        next(self._polls)()

    async def refresh(self) -> None:
        self.over = {"first"} if self.said_over else set()

    async def publish(self, record: RunRecord) -> None:
        assert record.peer_id == "me"


async def test_who_waits_asks_whether_an_owner_that_has_left_had_ended_its_run() -> None:
    told: list[str] = []
    mesh: Any = Polled(RunRecord("first", 1.0, "job", since=1.0), {"first": "anna"})
    assert await Turn(mesh, "job", told.append).wait("key")
    assert (told, mesh.now_s) == (["waiting: 'job' of anna is running"], 100.0)


@pytest.mark.slow
@virtual_time
async def test_who_waits_begins_when_the_owner_before_it_has_died(tmp_path: Path) -> None:
    """It says no last word: its records end, and its members give it up."""
    jobs = [replace(virtual_chaos.job_of(), name=name) for name in ("first", "second")]
    told: list[Report] = []
    waited: list[str] = []
    running, dying = asyncio.Event(), asyncio.Event()

    def hear(report: Report) -> None:
        (running if report.step < 3 else dying).set()

    with quick_planning():
        async with stormy(0, tmp_path) as storm, asyncio.TaskGroup() as group, asyncio.timeout(600):
            other = Mesh(await storm.here.start("other", lends=False), group, Home(tmp_path / "other"))
            first = group.create_task(virtual_chaos.train(storm, hear, jobs[0]))
            await running.wait()

            async def wait_and_own() -> None:
                training = other.train(jobs[1], captured=virtual_chaos.captured_job(), stages=3, on_wait=waited.append)
                async for report in training:
                    told.append(report)

            second = group.create_task(wait_and_own())
            await dying.wait()
            assert len(waited) == 1
            storm.here.crash("owner")
            first.cancel()
            began_s = virtual_chaos.now()
            await second
    assert waited[0].startswith("waiting: 'first' of owner")
    assert [report.loss for report in told] == virtual_chaos.expected()[0]
    assert virtual_chaos.now() - began_s < 300


@pytest.mark.slow
async def test_jobs_wait_for_their_turn_and_say_for_what(tmp_path: Path) -> None:
    """The first is running when two others come; the one in the middle is given up before its turn."""
    homes = [Home(tmp_path / name) for name in ("first", "second", "third")]
    told: list[list[Report]] = [[], [], []]
    waited: list[list[str]] = [[], [], []]
    order: list[int] = []
    weight = Gated()
    job = job_of()  # not later: making a model seeds the generator that members in this process draw from
    async with a_mesh(homes[0], 2) as (here, first), asyncio.TaskGroup() as group:
        meshes = [first]
        for name, home in zip(("second", "third"), homes[1:]):
            agent = await here.start(name, lends=False)
            await agent.wait_for_devices(2)
            meshes.append(Mesh(agent, group, home))

        async def own(i: int, job: Job) -> None:
            async for report in meshes[i].train(job, captured=captured_job(), stages=2, on_wait=waited[i].append):
                told[i].append(report)
            order.append(i)

        async def until(condition: Callable[[], object]) -> None:
            async with asyncio.timeout(20):
                await first.agent.directory.wait_for(condition)

        tasks = [group.create_task(own(0, replace(job, weight=weight)))]
        await until(lambda: told[0])
        weight.gate.clear()
        tasks.append(group.create_task(own(1, replace(job, name="other"))))
        await until(lambda: waited[1])
        with pytest.raises(PlanError):  # nobody is idle
            async for _ in meshes[2].train(job, captured=captured_job(), stages=2, wait=False):
                pass
        tasks.append(group.create_task(own(2, job)))
        await until(lambda: waited[2])
        seen = (await meshes[2].agent.status())["runs"]
        tasks[1].cancel()
        weight.gate.set()
        await asyncio.wait([tasks[0]])
        directory = meshes[2].agent.directory
        await directory.refresh()
        assert first.agent.peer_id not in directory.runs, (
            "it has said that it is over, so nobody waits for it to expire"
        )
        await asyncio.wait(tasks)
        assert (await meshes[1].agent.status())["runs"] == []
    assert_undisturbed(first.result, told[0], homes[0])
    assert_undisturbed(meshes[2].result, told[2], homes[2])
    assert (order, told[1]) == ([0, 2], [])
    assert [(run["job"], run["state"]) for run in seen] == [
        ("job", "running"),
        ("other", "waiting"),
        ("job", "waiting"),
    ]
    first_job = "waiting: 'job' of owner is running"
    assert waited[1][0] == first_job
    assert waited[2][0] == f"{first_job}, 1 more before this one"
