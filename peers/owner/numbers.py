"""What a run has computed so far, and on what devices; and what outlives its process, which is nothing unless it has a folder."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from meshcee.errors import MeshceeError, UsageError
from meshcee.figures import DeviceProfile, class_of
from meshcee.figures.kernels import KernelClass
from meshcee.job import Job
from meshcee.plan import Plan
from peers.state import CopySet

if TYPE_CHECKING:
    from meshcee.capture import Capture
    from meshcee.files.home import About, Home
    from meshcee.sampling.fed import Fed
    from peers.state.checkpoint import Checkpoint, CheckpointStore

__all__ = ["Entry", "Losses", "Numbers", "Resumed", "Unwritten", "next_incarnation", "same_threads"]

log = structlog.get_logger()

UNLIKE = 1e-3  # how much a repeated loss may differ, relatively, where devices or codecs round differently
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


@dataclass(frozen=True)
class Entry:
    """What is written of a run when an epoch begins: what is trained, from which step, by which plan, under which name for members
    (`key`). `samples`: digests of a few, None where what is fed must be kept. `failed`: peers that plans leave out.
    """

    job: Job
    captured: Capture
    plan: Plan
    names: Mapping[str, str]
    key: str
    incarnation: int
    first_step: int
    numbers: Numbers
    samples: Mapping[str, str] | None
    failed: Sequence[str]
    resumed: bool


@dataclass(frozen=True)
class Resumed:
    """A run to go on with: this job, with these weights. `base`: None where it begins with copies, or with its first step.
    `kinds`: of devices that have computed it. `reports`: of steps behind `base`.
    """

    job: Job
    captured: Capture
    base: Checkpoint | None
    kinds: Sequence[Any]
    about: About
    reports: list[dict[str, Any]]
    copies: list[CopySet]
    is_over: bool

    @property
    def begins(self) -> int:
        return self.base.next_step if self.base is not None else 0


class Unwritten:
    """Of a run that no disk knows. `peers.owner.folder.Folder` is of one that this machine keeps.

    `id`: of the run. `store`: where this epoch's checkpoints go. `durable`: the newest checkpoint, or that the run goes on from.
    `fed`: what the run was fed, where data[i] is another sample whenever it is read.
    """

    id: str | None = None
    store: CheckpointStore | None = None
    durable: Checkpoint | None = None
    fed: Fed | None = None

    def find(self, wanted: str, job: Job, captured: Capture) -> Resumed:
        """The run to go on with, by its id, or ID@STEPS. UsageError where it is not here, or does not fit this job."""
        raise UsageError("only a run that this machine keeps can be resumed: join a mesh, or say keeps=True")

    def incarnation(self) -> int:
        """Of an owner that begins now."""
        return next_incarnation(None)

    def check_samples(self, found: Mapping[str, str]) -> None:
        """UsageError where a run that goes on was fed others."""

    def check_weights(self, *, again: bool) -> None:
        """UsageError where a run that goes on began with others; `again`: it begins with its first step."""

    def write(self, entry: Entry) -> None:
        """An epoch begins."""

    def follow(self, entry: Entry) -> None:
        """Others may follow the run; in the event loop, behind `write`."""

    def note(self, found: Sequence[CopySet]) -> None:
        """These copies of the state are with members."""

    def has_told(self, copied: CopySet) -> bool:
        """Whether who may go on with the run knows of these copies."""
        return True

    def report(self, line: Mapping[str, Any]) -> None:
        """One step has been told of."""

    def saved(self) -> list[Checkpoint]:
        """The newest checkpoints that were made, in whatever epoch, the newest last."""
        return []

    def find_saved(self) -> list[Checkpoint]:
        """All that are on the disk, the newest first."""
        return []

    def look(self) -> None:
        """See which checkpoint is the newest."""

    def take_back(self, step: int, told: Iterable[int]) -> None:
        """Nothing since this step counts any more; `told`: steps that were reported."""

    def end(self, state: str, **more: Any) -> None:
        """The run is over, if it has begun."""

    async def close(self) -> None:
        """Somebody else may go on with it."""
