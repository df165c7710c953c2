"""Weights while a run goes on are those of the plain loop after so many steps, and leaving the loop keeps them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from meshcee.eager import plain
from meshcee.errors import UsageError
from meshcee.files.home import Home
from peers.node.departure import Departure
from peers.node.early import JoinOptions
from peers.node.in_process import join
from peers.state.checkpoint import CheckpointStore
from tests.peers.member.test_training import make_job
from tests.peers.owner.test_recovery import a_mesh, captured_job, job_of, stage_of

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here


@pytest.mark.slow
async def test_a_break_keeps_the_weights_that_were_asked_for(tmp_path: Path) -> None:
    home = Home(tmp_path)
    async with a_mesh(home, 2) as (_, mesh):
        with pytest.raises(UsageError, match="async for"):
            await mesh.state()
        async for report in mesh.train(job_of(checkpoint_every=1000), captured=captured_job(), stages=2):
            if report.step == 4:
                found = await mesh.state()
                break
    assert_of_the_newest(home, found, 5)


@pytest.mark.slow
async def test_after_a_peer_was_drained_they_are_not_those_of_the_drain(tmp_path: Path) -> None:
    home, ended = Home(tmp_path), -1
    async with a_mesh(home, 3) as (here, mesh), asyncio.TaskGroup() as group:
        async for report in mesh.train(job_of(checkpoint_every=1000), captured=captured_job(), stages=3):
            if report.step == 3:
                departure = Departure(here.agents[stage_of(here, mesh, 1)])
                departure.ask()
                group.create_task(departure.run())
            assert mesh.result.plan is not None
            if ended < 0 and len(mesh.result.plan.peers) == 2:
                ended = report.step
            if 0 <= ended <= report.step - 5:
                found = await mesh.state()
                break
    assert_of_the_newest(home, found, ended + 6)


def assert_of_the_newest(home: Home, found: dict[str, torch.Tensor], least: int) -> None:
    """The weights are the plain loop's after the newest checkpoint, which is of `least` steps or more."""
    steps = CheckpointStore(home.run("last").checkpoints).complete()[0].next_step
    assert steps >= least
    expected = plain(job_of(), steps, 6).state_dict
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


async def test_after_the_end_they_are_the_results_and_without_a_folder_a_run_says_what_to_do() -> None:
    job = make_job(micro_batch_size=6, steps=3)
    async with join(JoinOptions(local=1)) as mesh:
        async for report in mesh.train(job, stages=1):
            if not report.step:
                with pytest.raises(UsageError, match="keeps=True"):
                    await mesh.state()
        assert (await mesh.state()).keys() == mesh.result.state_dict.keys()


async def test_the_weights_are_had_though_reports_are_read_slowly(tmp_path: Path) -> None:
    """Steps are quick, and what the loop does takes long: the run waits with as many reports as it may, and saves nothing."""
    async with a_mesh(Home(tmp_path), 1) as (_, mesh):
        async for report in mesh.train(job_of(checkpoint_every=1000, steps=100), captured=captured_job(), stages=1):
            if report.step == 1:
                await asyncio.sleep(2)  # real seconds, of many steps
                found = await mesh.state()
                break
    assert found.keys() == plain(job_of(), 1, 6).state_dict.keys()
