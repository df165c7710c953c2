"""What meshcee keeps on this machine: identities and runs, under MESHCEE_HOME (default ~/.meshcee).

The idea: one folder, plain files, every write atomic; several peers on one machine each take the first identity that
no living process holds.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from meshcee.errors import JoinError, UsageError
from peers.strict_json import dumps

__all__ = ["Home", "Run", "write_atomic"]


def write_atomic(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Replace the file in one step, so that a reader or a crash never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class Run:
    """One `meshcee train` on this machine: its folder holds run.json, reports.jsonl, checkpoints and, at the end, result.json."""

    folder: Path

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def info(self) -> dict[str, Any]:
        try:
            data: dict[str, Any] = json.loads((self.folder / "run.json").read_text())
        except (OSError, ValueError):
            return {}
        return data

    @property
    def process(self) -> psutil.Process | None:
        """The owner's process, if it still is that process: a pid may have been used again."""
        info = self.info
        try:
            process = psutil.Process(int(info["pid"]))
            return process if abs(process.create_time() - float(info["process_started"])) < 1 else None
        except (KeyError, psutil.Error):
            return None

    @property
    def state(self) -> str:
        result = self.folder / "result.json"
        if result.exists():
            return str(json.loads(result.read_text()).get("state", "ended"))
        return "running" if self.process else "died"

    def report(self, line: Mapping[str, Any]) -> None:
        with (self.folder / "reports.jsonl").open("a") as file:
            file.write(dumps(line) + "\n")

    def reports(self) -> list[dict[str, Any]]:
        try:
            lines = (self.folder / "reports.jsonl").read_text().splitlines()
        except OSError:
            return []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def take_over(self, **info: Any) -> None:
        """This process goes on with it: its own number, no result, no half line at the end of the reports."""
        write_atomic(self.folder / "run.json", dumps({**self.info, **_this_process(), **info}).encode())
        lines = "".join(dumps(line) + "\n" for line in self.reports())
        write_atomic(self.folder / "reports.jsonl", lines.encode())
        (self.folder / "result.json").unlink(missing_ok=True)

    def end(self, state: str, **more: Any) -> None:
        write_atomic(self.folder / "result.json", dumps({"state": state, "ended": time.time(), **more}).encode())


def _this_process() -> dict[str, Any]:
    me = psutil.Process()
    return {"pid": me.pid, "process_started": me.create_time()}


class Home:
    """The folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(os.environ.get("MESHCEE_HOME", "~/.meshcee")).expanduser()

    @contextmanager
    def identity_file(self, chosen: Path | None = None) -> Iterator[Path]:
        """An identity file that no living process uses, ours while the block runs; `chosen` insists on one."""
        folder = self.folder / "identities"
        folder.mkdir(parents=True, exist_ok=True)
        for path in [chosen] if chosen else [folder / f"{i}.key" for i in range(256)]:
            with open(f"{path}.lock", "ab") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                yield path
                return
        if chosen:
            raise JoinError(f"a peer on this machine already runs with the identity {chosen}: leave --identity out")
        raise UsageError(f"256 peers already run from {self.folder}; give another MESHCEE_HOME")

    def next_incarnation(self, after: int = 0) -> int:
        """The owner's start counter: higher with every start, and than `after`; on disk before it is used."""
        path = self.folder / "incarnation"
        try:
            last = int(path.read_text())
        except FileNotFoundError:
            last = 0
        except ValueError as error:
            raise UsageError(f"{path} is damaged: write a number into it that is higher than any before") from error
        following = max(last, after) + 1
        write_atomic(path, str(following).encode(), durable=True)
        return following

    def new_run(self, name: str, **info: Any) -> Run:
        safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:40] or "job"
        base = time.strftime("%Y%m%d-%H%M%S") + f"-{safe}"
        for attempt in range(100):
            folder = self.folder / "runs" / (base if attempt == 0 else f"{base}-{attempt}")
            try:
                folder.mkdir(parents=True)
                break
            except FileExistsError:
                continue
        data = {"name": name, **_this_process(), "started": time.time(), **info}
        write_atomic(folder / "run.json", dumps(data).encode())
        return Run(folder)

    def runs(self) -> list[Run]:
        """Newest first."""
        folder = self.folder / "runs"
        return [Run(f) for f in sorted(folder.iterdir(), reverse=True) if f.is_dir()] if folder.exists() else []

    def run(self, run_id: str) -> Run:
        """A run by id or unique beginning; "last" is the newest."""
        found = self.runs()[:1] if run_id == "last" else [r for r in self.runs() if r.id.startswith(run_id)]
        if len(found) != 1:
            raise UsageError(f"{len(found)} runs match {run_id!r}; `meshcee run list` shows them")
        return found[0]
