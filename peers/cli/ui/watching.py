"""A page beside something that runs in this process: `train --ui`, `demo --ui`.

The idea: the page is optional in two ways: it needs the extra `ui`, and whatever happens to it, training goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
import webbrowser
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from meshcee.errors import UsageError
from meshcee.files.home import Home, Run
from peers.cli.ui.sources import MeshSource
from peers.cli.ui.wishes import Wishes
from peers.measure import Trace
from peers.node import Mesh

__all__ = ["Shown", "needs_ui", "on_a_desktop", "page_of"]


def needs_ui() -> None:
    """UsageError where the library that serves pages is missing."""
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise UsageError("a page needs a library that is not installed: pip install 'meshcee[ui]'") from error


def on_a_desktop() -> bool:
    """Whether a browser shows to who sits at this terminal: not over ssh, nor without a screen."""
    here = sys.stdout.isatty() and "SSH_CONNECTION" not in os.environ
    return here and (sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()))


class Shown:
    """What training does for pages: a few steps are traced, and put into the run's folder once they are complete. The callback
    `wishes` hears what a page of this or another process asks for.
    """

    def __init__(self, mesh: Mesh, home: Home, trace: Trace | None) -> None:
        self.trace = trace
        self.wishes = Wishes(self.run)
        self._mesh = mesh
        self._home = home
        self._written = -1  # the last traced step of the trace that was written

    def run(self) -> Run | None:
        """The one that trains, once it has a folder."""
        found = self._mesh.result.run
        return Run(self._home.folder / "runs" / found) if found is not None else None

    async def hear(self, step: int, trace: Trace | None) -> None:
        """A step is done. A plan that changes starts the trace afresh."""
        if trace is None or step < trace.last or trace.last == self._written or (run := self.run()) is None:
            return
        self._written = trace.last
        with contextlib.suppress(UsageError):  # of a disk that refuses
            await asyncio.to_thread(trace.write, run.folder / "trace.json")


@asynccontextmanager
async def page_of(
    mesh: Mesh, home: Home, say: Callable[[str], None], *, wanted: bool, token: str | None = None
) -> AsyncIterator[Shown]:
    """The page of this mesh and of what trains on it while the block runs, if it is wanted; `say` is told where it is.
    `token` is the line by which the mesh was joined, if it was.
    """
    shown = Shown(mesh, home, Trace() if wanted else None)
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(shown.wishes.watch())
        try:
            async with _served(shown, mesh, home, say, token) if wanted else contextlib.nullcontext():
                yield shown
        finally:
            watching.cancel()


@asynccontextmanager
async def _served(
    shown: Shown, mesh: Mesh, home: Home, say: Callable[[str], None], token: str | None
) -> AsyncIterator[None]:
    from peers.cli.ui.acts import drains, of_training, role_in
    from peers.cli.ui.server import Site, serving

    role, drain = role_in(mesh.agent, home, token), drains(mesh.agent) if token is not None else None
    acts = of_training(mesh, shown.wishes, role, drain)
    source = MeshSource(mesh.agent, shown.run, listens=True)
    async with serving(Site(source, acts=lambda run: acts, clock=time.time)) as site:
        say(f"the page: {site.address}")
        if on_a_desktop():
            await asyncio.to_thread(webbrowser.open, site.address)
        yield
