"""Data at its place: a peer reads what an owner has never seen, and the run equals the plain loop over that set, bit for bit."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch
from torch import nn

import meshcee
from dht.records import PeerRecord
from meshcee.capture import Capture, capture
from meshcee.config import Limits, Timeouts
from meshcee.eager import plain
from meshcee.errors import NotPermittedError, PeerLostError, UsageError, unwrap
from meshcee.events import Event
from meshcee.files.home import Home
from meshcee.job import At, Job
from meshcee.sampling import batch_of, inputs_of
from peers.device import Graphs
from peers.member import Member
from peers.node.departure import Departure, ask_to_leave
from peers.node.device_process import DeviceProcess
from peers.node.early import JoinOptions
from peers.node.in_process import InProcess
from peers.node.mesh import Mesh
from peers.owner.epoch import Report
from peers.owner.feed import Feed
from peers.owner.job_run import Result
from peers.owner.numbers import Numbers
from peers.owner.supplier import Supplier
from peers.transport.base import Frame, StreamClosed
from peers.wire import messages
from peers.wire.messages import Round
from tests.peers.member.test_training import Pairs, make_job
from tests.peers.owner.test_recovery import FAST
from tests.rig.mesh_fixture import beside, even_plan, grouped
from tests.rig.virtual_time import virtual_time

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here

STEPS, MICRO = 12, 6


class Noisy(Pairs):
    """Samples that draw from torch's generator each time they are read."""

    def __getitem__(self, i: int) -> tuple[int, int]:
        return super().__getitem__(i + int(torch.randint(23, ())))


class Here:
    """A set that is open in this process, as `Dataset` has it in one of its own. Steps of `waits` are read once that is set."""

    source = "pairs.py:make"

    def __init__(self, data: Any, fails: Callable[[int], None] = lambda step: None) -> None:
        self.samples, self._data, self._fails = len(data), data, fails
        self.read: list[int] = []  # steps
        self.waits: dict[int, asyncio.Event] = {}

    async def batch(self, seed: int, step: int, indices: Sequence[int], layout: Any) -> dict[str, torch.Tensor]:
        self._fails(step)
        if step in self.waits:
            await self.waits[step].wait()
        self.read.append(step)
        return inputs_of(batch_of(self._data, indices, seed, step))


def job_of(where: str = "hospital", **changes: Any) -> Job:
    settings = {
        "data": At(where, "pairs", like=(0, 0), samples=96),
        "steps": STEPS,
        "micro_batch_size": MICRO,
        "checkpoint_every": 3,
        **changes,
    }
    return make_job(**settings)


@functools.cache
def captured_job() -> Capture:
    return capture(job_of())


@functools.cache
def expected() -> tuple[list[float], dict[str, torch.Tensor]]:
    losses, _, model, _ = plain(make_job(data=Noisy(96), steps=STEPS), STEPS, MICRO)
    return losses, model.state_dict()


@asynccontextmanager
async def a_mesh(home: Home | None, peers: int, **more: Any) -> AsyncIterator[tuple[InProcess, Mesh, Here]]:
    """So many peers that compute, and one that only has the data."""
    source = Here(Noisy(96))
    try:
        async with InProcess(JoinOptions(), timeouts=replace(FAST, **more)) as here:
            for i in range(peers):
                await here.start(f"p{i}")
            await here.start("hospital", lends=False, datasets={"pairs": source}, region="north")
            yield here, await here.own("owner", home), source
    except BaseExceptionGroup as group:
        raise unwrap(group) from group


def virtual_mesh(timeouts: Timeouts) -> InProcess:
    now = asyncio.get_running_loop().time
    return InProcess(JoinOptions(), timeouts=timeouts, clock=now, monotonic=now)


async def train(mesh: Mesh, hear: Callable[[Report], None] = lambda report: None, **more: Any) -> Result:
    job = more.pop("job", None) or job_of()
    stages = more.pop("stages", len(mesh.agent.devices()))
    async for report in mesh.train(job, captured=captured_job(), stages=stages, **more):
        hear(report)
    return mesh.result


def assert_equal(result: Result) -> None:
    losses, state = expected()
    assert result.losses == losses
    assert all(torch.equal(tensor, state[name]) for name, tensor in result.state_dict.items())


async def test_samples_go_from_their_peer_to_the_stages_and_the_run_equals_the_plain_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read_here(self: Feed, round: Round, micro: int) -> Any:
        raise AssertionError("the owner has no samples")

    monkeypatch.setattr(Feed, "inputs", read_here)
    async with a_mesh(None, 3) as (here, mesh, source):
        reports: list[Report] = []
        async for report in mesh.train(job_of(), captured=captured_job(), stages=3):
            reports.append(report)
            if report.step == 3:  # nobody else feeds a member
                assert mesh.result.plan is not None
                first = mesh.result.plan.pipelines[0].stages[0].members[0].peer
                stranger = next(a for a in here.agents.values() if a.lends and a.peer_id != first)
                assert isinstance(stranger.member, Member)
                assert stranger.member.session is not None
                attach = stranger.member.session.offer.attach_header()
                stream = await stranger.transport.open(first, "inputs")
                await stream.send(Frame(messages.ATTACH, attach))
                with pytest.raises(StreamClosed):
                    await stream.recv()
        assert_equal(mesh.result)
        assert source.read == [step for step in range(STEPS) for _ in range(24 // MICRO)]
        assert not any(report.observed.fed for report in reports)
        assert [p["datasets"] for p in mesh.agent.known()["peers"] if p["name"] == "hospital"] == [{"pairs": 96}]


@pytest.mark.slow
async def test_evaluations_are_fed_by_the_owner_in_between() -> None:
    job = job_of(eval_data=Pairs(23), eval_every=4)
    async with a_mesh(None, 2) as (_, mesh, _):
        async for _ in mesh.train(job, stages=2):
            pass
        assert_equal(mesh.result)
        assert [step for step, _ in mesh.result.metrics] == [3, 7, 11]


async def test_a_peer_that_has_the_data_may_hold_stages_too() -> None:
    async with InProcess(JoinOptions(), timeouts=FAST) as here:
        await here.start("hospital", datasets={"pairs": Here(Noisy(96))})
        await here.start("p1")
        assert_equal(await train(await here.own("owner", None)))


async def test_pipelines_beside_each_other_get_the_samples_of_their_own_micro_batches() -> None:
    torch.manual_seed(0)
    sizes = [nn.Embedding(23, 16), nn.Linear(16, 16), nn.Dropout(0.1), nn.Linear(16, 16), nn.Linear(16, 23)]
    job = job_of(model=nn.Sequential(*sizes), steps=4)
    losses, _, model, _ = plain(replace(job, data=Noisy(96)), 4, MICRO)
    captured = capture(job)
    blocks = captured.train.num_blocks
    one = even_plan(blocks, 1, 24, MICRO)
    async with a_mesh(None, 3) as (_, mesh, source):
        plan = beside(one, (1, [(2, (MICRO,)), (blocks, (MICRO,))]), (3, [(blocks, (MICRO,))]))
        async for _ in mesh.train(job, captured=captured, plan=plan):
            pass
        assert mesh.result.losses == losses
        state = model.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in mesh.result.state_dict.items())
        assert source.read == [step for step in range(4) for _ in range(24 // MICRO)]
        # What groups compute is tried on samples that differ, and all that there is here is alike.
        with pytest.raises(UsageError, match="whether devices can share a stage"):
            async for _ in mesh.train(job, captured=captured, plan=grouped(one, ((4, 2),))):
                pass


@pytest.mark.slow
async def test_members_whose_devices_are_processes_are_fed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them by its own peer, which has the data."""
    monkeypatch.setattr("peers.node.in_process.Compute", lambda device, pace: DeviceProcess(device, Graphs(Limits())))
    async with InProcess(JoinOptions(), timeouts=FAST) as here:
        source = Here(Noisy(96))
        await here.start("hospital", datasets={"pairs": source})
        await here.start("p1")
        assert_equal(await train(await here.own("owner", None)))
        assert set(source.read) == {*range(STEPS)}


@pytest.mark.slow
async def test_a_standby_goes_on_with_the_same_supplier(tmp_path: Path) -> None:
    homes = [Home(tmp_path / name) for name in ("chief", "heir")]
    job = job_of()  # building a model draws, which the standby's look at the data would see
    async with a_mesh(homes[0], 2) as (here, mesh, source), asyncio.TaskGroup() as group:
        heir = await here.own("heir", homes[1])

        async def own() -> None:
            async for report in mesh.train(job, captured=captured_job(), stages=2):
                if report.step == 5:
                    here.crash("owner")
                    await asyncio.Event().wait()

        owning = group.create_task(own())
        followed = await heir.stand_by(job, captured_job())
        assert followed is not None
        assert_equal(await train(heir, resume=followed[0], after=followed[1]))
        assert set(source.read) == {*range(STEPS)}
        owning.cancel()


async def test_a_supplier_that_is_lost_is_replaced_by_another_of_its_region(tmp_path: Path) -> None:
    other = Here(Noisy(96))
    async with a_mesh(Home(tmp_path), 2) as (here, mesh, source):
        await here.start("clinic", lends=False, datasets={"pairs": other}, region="north")

        def hear(report: Report) -> None:
            if report.step == 5:
                first = next(name for name in ("hospital", "clinic") if (source if name == "hospital" else other).read)
                here.crash(first)

        assert_equal(await train(mesh, hear, job=job_of("north")))
        assert source.read
        assert other.read


@pytest.mark.slow
async def test_a_run_waits_for_its_only_supplier_and_goes_on_when_it_is_back(tmp_path: Path) -> None:
    async with a_mesh(Home(tmp_path), 2) as (here, mesh, _), asyncio.TaskGroup() as group:
        again = Here(Noisy(96))

        async def come_back() -> None:
            await asyncio.sleep(1.0)
            await here.start("hospital", lends=False, datasets={"pairs": again})

        def hear(report: Report) -> None:
            if report.step == 5:
                here.crash("hospital")
                group.create_task(come_back())

        assert_equal(await train(mesh, hear))
        assert again.read


@pytest.mark.slow
async def test_without_its_supplier_the_run_says_how_to_go_on_and_then_does(tmp_path: Path) -> None:
    home = Home(tmp_path)

    async def alone() -> None:
        async with a_mesh(home, 2, regroup_s=4.0, record_ttl_s=2.0) as (here, mesh, _):
            await train(mesh, lambda report: here.crash("hospital") if report.step == 5 else None)

    told = r"the data is gone; after 4 s: no peer 'hospital'.*: start a peer .*--dataset pairs=.*--resume \S+-job`"
    with pytest.raises(PeerLostError, match=told) as caught:
        await alone()
    run = str(caught.value).rpartition("--resume ")[2].rstrip("`")
    async with a_mesh(home, 2) as (_, mesh, source):
        assert_equal(await train(mesh, resume=run))
        assert min(source.read) > 0


@virtual_time
async def test_a_supplier_that_leaves_is_replaced_at_a_steps_end_and_no_step_is_computed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[int] = []
    monkeypatch.setattr(Numbers, "compare", lambda self, step, loss: again.append(step))
    sources = {name: Here(Noisy(96)) for name in ("hospital", "clinic")}
    in_time: list[bool] = []
    seen = asyncio.Event()
    with structlog.testing.capture_logs() as logs:
        async with virtual_mesh(FAST) as here, asyncio.TaskGroup() as group:
            for name in ("p0", "p1"):
                await here.start(name)
            for name, source in sources.items():
                await here.start(name, datasets={"pairs": source}, region="north")
                source.waits[4] = seen
            mesh = await here.own("owner", Home(tmp_path))

            async def leave(name: str) -> None:
                departure = Departure(here.agents[name])
                departure.ask()
                leaving = group.create_task(departure.run())
                known, peer = mesh.agent.directory, here.agents[name].peer_id
                await known.wait_for(lambda: known.peers[peer].leaving)
                seen.set()
                in_time.append(await leaving)
                here.crash(name)

            def hear(report: Report) -> None:
                if report.step == 3:
                    group.create_task(leave(next(name for name in sources if sources[name].read)))

            assert_equal(await train(mesh, hear, job=job_of("north"), stages=2))
    assert in_time == [True]
    assert again == []
    assert all(source.read for source in sources.values())
    assert Event.MEMBER_LOST not in [line["event"] for line in logs]


@virtual_time
async def test_the_only_supplier_is_asked_for_and_the_run_goes_on_when_another_comes(tmp_path: Path) -> None:
    source, new = Here(Noisy(96)), Here(Noisy(96))
    source.waits = {4: asyncio.Event(), 7: asyncio.Event()}
    supplied: list[str] = []
    with structlog.testing.capture_logs() as logs:
        async with virtual_mesh(replace(FAST, leave_s=1.0)) as here, asyncio.TaskGroup() as group:
            await here.start("p0")
            hospital = await here.start("hospital", datasets={"pairs": source})
            mesh = await here.own("owner", Home(tmp_path))
            other = await here.start("other", lends=False)

            async def leave() -> None:
                departure = Departure(hospital)
                leaving = group.create_task(departure.run())
                asking = group.create_task(
                    ask_to_leave(other, hospital.peer_id, lambda _, those: supplied.extend(those))
                )
                known = mesh.agent.directory
                await known.wait_for(lambda: known.peers[hospital.peer_id].leaving)
                source.waits[4].set()
                assert not await leaving
                here.crash("hospital")
                assert not await asking
                await here.start("hospital", datasets={"pairs": new})

            def hear(report: Report) -> None:
                if report.step == 3:
                    group.create_task(leave())

            assert_equal(await train(mesh, hear, stages=1))
    assert supplied == ["pairs"]
    assert new.read
    (line,) = [line for line in logs if line["event"] == Event.MEMBERS_NEEDED]
    assert line["who"] == ["hospital"]
    assert [line["datasets"] for line in logs if line["event"] == Event.DATA_NEEDED] == [["pairs"]]


@virtual_time
async def test_a_set_that_is_long_in_coming_is_told_of_with_its_peer_and_file() -> None:
    heard: list[str] = []
    with structlog.testing.capture_logs() as logs:
        async with virtual_mesh(FAST) as here:
            source = Here(Noisy(96))
            source.waits[4] = told = asyncio.Event()
            await here.start("p0")
            await here.start("hospital", lends=False, datasets={"pairs": source})
            mesh = await here.own("owner", None)

            def hear(text: str) -> None:
                if "dataset" in text:
                    heard.append(text)
                    told.set()

            assert_equal(await train(mesh, on_wait=hear))
            owner = mesh.agent.peer_id
    (sentence,) = heard
    assert "hospital has been reading dataset 'pairs' (pairs.py:make) for" in sentence
    at_hospital, at_owner = [line for line in logs if line["event"] == Event.DATA_AWAITED]
    assert (at_hospital["owner"], at_hospital["source"]) == (owner, "pairs.py:make")
    assert (at_owner["peer"], at_owner["source"]) == ("hospital", "pairs.py:make")


@pytest.mark.slow
async def test_a_lost_member_costs_no_step(tmp_path: Path) -> None:
    async with a_mesh(Home(tmp_path), 3) as (here, mesh, _):

        def hear(report: Report) -> None:
            if report.step == 5:
                assert mesh.result.plan is not None
                first = mesh.result.plan.pipelines[0].stages[0].members[0].peer
                here.crash(next(name for name, agent in here.agents.items() if agent.peer_id == first))

        assert_equal(await train(mesh, hear))


async def test_what_the_other_owners_code_does_ends_the_run_with_its_sentence(tmp_path: Path) -> None:
    def fails(step: int) -> None:
        if step == 4:
            raise UsageError("dataset 'pairs'[3] of step 5 failed at scans.py:12: ValueError")

    async with InProcess(JoinOptions(), timeouts=FAST) as here:
        await here.start("p0")
        await here.start("hospital", lends=False, datasets={"pairs": Here(Noisy(96), fails)})
        with pytest.raises(UsageError, match=r"scans.py:12"):
            await train(await here.own("owner", Home(tmp_path)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"where": "clinic"},
            "no peer 'clinic', nor one of a region .* \\(this mesh has 'pairs' at hospital\\).*--dataset pairs=",
        ),
        ({"name": "scans"}, "--dataset scans=FILE.py:make.*peers of --local have none"),
        ({"samples": 97}, "has 96 samples: write samples=96"),
    ],
)
async def test_a_set_that_nobody_has_is_refused_before_the_first_step(change: dict[str, Any], why: str) -> None:
    job = job_of()
    assert isinstance(job.data, At)
    async with a_mesh(None, 1) as (_, mesh, source):
        with pytest.raises(UsageError, match=why):
            await train(mesh, job=replace(job, data=replace(job.data, **change)))
        assert not source.read


async def test_an_older_peer_is_told_apart_before_the_first_step() -> None:
    async with a_mesh(None, 1) as (_, mesh, _):
        agent, records = mesh.agent, dict(mesh.agent.directory.peers)
        ((peer, record),) = [(peer, one) for peer, one in records.items() if one.device is not None]
        wire = {name: value for name, value in record.to_wire().items() if name != "datasets"}
        older = PeerRecord.from_wire(wire, peer, "a record")
        assert (record.datasets, older) == ((), replace(record, datasets=None))
        directory = SimpleNamespace(peers={**records, peer: older}, wait_for=agent.directory.wait_for)
        seen: Any = SimpleNamespace(
            directory=directory,
            timeouts=agent.timeouts,
            clock=agent.clock,
            names=agent.names,
            addresses_of=agent.addresses_of,
        )
        supplier = Supplier(job_of())
        await supplier.meet(seen, [], str)
        with pytest.raises(UsageError, match=r"peer p0 runs an older meshcee .* upgrade it"):
            await supplier.meet(seen, [peer], str)


def test_a_job_refuses_what_needs_samples_at_the_owner() -> None:
    for change, why in (
        ({"collate": lambda rows: rows}, "collate is code of yours"),
        ({"workers": 2}, "workers are processes of yours"),
        ({"weight": lambda y: 1.0}, "weight looks at targets"),
        ({"audit": 0.1}, "an audit computes steps again"),
        ({"groups": True}, "whether devices can share a stage is tried on several samples"),
        ({"eval_data": job_of().data}, "eval_data cannot be At"),
    ):
        with pytest.raises(UsageError, match=why):
            job_of(**change)
    with pytest.raises(UsageError, match="the data is at 'hospital'"):
        meshcee.plain(job_of())
    assert meshcee.check(job_of(), stages=(2,), steps=1).equal


async def test_only_who_may_own_jobs_may_ask_for_data() -> None:
    async with InProcess(JoinOptions(), timeouts=FAST) as here:
        hospital = await here.start("hospital", datasets={"pairs": Here(Noisy(96))})
        lender = await here.start("lender", role="compute")
        with pytest.raises(NotPermittedError, match="takes the role own"):
            await lender.transport.open(hospital.peer_id, "data")
