"""A peer that asks to leave costs no step, not even one that is computed twice; one that nobody can replace leaves late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from dht.records import PeerRecord
from meshcee.config import Timeouts
from meshcee.errors import JoinError, NotPermittedError, PlanError, UsageError
from meshcee.events import Event
from meshcee.figures.profile import DeviceProfile
from meshcee.files.home import Home
from peers.node import assemble
from peers.node.agent import Agent
from peers.node.departure import Departure, ask_to_leave, find_peer
from peers.node.early import JoinOptions
from peers.node.in_process import InProcess
from peers.node.mesh import Mesh
from peers.owner.epoch import Report
from peers.owner.job_run import Result
from peers.owner.numbers import Numbers
from tests.peers.owner.test_recovery import FAST, a_mesh, assert_undisturbed, captured_job, job_of, stage_of, train

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that were computed more than once."""
    found: list[int] = []
    compare = Numbers.compare

    def note(self: Numbers, step: int, loss: float) -> None:
        found.append(step)
        compare(self, step, loss)

    monkeypatch.setattr(Numbers, "compare", note)
    return found


class Leavers:
    """Agents that leave in a run of `train`; `in_time` says of each whether its job had gone on without it."""

    def __init__(self, here: InProcess, mesh: Mesh, group: asyncio.TaskGroup) -> None:
        self._here, self._mesh, self._group = here, mesh, group
        self.in_time: dict[str, bool] = {}
        self.gone = asyncio.Event()  # the first of them

    @property
    def coordinates(self) -> int:
        """The stage of the coordinator."""
        plan, lease = self._mesh.result.plan, self._mesh.agent.lease
        assert plan is not None
        assert lease is not None
        return plan.peers.index(lease.peer_id)

    def leave(self, stage: int) -> None:
        name = stage_of(self._here, self._mesh, stage)
        departure = Departure(self._here.agents[name])
        departure.ask()
        self._group.create_task(self._wait(name, departure))

    async def _wait(self, name: str, departure: Departure) -> None:
        self.in_time[name] = await departure.run()
        member = self._here.agents[name].member
        assert member is not None
        assert not member.is_busy
        self._here.crash(name)  # its process ends
        self.gone.set()


async def run(
    home: Home, peers: int, leave: Callable[[Leavers, Report], None], timeouts: Timeouts = FAST
) -> tuple[Result, list[Report], Leavers]:
    told: list[Report] = []
    async with a_mesh(home, peers, timeouts) as (here, mesh), asyncio.TaskGroup() as group:
        leavers = Leavers(here, mesh, group)

        def hear(report: Report) -> None:
            told.append(report)
            leave(leavers, report)

        return await train(mesh, hear), told, leavers


async def test_a_member_that_asks_to_leave_is_left_out_at_a_steps_end(tmp_path: Path, again: list[int]) -> None:
    """The one that coordinates, too."""

    def leave(leavers: Leavers, report: Report) -> None:
        if report.step == 10:
            leavers.leave(leavers.coordinates)

    home = Home(tmp_path)
    result, told, leavers = await run(home, 3, leave)
    assert result.plan is not None
    assert len(result.plan.pipelines[0].stages) == 2
    assert list(leavers.in_time.values()) == [True]
    assert_undisturbed(result, told, home)
    assert again == []


@pytest.mark.slow
async def test_two_leave_at_once_and_a_third_while_the_plan_changes(tmp_path: Path, again: list[int]) -> None:
    def leave(leavers: Leavers, report: Report) -> None:
        if report.step == 7:
            leavers.leave(0)
            leavers.leave(3)
        elif len(leavers.in_time) < 2 and report.step == 8:
            leavers.leave(1)

    home = Home(tmp_path)
    result, told, leavers = await run(home, 4, leave)
    assert result.plan is not None
    assert len(result.plan.pipelines[0].stages) == 4 - len(leavers.in_time)
    assert set(leavers.in_time.values()) == {True}
    assert_undisturbed(result, told, home)
    assert again == []


async def test_the_only_peer_goes_when_its_time_is_over_and_the_user_is_told_why(tmp_path: Path) -> None:
    home, told = Home(tmp_path), []
    with structlog.testing.capture_logs() as logs:
        async with a_mesh(home, 1, replace(FAST, leave_s=0.5)) as (here, mesh), asyncio.TaskGroup() as group:
            leavers = Leavers(here, mesh, group)

            def hear(report: Report) -> None:
                told.append(report)
                if report.step == 4:
                    leavers.leave(0)
                if report.step > 4:
                    time.sleep(0.05)  # so that the run is not over before the peer's time is

            async def replace_it() -> None:
                await leavers.gone.wait()
                await here.start("late")

            group.create_task(replace_it())
            result = await train(mesh, hear)
    assert leavers.in_time == {"p0": False}
    assert_undisturbed(result, told, home)
    assert Event.MEMBER_LOST in [entry["event"] for entry in logs]
    (line,) = [entry for entry in logs if entry["event"] == Event.MEMBERS_NEEDED]
    assert line["who"] == ["p0"]
    assert line["log_level"] == "warning"


@pytest.mark.slow
async def test_a_peer_is_asked_from_elsewhere_by_who_holds_the_mesh_key(tmp_path: Path, again: list[int]) -> None:
    home, told, heard = Home(tmp_path), [], []
    async with a_mesh(home, 2) as (here, mesh), asyncio.TaskGroup() as group:
        other = await here.start("other", lends=False)
        leaver = here.agents["p1"]
        departure = Departure(leaver)

        async def leave() -> None:
            assert await departure.run()
            await leaver.directory.say_goodbye()

        async def ask() -> None:
            assert await ask_to_leave(other, leaver.peer_id, lambda within_s, supplies: heard.append(within_s))
            assert leaver.peer_id not in other.directory.peers

        def hear(report: Report) -> None:
            told.append(report)
            if report.step == 10:
                group.create_task(leave())
                group.create_task(ask())

        result = await train(mesh, hear)
        async with here.network.transport("stranger", b"another key") as stranger:
            with pytest.raises(NotPermittedError):
                await stranger.open(leaver.peer_id, "leave")
        with pytest.raises(JoinError, match="does not serve 'leave'"):
            await ask_to_leave(other, mesh.agent.peer_id, lambda within_s, supplies: heard.append(within_s))
    assert heard == [FAST.leave_s]
    assert_undisturbed(result, told, home)
    assert again == []


async def test_an_idle_peer_leaves_at_once_and_takes_no_job(tmp_path: Path) -> None:
    async with a_mesh(Home(tmp_path), 2) as (here, mesh):
        leaver: Agent = here.agents["p0"]
        assert await leaver.leave()
        await mesh.agent.directory.wait_for(lambda: mesh.agent.directory.peers[leaver.peer_id].leaving)
        states = {p["name"]: p["state"] for p in (await mesh.agent.status())["peers"]}
        assert states == {"owner": "idle", "p0": "leaving", "p1": "idle"}
        planned = await mesh.plan(job_of(), captured_job())
        assert planned.plan.peers == (here.agents["p1"].peer_id,)
        with pytest.raises(PlanError):
            await mesh.plan(job_of(), captured_job(), stages=2)


@pytest.mark.slow
async def test_the_device_that_an_owner_lends_leaves_and_the_owner_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: list[int]
) -> None:
    home, told, ended = Home(tmp_path), list[Report](), list[str]()
    async with a_mesh(home, 1) as (here, _):

        @asynccontextmanager
        async def agent(options: JoinOptions, home: Home) -> AsyncIterator[Agent]:
            yield await here.start(options.name, lends=options.compute)
            await here.agents[options.name].directory.say_goodbye()
            here.crash(options.name)
            ended.append(options.name)

        monkeypatch.setattr(assemble, "a_peer", agent)
        other = await here.start("other", lends=False)
        async with (
            assemble.an_owner(JoinOptions(name="mine", compute=True), home) as mesh,
            asyncio.TaskGroup() as group,
        ):
            lender = here.agents["mine-device"].peer_id

            def hear(report: Report) -> None:
                told.append(report)
                if report.step == 10:
                    group.create_task(
                        ask_to_leave(other, find_peer(other.directory.peers, "mine-device").peer_id, print)
                    )

            result = await train(mesh, hear, stages=2)
            assert ended == ["mine-device"]
            planned = await mesh.plan(job_of(), captured_job())
            assert planned.plan.peers == (here.agents["p0"].peer_id,), "it is not waited for any more"
        assert ended == ["mine-device", "mine"]
    assert result.plan is not None
    assert lender not in result.plan.peers
    assert_undisturbed(result, told, home)
    assert again == []


async def test_an_owner_whose_device_cannot_join_says_so_and_goes_on_when_it_is_lost_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, gone = asyncio.Event(), asyncio.Event()

    async def breaks() -> None:
        await broken.wait()
        raise JoinError("p2pd is gone")

    async with InProcess(JoinOptions(), timeouts=FAST) as here:

        @asynccontextmanager
        async def agent(options: JoinOptions, home: Home) -> AsyncIterator[Agent]:
            if options.region == "nowhere":
                raise JoinError("nobody is there")
            async with asyncio.TaskGroup() as group:
                task = group.create_task(breaks())
                yield await here.start(options.name, lends=options.compute)
                task.cancel()

        monkeypatch.setattr(assemble, "a_peer", agent)
        with pytest.raises(JoinError, match="nobody is there"):
            async with assemble.an_owner(JoinOptions(compute=True, region="nowhere"), Home(tmp_path)):
                pass
        with structlog.testing.capture_logs() as logs:
            async with assemble.lender(JoinOptions(compute=True), Home(tmp_path), gone.set) as lender:
                assert lender == here.agents["owner"].peer_id
                broken.set()
                async with asyncio.timeout(5):
                    await gone.wait()
    (line,) = [entry for entry in logs if entry["log_level"] == "error"]
    assert "p2pd is gone" in line["error"]


def test_a_peer_is_found_by_its_name_or_a_part_of_its_id() -> None:
    device = DeviceProfile("cpu", "one", 1 << 30, 1e9, 1)
    a, b, owner = "12D3KooWaaaa11111111", "12D3KooWbbbb22222222", "12D3KooWcccc33333333"
    known = {
        a: PeerRecord(a, 0.0, "anna", device=device),
        b: PeerRecord(b, 0.0, "ben", device=device),
        owner: PeerRecord(owner, 0.0, "owner"),
    }
    for wanted in ("ben", b, "12D3KooWb", "22222222", "…22222222"):
        assert find_peer(known, wanted) is known[b], wanted
    with pytest.raises(UsageError, match=r"nobody.*anna \(12D3KooWaaaa11111111\), ben"):
        find_peer(known, "nobody")
    with pytest.raises(UsageError, match=r"means 3 peers: .*give a whole id"):
        find_peer(known, "12D3KooW")
    with pytest.raises(UsageError, match="meshcee run stop"):
        find_peer(known, "owner")
    known[a] = PeerRecord(a, 0.0, "ben", device=device)
    with pytest.raises(UsageError, match="means 2 peers"):
        find_peer(known, "ben")
    known[a] = PeerRecord(a, 0.0, b[-8:], device=device)
    with pytest.raises(UsageError, match="means 2 peers"):
        find_peer(known, b[-8:])
    assert find_peer(known, b) is known[b]
