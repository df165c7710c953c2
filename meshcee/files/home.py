"""What meshcee keeps on this machine: identities and runs.

The idea: one folder, plain files, every write atomic; several peers on one machine each take the first identity that
no living process holds.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from meshcee.errors import CheckpointError, JoinError, ProtocolError, UsageError
from meshcee.fields import Count, Finite, NotNegative, Ordinal, read
from meshcee.files import disk
from meshcee.files.strict_json import loads

__all__ = ["About", "Home", "Run", "file_name", "home_folder", "is_locked", "is_retraction", "under"]

LOCK, NUMBER = "owner.lock", "number"


def is_locked(path: Path) -> bool:
    """Whether a living process holds this file; one that is not there or cannot be read is nobody's."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


@dataclass(frozen=True)
class About:
    """What run.json says of a run that shall go on, on this machine or another one; empty where nothing is said."""

    job: Mapping[str, Any] | None = None
    micro_batch: Ordinal = 1
    devices: tuple[tuple[str, str, int | None], ...] = ()  # kinds that computed it: processor, model and torch, threads
    rounds: tuple[bool, bool] = (False, False)  # whether its numbers were rounded, by groups and by codecs
    key: str | None = None
    incarnation: Count = 0
    plan: Mapping[str, Any] = field(default_factory=dict)
    failed: tuple[str, ...] = ()
    weights: Mapping[str, str] = field(default_factory=dict)  # digests of the first ones; none in older runs
    samples: Mapping[str, str] = field(default_factory=dict)  # digests of a few, by index; as above


@dataclass(frozen=True)
class _Line:
    """What anybody reads of a line of reports.jsonl; it holds more (peers/owner/answers.py). A figure that is none is null."""

    step: Count
    loss: Finite | None
    metrics: Mapping[str, Finite | None] = field(default_factory=dict)
    lr_changes: tuple[tuple[Count, NotNegative, NotNegative], ...] = ()  # from here on: meshcee/callbacks/control.py
    evaluations: tuple[Count, ...] = ()
    checkpoints: tuple[Count, ...] = ()
    kept_checkpoints: tuple[Count, ...] = ()
    stops: bool = False


@dataclass(frozen=True)
class Run:
    """One `meshcee train` on this machine: its folder holds run.json, reports.jsonl, checkpoints and, at the end, result.json.
    Its owner writes them (peers/owner/folder/diary.py).
    """

    folder: Path

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def order(self) -> tuple[int, str]:
        """Its place among the runs of this machine, by a number that no clock sets back. Older runs have names alone."""
        try:
            return int((self.folder / NUMBER).read_bytes()), self.id
        except (OSError, ValueError):
            return 0, self.id

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def report_file(self) -> Path:
        return self.folder / "reports.jsonl"

    @property
    def info(self) -> dict[str, Any]:
        """As it was written, for who writes it again."""
        return _object(self.folder / "run.json")

    @property
    def about(self) -> About:
        """UsageError where the file holds something else."""
        try:
            return read(self.info, About, str(self.folder / "run.json"), defaults=True)
        except ProtocolError as error:
            raise UsageError(
                f"{error}: the run cannot go on from there; `meshcee checkpoint export` saves its weights"
            ) from error

    @property
    def result(self) -> dict[str, Any]:
        """What the owner wrote when the run ended; nothing before."""
        return _object(self.folder / "result.json")

    @property
    def process(self) -> psutil.Process | None:
        """The owner's process, while it holds the run; None where its number is one of another container or machine."""
        try:
            pid, *where = (self.folder / LOCK).read_text().split()
            return psutil.Process(int(pid)) if self.is_owned and where in ([], [_numbered_in()]) else None
        except (OSError, ValueError, psutil.Error):
            return None

    @property
    def is_owned(self) -> bool:
        """Whether a living process owns it: its lock ends with the process, whatever clocks say and numbers are used again."""
        return is_locked(self.folder / LOCK)

    @property
    def state(self) -> str:
        return "running" if self.is_owned else str(self.result.get("state", "died"))

    @property
    def is_over(self) -> bool:
        """Whether it ended as it was to, at its last step or because somebody asked."""
        return self.result.get("state") in ("stopped", "done")

    def stop_mark(self, pid: int) -> Path:
        """The file is there once this process was asked to stop; a mark of another process counts for nothing."""
        return self.folder / f"stop.{pid}"

    def hold(self) -> BinaryIO:
        """Own it until this is closed, or the process ends; UsageError while another process does. The lock says whose it is."""
        lock = (self.folder / LOCK).open("ab", buffering=0)
        for _ in range(20):  # who only looks whether it is held holds it for a moment
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
                continue
            with suppress(OSError):  # numbers of processes are used again
                for mark in self.folder.glob("stop.*"):
                    disk.remove(mark)
            with suppress(OSError):  # a disk without room is told of where more is written
                lock.truncate(0)
                lock.write(f"{os.getpid()} {_numbered_in()}".encode())
            return lock
        lock.close()
        raise UsageError(f"run {self.id} is still running; stop it with `meshcee run stop {self.id}`")

    def reports(self, needed: int = 0) -> list[dict[str, Any]]:
        """One a step, as it was told last; none of a step that was taken back. A line that a killed owner or a power cut has torn
        is none. CheckpointError where one of the first `needed` steps has none.
        """
        told, _ = self._told()
        if (missing := next((step for step in range(needed) if step not in told), None)) is not None:
            raise CheckpointError(
                f"{self.report_file} has no line of step {missing + 1}, which the checkpoint counts: callbacks may have changed a "
                "rate there, and the run would go on with other rates; put the file back from a copy, or begin a run with the "
                f"weights of `meshcee checkpoint export {self.id}`"
            )
        return [told[step] for step in sorted(told)]

    @property
    def counts_to(self) -> float:
        """The first step that was taken back and not told again: a state behind it does not count. Infinity where there is none."""
        told, takes_back = self._told()
        return next(step for step in itertools.count() if step not in told) if takes_back else math.inf

    def _told(self) -> tuple[dict[int, dict[str, Any]], bool]:
        """The reports by their steps, and whether some were taken back. Who takes a step back takes back all later ones."""
        told, end, takes_back = dict[int, dict[str, Any]](), 0, False
        data = b""
        with suppress(OSError):
            data = self.report_file.read_bytes()
        for line in filter(None, map(_report, data.splitlines())):
            step = int(line["step"])
            if not is_retraction(line):
                told[step], end = line, max(end, step + 1)  # what a power cut took was told again later
                continue
            takes_back = True
            if step < end:
                told, end = {s: line for s, line in told.items() if s < step}, step
        return told, takes_back


def _numbered_in() -> str:
    """Where a number names one process: this machine since it was started, and this container."""
    found = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    try:
        return f"{found[0].read_text().strip()}/{found[1].stat().st_ino}"
    except OSError:  # another system
        return "-"


def _object(path: Path) -> dict[str, Any]:
    try:
        data = loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _report(line: bytes) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = loads(line)
        read(found, _Line, "a report", defaults=True)
    except (ValueError, ProtocolError):
        return None
    return found


def is_retraction(report: Mapping[str, Any]) -> bool:
    """Whether a line takes back what was told of a step (peers/owner/folder/diary.py), and is no report."""
    return report.keys() == {"step", "loss"} and report["loss"] is None


def file_name(name: str) -> str:
    """Of a job, for what is called after it: a name that every folder takes."""
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:40] or "job"


def under(variable: str, default: str, environment: Mapping[str, str]) -> Path:
    """A folder of the user's by the XDG rules: what the variable says where that is absolute, else the default."""
    said = environment.get(variable, "")
    return _expanded(said if said.startswith("/") else default)


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(f"this user has no home folder for {path}: set MESHCEE_HOME to a folder") from error


def home_folder(environment: Mapping[str, str]) -> Path:
    """MESHCEE_HOME; else ~/.meshcee where that is there; else `meshcee` in XDG_DATA_HOME, by default ~/.local/share."""
    if said := environment.get("MESHCEE_HOME"):
        return _expanded(said)
    old = _expanded("~/.meshcee")
    try:
        is_old = old.is_dir()
    except OSError as error:
        raise UsageError(f"{disk.refusal(error)}: set MESHCEE_HOME to a folder of yours") from error
    return old if is_old else under("XDG_DATA_HOME", "~/.local/share", environment) / "meshcee"


class Home:
    """The folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or home_folder(os.environ)
        with self.writable():  # a name that is too long, or in a folder of somebody else
            is_file = self.folder.is_file()
        if is_file:
            raise UsageError(
                f"{self.folder} is a file, and runs and identities need a folder: set MESHCEE_HOME to another path"
            )

    @contextmanager
    def identity_file(self, chosen: Path | None = None, apart_from: Collection[Path] = ()) -> Iterator[Path]:
        """An identity file that no living process uses, ours while the block runs; `chosen` insists on one. `apart_from` are
        those that other peers come back with."""
        folder = self.folder / "identities"
        with self.writable():
            disk.make_folder(folder)
            if chosen is not None and chosen.absolute().parent != folder.absolute():
                where = os.fsencode(chosen.absolute())
                disk.write_whole(folder / f"{hashlib.sha256(where).hexdigest()[:16]}.elsewhere", where)
        left = {one.absolute() for one in apart_from}
        for path in [chosen] if chosen else [folder / f"{i}.key" for i in range(256)]:
            if chosen is None and path.absolute() in left:
                continue
            with self.writable():
                lock = path.with_name(f"{path.name}.lock").open("ab")
            with lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                yield path
                return
        if chosen:
            raise JoinError(f"a peer on this machine already runs with the identity {chosen}: leave --identity out")
        raise UsageError(f"256 peers already run from {self.folder}; give another MESHCEE_HOME")

    def identities_elsewhere(self) -> list[Path]:
        """Those that were chosen and lie in no folder of ours, as far as they are there."""
        found = sorted((self.folder / "identities").glob("*.elsewhere"))
        return [path for path in (Path(os.fsdecode(file.read_bytes())) for file in found) if path.exists()]

    @contextmanager
    def writable(self) -> Iterator[None]:
        """Before anything runs, a disk that refuses is the user's to mend."""
        try:
            yield
        except OSError as error:
            remedy = disk.remedy(error, "set MESHCEE_HOME to another folder")
            raise disk.kind_of(error)(
                f"this machine's folder cannot be written ({disk.refusal(error)}): {remedy}"
            ) from error

    def next_incarnation(self, after: int = 0) -> int:
        """The owner's start counter: higher with every start, and than `after`; on disk before it is used. Two owners that
        start at once get two.
        """
        path = self.folder / "incarnation"
        with self.writable(), disk.locked(path):
            try:
                last = int(path.read_text())
            except FileNotFoundError:
                last = 0
            except ValueError as error:
                raise UsageError(f"{path} is damaged: write a number into it that is higher than any before") from error
            following = max(last, after) + 1
            disk.write_whole(path, str(following).encode())
        return following

    def new_run(self, name: str) -> Run:
        """A folder for it, with nothing but its number."""
        base = time.strftime("%Y%m%d-%H%M%S") + f"-{file_name(name)}"
        with self.writable(), disk.locked(self.folder / "runs"):
            disk.make_folder(self.folder / "runs")
            number = max((run.order[0] for run in self.runs()), default=0) + 1
            for attempt in itertools.count():
                folder = self.folder / "runs" / (base if attempt == 0 else f"{base}-{attempt}")
                with suppress(FileExistsError):
                    disk.new_folder(folder)
                    disk.write_whole(folder / NUMBER, str(number).encode())
                    return Run(folder)
        raise AssertionError("there is always another number")

    def runs(self) -> list[Run]:
        """Newest first."""
        folder = self.folder / "runs"
        found = (Run(place) for place in folder.iterdir() if place.is_dir()) if folder.exists() else ()
        return sorted(found, key=lambda run: run.order, reverse=True)

    def run(self, run_id: str) -> Run:
        """A run by id or unique beginning; "last" is the newest. An id that begins another one is still that run's."""
        runs = self.runs()
        found = runs[:1] if run_id == "last" else [r for r in runs if r.id == run_id]
        found = found or [r for r in runs if r.id.startswith(run_id)]
        if len(found) != 1:
            match = f"{len(found)} runs match" if found else "no run matches"
            raise UsageError(f"{match} {run_id!r}; `meshcee run list` shows them")
        return found[0]
