"""Where a picture comes from: the folder of a run on this machine, a mesh that this process has joined, or both.

The idea: a source is asked now and then and reads what is new, a bounded piece at a time, in a thread. What a killed owner has
torn, or somebody else has written into the folder, is passed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from meshcee.errors import MeshceeError
from meshcee.files import loads
from meshcee.files.home import Run
from meshcee.picture import FIGURES, Painter
from peers.mesh_view import MeshView

__all__ = ["FolderSource", "MeshSource", "Source", "Tail"]

CHUNK_BYTES = 4 << 20  # that is read of a file at a time
LONGEST_BYTES = 1 << 20  # of a line; what is longer is none
MOST_BYTES = 64 << 20  # of a file that is read in one piece
LOOK_EVERY_S = 3.0  # between two looks at a mesh
SHORT_ID = re.compile(r"\.\.(\w{8})(?!\w)")  # as errors of the transport call a peer: by the end of its id


class Source(Protocol):
    """`refresh` brings the painter up to date, and says whether there is more to read at once."""

    painter: Painter

    async def refresh(self) -> bool: ...


# What is drawn of a line of reports.jsonl; the rest of it is passed over at the speed of C.
_Line = msgspec.defstruct(
    "_Line",
    [
        ("step", int),
        ("steps", int | None | msgspec.UnsetType, msgspec.UNSET),  # every report has them, and no retraction
        *((name, float | None, None) for name in FIGURES),
        ("limit", str, ""),
        ("metrics", dict[str, float | None], {}),
    ],
)


class Tail:
    """The lines of a file that grows, each once. One that is not ended yet comes when it is."""

    def __init__(self, path: Path, at: int = 0) -> None:
        self._path = path
        self._at = at
        self.is_behind = False

    def lines(self) -> list[bytes]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read(CHUNK_BYTES)
        except OSError:
            return []
        self.is_behind = len(data) == CHUNK_BYTES
        end = data.rfind(b"\n") + 1
        if not end and len(data) > LONGEST_BYTES:
            end = len(data)
        self._at += end
        return [line for line in data[:end].splitlines() if len(line) <= LONGEST_BYTES]


class Replaced:
    """A file of one JSON object that is replaced now and then: what it holds, when that is new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None

    def news(self) -> dict[str, Any] | None:
        try:
            found = self._path.stat()
            stamp = (found.st_mtime_ns, found.st_size)
            if stamp == self._stamp or found.st_size > MOST_BYTES:
                return None
            self._stamp = stamp
            data = loads(self._path.read_bytes())
        except (OSError, ValueError):
            return None
        return data if isinstance(data, dict) else None


class FolderSource:
    """A run of this machine, running or over. `is_live` says whether a mesh is drawn besides, which is newer than the folder's."""

    def __init__(self, run: Run, painter: Painter | None = None, *, is_live: bool = False) -> None:
        self.run = run
        self.painter = painter or Painter()
        self._is_live = is_live
        self._names: dict[str, str] = {}  # by the end of a peer's id
        self._decoder = msgspec.json.Decoder(_Line)
        self._reports, self._events = Tail(run.report_file), Tail(run.folder / "events.jsonl")
        self._info, self._mesh, self._seen, self._trace = (
            Replaced(run.folder / f"{name}.json") for name in ("run", "mesh", "seen", "trace")
        )

    async def refresh(self) -> bool:
        return await asyncio.to_thread(self.read)

    def read(self) -> bool:
        """What is new; whether there is more."""
        painter = self.painter
        if (info := self._info.news()) is not None:
            with contextlib.suppress(TypeError, AttributeError):  # of a file that somebody else wrote
                painter.begin(self.run.id, info)
                self._learn((info.get("names") or {}).items())
        painter.hear_all([report for line in self._reports.lines() if (report := self.report(line)) is not None])
        if (behind := self._mesh.news()) is not None and isinstance(status := behind.get("status"), dict):
            with contextlib.suppress(KeyError, TypeError):
                self._learn((peer["peer"], peer["name"]) for peer in status["peers"])
        for line in self._events.lines():
            with contextlib.suppress(ValueError):
                if isinstance(event := loads(line), dict):
                    painter.tell({**event, "text": self._named(event.get("text"))})
        if behind is not None:
            status, account = behind.get("status"), behind.get("account")
            if isinstance(status, dict) and not self._is_live:
                with contextlib.suppress(MeshceeError, KeyError, TypeError, ValueError):
                    painter.look({**status, "runs": ()}, float(behind.get("at", 0.0)))
            if isinstance(account, dict):
                painter.account(account)
        if (seen := self._seen.news()) is not None:
            painter.seen(seen)
        if (trace := self._trace.news()) is not None and isinstance(events := trace.get("traceEvents"), list):
            painter.trace(events)
        result = self.run.result
        painter.end(self.run.state, {**result, "error": self._named(result.get("error"))})
        return self._reports.is_behind or self._events.is_behind

    def _learn(self, names: Iterable[tuple[Any, Any]]) -> None:
        self._names |= {str(peer)[-8:]: str(name) for peer, name in names}

    def _named(self, text: Any) -> Any:
        """With names of peers in the place of short ids. What is no text stays what it is."""
        return SHORT_ID.sub(lambda found: self._names.get(found[1], found[0]), text) if isinstance(text, str) else text

    def report(self, line: bytes) -> dict[str, Any] | None:
        """A line of reports.jsonl: a report with all that is drawn, or a retraction; None where it is none."""
        try:
            found = msgspec.structs.asdict(self._decoder.decode(line))
        except msgspec.DecodeError:
            return None
        return {"step": found["step"], "loss": found["loss"]} if found["steps"] is msgspec.UNSET else found

    def read_all(self) -> Painter:
        """To the end of it."""
        while self.read():
            pass
        return self.painter


class MeshSource:
    """A mesh that this process is in, and a run of its own once `run` names it. `listens`: nobody is asked, as beside training."""

    def __init__(
        self,
        agent: MeshView,
        run: Callable[[], Run | None] = lambda: None,
        *,
        listens: bool = False,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.painter = Painter()
        self._agent = agent
        self._listens = listens
        self._run = run
        self._folder: FolderSource | None = None
        self._clock, self._monotonic = clock, monotonic
        self._looked_s = float("-inf")

    async def refresh(self) -> bool:
        if self._monotonic() - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = self._monotonic()
            status: Mapping[str, Any] = self._agent.known() if self._listens else await self._agent.status()
            self.painter.look(status, self._clock())
        run = self._run()
        if run is not None and (self._folder is None or self._folder.run != run):
            self._folder = FolderSource(run, self.painter, is_live=True)
        return await self._folder.refresh() if self._folder is not None else False
