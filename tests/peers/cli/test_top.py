"""`meshcee top` by textual's pilot, without a terminal: what a picture holds is on the screen, as it is and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("textual", reason="the top extra is not installed")
from textual.widgets import DataTable, Sparkline, Static

from meshcee.errors import JoinError, UsageError
from meshcee.files import dumps
from meshcee.files.home import Home
from meshcee.picture import Painter, Picture
from peers.cli.session import printable
from peers.cli.top import run_top
from peers.cli.top.app import Top
from peers.cli.top.command import run_here
from peers.cli.top.drawing import COLUMNS, events, headline, limits, losses, peer_rows, pipeline
from peers.cli.ui.sources import FolderSource, MeshSource
from tests.peers.cli.test_screen import HOSTILE
from tests.peers.owner.test_recovery import a_mesh, captured_job, job_of
from tests.picture.test_picture import plan, report, status


class Given:
    """A source that tells what it is given, and fails when it is told to."""

    def __init__(self) -> None:
        self.painter = Painter()
        self.looks = 0
        self.error: JoinError | None = None

    async def refresh(self) -> bool:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return False


def painted(*, name: str = "") -> Given:
    """Two peers, a run of some steps, a loss of a peer."""
    source = Given()
    data = status("a", "b", links=[("a", "b", 0.001)])
    if name:
        for peer in data["peers"]:
            peer |= {"name": f"{name}{peer['peer']}", "region": name}
    source.painter.look(data, 10.0)
    names = {p["peer"]: p["name"] for p in data["peers"]}
    about = {"name": f"gpt{name}", "steps": 100, "started": 9.0, "plan": plan("a", "b").to_json(), "names": names}
    source.painter.begin("run-1", about)
    for step in range(20):
        source.painter.hear(report(step, 3.0 - step / 10, limit=f"compute of a{name}"))
    source.painter.tell({"at": 11.0, "kind": "lost", "text": f"b{name} was lost", "step": 4})
    source.painter.seen({"members": {"a": {"compute": 0.05, "wait": 0.01, "total": 0.1}}})
    return source


def texts(app: Top) -> str:
    """All that the screen says."""
    table = app.query_one("#peers", DataTable)
    cells = [str(cell) for key in table.rows for cell in table.get_row(key)]
    return "\n".join(
        [
            *cells,
            *(str(app.query_one(f"#{part}", Static).render()) for part in ("head", "pipeline", "moments", "limit")),
        ]
    )


async def test_the_screen_shows_peers_pipeline_loss_events_and_the_limit() -> None:
    source = painted()
    app = Top(source, clock=lambda: 12.0)
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.pause()
        shown = texts(app)
        table = app.query_one("#peers", DataTable)
        assert [str(column.label) for column in table.columns.values()] == list(COLUMNS)
        assert table.row_count == 2
        for text in (
            "name of a *",
            "2 peers",
            "20 of 100 steps",
            "stage 0  blocks 0..1",
            "computes 0.05 of 0.1 s",
            "b was lost",
        ):
            assert text in shown
        assert "limit: compute of a" in shown
        assert list(app.query_one("#loss", Sparkline).data or ()) == pytest.approx([3.0 - k / 10 for k in range(20)])
        await pilot.press("q")
    assert app.return_code == 0


async def test_it_follows_the_mesh_and_survives_a_look_that_fails() -> None:
    source = painted()
    app = Top(source, clock=lambda: 12.0)
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.pause()
        looks = source.looks
        source.painter.look(status("a", "b", "c"), 13.0)
        await app.look()
        assert source.looks == looks + 1
        assert app.query_one("#peers", DataTable).row_count == 3
        source.error = JoinError("nobody answers")
        await app.look()
        assert "no new look: nobody answers" in texts(app)
        assert "name of c" in texts(app), "what was seen stays"
        source.error = None
        await app.look()
        assert "no new look" not in texts(app)
        await pilot.press("ctrl+c")
    assert app.return_code == 0


@pytest.mark.parametrize("name", HOSTILE)
async def test_names_of_others_are_shown_as_they_are(name: str) -> None:
    app = Top(painted(name=name), clock=lambda: 12.0)
    async with app.run_test(size=(200, 50)) as pilot:
        await pilot.pause()
        shown = texts(app)
    assert printable(name) in shown
    assert not {c for c in shown if not c.isprintable()} - {"\n"}


def test_an_empty_picture_says_what_is_missing() -> None:
    nothing = Picture(at=0.0)
    assert headline(nothing) == "no job is running"
    assert (peer_rows(nothing), pipeline(nothing), losses(nothing), limits(nothing), events(nothing)) == (
        [], ["no plan runs"], [], [], [],
    )  # fmt: skip


@pytest.mark.slow
async def test_a_run_of_this_machine_tells_its_limit_and_all_its_losses(tmp_path: Path) -> None:
    """An observer on the owner's machine finds the run's folder; one on another machine knows what the mesh was told."""
    home, told = Home(tmp_path / "home"), []
    async with a_mesh(home, 2) as (_, mesh):
        app = Top(MeshSource(mesh.agent, lambda: run_here(mesh.agent, home)))
        elsewhere = Top(MeshSource(mesh.agent, lambda: run_here(mesh.agent, Home(tmp_path / "other"))))
        async for report in mesh.train(job_of(), captured=captured_job(), stages=2):
            told.append(report)
            if report.step != 20:
                continue
            async with app.run_test(size=(140, 40)) as pilot:
                await pilot.pause()
                shown, curve = texts(app), [*(app.query_one("#loss", Sparkline).data or ())]
                await pilot.press("q")
            async with elsewhere.run_test(size=(140, 40)) as pilot:
                await pilot.pause()
                less = texts(elsewhere)
                await pilot.press("q")
            break
    assert "limit: " in shown
    assert "p0" in shown
    assert "p1" in shown
    assert len(curve) >= 20
    assert curve[:20] == pytest.approx([report.loss for report in told[:20]], rel=1e-5), (
        "all of them, not those that records told of"
    )
    assert "limit: " not in less
    assert "p0" in less


async def test_a_run_that_is_over_is_shown_from_its_folder(tmp_path: Path) -> None:
    home = Home(tmp_path)
    run = home.new_run("gpt")
    (run.folder / "run.json").write_text(dumps({"name": "gpt", "steps": 3, "plan": plan("a", "b").to_json()}))
    run.report_file.write_text("".join(dumps({**report(step, steps=3), "codecs": {}}) + "\n" for step in range(3)))
    app = Top(FolderSource(home.run("last")), clock=lambda: 12.0)
    async with app.run_test(size=(140, 30)) as pilot:
        await pilot.pause()
        assert "3 of 3 steps" in texts(app)


def test_without_terminal_mesh_or_library_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="say what to show"):
        run_top(None, None)
    with pytest.raises(UsageError, match="status --watch"):
        run_top(None, "meshcee2.abc")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'meshcee\[top\]'"):
        run_top(None, "meshcee2.abc")


def test_curves_of_many_points_and_gains_are_told() -> None:
    source: Any = Given()
    source.painter.look(status("a"), 1.0)
    source.painter.begin("run-1", {"name": "gpt", "steps": 5000, "started": 0.0})
    for step in range(5000):
        source.painter.hear(report(step, 1.0))
    source.painter.tell({"at": 2.0, "kind": "replanned", "text": "a link", "step": 9, "gain": 1.5})
    source.painter.tell({"at": 3.0, "kind": "gain", "text": "", "step": 19, "gain": 1.4})
    picture = source.painter.picture(4.0)
    assert 100 < len(losses(picture)) <= 1024
    assert events(picture)[0].endswith("step 10: a link (1.50 times as fast expected, 1.40 measured)")
