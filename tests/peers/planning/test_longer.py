"""A longer search beside a running job: what it finds, when it runs, and that its process ends with whoever asked."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from torch import nn

from benchmarks.rehearsal import FakeMesh, Played, costs, fresh, mesh
from meshcee.adapt import longer as program
from meshcee.adapt.longer import LongerQuestion, plans_of
from meshcee.capture import capture
from meshcee.eager import plain
from meshcee.figures import Measured
from meshcee.figures.profile import DeviceProfile
from meshcee.files.home import Home
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.plan import Plan
from meshcee.planner import choose, live
from peers.device.compute import Pace
from peers.node.early import JoinOptions
from peers.node.in_process import QUICK, InProcess
from peers.owner.adaptation import Newcomers
from peers.planning import PlanRequest, longer
from peers.planning.longer import Longer
from peers.transport.memory import Impairment, MemoryNetwork

QUESTION = LongerQuestion.of(mesh(1.0), costs(), None)
MODULE = "meshcee.adapt.longer"


def searches() -> list[psutil.Process]:
    """Processes of ours that search."""
    begins = f"from {MODULE} import main"
    return [p for p in psutil.Process().children() if any(begins in word for word in p.cmdline())]


@contextmanager
def asked(question: LongerQuestion) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", f"from {MODULE} import main; main()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(question.pack())
            process.stdin.flush()
            yield process
        finally:
            process.kill()


def test_the_process_answers_as_the_same_search_here() -> None:
    with asked(replace(QUESTION, times=0.1)) as process:
        assert process.stdout is not None
        found = plans_of(process.stdout.read())
    choice, _, _ = choose(mesh(1.0), costs(), None, live.EFFORT.times(0.1, rows=0.1))
    assert found == choice.candidates
    assert found


def test_where_nothing_fits_nothing_is_found() -> None:
    small = {name: replace(device, memory_bytes=1) for name, device in mesh(1.0).devices.items()}
    assert plans_of(replace(QUESTION, mesh=replace(QUESTION.mesh, devices=small)).answer()) == []


def test_the_process_ends_with_whoever_asked() -> None:
    with asked(replace(QUESTION, times=1000.0)) as process:
        time.sleep(1.0)
        assert process.poll() is None
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=20) == 1


class Here(FakeMesh):
    """An owner's machine, on which nobody computes; device `near-0` may be lent by it."""

    def __init__(self, host: str, lends: str = "") -> None:
        super().__init__(Played([1.0]), True, 1.0)
        self.host = host
        self.lends = lends
        self.tasks: list[asyncio.Task[None]] = []

    def spawn(self, work: Any) -> asyncio.Task[None]:
        self.tasks.append(task := super().spawn(work))
        return task

    def seen(self) -> Measured:
        hosts = {name: self.host if name == self.lends else "" for name in self.present}
        devices: dict[str, DeviceProfile] = {n: replace(d, host=hosts[n]) for n, d in self.devices(()).items()}
        return replace(self.measured(()), devices=devices)


def looked(here: Here, left_s: float = 1e6) -> Longer:
    found = Longer(cast(Any, here))
    found.look(here.seen, PlanRequest(costs()), fresh(1.0), left_s)
    return found


@pytest.mark.parametrize(
    ("host", "lends", "left_s", "begins"),
    [
        ("a machine", "", 1e6, True),
        ("a machine", "near-0", 1e6, False),
        ("", "", 1e6, False),
        ("a machine", "", longer.WORTH_S - 1, False),
    ],
)
async def test_it_runs_where_no_member_computes_and_for_jobs_that_last(
    host: str, lends: str, left_s: float, begins: bool
) -> None:
    here = Here(host, lends)
    search = looked(here, left_s)
    assert len(here.tasks) == begins
    search.look(here.seen, PlanRequest(costs()), fresh(1.0), left_s)
    assert len(here.tasks) == begins, "one at a time"
    search.close()
    await asyncio.gather(*here.tasks, return_exceptions=True)
    assert not searches()


@pytest.mark.slow
async def test_after_a_change_another_search_begins_when_its_time_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "LONGER", 0.02)
    here = Here("a machine")
    search = looked(here)
    await asyncio.sleep(0)
    search.changed()
    here.now_s += 30
    await asyncio.gather(*here.tasks)
    assert search.take(), "what it has found while something changed is of use"
    for wait_s, count in ((30 / longer.SHARE - 1, 1), (2, 2), (1e4, 2)):
        here.now_s += wait_s
        search.look(here.seen, PlanRequest(costs()), fresh(1.0), 1e6)
        assert len(here.tasks) == count
        await asyncio.gather(*here.tasks)
    assert not searches()


async def test_the_end_of_the_job_is_the_end_of_its_search() -> None:
    here = Here("a machine")
    search = looked(here)
    until = time.monotonic() + 20
    while not searches():
        assert time.monotonic() < until
        await asyncio.sleep(0.05)
    search.close()
    await asyncio.gather(*here.tasks, return_exceptions=True)
    assert not searches()


async def test_a_plan_that_the_user_has_given_is_left_alone() -> None:
    here = Here("a machine")
    search = Newcomers(cast(Any, here), here.profiles, {}, is_given=True).longer
    for _ in range(2):
        search.look(here.seen, PlanRequest(costs()), fresh(1.0), 1e6)
        search.changed()
    assert not here.tasks


async def test_a_search_that_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longer, "own_python", lambda module: [sys.executable, "-c", "raise SystemExit(3)"])
    here = Here("a machine")
    search = looked(here)
    await asyncio.gather(*here.tasks)
    assert search.take() == ()


STEPS, LONG, MICRO = 40, 160, 8


class Noise:
    def __len__(self) -> int:
        return 320

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(i))
        return x, x.roll(1, 0)


def job() -> Job:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)]
    model, loss, optimizer = nn.Sequential(*layers), nn.functional.mse_loss, Optimizer("AdamW", lr=1e-3)
    return Job(model, loss, Noise(), optimizer, batch_size=4 * MICRO, micro_batch_size=MICRO, steps=STEPS, codec="none")


@pytest.mark.slow
async def test_a_run_goes_over_to_what_a_longer_search_has_found_and_no_number_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first plan has one device, as if the first search had found no better one."""
    monkeypatch.setattr(longer, "WORTH_S", 0.0)
    monkeypatch.setattr(program, "LONGER", 0.05)
    whole = live.plan_job

    def short(mesh: Measured, *asked: Any) -> tuple[Plan, list[str]]:
        first = min(mesh.devices)
        return whole(replace(mesh, devices={first: mesh.devices[first]}), *asked)

    monkeypatch.setattr("meshcee.planner.plan_job", short)
    options = JoinOptions(pace=Pace(8e8))
    network = MemoryNetwork(impairment=Impairment(latency_s=0.001, bandwidth_bytes_per_s=1e8))
    async with InProcess(options, network, timeouts=QUICK) as here:
        for i in range(3):
            await here.start(f"p{i}")
        owner = await here.own("owner", Home(tmp_path))
        owner.agent.host = "a machine"
        plans = []
        long = replace(job(), steps=LONG)  # the search is another process's, which a busy machine may hold up
        async for _ in owner.train(long, captured=capture(long), on_plan=lambda plan, names: plans.append(plan)):
            pass
        result = owner.result
    assert len(plans[0].peers) == 1
    assert len(plans[-1].peers) > 1
    assert [change.cause for change in result.changes] == [("a longer search has found other plans",)]
    assert result.changes[0].gain > 1.5
    losses, _, model, _ = plain(long, LONG, MICRO)
    assert result.losses == losses
    for name, tensor in model.state_dict().items():
        assert torch.equal(result.state_dict[name], tensor), name
    assert not searches()
