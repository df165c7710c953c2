"""How long an owner looks for peers is told to members, who keep what a run goes on from for as long, not for their own figure."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from benchmarks import virtual_chaos
from benchmarks.virtual_chaos import STEPS, Storm, captured_job, job_of, stormy, train
from meshcee.errors import PeerLostError, PlanError
from meshcee.events import Event
from peers.cli.main import app
from peers.member.service import Member
from peers.owner.epoch import Report
from peers.owner.recovery import Recovery
from peers.planning import Planned, PlanRequest
from peers.state.restoring import Lender
from peers.wire.offer import Offer
from tests.rig.virtual_time import quiet, run

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here

OWN_S = 20.0  # every member's figure
STRUCK = 7  # a copy is complete by then, and no checkpoint
NOTICED_S = 8.0  # by then everybody has heard of a loss

JOB = """
import torch
from meshcee import Job, Optimizer

job = Job(
    model=torch.nn.Linear(4, 1),
    loss=torch.nn.functional.mse_loss,
    data=[(torch.ones(4), torch.ones(1))] * 8,
    optimizer=Optimizer("SGD", lr=0.1),
    batch_size=4,
    steps=2,
)
"""


def holding(storm: Storm) -> set[str]:
    """Who holds some of the run's state."""
    stores = {name: cast(Member, storm.here.agents[name].member).lender.copies for name in storm.lending}
    names = captured_job().param_order
    return {who for who, copies in stores.items() if any(True for name in names for _ in copies.values(name, ""))}


def short_of_memory(
    monkeypatch: pytest.MonkeyPatch, folder: Path, regroup_s: float, look_s: float, come_s: float | None
) -> tuple[str, set[str]]:
    """The outcome of a run that loses a member and that nobody can hold until another peer comes; who holds some of its state
    some time after the loss."""
    monkeypatch.setattr(virtual_chaos, "TIMES", replace(virtual_chaos.TIMES, regroup_s=OWN_S))
    plan, found = Recovery.plan, set[str]()

    async def story() -> str:
        async with stormy(0, folder) as storm, asyncio.timeout(1800), asyncio.TaskGroup() as group:

            async def plan_if_somebody_came(recovery: Recovery, request: PlanRequest) -> Planned:
                if "late" not in storm.here.agents:
                    raise PlanError("no device has the memory")
                return await plan(recovery, request)

            async def look_and_come() -> None:
                await asyncio.sleep(look_s)
                found.update(holding(storm))
                if come_s is not None:
                    await asyncio.sleep(come_s - look_s)
                    await storm.start("late")

            def hear(report: Report) -> None:
                if report.step == STRUCK and "late" not in storm.here.agents:
                    storm.kill(storm.members()[1])
                    group.create_task(look_and_come())

            monkeypatch.setattr(Recovery, "plan", plan_if_somebody_came)
            agent = storm.mesh.agent
            agent.timeouts = replace(agent.timeouts, regroup_s=regroup_s)
            try:
                return await train(storm, hear, replace(job_of(), checkpoint_every=100))
            except PeerLostError as error:
                return str(error)

    return run(story(), inline=True), found


@pytest.mark.slow
def test_a_run_goes_on_from_copies_long_after_its_members_own_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with capture_logs() as logged:
        outcome, found = short_of_memory(monkeypatch, tmp_path, 5 * OWN_S, 1.7 * OWN_S, 1.8 * OWN_S)
    assert outcome == "equal"
    assert found
    went_on = [entry for entry in logged if entry["event"] == Event.STATE_FOUND]
    assert went_on
    assert all(entry["with_peers"] and 0 < entry["next_step"] < STEPS for entry in went_on)


def test_members_keep_what_they_hold_for_their_own_figure_where_the_owner_waits_for_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby, or the user who resumes the run, comes when the owner has given up."""
    with quiet():
        outcome, found = short_of_memory(monkeypatch, tmp_path, OWN_S / 4, OWN_S / 4 + NOTICED_S, None)
    assert "after 5 s: no device has the memory" in outcome
    assert found


def test_the_flag_is_what_members_hear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[float] = []
    for_epoch = Lender.for_epoch

    def hear(lender: Lender, offer: Offer) -> object:
        heard.append(offer.terms.regroup_s)
        return for_epoch(lender, offer)

    monkeypatch.setattr(Lender, "for_epoch", hear)
    monkeypatch.setenv("MESHCEE_HOME", str(tmp_path / "home"))
    (tmp_path / "job.py").write_text(JOB)
    asked = ["train", str(tmp_path / "job.py"), "--local", "1", "--regroup", "7.5", "--json"]
    done = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert set(heard) == {7.5}
