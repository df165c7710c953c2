"""What a run leaves for whoever looks at it later: events, what stood behind its plan, what its members did."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from meshcee.callbacks import Control
from meshcee.files import loads
from meshcee.files.home import Home
from meshcee.picture import Painter
from meshcee.plan import Plan
from peers.cli.ui.sources import FolderSource
from peers.mesh_view import MeshView
from peers.owner import adaptation
from peers.owner.adaptation import Change
from peers.owner.epoch import Report
from peers.owner.job_run import Result, Training
from peers.owner.story import Story
from tests.peers.owner.test_recovery import a_mesh, assert_undisturbed, stage_of, train
from tests.rig.mesh_fixture import even_plan


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
async def test_the_story_of_a_run_that_lost_a_member(tmp_path: Path) -> None:
    home, told = Home(tmp_path), list[Report]()
    async with a_mesh(home, 3) as (here, mesh):
        lost = ""

        def hear(report: Report) -> None:
            nonlocal lost
            told.append(report)
            if report.step == 10:
                lost = stage_of(here, mesh, 1)
                here.crash(lost)

        result = await train(mesh, hear)
    assert_undisturbed(result, told, home)
    run = home.run("last")
    events = lines_of(run.folder / "events.jsonl")
    assert [event["kind"] for event in events] == ["planned", "lost", "recovered", "ended"]
    assert lost in events[1]["text"]
    assert lost in events[2]["text"]
    assert events[1]["step"] > 10
    assert [event["at"] for event in events] == sorted(event["at"] for event in events)
    assert result.plan is not None
    seen = loads((run.folder / "seen.json").read_text())
    assert seen["members"].keys() == {*result.plan.peers}
    assert all(took["total"] >= took["compute"] > 0 for took in seen["members"].values())
    behind = loads((run.folder / "mesh.json").read_text())
    painter = Painter()
    painter.begin(run.id, run.info)
    painter.look(behind["status"], behind["at"])
    painter.account(behind["account"])
    painter.seen(seen)
    found = painter.picture(0.0)
    assert found.plan is not None
    assert all(seat.needed_bytes and seat.compute_s and seat.f_s for seat in found.plan.seats)


class Scripted:
    """In the place of the adaptation: after step 9 the first member of the plan is to go on alone."""

    def __init__(
        self, agent: MeshView, request: Any, plan: Plan, changes: list[Change], newcomers: Any, check: Any
    ) -> None:
        self._plan, self._changes, self._chosen = plan, changes, cast(Plan | None, None)

    async def hear(self, report: Report, can_move: bool) -> Plan | None:
        if report.step != 9 or self._chosen is not None:
            return None
        (pipeline,) = self._plan.pipelines
        alone = replace(pipeline.stages[0], end=self._plan.num_blocks, window=1, live_cap=1)
        self._chosen = replace(self._plan, pipelines=(replace(pipeline, stages=(alone,)),))
        return self._chosen

    def moved(self, plan: Plan, since_s: float | None = None) -> bool:
        if plan is self._chosen:
            self._changes.append(Change(9, ("the link from ann to ben sagged",), "cut", 3, 1.4, 1.4))
        return plan is self._chosen

    def learnt(self, request: Any) -> Any:
        return request


@pytest.mark.slow
async def test_a_running_job_tells_why_its_plan_was_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It told of a member that may leave: what it hears of a new plan came before the reason."""
    monkeypatch.setattr(adaptation, "Adaptation", Scripted)
    home, told = Home(tmp_path), list[Report]()
    async with a_mesh(home, 2) as (_, mesh):
        result = await train(mesh, told.append)
    assert_undisturbed(result, told, home)
    assert result.plan is not None
    assert len(result.plan.peers) == 1
    events = lines_of(home.run("last").folder / "events.jsonl")
    assert [(event["kind"], event.get("gain")) for event in events] == [
        ("planned", None),
        ("replanned", 1.4),
        ("ended", None),
    ]
    assert events[1]["text"].startswith("the link from ann to ben sagged: ")


@pytest.mark.slow
async def test_without_a_folder_nothing_is_told(tmp_path: Path) -> None:
    async with a_mesh(None, 2) as (_, mesh):  # type: ignore[arg-type]
        await train(mesh, lambda report: None)
    assert list(tmp_path.iterdir()) == []


@asynccontextmanager
async def a_story(home: Home, result: Result) -> AsyncIterator[Story]:
    """Of a training that is made up."""
    result.run = home.new_run("job").id
    story = Story(cast(MeshView, None), home, clock=lambda: 7.0)
    telling = asyncio.get_running_loop().create_task(story.run(cast(Training, SimpleNamespace(result=result))))
    await asyncio.sleep(0)
    try:
        yield story
    finally:
        telling.cancel()
        await asyncio.wait([telling])


async def test_a_change_of_plan_has_its_reason_and_both_gains(tmp_path: Path) -> None:
    home, control = Home(tmp_path), Control()
    before, after = even_plan(6, 3, 12, 4), even_plan(6, 2, 12, 4)
    result = Result(losses=[1.0] * 9, names={"p0": "ann", "p1": "ben", "p2": "cy"})
    async with a_story(home, result) as story:
        story.on_plan(control, before)
        result.changes.append(Change(4, ("the link from ann to ben sagged",), "cut", 3, 1.4, 1.4))
        story.on_change(control, after)
        result.changes[-1].after_s = 1.0
        story.hear(Report(6, 9, 1.0, 1.0, 12.0, 3.0, "links"))
        story.on_change(control, before)
        story.on_change(control, after)
        story.on_end(control, result, None)
    found = lines_of(home.run("last").folder / "events.jsonl")
    assert [(line["kind"], line.get("gain")) for line in found] == [
        ("planned", None),
        ("replanned", 1.4),
        ("gain", 1.4),
        ("replanned", None),
        ("drained", None),
        ("ended", None),
    ]
    assert found[1]["text"].startswith("the link from ann to ben sagged: 2 stages on ann, ben")
    assert found[4]["text"].startswith("cy may leave")


async def test_what_is_told_behind_a_line_that_a_kill_has_torn_is_read(tmp_path: Path) -> None:
    home, result = Home(tmp_path), Result(losses=[1.0] * 9)
    async with a_story(home, result) as story:
        events = home.run("last").folder / "events.jsonl"
        for torn in (b"", b'{"at": 1, "kind": "planned", "te'):
            with events.open("ab") as file:
                file.write(torn)
            story.on_end(Control(), result, None)
    painter = FolderSource(home.run("last")).read_all()
    assert [moment.kind for moment in painter.picture(0.0).moments] == ["ended", "ended"]


async def test_a_story_that_fails_ends_no_run(tmp_path: Path) -> None:
    """Here the training has no request, which no real one lacks."""
    async with a_story(Home(tmp_path), Result()) as story:
        story.on_plan(Control(), even_plan(6, 3, 12, 4))
        with capture_logs() as logged:
            story.hear(Report(0, 9, 1.0, 1.0, 12.0, 3.0, "links"))
            for _ in range(5):
                await asyncio.sleep(0)
    assert [entry["log_level"] for entry in logged] == ["error"]
