"""A page beside something that runs in this process: `train --ui`, `demo --ui`.

The idea: the page is optional in two ways: it needs the extra `ui`, and whatever happens to it, training goes on.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from meshcee.errors import UsageError
from meshcee.files import Home, Run
from peers.cli.ui.sources import MeshSource
from peers.mesh_view import MeshView

__all__ = ["Watching", "needs_ui", "watching"]

Watching = Callable[[str], None]  # is given the address of the page


def needs_ui() -> None:
    """UsageError where the library that serves pages is missing."""
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise UsageError("a page needs a library that is not installed: pip install 'meshcee[ui]'") from error


@asynccontextmanager
async def watching(
    agent: MeshView, home: Home, run: Callable[[], str | None], say: Watching, port: int = 0
) -> AsyncIterator[None]:
    """The page of this mesh, and of the run that `run` names once there is one, while the block runs."""
    needs_ui()
    from peers.cli.ui.server import Site, serving

    def of_now() -> Run | None:
        return Run(home.folder / "runs" / found) if (found := run()) is not None else None

    async with serving(Site(MeshSource(agent, of_now), clock=time.time), port) as site:
        say(site.address)
        yield
