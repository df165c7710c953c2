"""What the owner writes into its run's folder while it trains: run.json, a line for every step, and how it ended.

The idea: a disk that is full or cannot be written does not end a run. What it refuses is kept here, and brought to it before what
comes next. A checkpoint relies on the lines of the steps before it, so they reach the disk first (`sync`).
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import structlog

from meshcee.errors import MeshceeError, UsageError
from meshcee.figures import DeviceProfile, class_of
from meshcee.figures.kernels import KernelClass
from meshcee.files import Home, Run, Trouble, disk, dumps
from meshcee.job import Job
from meshcee.plan import Plan
from peers.state import RETRY_S

__all__ = ["Diary", "Losses", "Numbers", "next_incarnation", "same_threads"]

log = structlog.get_logger()

_incarnations = itertools.count(1)


def next_incarnation(home: Home | None, after: int = 0) -> int:
    """Higher than any before: on disk where there is a home, else in this process, which then is all there is."""
    return home.next_incarnation(after) if home is not None else next(_incarnations)


class Losses:
    """A mapping from steps to finite losses that grows, unless steps are taken back."""

    def __init__(self) -> None:
        self._losses = array("d")  # NaN where nothing was told

    def __contains__(self, step: int) -> bool:
        return step < len(self._losses) and not math.isnan(self._losses[step])

    def __len__(self) -> int:
        """Of the steps up to the last that was told of."""
        return len(self._losses)

    def __getitem__(self, step: int) -> float:
        """NaN for a step that was not told of."""
        return self._losses[step] if step < len(self._losses) else math.nan

    def __setitem__(self, step: int, loss: float) -> None:
        self._losses.extend([math.nan] * (step + 1 - len(self._losses)))
        self._losses[step] = loss

    def take_back(self, step: int) -> list[int]:
        """This one and later ones were not told of; which they are."""
        told = [s for s in range(step, len(self._losses)) if s in self]
        del self._losses[step:]
        return told


class Numbers:
    """What a run has computed so far, and on what. A step that is computed again must give the same loss."""

    def __init__(self) -> None:
        self.losses = Losses()  # of every step that has been reported
        self.kinds: set[tuple[str, str, int]] = set()  # of devices that have computed it
        self.classes: Collection[KernelClass] = ()  # of those that computed it last
        self.begins = 0  # with which step this process began
        self._joined: dict[str, int] = {}  # the first step of each member
        self.shares = self.coded = False  # whether a plan of it had groups, or codecs: sums and roundings are its own

    @property
    def bound_to(self) -> Collection[KernelClass]:
        """The classes of devices whose numbers the run goes on with: none while no step was told of."""
        return self.classes if len(self.losses) else ()

    def go_on(self, kinds: Iterable[Sequence[Any]], rounds: tuple[bool, bool]) -> None:
        """With a run that these kinds of devices have computed, with or without groups and codecs."""
        self.kinds = {(kind, name, threads) for kind, name, threads in kinds}
        self.classes = {KernelClass.of_run(*kind) for kind in self.kinds}
        self.shares, self.coded = rounds

    def begin(self, plan: Plan, devices: Mapping[str, DeviceProfile]) -> None:
        """Steps are computed by this plan on these devices from now on."""
        self.shares |= plan.shares_samples
        self.coded |= bool(plan.codecs)
        if not len(self.losses):  # nothing that others computed counts
            self.kinds.clear()
        self.classes = {class_of(device, plan.threads) for device in devices.values()}
        self.kinds |= {(of.kind, f"{of.model}, torch {of.torch}", of.threads) for of in self.classes}

    def join(self, peers: Iterable[str], step: int) -> None:
        """These compute this step, and those behind it."""
        self._joined |= {peer: min(step, self._joined.get(peer, step)) for peer in peers}

    def first_of(self, peers: Iterable[str]) -> int | None:
        """The first step that any of these has computed; None where there are none."""
        return min((self._joined[peer] for peer in peers), default=None)

    def compare(self, step: int, loss: float) -> None:
        """Hold a step that was computed again against what was reported of it; MeshceeError where it is another loss."""
        before = self.losses[step]
        if loss == before:
            return
        alike = len(self.kinds) == 1 and not self.shares
        told = f"step {step + 1} had loss {before!r} and has {loss!r} now that it is computed again"
        if not self.coded and (alike or not math.isclose(loss, before, rel_tol=UNLIKE)):
            raise MeshceeError(
                f"{told}: data[i] was not the same when it was read again (docs/models.md), or the state that training went on "
                "from was not that of the run; if the data is not at fault, please report it"
            )
        log.warning(told + ": the peers' devices or codecs round differently")


def same_threads(job: Job, kinds: Sequence[Any], run: str) -> int | None:
    """The number of threads that these kinds of devices have had; another one would go on with other bits."""
    had = {threads for kind, _, threads in kinds if kind == "cpu"}
    if len(had) != 1:
        return job.threads
    if job.threads not in (None, *had):
        raise UsageError(
            f"run {run} computes with {min(had)} threads, and {job.threads} were asked for: they give other bits; leave "
            "--threads, or `threads` of the job, out"
        )
    return int(min(had))


UNLIKE = 1e-3  # how much a repeated loss may differ, relatively, where devices or codecs round differently
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
