"""What the owner feeds can bound a step like any stage: it is measured, and named."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import msgpack
import pytest
import torch
from torch import nn

from dht import Identity
from meshcee.adapt.feeding import Feeding
from meshcee.adapt.senses import LASTING_STEPS, Feeds, Reads, Shift
from meshcee.capture import capture
from meshcee.config import Timeouts
from meshcee.eager import plain
from meshcee.errors import ProtocolError
from meshcee.figures.measured import JobCosts
from meshcee.figures.profile import BlockCost, LinkProfile
from meshcee.figures.timing import BlockTimes
from meshcee.figures.versions import Versions
from meshcee.files.home import Home
from meshcee.job import At, Job
from meshcee.optim import Optimizer
from meshcee.plan import Plan
from peers.device.compute import Pace
from peers.node.early import JoinOptions
from peers.node.in_process import InProcess
from peers.owner.answers import Answers, Report
from peers.owner.feed import Portion
from peers.planning.asking import question
from peers.planning.coordinator import PlanRequest
from peers.transport.base import Frame, Stream
from peers.transport.memory import Impairment, MemoryNetwork
from tests.mutation import breaks, changed
from tests.peers.measure.test_depths import MICRO, MICROS, Wide, about, answers_of
from tests.peers.owner.test_supplier import Here
from tests.rig.mesh_fixture import train
from tests.rig.mutations import check_every_field
from tests.rig.virtual_time import virtual_time

NAMES = {"p0": "ann", "p1": "ben"}


def fed(data_s: float, rates: tuple[Any, Any]) -> str:
    """The limit of a step of 10 s in which each member was sent 6 MB, and was idle for 60 % of the time or more."""
    answers, plan = answers_of({})
    answers.data_s = data_s
    answers.round = replace(answers.round, weights=(0.25,) * MICROS)
    answers.fed_bytes = {"p0": 6_000_000, "p1": 6_000_000}
    for peer, rate in zip(("p0", "p1"), rates):
        answers.applied[peer] = {**answers.applied[peer], "fed": rate}
    return answers.limit(plan, NAMES, 10.0)


def test_who_feeds_for_most_of_a_step_bounds_it() -> None:
    assert fed(0.1, (0.7e6, 3e6)) == "the owner's link to ann: 6 MB of inputs a step take 8.6 s"
    assert fed(0.1, (None, 0.8e6)) == "the owner's link to ben: 6 MB of inputs a step take 7.5 s"
    assert fed(9.5, (0.7e6, None)) == f"data: {MICRO * MICROS} samples take 9.5 s"
    for data_s, rates in ((0.1, (None, None)), (3.0, (3e6, 9e6)), (6.9, (None, None))):
        assert fed(data_s, rates) == "links: the busiest stage, 0 on ann, waits 60%"


@pytest.mark.parametrize("rate", [0.0, -1.0, "1", float("inf"), float("nan"), [1.0]])
def test_a_rate_that_is_none_is_refused(rate: Any) -> None:
    with pytest.raises(ProtocolError):
        answers_of({}, fed=rate)


class Slow:
    """Reading it takes longer than everything else."""

    def __init__(self, sample_s: float) -> None:
        self.x = torch.randn(40, 64, 64, generator=torch.Generator().manual_seed(0))
        self._sample_s = sample_s

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self._sample_s)
        return self.x[index], self.x[index]


def job_of(sample_s: float) -> Job:
    return Job(
        model=Wide(),
        loss=nn.functional.mse_loss,
        data=cast(Any, Slow(sample_s)),
        optimizer=Optimizer("SGD", lr=1e-2),
        batch_size=MICRO * MICROS,
        micro_batch_size=MICRO,
        steps=4,
        codec="none",
    )


async def limits(network: MemoryNetwork, sample_s: float) -> list[str]:
    trained = await train(job_of(sample_s), 2, MICRO, network=network)
    return [report.limit for report in trained.reports[1:]]


async def test_a_poor_line_from_the_owner_is_named() -> None:
    network = MemoryNetwork()
    network.impair("owner", "p0", Impairment(bandwidth_bytes_per_s=1e6))
    found = await limits(network, 0.0)
    assert any(told.startswith("the owner's link to p0: 0.52 MB of inputs a step take 0.5") for told in found)


async def test_data_that_takes_long_to_read_is_named() -> None:
    assert any(told.startswith("data: 32 samples take 0.") for told in await limits(MemoryNetwork(), 0.01))


def test_without_its_line_a_stage_is_blamed() -> None:
    with changed(Answers.limit, "if (fed := self._fed(plan, names, step_s)) is not None:", "if (fed := '') != '':"):
        assert breaks(test_who_feeds_for_most_of_a_step_bounds_it)


UPLINK = 1e6  # bytes per second


async def behind_a_thin_uplink(monkeypatch: pytest.MonkeyPatch) -> tuple[float, list[Report]]:
    """What a plan was predicted to take a step, and the reports of its run: two devices that would take a quarter of that."""
    loop, real = asyncio.get_running_loop(), time.perf_counter
    job = replace(job_of(0.0), steps=8)
    network = MemoryNetwork(impairment=Impairment(0.001, 5e7))
    peers = JoinOptions(pace=Pace(4e8))
    async with InProcess(peers, network, Timeouts(), clock=loop.time, monotonic=loop.time) as here:
        lending = [(await here.start(name)).peer_id for name in ("ann", "ben")]
        mesh = await here.own("owner", None)
        for peer in lending:
            network.impair(mesh.agent.peer_id, peer, Impairment(0.001, UPLINK))
        monkeypatch.setattr(time, "perf_counter", lambda: loop.time() + real() / 100)  # what devices take is emulated
        reports = [report async for report in mesh.train(job, captured=capture(job))]
        assert mesh.result.plan is not None
        assert mesh.result.plan.predicted is not None
        return mesh.result.plan.predicted.step_s, reports


@virtual_time
async def test_behind_a_thin_uplink_a_plan_takes_what_it_said_and_the_link_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fed_bytes = 2 * MICRO * MICROS * 64 * 64 * 4  # x and y
    predicted_s, reports = await behind_a_thin_uplink(monkeypatch)
    took_s = median(report.step_s for report in reports[1:])
    assert predicted_s == pytest.approx(fed_bytes / UPLINK, rel=0.1)
    assert took_s == pytest.approx(predicted_s, rel=0.1)
    for report in reports:
        assert re.match(r"the owner's link to (ann|ben): 1 MB of inputs a step take 1(\.1)? s", report.limit)


@pytest.mark.slow
@virtual_time
async def test_a_run_goes_over_to_who_is_fed_faster_when_the_owners_uplink_sags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = replace(job_of(0.0), steps=36)
    captured, expected = capture(job), plain(job, micro_batch=MICRO).losses
    loop, real = asyncio.get_running_loop(), time.perf_counter
    network = MemoryNetwork(impairment=Impairment(0.001, 5e7))
    peers = JoinOptions(pace=Pace(4e8))
    async with InProcess(peers, network, Timeouts(), clock=loop.time, monotonic=loop.time) as here:
        both = {(await here.start(name)).peer_id for name in ("ann", "ben")}
        mesh = await here.own("owner", Home(tmp_path))
        monkeypatch.setattr(time, "perf_counter", lambda: loop.time() + real() / 100)
        first: set[str] = set()
        async for report in mesh.train(job, captured=captured, stages=1):
            assert mesh.result.plan is not None
            if report.step == 3:
                first = set(mesh.result.plan.peers)
                for peer in first:
                    network.impair(mesh.agent.peer_id, peer, Impairment(0.001, UPLINK))
    (change,) = mesh.result.changes
    assert all(re.match(r"the link that feeds (ann|ben) has 0\.\d+ times its bandwidth", why) for why in change.cause)
    assert len(first) == 1
    assert set(mesh.result.plan.peers) == both - first
    assert mesh.result.losses == expected


@virtual_time
async def test_an_owner_measures_its_links_before_it_asks_and_the_coordinator_hears_of_them() -> None:
    now = asyncio.get_running_loop().time
    network = MemoryNetwork(impairment=Impairment(0.001, 1e8))
    job = job_of(0.0)
    async with InProcess(JoinOptions(), network, Timeouts(), clock=now, monotonic=now) as here:
        peers = [(await here.start(name)).peer_id for name in ("near", "far")]
        mesh = await here.own("owner", None)
        for peer, rate in zip(peers, (5e7, 1e6)):
            network.impair(mesh.agent.peer_id, peer, Impairment(0.001, rate))
        asked = await question(mesh.agent, job, capture(job), None)
    assert [asked.feeds[peer].bandwidth_bytes_per_s for peer in peers] == [
        pytest.approx(r, rel=0.2) for r in (5e7, 1e6)
    ]
    assert asked.job.feeds == ((64 * 64 * 4, (0,)), (64 * 64 * 4, (asked.job.feeds[1][1][0],)))
    heard = PlanRequest.from_frame(asked.frame())
    assert (heard.job.feeds, heard.job.data_s) == (asked.job.feeds, asked.job.data_s)
    for peer in peers:
        assert heard.feeds[peer].bandwidth_bytes_per_s == asked.feeds[peer].bandwidth_bytes_per_s


@virtual_time
async def test_who_is_silent_takes_no_others_time_and_no_graph_is_on_the_way_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = asyncio.get_running_loop().time
    began: list[float] = []

    async def profiled(*args: Any) -> dict[str, BlockTimes]:
        began.append(now())
        return {}

    async def silent(stream: Stream) -> None:
        await asyncio.sleep(1e6)

    monkeypatch.setattr("peers.planning.asking.profile", profiled)
    job, network = job_of(0.0), MemoryNetwork(impairment=Impairment(0.001, 1e7))
    async with InProcess(JoinOptions(), network, Timeouts(), clock=now, monotonic=now) as here:
        agents = [await here.start(name) for name in ("ann", "ben", "cid")]
        mesh = await here.own("owner", None)
        first, *others = mesh.agent.devices()
        for agent in agents:
            if agent.peer_id == first:
                agent.transport.serve("probe", silent)
        asked = await question(mesh.agent, job, capture(job), None)
    assert asked.feeds.keys() == {mesh.agent.peer_id, *others}
    for peer in others:
        assert asked.feeds[peer].bandwidth_bytes_per_s == pytest.approx(1e7, rel=0.2)
        assert asked.feeds[peer].measured_at < began[0]


@virtual_time
async def test_where_data_is_elsewhere_the_suppliers_links_are_priced_and_not_the_owners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two devices are alike. The owner reaches one of them well, and the supplier the other one."""
    now, real = asyncio.get_running_loop().time, time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: now() + real() / 100)
    network = MemoryNetwork(impairment=Impairment(0.001, 1e8))
    like = torch.zeros(64, 64)
    job = replace(job_of(0.0), data=At("hospital", "pairs", like=(like, like), samples=40))
    captured = capture(job)
    here_is_the_data = Here([(like, like)] * 40)
    async with InProcess(JoinOptions(pace=Pace(4e8)), network, Timeouts(), clock=now, monotonic=now) as here:
        who = {name: Identity.generate() for name in ("near", "far", "hospital")}
        for name, rate in (("near", 5e7), ("far", UPLINK)):
            network.impair(who["hospital"].peer_id, who[name].peer_id, Impairment(0.001, rate))
        for name in ("near", "far"):
            await here.start(name, identity=who[name])
        await here.start("hospital", identity=who["hospital"], pace=Pace(1e7), datasets={"pairs": here_is_the_data})
        mesh = await here.own("owner", None)
        network.impair(mesh.agent.peer_id, who["near"].peer_id, Impairment(0.001, UPLINK))
        asked = await question(mesh.agent, job, captured, 1)
        planned = await mesh.plan(job, captured, 1)
        assert [asked.feeds[who[name].peer_id].bandwidth_bytes_per_s for name in ("near", "far")] == [
            pytest.approx(rate, rel=0.2) for rate in (5e7, UPLINK)
        ]
        assert planned.plan.peers == (who["near"].peer_id,)
        reports = [report async for report in mesh.train(job, captured=captured, plan=on(planned.plan, who["far"]))]
    assert all(report.limit.startswith("hospital's link to far: 1 MB of inputs") for report in reports[1:])


def on(plan: Plan, who: Identity) -> Plan:
    """The same plan of one stage, on this peer."""
    (pipeline,) = plan.pipelines
    (stage,) = pipeline.stages
    stage = replace(stage, members=(replace(stage.members[0], peer=who.peer_id),))
    return replace(plan, pipelines=(replace(pipeline, stages=(stage,)),))


@pytest.mark.parametrize(
    "wrong",
    [
        {"job": {"feeds": [[1, [9]]]}},
        {"job": {"feeds": [[-1, [0]]]}},
        {"job": {"feeds": [5]}},
        {"job": {"data_s": -1.0}},
        {"job": {"data_s": float("inf")}},
        {"feeds": {"p": {"bandwidth_bytes_per_s": 0.0}}},
        {"feeds": {"p": {"latency_s": None}}},
        {"feeds": {"p": {"bandwidth_bytes_per_s": float("nan")}}},
        {"feeds": []},
    ],
)
def test_a_request_whose_feeds_make_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    costs = JobCosts([BlockCost("b", 1.0, 1, 1, 1, 1, 1)], 8, feeds=((4, (0,)),), data_s=0.1)
    frame = PlanRequest(costs, feeds={"p": LinkProfile(0.1, 1e6)}).frame()
    assert PlanRequest.from_frame(frame).job.feeds == costs.feeds
    body = msgpack.unpackb(bytes(frame.payloads[0]))
    with pytest.raises(ProtocolError):
        PlanRequest.from_frame(Frame(frame.kind, {}, [msgpack.packb(but(body, wrong))]))


def but(body: dict[str, Any], by: dict[str, Any]) -> dict[str, Any]:
    """The same, with some of its fields, or of theirs, as `by` has them."""
    inner = {k: but(body[k], v) if isinstance(v, dict) else v for k, v in by.items()}
    return {**body, **inner}


@pytest.mark.slow
def test_each_field_of_a_request_is_checked() -> None:
    times = BlockTimes((0,), (1, 2), (((((1.0, 2.0, 3.0),),) * 2),) * 3, (0.1,))
    costs = JobCosts(
        [BlockCost("b", 1.0, 1, 1, 1, 1, 1)] * 3,
        8,
        4,
        alike=(0, 0, 0),
        tied=((0, 2, 8),),
        feeds=((4, (0, 1)),),
        data_s=0.1,
        versions=Versions("0.1", "2.13.0", "3.11"),
    )
    request = PlanRequest(
        costs, {"p": times}, 2, ("p",), ("q",), ("r",), (("p", "q"),), {"p": LinkProfile(0.1, 1e6)}, True
    )
    frame = request.frame()
    assert PlanRequest.from_frame(frame) == request
    check_every_field(
        msgpack.unpackb(frame.payloads[0]),
        lambda body: PlanRequest.from_frame(Frame(frame.kind, {}, [msgpack.packb(body)])),
        free=(".stages = None", ".job.micro_batch = None", ".job.versions = None", ".times.p left", ".feeds.p left"),
    )


def test_a_link_that_feeds_is_known_by_what_has_held_where_it_matters() -> None:
    feeding = Feeding({"p0": LinkProfile(0.01, 1e8)})

    def heard(size: int, rate: float, peer: str = "p0", steps: int = LASTING_STEPS) -> list[Shift]:
        return [told for _ in range(steps) for told in feeding.hear({peer: (size, rate)}, 1.0)]

    assert heard(10_000, 1e6) == [], "it takes a hundredth of the step"
    feeding.restart()
    assert heard(2_000_000, 1e6, steps=LASTING_STEPS - 1) == [], "it may pass"
    assert heard(2_000_000, 1e6, steps=1) == [Feeds("p0", about(0.02))]
    assert feeding.links == {"p0": LinkProfile(0.01, 1e6)}
    assert heard(2_000_000, 1.1e6) == [], "noise"
    assert heard(2_000_000, 4e6) == [Feeds("p0", about(4.00))]
    assert heard(2_000_000, 1e6, "new") == [Feeds("new", about(0.25))], "it was taken to be as slow as the slowest"


def test_a_step_tells_of_what_was_fed() -> None:
    answers, _ = answers_of({}, fed=2e6)
    answers.fed_bytes = {"p0": 1000, "p1": 5}
    assert answers.observed().fed == {"p0": (1000, 2e6)}


def test_how_long_data_takes_counts_by_what_has_held_where_it_matters() -> None:
    feeding = Feeding({}, 0.4)

    def heard(read_s: float | None, steps: int = LASTING_STEPS) -> list[Shift]:
        return [told for _ in range(steps) for told in feeding.hear({}, 1.0, read_s)]

    assert heard(0.1) == [], "neither takes half of a step"
    assert heard(None) == [], "others read, and nobody sees how long"
    assert heard(0.8, LASTING_STEPS // 2) == [], "it may pass"
    assert heard(0.8, 1) == [Reads(0.8)], "in most of the last steps"
    assert feeding.data_s == 0.8
    assert heard(0.9) == [], "noise"
    feeding.restart()
    assert heard(0.1, LASTING_STEPS - 1) == [], "another plan has begun"
    assert heard(0.1, 1) == [Reads(0.1)]


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_a_step_tells_how_long_its_samples_took_unless_others_read_ahead(reads_ahead: bool) -> None:
    answers, plan = answers_of({})
    answers.data_s, answers.portions = 0.3, [Portion(replace(answers.round, weights=(1.0,) * MICROS), ((1.0,),))]
    assert answers.as_planned(plan, reads_ahead=reads_ahead).data_s == (None if reads_ahead else 0.3)
