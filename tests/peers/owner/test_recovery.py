"""A lost member costs time, never a step: the run goes on with who is left, and nothing that is told of it differs."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from structlog.testing import capture_logs

from meshcee.callbacks import Callback
from meshcee.capture import Capture, Program, capture
from meshcee.config import Timeouts
from meshcee.eager import plain
from meshcee.errors import PeerLostError, PlanError, unwrap
from meshcee.events import Event
from meshcee.figures.measured import NEXT_TO_NOTHING
from meshcee.figures.profile import LinkProfile
from meshcee.files.home import Home
from meshcee.job import Job
from meshcee.plan import Plan
from meshcee.stage.runner import StageRunner
from peers.measure.sounding import sound
from peers.node.early import JoinOptions
from peers.node.in_process import QUICK, InProcess
from peers.node.mesh import Mesh
from peers.owner import adaptation, offering
from peers.owner.epoch import Report
from peers.owner.job_run import Result
from peers.owner.offering import Offering
from peers.owner.recovery import Recovery
from peers.planning.coordinator import PlanRequest
from peers.state.copying import Copying
from peers.transport.base import Frame, Stream
from peers.transport.memory import Impairment, MemoryNetwork
from peers.wire.failures import Failures
from peers.wire.offer import Offer
from peers.wire.weights import names_of
from tests.peers.member.test_training import make_job
from tests.rig.virtual_time import virtual_time

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here

STEPS = 30
FAST = replace(QUICK, record_ttl_s=5.0, lease_ttl_s=5.0, beat_s=0.1, silent_s=3.0, regroup_s=30.0)


def job_of(**changes: object) -> Job:
    return make_job(**{"steps": STEPS, "micro_batch_size": 6, "checkpoint_every": 3, **changes})


@functools.cache
def captured_job() -> Capture:
    return capture(job_of())


@functools.cache
def expected() -> tuple[list[float], dict[str, torch.Tensor]]:
    losses, _, model, _ = plain(job_of(), STEPS, 6)
    return losses, model.state_dict()


@asynccontextmanager
async def a_mesh(home: Home, peers: int, timeouts: Timeouts = FAST) -> AsyncIterator[tuple[InProcess, Mesh]]:
    try:
        async with InProcess(JoinOptions(), timeouts=timeouts) as here:
            for i in range(peers):
                await here.start(f"p{i}")
            yield here, await here.own("owner", home)
    except BaseExceptionGroup as group:
        raise unwrap(group) from group


async def train(mesh: Mesh, hear: Callable[[Report], None], **more: object) -> Result:
    async for report in mesh.train(job_of(), captured=captured_job(), **{"stages": len(mesh.agent.devices()), **more}):
        hear(report)
    return mesh.result


def stage_of(here: InProcess, mesh: Mesh, index: int) -> str:
    """The name of the peer that holds this stage now."""
    assert mesh.result.plan is not None
    peer_id = mesh.result.plan.pipelines[0].stages[index].members[0].peer
    return next(name for name, agent in here.agents.items() if agent.peer_id == peer_id)


def assert_undisturbed(result: Result, told: list[Report], home: Home) -> None:
    losses, state = expected()
    assert result.losses == losses
    assert [r.step for r in told] == list(range(STEPS))  # each step once
    assert [r.loss for r in told] == losses
    assert [line["step"] for line in home.run("last").reports()] == list(range(STEPS))
    for name, tensor in result.state_dict.items():
        assert torch.equal(tensor, state[name]), name


class Learns:
    """In the place of the adaptation: steps have shown a link that feeds."""

    requests: ClassVar[list[PlanRequest]] = []

    def __init__(self, agent: Any, request: PlanRequest, *more: Any) -> None:
        self.requests.append(request)

    async def hear(self, report: Report, can_move: bool) -> Plan | None:
        return None

    def moved(self, plan: Plan, since_s: float | None = None) -> bool:
        return False

    def learnt(self, request: PlanRequest) -> PlanRequest:
        return replace(request, feeds={"p": LinkProfile(0.0, 4e6)})


@pytest.mark.slow
async def test_what_steps_showed_of_links_that_feed_outlives_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptation, "Adaptation", Learns)
    Learns.requests.clear()
    home, told = Home(tmp_path), list[Report]()
    async with a_mesh(home, 3) as (here, mesh):

        def hear(report: Report) -> None:
            told.append(report)
            if report.step == 10:
                here.crash(stage_of(here, mesh, 1))

        result = await train(mesh, hear)
    assert_undisturbed(result, told, home)
    assert [request.feeds for request in Learns.requests] == [{}, {"p": LinkProfile(0.0, 4e6)}]


class Slow(Callback):
    """Its first call of a step lasts until the epoch has lost a member."""

    def __init__(self, lose: Callable[[], None]) -> None:
        self.lose, self.heard = lose, list[int]()
        self.loop = asyncio.get_running_loop()

    def on_step(self, run: object, report: Report) -> None:
        self.heard.append(report.step)
        if report.step == 10 and self.heard.count(10) == 1:
            self.loop.call_soon_threadsafe(self.lose)
            time.sleep(0.5)


@pytest.mark.slow
async def test_a_step_that_counts_is_told_of_though_its_epoch_ends_while_callbacks_hear_of_it(tmp_path: Path) -> None:
    home, told = Home(tmp_path), []
    async with a_mesh(home, 3) as (here, mesh):
        slow = Slow(lambda: here.crash(stage_of(here, mesh, 1)))
        result = await train(mesh, told.append, callbacks=[slow])
    assert slow.heard == list(range(STEPS))
    assert_undisturbed(result, told, home)


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_a_killed_member_is_replaced_by_those_who_are_left(tmp_path: Path, stage: int) -> None:
    home, told = Home(tmp_path), []
    async with a_mesh(home, 3) as (here, mesh):

        def hear(report: Report) -> None:
            told.append(report)
            if report.step == 10:
                here.crash(stage_of(here, mesh, stage))

        with capture_logs() as logged:
            result = await train(mesh, hear)
        assert result.plan is not None
        assert len(result.plan.pipelines[0].stages) == 2
    assert_undisturbed(result, told, home)
    (fewer,) = [entry for entry in logged if entry["event"] == Event.STAGES_GIVEN_UP]
    assert (fewer["asked"], fewer["stages"], fewer["peers"]) == (3, 2, 2)
    (course,) = [entry for entry in logged if entry["event"] == Event.RUN_GOES_ON]
    assert list(course["seconds"]) == ["called", "planned", "ready", "first step", "new step"]
    assert 0 < course["seconds"]["called"] <= course["seconds"]["new step"] < 10
    assert 0 <= course["steps_again"] <= 11
    assert course["step"] > 10


@pytest.mark.slow
async def test_who_stays_is_sent_only_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Copying, "is_due", lambda *args: False)  # else it may be read from peers
    home, told = Home(tmp_path), []
    asked: dict[str, set[str]] = {}

    def spy(frame: Frame, part: int, known: Set[str]) -> list[str]:
        names = names_of(frame, part, known)
        asked.setdefault(str(part), set()).update(names)
        return names

    monkeypatch.setattr("peers.owner.offering.names_of", spy)
    async with a_mesh(home, 3) as (here, mesh):
        before: dict[str, tuple[int, int]] = {}

        def hear(report: Report) -> None:
            told.append(report)
            if report.step == 10:
                assert mesh.result.plan is not None
                before.update({s.peers[0]: (s.first, s.end) for s in mesh.result.plan.pipelines[0].stages})
                here.crash(stage_of(here, mesh, 2))

        result = await train(mesh, hear)
        assert result.plan is not None
        train_graph = captured_job().train
        lacked: set[str] = set()
        for stage in result.plan.pipelines[0].stages:
            had = set(train_graph.slice(*before[stage.peers[0]]).state_names())
            lacked |= set(train_graph.slice(stage.first, stage.end).state_names()) - had
    assert_undisturbed(result, told, home)
    assert asked["0"] == lacked
    trained = {entry.name for entry in train_graph.inputs if entry.trainable}
    assert {name.rpartition("/")[0] for name in asked["1"]} == lacked & trained


@pytest.mark.slow
async def test_two_losses_a_newcomer_and_no_snapshot_yet(tmp_path: Path) -> None:
    """The first loss comes before any checkpoint: the run begins anew, and is told of as if it had not."""
    home, told = Home(tmp_path), []
    async with a_mesh(home, 3) as (here, mesh), asyncio.TaskGroup() as group:

        def hear(report: Report) -> None:
            told.append(report)
            if report.step == 1:
                here.crash(stage_of(here, mesh, 1))
                group.create_task(here.start("late"))
            elif report.step == 15:
                here.crash(stage_of(here, mesh, 0))

        result = await train(mesh, hear)
    assert_undisturbed(result, told, home)


@pytest.mark.slow
async def test_the_coordinators_loss_stops_nothing(tmp_path: Path) -> None:
    home, told = Home(tmp_path), []
    async with a_mesh(home, 3) as (here, mesh):

        def hear(report: Report) -> None:
            told.append(report)
            if report.step == 10:
                lease = mesh.agent.lease
                assert lease is not None
                here.crash(next(n for n, agent in here.agents.items() if agent.peer_id == lease.peer_id))

        result = await train(mesh, hear)
    assert_undisturbed(result, told, home)


@pytest.mark.slow
async def test_a_cut_between_two_stages_that_both_answer_the_owner(tmp_path: Path) -> None:
    """The next plan already does without their link: with the fourth peer in the place of one of them."""
    home, told, plans = Home(tmp_path), list[Report](), list[Plan]()
    async with a_mesh(home, 4) as (here, mesh):
        parted: list[str] = []

        def hear(report: Report) -> None:
            told.append(report)
            if report.step == 10:
                parted.extend(here.agents[stage_of(here, mesh, i)].peer_id for i in (0, 1))
                here.network.cut(*parted)

        result = await train(mesh, hear, stages=3, on_plan=lambda plan, names: plans.append(plan))
    assert [len(plan.peers) for plan in plans] == [3, 3]
    assert set(parted) <= set(plans[0].peers)
    assert len(set(parted) & set(plans[1].peers)) == 1
    assert_undisturbed(result, told, home)


def test_members_that_have_lost_each_other_are_told_from_consequences() -> None:
    failures = Failures()
    failures.blame("b", ["c"])
    failures.blame("a", ["b"])  # which had ended its session because of c
    assert failures.parted == {("b", "c"), ("c", "b")}
    failures.missed.add("c")
    assert failures.parted == set(), "c had lost the owner"


async def test_a_link_is_planned_with_again_once_a_probe_has_crossed_it() -> None:
    async with InProcess(JoinOptions(), timeouts=FAST) as here:
        a, b, c = [await here.start(name) for name in "abc"]
        pair = (a.peer_id, b.peer_id)
        async with asyncio.timeout(10):
            await c.directory.wait_for(lambda: pair in c.links() and pair[::-1] in c.links())
            before = c.links()
            c.cut_off([pair])
            assert c.parted() == (pair,)
            assert c.links()[pair].bandwidth_bytes_per_s == NEXT_TO_NOTHING
            assert {p: link for p, link in c.links().items() if p != pair} == {
                p: link for p, link in before.items() if p != pair
            }
            await sound(c, [pair])
            await c.directory.wait_for(lambda: not c.parted())
        assert c.links()[pair].bandwidth_bytes_per_s > 100 * NEXT_TO_NOTHING


@pytest.mark.slow
async def test_without_enough_peers_the_run_says_how_to_go_on_and_then_does(tmp_path: Path) -> None:
    home, told = Home(tmp_path), []

    def hear(report: Report) -> None:
        told.append(report)

    async def alone() -> None:
        async with a_mesh(home, 1, replace(FAST, regroup_s=6.0)) as (here, mesh):

            def hear_and_crash(report: Report) -> None:
                hear(report)
                if report.step == 10:
                    here.crash("p0")

            await train(mesh, hear_and_crash)

    with pytest.raises(PeerLostError, match=r"was lost in step .* no .*device.*--resume \S+-job`") as caught:
        await alone()
    run = str(caught.value).rpartition("--resume ")[2].rstrip("`")
    assert home.run(run).state == "failed"
    async with a_mesh(home, 2) as (_, mesh):
        result = await train(mesh, hear, resume=run)
    assert_undisturbed(result, told, home)


@pytest.mark.slow
async def test_a_member_that_falls_silent_is_given_up_and_finds_its_epoch_over(tmp_path: Path) -> None:
    """Nothing breaks and nothing comes, as of a process that is stopped; then everything comes, late."""
    home, told = Home(tmp_path), []
    async with a_mesh(home, 3) as (here, mesh):

        def hear(report: Report) -> None:
            told.append(report)
            if report.step == 10:
                silent = here.agents[stage_of(here, mesh, 1)].peer_id
                for agent in here.agents.values():
                    here.network.impair(silent, agent.peer_id, Impairment(latency_s=4.0))
                    here.network.impair(agent.peer_id, silent, Impairment(latency_s=4.0))

        result = await train(mesh, hear)
        await mesh.agent.wait_for_devices(3)  # it is idle again
    assert_undisturbed(result, told, home)


@virtual_time
async def test_nobody_waits_long_for_the_answer_of_who_was_silent_before(tmp_path: Path) -> None:
    """Who is stopped does not refuse a stream: it says nothing. One that answers again in time is there."""
    loop = asyncio.get_running_loop()
    async with InProcess(JoinOptions(), MemoryNetwork(), FAST, clock=loop.time, monotonic=loop.time) as here:
        peers = [(await here.start(f"p{i}")).peer_id for i in range(3)]
        mesh = await here.own("owner", Home(tmp_path))
        await mesh.agent.wait_for_devices(3)
        stopped, back, _ = peers
        here.network.impair(mesh.agent.peer_id, stopped, Impairment(latency_s=4.0))
        for silent, took_s in [({stopped, back}, 0.3), ({back}, 1.5), (set[str](), 1.5)]:
            began_s = loop.time()
            called = await Recovery(mesh.agent).call(peers, silent)
            assert called.here == {*peers} - {stopped}
            assert loop.time() - began_s == pytest.approx(took_s)


@pytest.mark.slow
async def test_a_member_that_falls_silent_during_its_offer_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither answers nor breaks while it should build its stage; an offer itself may take minutes."""
    home, told = Home(tmp_path), []
    send = Offering.send
    async with a_mesh(home, 3) as (here, mesh):
        silent: list[str] = []

        async def fall_silent(self: Offering, stream: Stream, offer: Offer) -> Frame:
            if offer.resumes and not silent:
                silent.append(offer.peer_id)
                for agent in here.agents.values():
                    here.network.impair(agent.peer_id, offer.peer_id, Impairment(latency_s=300.0))
                    here.network.impair(offer.peer_id, agent.peer_id, Impairment(latency_s=300.0))
            return await send(self, stream, offer)

        monkeypatch.setattr(Offering, "send", fall_silent)

        def hear(report: Report) -> None:
            told.append(report)
            if report.step == 10:
                here.crash(stage_of(here, mesh, 2))

        async with asyncio.timeout(FAST.offer_s / 2):  # far more than it takes, on a busy machine too
            result = await train(mesh, hear)
        assert silent
        assert len(result.plan.pipelines[0].stages) == 1
    assert_undisturbed(result, told, home)


@pytest.mark.slow
async def test_whoever_is_ready_waits_for_a_slow_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a silent owner would be given."""
    home, told = Home(tmp_path), []
    build = Offer.build

    def slow(self: Offer, state: Mapping[str, torch.Tensor], device: torch.device) -> StageRunner:
        if self.index == 0:
            time.sleep(2.0)
        return build(self, state, device)

    monkeypatch.setattr(Offer, "build", slow)
    async with a_mesh(home, 2) as (_, mesh):
        with capture_logs() as logged:
            result = await train(mesh, told.append)
    assert_undisturbed(result, told, home)
    assert not [entry for entry in logged if entry["event"] == Event.MEMBER_LOST]


@pytest.mark.slow
async def test_a_later_plan_that_cannot_run_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer's coordinator may plan what the job cannot have, as dropout on devices of two kinds; the next plan may do."""
    home, told, refused = Home(tmp_path), list[Report](), list[Plan]()
    really = offering.check_kinds

    def check(program: Program, plan: Plan, kinds: Mapping[str, str]) -> None:
        really(program, plan, kinds)
        if told and not refused:
            refused.append(plan)
            raise PlanError("the plan draws random numbers (dropout) on cpu and cuda devices")

    monkeypatch.setattr(offering, "check_kinds", check)
    async with a_mesh(home, 3) as (here, mesh):

        def hear(report: Report) -> None:
            told.append(report)
            if report.step == 10:
                here.crash(stage_of(here, mesh, 1))

        result = await train(mesh, hear, stages=2)
    assert len(refused) == 1
    assert_undisturbed(result, told, home)
