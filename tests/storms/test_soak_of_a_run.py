"""A long run on the owner's side (benchmarks/soak.py), short: it stays small, and nothing keeps the event loop."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.optim.lr_scheduler import CosineAnnealingLR

from benchmarks.soak import soak
from benchmarks.storm_job import MICRO, captured_job, job_of
from benchmarks.virtual_chaos import quick_planning, stormy
from meshcee.eager import plain
from meshcee.files.home import Home, Run
from meshcee.optim import HyperSchedule
from meshcee.optim.rates import Schedule
from tests.rig.virtual_time import quiet, run

WIDTH = 256  # figures in a sample: a step is fed 8 KiB


@pytest.mark.slow
@pytest.mark.usefixtures("thawed")
@pytest.mark.parametrize(
    ("steps", "epochs"),
    [(2_000, 4), pytest.param(100_000, 50, marks=pytest.mark.timeout(1800))],
)
def test_a_long_run_stays_small_and_keeps_nobody_waiting(tmp_path: Path, steps: int, epochs: int) -> None:
    with quick_planning(), quiet():
        seen = run(soak(tmp_path, steps, epochs, samples=1_000_000, width=WIDTH))
    assert (seen.steps, seen.epochs) == (steps, epochs)
    assert seen.pause_s < 0.5, seen.paused_by  # of CPU; 0.1 on a quiet machine
    assert seen.growth.allocated < 4096  # what a step was fed would be 8 KiB
    assert seen.growth.objects < 10  # a loss in the result is one; a report, or what was fed, would be dozens


class Counted:
    """Of a run: the step that each look at a schedule was for, and how often torch's scheduler took a step for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks: list[tuple[int, int]] = []
        self.back: list[
            tuple[int, int]
        ] = []  # those that were for an earlier step than the one before, at this schedule
        newest = dict[HyperSchedule, int]()
        self._taken = 0
        at, take = HyperSchedule.at, CosineAnnealingLR.step

        def looked(schedule: HyperSchedule, step: int) -> Any:
            before = self._taken
            found = at(schedule, step)
            self.looks.append((step, self._taken - before))
            if step < newest.get(schedule, 0):
                self.back.append(self.looks[-1])
            newest[schedule] = step
            return found

        def taken(scheduler: CosineAnnealingLR, *args: Any) -> None:
            self._taken += 1
            take(scheduler, *args)

        monkeypatch.setattr(HyperSchedule, "at", looked)
        monkeypatch.setattr(CosineAnnealingLR, "step", taken)


@pytest.mark.slow
def test_an_epoch_takes_no_longer_to_begin_the_later_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was reported is neither read again nor written again, and the schedule does not begin anew."""
    kept_every, lost = 4, (8, 14)
    job = replace(job_of(steps=20), schedule=Schedule("CosineAnnealingLR", T_max=20))
    expected = plain(job, micro_batch=MICRO).losses
    monkeypatch.setattr("meshcee.optim.hyper.KEPT_EVERY", kept_every)
    counted = Counted(monkeypatch)

    async def story() -> None:
        async with stormy(0, tmp_path) as storm, asyncio.timeout(1800):
            file, held = Path(), None
            async for report in storm.mesh.train(job, captured=captured_job(), stages=2):
                if held is None:
                    file = Home(tmp_path).run("last").report_file
                    held = file.open("rb")  # or its number may be another file's
                if report.step in lost:
                    storm.kill(storm.members()[0])
            assert held is not None
            with held:
                assert file.samefile(f"/dev/fd/{held.fileno()}")
            assert storm.mesh.result.losses == expected

    with quiet(), quick_planning(), mock.patch.object(Run, "reports") as reports:
        run(story(), inline=True)
    assert reports.call_count == 0
    assert len(counted.back) >= len(lost)
    assert all(step > kept_every for step, _ in counted.back), counted.back
    assert max(taken for _, taken in counted.looks) < kept_every
