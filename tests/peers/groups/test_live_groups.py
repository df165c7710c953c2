"""Groups that the coordinator itself proposes, because a job asks: who is in them, what a step takes, and its numbers.

The idea: on virtual time devices are exactly as fast as they are paced, so that plans and steps are the same on any machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from torch import nn

from dht.signing import Identity
from meshcee.capture import capture
from meshcee.config import Timeouts
from meshcee.equality.trial import why_not_shared
from meshcee.errors import ProtocolError, unwrap
from meshcee.figures.measured import JobCosts
from meshcee.files.home import Home
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.plan import Plan, Predicted
from meshcee.planner.live import situation
from meshcee.simulator import period_s
from peers.device.compute import Pace
from peers.node.early import JoinOptions
from peers.node.in_process import InProcess
from peers.owner.job_run import Result, question
from peers.planning import job_costs
from peers.planning.coordinator import PlanRequest
from peers.planning.given import placed
from peers.planning.job_costs import costs_of, sizes_of
from peers.transport.base import Frame
from peers.transport.memory import Impairment, MemoryNetwork
from tests.rig import zoo
from tests.rig.reference import Reference, reference
from tests.rig.virtual_time import virtual_time

MICRO, STEPS = 8, 6
LINK = Impairment(latency_s=0.001, bandwidth_bytes_per_s=1e8)
FAR = Impairment(latency_s=0.03, bandwidth_bytes_per_s=4e6)
PACES = {"p0": 1e7, "p1": 2e7}


class Lopsided(nn.Module):
    """Nearly all work is in one or two blocks of few parameters, so that no cut gives two devices half of one each."""

    def __init__(self, blocks: int = 1) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.heavy = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Dropout(0.1), nn.Linear(256, 16)) for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.first(x).unsqueeze(1).expand(-1, 16, -1)
        for block in self.heavy:
            h = h + block(h)
        return self.last(h.mean(1))


class Points:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        made = torch.Generator().manual_seed(i)
        return torch.randn(16, generator=made, dtype=torch.float64), i % 4


def lopsided(**changes: Any) -> Job:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "model": Lopsided().double(),
        "loss": nn.functional.cross_entropy,
        "data": Points(),
        "optimizer": Optimizer("AdamW", lr=1e-2),
        "batch_size": 4 * MICRO,
        "micro_batch_size": MICRO,
        "steps": STEPS,
        "clip_norm": 1.0,
        "cuts": ("first", "heavy.0"),
        "groups": True,
    }
    return Job(**(settings | changes))


def now() -> float:
    return asyncio.get_running_loop().time()


async def train(
    job: Job,
    paces: Mapping[str, float] = PACES,
    home: Mapping[str, int] | None = None,
    dies: tuple[int, *tuple[str, ...]] = (-1,),
    folder: Path | None = None,
    plan: Plan | None = None,
    stages: int | None = None,
) -> tuple[Result, dict[str, str], float]:
    """What it leaves, the peers' names, and the virtual seconds of a step once the first two are done.

    home   peer -> region; None: all in one
    dies   which peers, when the step with this number is told of
    plan   by names, instead of the coordinator's; then priced by what is known of the mesh
    """
    network = MemoryNetwork(impairment=LINK)
    known = {name: Identity.generate() for name in paces}
    for a, b in permutations(home or (), 2):
        if home is not None and home[a] != home[b]:
            network.impair(known[a].peer_id, known[b].peer_id, FAR)
    async with InProcess(JoinOptions(), network, Timeouts(), clock=now, monotonic=now) as here:
        for name, speed in paces.items():
            await here.start(name, identity=known[name], pace=Pace(speed))
        mesh = await here.own("owner", None if folder is None else Home(folder))
        captured, ends_s = await asyncio.to_thread(capture, job), []
        if plan is not None:
            request = await question(mesh.agent, job, captured, None)
            known_of = replace(mesh.agent.measured(), times=request.times)
            plan = placed(plan, mesh.agent.names())
            expected_s = period_s(plan, *situation(known_of, request.job))
            plan = replace(plan, predicted=Predicted(expected_s, job.batch_size / expected_s, 0.0))
        names = mesh.agent.names()
        async for report in mesh.train(job, captured=captured, plan=plan, stages=stages):
            ends_s.append(now())
            if report.step == dies[0]:
                for name in dies[1:]:
                    here.crash(name)
        return mesh.result, names, (ends_s[-1] - ends_s[1]) / (len(ends_s) - 2)


def shares(plan: Plan | None, names: dict[str, str]) -> list[dict[str, int]]:
    assert plan is not None
    return [{names[m.peer]: m.samples for m in stage.members} for stage in plan.pipelines[0].stages]


def losses_of(expected: Reference) -> list[float]:
    return [sum(float(loss) for loss in step) / len(step) for step in expected.losses]


def assert_close(result: Result, job: Job) -> None:
    expected = reference(job)
    assert result.losses == pytest.approx(losses_of(expected), rel=1e-9)
    for name, tensor in result.state_dict.items():
        torch.testing.assert_close(tensor, expected.state[name], rtol=1e-9, atol=1e-9, msg=name)


@virtual_time
async def test_a_job_that_asks_is_trained_by_a_group_of_unlike_devices_as_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_costs, "why_one_pipeline", lambda program: "this test is about groups")
    """p1 is twice as fast and takes twice as many samples; the numbers are the plain loop's, the step as expected."""
    job = lopsided()
    result, names, step_s = await train(job)
    (group,) = [stage for stage in shares(result.plan, names) if len(stage) > 1]
    assert group.keys() == PACES.keys()
    assert group["p1"] in (5, 6)
    assert result.plan is not None
    assert result.plan.predicted is not None
    assert step_s == pytest.approx(result.plan.predicted.step_s, rel=0.03)
    assert_close(result, job)


@pytest.mark.slow
@virtual_time
async def test_those_who_are_left_of_a_group_form_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_costs, "why_one_pipeline", lambda program: "this test is about groups")
    job = lopsided(steps=12, checkpoint_every=2, adapt=False)
    result, names, _ = await train(job, {**PACES, "p2": 2e7}, dies=(6, "p2"), folder=tmp_path)
    assert [group.keys() for group in shares(result.plan, names)] == [PACES.keys()]
    assert Home(tmp_path).run("last").info["rounds"] == [True, False], "whoever resumes it expects other roundings"
    assert_close(result, job)


@virtual_time
async def test_two_regions_have_a_group_each_and_16_bits_between_them_and_the_step_is_as_expected() -> None:
    home = {"a0": 0, "a1": 0, "b0": 1, "b1": 1}
    job = lopsided(model=Lopsided(2).double(), cuts=("first", "heavy.0", "heavy.1"), batch_size=8 * MICRO)
    result, names, step_s = await train(job, dict.fromkeys(home, 1e7), home)
    assert result.plan is not None
    groups = shares(result.plan, names)
    assert [{home[name] for name in group} for group in groups] in ([{0}, {1}], [{1}, {0}])
    assert all(sorted(group.values()) == [4, 4] for group in groups)
    assert [stage.codec_out for stage in result.plan.pipelines[0].stages] == ["bf16-lossless", "none"]
    assert result.plan.predicted is not None
    assert step_s == pytest.approx(result.plan.predicted.step_s, rel=0.03)
    wanted = losses_of(reference(job))
    assert result.losses == pytest.approx(wanted, rel=0.05)
    assert result.losses != pytest.approx(wanted, rel=1e-9)


@pytest.mark.slow
@virtual_time
async def test_between_regions_that_pack_what_they_send_no_bit_differs() -> None:
    home = {"a0": 0, "a1": 0, "b0": 1, "b1": 1}
    torch.manual_seed(1)
    job = lopsided(
        model=Lopsided(2).double(),
        cuts=("first", "heavy.0", "heavy.1"),
        batch_size=8 * MICRO,
        groups=False,
        codec="lossless",
    )
    result, names, _ = await train(job, {"a0": 1e7, "a1": 1e5, "b0": 1e7, "b1": 1e5}, home, stages=2)
    assert result.plan is not None
    stages = result.plan.pipelines[0].stages
    at = [home[names[peer]] for stage in stages for peer in stage.peers]
    assert {0, 1} == {*at}
    assert [s.codec_out for s in stages[:-1]] == ["none" if a == b else "lossless" for a, b in pairwise(at)]
    expected = reference(job)
    assert result.losses == [sum(float(loss) / len(step) for loss in step) for step in expected.losses]
    for name, tensor in result.state_dict.items():
        assert torch.equal(tensor, expected.state[name]), name


@virtual_time
async def test_devices_whose_owners_have_not_agreed_open_no_connections_and_the_job_hears_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_costs, "why_one_pipeline", lambda program: "this test is about groups")
    with pytest.raises(ExceptionGroup) as refused:
        await train(lopsided(direct_sums=True))
    why = str(unwrap(refused.value))
    assert "opens no connections for direct_sums" in why
    assert "start it with `meshcee peer --direct-sums`, or leave direct_sums out of the job" in why


def test_what_may_not_be_shared_is_known_before_planning() -> None:
    job = zoo.make("cnn")
    assert "statistics of the whole batch" in why_not_shared(job, capture(job))
    job = lopsided()
    assert why_not_shared(job, capture(job)) == ""


def test_members_of_a_group_take_sizes_that_were_measured() -> None:
    job = lopsided(micro_batch_size=8)
    costs = costs_of(job, capture(job))
    assert costs.groups
    assert costs.clips
    assert sizes_of(job, costs, 1 << 30) == (1, 2, 4, 8)
    assert sizes_of(replace(job, micro_batch_size=1), costs, 1 << 30) == (1,)
    assert sizes_of(job, replace(costs, groups=False), 1 << 30) == (8,)


def test_the_coordinator_hears_of_groups_and_believes_only_flags() -> None:
    job = lopsided()
    costs: JobCosts = costs_of(job, capture(job))
    frame = PlanRequest(costs).frame()
    heard = PlanRequest.from_frame(frame).job
    assert (heard.groups, heard.direct_sums, heard.clips) == (True, False, True)
    body = msgpack.unpackb(frame.payloads[0])
    wrong = {**body, "job": {**body["job"], "groups": 1}}
    with pytest.raises(ProtocolError, match="groups"):
        PlanRequest.from_frame(Frame(frame.kind, {}, [msgpack.packb(wrong)]))
