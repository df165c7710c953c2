"""A run that keeps to one kernel class keeps to that which it has begun on: others wait, however fast. On virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.virtual_chaos import PEERS, STEPS, Storm, job_of, stormy, train
from meshcee.errors import MeshceeError, PeerLostError
from meshcee.plan import Plan
from peers.owner.epoch import Report
from tests.rig.virtual_time import quiet, run

pytestmark = pytest.mark.usefixtures("quick_planning")

COME, FIRST_LOSS, LAST_LOSS = 2, 4, 8  # steps
SAID = r"the run has begun on cpu .*, whose bits it must keep: join such a device, or go on with --mix devices"


async def others_come(storm: Storm) -> None:
    """Two faster devices of another class."""
    with mock.patch("peers.device.profile.capability", return_value="another kind"):
        for name in ("fast-0", "fast-1"):
            await storm.start(name, times=8.0)


@pytest.mark.slow
def test_a_run_whose_class_is_lost_waits_for_it_and_does_not_go_on_with_another(tmp_path: Path) -> None:
    classes: list[tuple[str, ...]] = []

    def planned(plan: Plan, names: Any) -> None:
        classes.append(plan.kernels)

    async def story() -> None:
        async with stormy(0, tmp_path) as storm, asyncio.timeout(1800), asyncio.TaskGroup() as group:

            def hear(report: Report) -> None:
                if report.step == COME:
                    group.create_task(others_come(storm))
                if report.step == FIRST_LOSS:
                    storm.kill(storm.members()[1])
                if report.step == LAST_LOSS:
                    for name in (f"p{i}" for i in range(PEERS)):
                        storm.kill(name)

            agent = storm.mesh.agent
            agent.timeouts = replace(agent.timeouts, regroup_s=20.0)
            job = replace(job_of(), mix="none", checkpoint_every=3)
            with pytest.raises(PeerLostError, match=SAID):
                await train(storm, hear, job, stages=2, on_plan=planned)
            run_id = storm.mesh.result.run
            with pytest.raises(MeshceeError, match=SAID):
                _ = [report async for report in storm.mesh.train(job, resume=run_id, on_plan=planned)]
            assert len(classes) >= 2
            assert len(set(classes)) == len(classes[0]) == 1
            resumed = storm.mesh.train(replace(job, mix="devices"), resume=run_id, on_plan=planned)
            assert [report.step async for report in resumed][-1] == STEPS - 1
            assert "another kind" in classes[-1][0]

    with quiet():
        run(story(), inline=True)
