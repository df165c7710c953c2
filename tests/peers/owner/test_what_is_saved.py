"""What has come to the disk counts, whatever becomes of the epoch that wrote it; what was asked for and has not come is told."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

import meshcee
from meshcee.callbacks import Callback, Control
from meshcee.eager import plain
from meshcee.errors import PlanError
from meshcee.events import Event
from meshcee.files import disk
from meshcee.files.home import Home
from meshcee.plan import Plan
from peers.node.mesh import Mesh
from peers.owner.adaptation import Adaptation
from peers.owner.epoch import Report
from peers.owner.recovery import Recovery
from peers.owner.result import Result
from peers.state.checkpoint import CheckpointStore
from peers.state.copying import Copying
from peers.state.keeping import Keeping
from peers.state.policy import RETRY_S
from tests.peers.owner.test_callbacks import MICRO, STEPS, assert_same, captured_job, job_of, run
from tests.peers.owner.test_recovery import a_mesh, stage_of
from tests.peers.state.test_hand_over import shifted
from tests.rig.disks import RefusingDisk

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here


class Hears(Callback):
    """The checkpoints that it is told of."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    def on_checkpoint(self, run: Control, steps: int, folder: Path) -> None:
        self.saved.append(steps)


async def train(mesh: Mesh, callbacks: Sequence[Any], **changes: object) -> tuple[Result, list[int]]:
    stages = len(mesh.agent.devices())
    training = mesh.train(job_of(**changes), captured=captured_job(), stages=stages, callbacks=callbacks)
    steps = [report.step async for report in training]
    return mesh.result, steps


def assert_plain(result: Result, steps: int = STEPS, **changes: object) -> None:
    expected = plain(job_of(**changes), steps, MICRO)
    assert_same(result, expected.losses, expected.state_dict)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("stops", [False, True])
async def test_who_is_lost_when_all_is_on_the_disk_takes_no_weights_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    """Nobody who is left could hold the model: another epoch, in which nothing is left to do, found no plan."""
    home, again, hears = Home(tmp_path), Keeping.again, Hears()

    async def nobody(self: Recovery, request: object) -> None:
        raise PlanError("no device has the memory")

    def stop(run: Control, report: Report) -> None:
        if stops and report.step == 3:
            run.stop()

    async with a_mesh(home, 2) as (here, mesh):

        async def and_die(self: Keeping, is_stopping: Callable[[], bool]) -> bool:
            if await again(self, is_stopping):
                return True
            here.crash(stage_of(here, mesh, 1))
            return False

        monkeypatch.setattr(Recovery, "plan", nobody)
        monkeypatch.setattr(Keeping, "again", and_die)
        with capture_logs() as logged:
            result, steps = await train(mesh, [stop, hears], ema=0.9)
    assert Event.MEMBER_LOST in {entry["event"] for entry in logged}
    assert result.stopped == stops
    assert hears.saved == sorted({*hears.saved, len(steps)})
    assert home.run("last").state == ("stopped" if stops else "done")
    assert_plain(result, len(steps), ema=0.9)
    expected = plain(job_of(ema=0.9), len(steps), MICRO).ema
    assert result.ema.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(result.ema[name], tensor), name


async def test_who_stops_a_run_whose_disk_refuses_the_last_weights_has_them_in_memory(tmp_path: Path) -> None:
    """It waited for the disk without end, and a second Ctrl-C left nothing."""
    home, broken = Home(tmp_path), RefusingDisk(tmp_path)

    def fill(run: Control, report: Report) -> None:
        if report.step == STEPS - 1:
            broken.error = errno.ENOSPC

    with disk.using(broken), capture_logs() as logged:
        async with a_mesh(home, 2) as (_, mesh), asyncio.TaskGroup() as group:
            training = group.create_task(train(mesh, [fill], ema=0.9))
            while not broken.refused:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.05)
            mesh.stop()
            async with asyncio.timeout(RETRY_S / 2):
                result, _ = await training
            broken.error = None
    assert Event.ONLY_IN_MEMORY in {entry["event"] for entry in logged}
    assert result.stopped, "or its weights are believed to be in the run's folder"
    assert_plain(result, ema=0.9)
    assert all(one.next_step < STEPS for one in CheckpointStore(home.run("last").checkpoints).complete())


@pytest.mark.slow
async def test_a_checkpoint_that_outlives_its_epoch_while_it_is_completed_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, hears, goes, call = Home(tmp_path), Hears(), threading.Event(), Recovery.call
    loop = asyncio.get_running_loop()

    async def and_go(self: Recovery, *peers: Any) -> object:
        goes.set()
        return await call(self, *peers)

    async with a_mesh(home, 2) as (here, mesh):

        class Waits(disk.Disk):
            def rename(self, old: Path, new: Path) -> None:
                if new.name == "step-00000003" and not goes.is_set():
                    loop.call_soon_threadsafe(here.crash, stage_of(here, mesh, 1))
                    assert goes.wait(30)
                super().rename(old, new)

        monkeypatch.setattr(Recovery, "call", and_go)
        monkeypatch.setattr(Copying, "is_due", lambda *args: False)  # the run can only go on from the disk
        with disk.using(Waits()):
            result, _ = await train(mesh, [hears], checkpoint_every=3)
    assert goes.is_set()
    assert_plain(result)
    assert hears.saved == sorted({*hears.saved, 3, STEPS})


@pytest.mark.slow
async def test_the_best_state_is_kept_though_another_plan_begins_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, best, plans = Home(tmp_path), meshcee.KeepBest("loss", mode="max"), list[Plan]()

    async def choose(self: Adaptation, report: Report, can_move: bool) -> Plan | None:
        if report.step != 2:
            return None
        plans.append(shifted(mesh.result.plan))
        return plans[0]

    monkeypatch.setattr(Adaptation, "hear", choose)
    async with a_mesh(home, 3) as (_, mesh):
        result, _ = await train(mesh, [best], eval_every=3, checkpoint_every=1000)
    assert [result.plan] == plans
    assert best.best is not None
    assert best.best[0] == 3
    found = {c.next_step: c for c in CheckpointStore(home.run("last").checkpoints).complete()}
    assert found.keys() == {3, STEPS}
    kept, expected = found[3].weights(found[3].names), plain(job_of(), 3, MICRO).state_dict
    assert all(torch.equal(tensor, expected[name]) for name, tensor in kept.items())
    assert_plain(result)


async def test_a_checkpoint_that_was_asked_for_and_never_made_is_told_of_once(tmp_path: Path) -> None:
    class Refuses(disk.Disk):
        def rename(self, old: Path, new: Path) -> None:
            if new.name == "step-00000003":
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(new))
            super().rename(old, new)

    class Asks(Hears):
        waits = "steps"

        def on_step(self, run: Control, report: Report) -> None:
            if report.step in (2, 5):
                run.checkpoint()

    hears = Asks()
    with disk.using(Refuses()), capture_logs() as logged:
        result, _ = await run(job_of(checkpoint_every=1000), [hears], Home(tmp_path))
    assert_plain(result)
    assert hears.saved == [6, STEPS]
    assert [entry["steps"] for entry in logged if entry["event"] == Event.CHECKPOINT_MISSED] == [3]
