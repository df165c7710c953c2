"""A page beside something that runs in this process: `train --ui`, `demo --ui`.

The idea: the page is optional in two ways: it needs the extra `ui`, and whatever happens to it, training goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from meshcee.errors import UsageError
from meshcee.files import Home, Run
from peers.cli.ui.sources import MeshSource
from peers.measure import Trace
from peers.node import Mesh

__all__ = ["Shown", "needs_ui", "page_of"]


def needs_ui() -> None:
    """UsageError where the library that serves pages is missing."""
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise UsageError("a page needs a library that is not installed: pip install 'meshcee[ui]'") from error


class Shown:
    """What training does for its page: a few steps are traced, and put into the run's folder once they are complete."""

    def __init__(self, mesh: Mesh, home: Home, trace: Trace | None) -> None:
        self.trace = trace
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
async def page_of(mesh: Mesh, home: Home, say: Callable[[str], None], *, wanted: bool) -> AsyncIterator[Shown]:
    """The page of this mesh and of what trains on it while the block runs, if it is wanted; `say` is told where it is."""
    if not wanted:
        yield Shown(mesh, home, None)
        return
    from peers.cli.ui.server import Site, serving

    shown = Shown(mesh, home, Trace())
    async with serving(Site(MeshSource(mesh.agent, shown.run, listens=True), clock=time.time)) as site:
        say(f"the page: {site.address}")
        yield shown
