"""`meshcee top`: a mesh as an observer sees it, or a run of this machine, until q or Ctrl-C.

The idea: what an owner tells its mesh of a run is little. Where the run is this machine's own, its folder tells the rest.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

from meshcee.errors import UsageError
from meshcee.files.home import Home, Run
from peers.cli.session import configure_logging, run_async
from peers.cli.ui.sources import FolderSource, MeshSource, Source
from peers.mesh_view import MeshView
from peers.node import JoinOptions, join

if TYPE_CHECKING:
    from peers.cli.top.app import Top

__all__ = ["run_here", "run_top"]

NEWEST = 8  # runs of this machine that may be the one


def run_top(wanted: str | None, token: str | None) -> None:
    if importlib.util.find_spec("textual") is None:
        raise UsageError("`meshcee top` needs a library that is not installed here: pip install 'meshcee[top]'")
    if wanted is None and token is None:
        raise UsageError("say what to show: --join TOKEN for a mesh, or RUN or last for a run of this machine")
    if not sys.stdout.isatty():
        raise UsageError("`meshcee top` draws on a terminal: use `meshcee status --watch` where there is none")
    configure_logging(as_json=False, level="error")  # a line of a log would tear the screen
    home = Home()
    run = home.run(wanted) if wanted is not None else None
    current: list[Top] = []

    def polite() -> bool:
        for app in current:
            app.exit()
        return bool(current)

    run_async(_top(home, run, token, current), polite)


async def _top(home: Home, run: Run | None, token: str | None, current: list[Top]) -> None:
    from peers.cli.top.app import Top

    async def show(source: Source) -> None:
        current.append(app := Top(source))
        await app.run_async()

    if run is not None:
        await show(FolderSource(run))
        return
    async with join(JoinOptions(token=token, name="top", observes=True), home) as mesh:
        await show(MeshSource(mesh.agent, lambda: run_here(mesh.agent, home)))


def run_here(agent: MeshView, home: Home) -> Run | None:
    """The running job of the mesh, where this machine owns it: its folder has the name and incarnation that the mesh was told."""
    told = {(run.job, run.epoch[0]) for run in agent.directory.runs.values() if run.state == "running"}
    if not told:
        return None
    for run in home.runs()[:NEWEST]:
        info = run.info
        if (info.get("name"), info.get("incarnation")) in told and run.is_owned:
            return run
    return None
