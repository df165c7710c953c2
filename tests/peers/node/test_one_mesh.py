"""One mesh as Python code holds it: a job at a time, a loop that is left, and captures while others train."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

import meshcee
from meshcee.capture.export import settings
from meshcee.eager import plain
from meshcee.errors import UsageError
from meshcee.job import Job
from meshcee.optim import Optimizer
from peers.node.mesh import Mesh

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here


def job_of(seed: int, steps: int) -> Job:
    torch.manual_seed(seed)
    rows = torch.randn(64, 8)
    return Job(
        model=nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1)),
        loss=nn.functional.mse_loss,
        data=[(row, row.sum(0, keepdim=True)) for row in rows],
        optimizer=Optimizer("AdamW", lr=0.01),
        batch_size=16,
        micro_batch_size=8,
        steps=steps,
        name=f"job-{seed}",
    )


async def losses_of(mesh: Mesh, job: Job) -> list[float]:
    return [report.loss async for report in mesh.train(job)]


async def test_a_second_job_at_once_is_refused_and_disturbs_nothing() -> None:
    """Both took each other's members, and `result` was the other one's."""
    first, second = job_of(0, 8), job_of(1, 4)
    async with meshcee.join(local=2) as mesh:
        losses, refused = await asyncio.gather(losses_of(mesh, first), losses_of(mesh, second), return_exceptions=True)
        assert isinstance(refused, UsageError)
        assert "join once more" in str(refused)
        assert losses == plain(first).losses == mesh.result.losses
        async for report in mesh.train(first):
            if report.step == 2:
                break  # nobody closes the generator but Python
        assert await losses_of(mesh, second) == plain(second).losses


async def test_an_evaluation_of_another_job_while_one_trains_is_captured_beside_it() -> None:
    """A capture replaces functions of torch; in the threads that train, it must not."""
    job = job_of(0, 12)
    async with meshcee.join(local=2) as mesh:
        losses = []
        async for report in mesh.train(job):
            losses.append(report.loss)
            if report.step == 2:
                found = await mesh.evaluate(replace(job, eval_data=job.data[:8]))
        assert found["loss"] > 0
        assert losses == plain(job).losses
        assert not mesh.result.changes, "no member was lost"


async def test_captures_in_another_thread_change_no_bit_of_a_run() -> None:
    """torch.export turns oneDNN off for the whole process, and counters of operations hang hooks into all modules."""
    job, over = job_of(0, 30), threading.Event()

    def go_on() -> None:
        while not over.is_set():
            meshcee.capture(job_of(1, 3))

    thread = threading.Thread(target=go_on)
    async with meshcee.join(local=2) as mesh:
        losses = []
        async for report in mesh.train(job, stages=2):
            losses.append(report.loss)
            if report.step == 2:
                thread.start()
        over.set()
        await asyncio.to_thread(thread.join)
        assert losses == plain(job).losses
        assert not mesh.result.changes


def test_what_a_capture_replaces_other_threads_do_not_see() -> None:
    seen: list[str] = []

    class Owner:
        def word(self) -> str:
            return "as ever"

    def look() -> None:
        thread = threading.Thread(target=lambda: seen.append(Owner().word()))
        thread.start()
        thread.join()

    def story() -> list[str]:
        seen.clear()
        with settings.replaced(Owner, "word", lambda self: "replaced"):
            seen.append(Owner().word())
            look()
        return [*seen, Owner().word()]

    assert story() == ["replaced", "as ever", "as ever"]


async def test_a_job_whose_loop_was_left_ends_with_the_mesh() -> None:
    """Its generator is in a variable, so Python does not close it; `join` waited without end."""
    reports = None
    async with asyncio.timeout(60), meshcee.join(local=1) as mesh:
        reports = mesh.train(job_of(0, 200))
        async for report in reports:
            if report.step == 1:
                break
        with pytest.raises(UsageError, match="aclose"):
            await losses_of(mesh, job_of(1, 2))
    assert reports is not None
