"""Which copies of a run's state peers hold, on the owner's disk: so a run whose owner has died goes on where its peers are.

The idea: a line of digests for each stage is all that the next owner needs; the bits are with the peers for a while yet.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dht.trouble import Trouble
from meshcee import disk
from peers.copies import Copied
from peers.mesh_view import MeshView
from peers.shelf import COPIES
from peers.strict_json import dumps

__all__ = ["Ledger", "noted"]

WHAT = "the list of copies that peers hold"


class Ledger:
    """One run's. `note` is called with every new copy; the newest is written, one at a time, in a thread."""

    def __init__(self, agent: MeshView, trouble: Trouble) -> None:
        self.run = ""  # the name by which members know it
        self.folder: Path | None = None  # of the run; without one nothing is written
        self._agent = agent
        self._trouble = trouble
        self._next: dict[str, Any] | None = None
        self._writing: asyncio.Task[None] | None = None

    def note(self, found: Sequence[Copied]) -> None:
        self._next = {"run": self.run, "copies": [copied.to_json() for copied in found]}
        if self.folder is not None and (self._writing is None or self._writing.done()):
            self._writing = self._agent.beside(self._write(self.folder))

    async def _write(self, folder: Path) -> None:
        while (what := self._next) is not None:
            self._next = None
            data = dumps(what).encode()
            try:
                await asyncio.to_thread(disk.write_whole, folder / COPIES, data)
            except OSError as error:  # the run goes on; only a resumed one would go back further
                self._trouble.tell(WHAT, error, len(data))
            else:
                self._trouble.over(WHAT)


def noted(folder: Path, run: str, after: int, done: int) -> list[Copied]:
    """Of steps beyond `after`, up to `done`; none of another run, as members know whose copies they keep."""
    try:
        data = json.loads((folder / COPIES).read_text())
        found = [Copied.from_json(copied) for copied in data["copies"]] if data["run"] == run else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return [copied for copied in found if after < copied.next_step <= done]
