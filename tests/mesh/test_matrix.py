"""Parity over a pairwise matrix of models and settings, and over a long run: whatever is combined, the same bits.

The idea: one mesh of five real peers and one eager process serve the whole session; a case is a plan and a job that both get
at the same time. The test gives the plan itself, because windows, live caps and fused stages are what it varies.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from meshcee.capture import Capture, capture
from meshcee.errors import PlanError
from meshcee.files.home import Home
from meshcee.job import Job
from meshcee.plan import Pipeline, Plan, Stage
from meshcee.stage.plan_checks import why_one_pipeline
from peers.node.early import JoinOptions
from peers.node.in_process import join
from peers.node.mesh import Mesh
from peers.owner.epoch import Owner, Report
from peers.owner.feed import Feed
from tests.mesh.harness import Peers, environment, peers
from tests.rig.matrix import CASES, FACTORS, MICROS, Case, job_of, pairs_of, pairwise, stages_of
from tests.rig.mesh_fixture import even_plan

QUICK = 6
RUN_S = 600.0  # for one case, the wait for free peers included


# -- plans -------------------------------------------------------------------------------------------------------------


def plan_of(case: Case, captured: Capture, job: Job, names: Sequence[str]) -> Plan:
    """Stage j on peer j; in one pipeline where the model cannot be in several."""
    micro, stages = job.micro_batch_size, stages_of(case)
    assert micro is not None
    count = 1 if why_one_pipeline(captured.train) else min(case["pipelines"], stages)
    micros = MICROS.get(count, (job.batch_size // micro,))

    def pipeline(k: int) -> Pipeline:
        mine = names[:stages][k :: len(micros)]
        batch = micros[k] * job.batch_size // sum(micros)
        return even_plan(captured.train.num_blocks, len(mine), batch, micro, peers=mine).pipelines[0]

    return Plan(micro, tuple(map(pipeline, range(len(micros)))))


def scheduled(plan: Plan, schedule: str) -> Plan:
    """The plan with the windows of a schedule.

    sequential  one micro-batch at a time through the whole pipeline, its W before the next F
    1f1b        one forward, one backward: as many in flight as stages follow, the live cap as tight as it can be
    wide        everything may be in flight, and every W be put off to the end of the step
    fused       1f1b with B and W in one on every stage
    unlike      stages that differ in all of this, so that neighbours disagree
    """

    def stage(pipeline: Pipeline, j: int) -> Stage:
        count, micros = len(pipeline.stages), pipeline.num_micro
        windows = {"sequential": 1, "wide": micros, "unlike": (2, micros, 1, micros, 3)[j]}
        window = windows.get(schedule, count - j)
        fused = schedule == "fused" or (schedule == "unlike" and j % 2 == 0)
        cap = window + 2 if schedule == "unlike" and j % 2 else window
        return replace(pipeline.stages[j], window=window, live_cap=cap, fused=fused)

    def pipeline(one: Pipeline) -> Pipeline:
        return replace(one, stages=tuple(stage(one, j) for j in range(len(one.stages))))

    return replace(plan, pipelines=tuple(map(pipeline, plan.pipelines)))


# -- the two that are compared -----------------------------------------------------------------------------------------


@dataclass
class Trained:
    """What a run left: the loss of each step, and the final state."""

    losses: list[float]
    state: Mapping[str, torch.Tensor]


class MeshOwner:
    """An owner that has joined the mesh; its event loop runs in a thread for the whole session."""

    def __init__(self, mesh: Mesh, home: Home, peers: Sequence[str]) -> None:
        self._mesh, self._home, self._peers = mesh, home, peers
        self._loop = asyncio.get_running_loop()

    def train(self, job: Job, case: Case) -> Trained:
        """Blocks; raises what went wrong in the run."""
        return asyncio.run_coroutine_threadsafe(self._train(job, case), self._loop).result()

    async def _train(self, job: Job, case: Case) -> Trained:
        captured = await asyncio.to_thread(capture, job)
        plan = scheduled(plan_of(case, captured, job, self._peers), case["schedule"])
        losses: list[float] = []

        async def hear(report: Report) -> None:
            losses.append(report.loss)

        state: Mapping[str, torch.Tensor] | None = None
        async with asyncio.timeout(RUN_S):
            while state is None:
                owner = await self._owner(job, captured, plan)
                try:
                    state = await owner.train(Feed(job, captured, plan.micro_batch), hear)
                except PlanError as error:
                    if "already runs a job" not in str(error):  # the case before: its peers are free in a moment
                        raise
                    await asyncio.sleep(0.05)
        return Trained(losses, state)

    async def _owner(self, job: Job, captured: Capture, plan: Plan) -> Owner:
        agent = self._mesh.agent
        return Owner(
            job,
            captured,
            plan,
            (await agent.coordinator()).term,
            (self._home.next_incarnation(), 1),
            agent.transport,
            addresses=agent.addresses_of(plan.peers),
            names=agent.names(),
            timeouts=agent.timeouts,
            limits=agent.limits,
        )


class EagerProcess:
    """tests/rig/reference_process.py, started once."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder = process, folder

    @contextmanager
    def training(self, case: Case, weight: float) -> Iterator[Trained]:
        """Trains the case while the block runs; then what it yielded is filled. `weight` is a micro-batch's in the loss."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"case": case, "out": str(self._folder / "state")}), file=self._process.stdin, flush=True)
        result = Trained([], {})
        try:
            yield result
        finally:
            answer = json.loads(self._process.stdout.readline() or '{"losses": [], "loaded": ["it died"]}')
        assert answer["loaded"] == []
        result.losses = [sum(loss * weight for loss in step) for step in answer["losses"]]
        result.state = safetensors.torch.load_file(self._folder / "state")


@pytest.fixture(scope="session", params=["in the peer", pytest.param("in a process", marks=pytest.mark.slow)])
def devices(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    """Five peers; where their devices compute."""
    if request.param == "in the peer":
        yield request.getfixturevalue("five_peers")
        return
    with peers(tmp_path_factory.mktemp("five-processes"), 5, "--device-process") as found:
        yield found


@pytest.fixture(scope="module")
def owner(devices: Peers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshOwner]:
    """A member in this process, on a thread: of this module only, as tests elsewhere replace parts of what it runs."""
    ready: Future[tuple[MeshOwner, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def hold() -> None:
        home, leave = Home(tmp_path_factory.mktemp("owner")), asyncio.Event()
        async with join(JoinOptions(token=devices.token), home) as mesh:
            await mesh.agent.wait_for_devices(5)
            ready.set_result((MeshOwner(mesh, home, list(devices.ids.values())), asyncio.get_running_loop(), leave))
            await leave.wait()

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(asyncio.run, hold())
        wait([ready, held], return_when=FIRST_COMPLETED)
        if held.done():
            held.result()  # it could not join: raises why
        found, loop, leave = ready.result()
        yield found
        loop.call_soon_threadsafe(leave.set)
        held.result(60)


@pytest.fixture(scope="session")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EagerProcess]:
    folder = tmp_path_factory.mktemp("eager")
    command = [sys.executable, "-m", "tests.rig.reference_process"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], env=environment(folder), **pipes) as process:
        yield EagerProcess(process, folder)
        assert process.stdin is not None
        process.stdin.close()  # it ends at the end of its input


def assert_equal(trained: Trained, expected: Trained) -> None:
    assert trained.losses == expected.losses
    assert trained.state.keys() == expected.state.keys()
    different = [name for name, tensor in trained.state.items() if not torch.equal(tensor, expected.state[name])]
    assert different == []


# -- the cases ---------------------------------------------------------------------------------------------------------


def marked() -> list[Any]:
    stride = len(FACTORS["stages"]) * (len(FACTORS["model"]) // QUICK) + 1  # models and stages both move on
    quick = set(range(0, len(CASES), stride))
    return [
        pytest.param(
            case,
            id="-".join(f"{name}={value}" if name != "model" else value for name, value in case.items()),
            marks=() if i in quick else pytest.mark.slow,
        )
        for i, case in enumerate(CASES)
    ]


def test_every_pair_of_settings_is_in_some_case() -> None:
    covered = set().union(*map(pairs_of, CASES))
    wanted = {
        ((a, x), (b, y))
        for (a, xs), (b, ys) in itertools.combinations(FACTORS.items(), 2)
        for x, y in itertools.product(xs, ys)
    }
    assert covered == wanted
    assert len(CASES) < 1.3 * len(FACTORS["model"]) * len(FACTORS["stages"])  # and no case is there in vain
    assert pairwise(FACTORS) == CASES


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", marked())
def test_any_combination_equals_the_plain_loop(owner: MeshOwner, eager: EagerProcess, case: Case) -> None:
    job = job_of(case)
    assert job.micro_batch_size is not None
    with eager.training(case, job.micro_batch_size / job.batch_size) as expected:
        trained = owner.train(job, case)
    assert_equal(trained, expected)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_steps_on_four_stages_equal_the_plain_loop(owner: MeshOwner, eager: EagerProcess) -> None:
    """The demo's model, small: rounding that differs once would have a thousand steps to grow."""
    case = {"model": "long", "stages": 4, "pipelines": 1, "schedule": "1f1b"}
    job = job_of(case)
    with eager.training(case, 1 / 4) as expected:
        trained = owner.train(job, case)
    assert_equal(trained, expected)
    assert trained.losses[-1] < 0.8 * trained.losses[0]
