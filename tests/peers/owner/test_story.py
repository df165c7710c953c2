"""What a run leaves for whoever looks at it later: events, what stood behind its plan, what its members did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshcee.files import Home, loads
from meshcee.picture import Painter
from peers.owner.epoch import Report
from tests.peers.owner.test_recovery import a_mesh, assert_undisturbed, stage_of, train


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [loads(line) for line in path.read_text().splitlines()]


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


async def test_without_a_folder_nothing_is_told(tmp_path: Path) -> None:
    async with a_mesh(None, 2) as (_, mesh):  # type: ignore[arg-type]
        await train(mesh, lambda report: None)
    assert list(tmp_path.iterdir()) == []
