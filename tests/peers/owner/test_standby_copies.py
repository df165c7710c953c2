"""A standby goes on from copies that members still hold, however fast these follow one another. On virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from benchmarks import blows, virtual_chaos
from benchmarks.virtual_chaos import MICRO, captured_job
from meshcee import plain
from meshcee.events import Event
from peers.device.compute import Pace
from peers.node.mesh import Mesh
from peers.owner.epoch import Report
from peers.state.copying import Copying
from peers.state.journal import Ledger
from peers.transport.memory import Impairment
from tests.mutation import breaks, changed
from tests.peers.owner.test_standby import Story
from tests.rig.virtual_time import run

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here

STEPS = 36
LAN = Impairment(latency_s=0.002, bandwidth_bytes_per_s=12.5e6, jitter_s=0.001)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 0.05 s and copies 0.3 s apart: many between two beats."""
    monkeypatch.setattr(virtual_chaos, "PACE", Pace(3e5))
    for module in (blows, virtual_chaos):
        monkeypatch.setattr(module, "LINK", LAN)


class Fast(Story):
    """The owner dies once this step is reported, or as it asks for copies behind that. `began`: what the heir begins with."""

    def __init__(self, folder: Path, dies_at: int, every: int = 1000, *, asking: bool = False) -> None:
        super().__init__(folder, None, STEPS)
        self.dies_at, self.every, self.asking = dies_at, every, asking
        self.began: list[int] = []
        self.checkpoints = 0

    async def own(self, mesh: Mesh) -> None:
        self.storm.mesh = mesh
        training = mesh.train(replace(self.job, checkpoint_every=self.every), captured=captured_job(), stages=3)
        async with aclosing(training):
            async for report in self.until_struck(training):
                self.chief.append(report.step)

    async def until_struck(self, training: AsyncIterator[Report]) -> AsyncIterator[Report]:
        async for report in training:
            yield report
            if report.step == self.dies_at and not self.asking:
                self.die()
                await asyncio.Event().wait()

    def die(self) -> None:
        self.struck_s = self.loop.time()
        self.checkpoints = len(list((self.homes["chief"].runs()[0].folder / "checkpoints").glob("*")))
        self.storm.here.crash("chief")

    async def _stand_by(self, mesh: Mesh) -> Any:
        followed = await mesh.stand_by(self.job, captured_job(), tell=self.told.append)
        assert followed is not None
        training = mesh.train(self.job, captured=captured_job(), resume=followed[0], after=followed[1])
        async with aclosing(training):
            async for report in training:
                assert mesh.training is not None
                self.heir.append(report.step)
                self.began.append(mesh.training.base.next_step if mesh.training.base is not None else 0)
        return mesh.result


def play(story: Fast) -> None:
    with capture_logs() as logged:
        result = run(story.play())
    losses, _, model, _ = plain(story.job, STEPS, MICRO)
    assert result.losses == losses
    assert all(torch.equal(result.state_dict[name], tensor) for name, tensor in model.state_dict().items())
    assert story.heir == list(range(story.heir[0], STEPS))
    assert {*story.began} != {0}
    assert min(story.began) > 0
    assert Event.COPIES_OUT_OF_REACH not in [entry["event"] for entry in logged]


@pytest.mark.slow
@pytest.mark.parametrize("dies_at", [16, 22, 25, 28])
def test_wherever_an_owner_dies_copies_that_its_standby_knows_of_are_there(tmp_path: Path, dies_at: int) -> None:
    play(story := Fast(tmp_path, dies_at))
    assert dies_at - story.began[0] <= 20  # steps: a second


@pytest.mark.slow
def test_without_waiting_for_the_standby_members_have_dropped_what_it_knows_of(tmp_path: Path) -> None:
    with changed(Ledger.has_told, "if not copied.asked and", "return True\n    if not copied.asked and"):
        assert breaks(lambda: play(Fast(tmp_path, 28)))


@pytest.mark.slow
def test_copies_are_there_though_a_newer_checkpoint_died_with_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies when it has asked for the next copies, and before these are whole."""
    story = Fast(tmp_path, 24, every=5, asking=True)
    begin = Copying.begin

    def and_die(self: Copying, next_step: int) -> None:
        begin(self, next_step)
        if next_step > story.dies_at and not story.checkpoints:
            story.loop.call_later(0.02, story.die)

    monkeypatch.setattr(Copying, "begin", and_die)
    play(story)
    assert story.checkpoints
