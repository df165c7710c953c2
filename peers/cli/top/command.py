"""`meshcee top`: joins as an observer, and shows what it sees until q or Ctrl-C."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshcee.errors import UsageError
from meshcee.files import Home
from meshcee.picture import Painter
from peers.cli.session import configure_logging, run_async
from peers.mesh_view import MeshView
from peers.node import JoinOptions, join

if TYPE_CHECKING:
    from peers.cli.top.app import Top

__all__ = ["Looking", "run_top"]


class Looking:
    """A mesh that this process is in, as a source of pictures."""

    def __init__(self, agent: MeshView, *, clock: Callable[[], float] = time.time) -> None:
        self.painter = Painter()
        self._agent = agent
        self._clock = clock

    async def refresh(self) -> None:
        self.painter.look(await self._agent.status(), self._clock())


def run_top(token: str | None) -> None:
    if importlib.util.find_spec("textual") is None:
        raise UsageError("`meshcee top` needs a library that is not installed here: pip install 'meshcee[top]'")
    if token is None:
        raise UsageError("say which mesh: --join TOKEN, the line that `meshcee peer` printed (or set MESHCEE_JOIN)")
    if not sys.stdout.isatty():
        raise UsageError("`meshcee top` draws on a terminal: use `meshcee status --watch` where there is none")
    configure_logging(as_json=False, level="error")  # a line of a log would tear the screen
    current: list[Top] = []

    def polite() -> bool:
        for app in current:
            app.exit()
        return bool(current)

    run_async(_top(token, current), polite)


async def _top(token: str, current: list[Top]) -> None:
    from peers.cli.top.app import Top

    async with join(JoinOptions(token=token, name="top", observes=True), Home()) as mesh:
        current.append(app := Top(Looking(mesh.agent)))
        await app.run_async()
