"""What the owner writes into its run's folder while it trains: run.json, a line for every step, and how it ended.

The idea: a disk that is full or cannot be written does not end a run. What it refuses is kept here, and brought to it before what
comes next. A checkpoint relies on the lines of the steps before it, so they reach the disk first (`sync`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from meshcee.files import Trouble, disk, dumps
from meshcee.files.home import Run
from peers.state import RETRY_S

__all__ = ["Diary"]

LINES, ABOUT, RESULT = "the run's reports", "the run's description", "the run's result"


class Diary:
    """Of the run that this process owns, from now until `close`; UsageError while another process owns it."""

    def __init__(self, run: Run, trouble: Trouble) -> None:
        self.run = run
        self._trouble = trouble
        self._lock = threading.Lock()  # lines are told by the event loop, and wanted on the disk by threads
        self._held = run.hold()
        self._waiting = [b"\n"] if disk.is_torn(run.report_file) else []  # lines not in the file, or the end of one
        self._file = run.report_file
        self._info = run.info
        self._is_noted = True
        self.is_begun = False
        self._retry_s = 0.0  # on the monotonic clock

    def begin(self, **info: Any) -> None:
        """The run goes on, or begins, with this process: no result counts any more. Raises what the disk refuses."""
        self._info |= {"started": self._info.get("started", time.time()), **info}
        disk.write_whole(self.run.folder / "run.json", dumps(self._info).encode())
        disk.remove(self.run.folder / "result.json")
        disk.sync_folder(self.run.folder)
        disk.append(self._file, b"".join(self._waiting))
        self._waiting.clear()
        self.is_begun = True

    def note(self, **info: Any) -> None:
        """What has become of it since."""
        self._info |= info
        self._is_noted = False
        self._write_info()

    def _write_info(self) -> None:
        data = dumps(self._info).encode()
        try:
            disk.write_whole(self.run.folder / "run.json", data)
        except OSError as error:
            self._trouble.tell(ABOUT, error, len(data))
        else:
            self._is_noted = True
            self._trouble.over(ABOUT)

    def report(self, line: Mapping[str, Any]) -> None:
        """One step has been told of."""
        with self._lock:
            self._waiting.append(dumps(line).encode() + b"\n")
            if self._trouble.monotonic() < self._retry_s:
                return
            try:
                self._append()
            except OSError as error:
                self._retry_s = self._trouble.monotonic() + RETRY_S
                self._trouble.tell(LINES, error, sum(map(len, self._waiting)))

    def take_back(self, steps: Iterable[int]) -> None:
        """These were told of, and do not count."""
        for step in steps:
            self.report({"step": step, "loss": None})

    def _append(self) -> None:
        if self._waiting:
            disk.append(self._file, b"".join(self._waiting))
            self._waiting.clear()
            self._trouble.over(LINES)

    def sync(self) -> None:
        """Every line that was told survives a power cut. Raises what the disk refuses."""
        with self._lock:
            self._append()
        disk.sync_file(self._file)
        if not self._is_noted:
            self._write_info()

    def end(self, state: str, **more: Any) -> None:
        data = dumps({"state": state, "ended": time.time(), **more}).encode()
        try:
            self.sync()
            disk.write_whole(self.run.folder / "result.json", data)
        except OSError as error:
            self._trouble.tell(RESULT, error, len(data))

    def close(self) -> None:
        """Somebody else may go on with it."""
        self._held.close()
