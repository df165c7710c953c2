"""What a run was fed, for data that is not the same when it is read again: steps that may be computed again see it again.

The idea: most data can be read again, as its generators are seeded (order.py), and nothing is kept. What reads a clock,
the network or a generator of its own is found out before the start. From then on a step's samples lie on the owner's disk
before anybody computes on them, and stay until no checkpoint is left that training could go back to.

    fed/step-00000040.safetensors     "0/x", "0/y", "1/x", ...: the raw inputs of each micro-batch
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import structlog
import torch

from meshcee.errors import MeshceeError, UsageError
from meshcee.files import disk
from meshcee.job import Job
from meshcee.sampling import data as data_rules
from meshcee.sampling.order import read

__all__ = ["FED", "Fed", "repeats", "unrepeatable"]

log = structlog.get_logger()

FED = "fed"  # the folder, in a run's
MOST_BYTES = 4 << 30
MOST_STEPS = 10_000
LOOK_FOR_ROOM = 16  # steps from one look at the checkpoints to the next
LOOKED_AT = 16  # samples that are read twice
AT_LEAST = 4  # of them, when they take longer than
LOOK_S = 1.0
BEGINNING = "step-"
SUFFIX = ".safetensors"
REFUSED = "what a step was fed could not be kept: if it must be computed again, the run ends"
FORGOTTEN = "what early steps were fed is kept no longer: if they must be computed again, the run ends"

Raw = Mapping[str, torch.Tensor]  # inputs of one micro-batch by name


def repeats(job: Job, *, keeps: bool) -> bool:
    """Whether a few samples are what they were when they are read again. If not, a warning says what it costs; `keeps`: the run
    has a folder.
    """
    index = unrepeatable(job)
    if index is None:
        return True
    step_bytes = job.batch_size * sum(tensor.nbytes for tensor in _sample(job, index).values())
    cost = f"all that is fed is kept on the disk, {step_bytes:,} bytes a step and at most {MOST_BYTES:,}"
    log.warning(
        f"data[{index}] is another sample when it is read again: it must draw from `random`, `numpy.random` or torch's own "
        f"generator only; {cost if keeps else 'this run has no folder to keep it, so a lost peer ends the run'}"
    )
    return False


def unrepeatable(job: Job) -> int | None:
    """Of a few samples the index of one that is another one when it is read again, in another order; None if there is none."""
    indices = sorted({k * len(job.data) // LOOKED_AT for k in range(LOOKED_AT)})
    first: dict[int, Raw] = {}
    began_s = time.monotonic()
    for i in indices:
        first[i] = _sample(job, i)
        if len(first) >= AT_LEAST and time.monotonic() - began_s > LOOK_S:
            break
    return next((i for i in reversed(first) if not _alike(first[i], _sample(job, i))), None)


def _sample(job: Job, index: int) -> Raw:
    try:
        return data_rules.inputs_of(data_rules.stack(read(job.data, [index], job.seed)))
    except MeshceeError:
        raise
    except Exception as error:
        raise UsageError(f"data[{index}] failed: {type(error).__name__}: {error}") from error


def _alike(one: Raw, other: Raw) -> bool:
    """By bytes: what is not a number equals itself."""
    return one.keys() == other.keys() and all(
        a.dtype == (b := other[name]).dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
        for name, a in one.items()
    )


class Fed:
    """Of one run. `was_told(step)` says whether a step's loss was reported; `floor()` is the first step that training could
    still go back to. Its methods are called by threads.
    """

    def __init__(
        self,
        folder: Path,
        was_told: Callable[[int], bool],
        floor: Callable[[], int],
        most_bytes: int = MOST_BYTES,
        most_steps: int = MOST_STEPS,
    ) -> None:
        self.folder = folder
        self._was_told = was_told
        self._floor = floor
        self._most_bytes, self._most_steps = most_bytes, most_steps
        self._lock = threading.Lock()  # an epoch that has ended may still be reading beside the next one
        self._sizes: dict[int, int] = {}  # of the steps that are kept, oldest first
        for path in sorted(folder.glob(f"{BEGINNING}*{SUFFIX}")):
            number = path.name.removeprefix(BEGINNING).removesuffix(SUFFIX)
            if number.isdecimal():
                self._sizes[int(number)] = path.stat().st_size
        self._bytes = sum(self._sizes.values())
        self._warned: set[str] = set()

    def batches(self, step: int, make: Callable[[], list[Raw]]) -> list[Raw]:
        """The micro-batches of this step: what was fed before, else what `make` reads, which is kept first.

        Raises UsageError if the step's loss was told and what it was fed is not there any more.
        """
        with self._lock:
            kept = self._load(step)
        if kept is not None:
            return kept
        if self._was_told(step):
            raise UsageError(
                f"step {step + 1} must be computed again, data[i] does not give the samples again that it was fed, and they are no "
                "longer kept: start a new run, with a smaller checkpoint_every or with data that draws from `random`, "
                "`numpy.random` or torch only"
            )
        made = make()
        with self._lock:
            if (kept := self._load(step)) is not None:
                return kept  # read by an epoch that was lost meanwhile; the first one counts
            self._save(step, made)
        return made

    def _path(self, step: int) -> Path:
        return self.folder / f"{BEGINNING}{step:08d}{SUFFIX}"

    def _load(self, step: int) -> list[Raw] | None:
        if step not in self._sizes:
            return None
        found: dict[int, dict[str, torch.Tensor]] = {}
        try:
            for name, tensor in safetensors.torch.load(self._path(step).read_bytes()).items():
                micro, _, own = name.partition("/")
                found.setdefault(int(micro), {})[own] = tensor
            return [found[micro] for micro in range(len(found))]
        except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
            log.warning("what a step was fed cannot be read", step=step, error=str(error))
            self._forget(step)
            return None

    def _save(self, step: int, batches: list[Raw]) -> None:
        # Cloned: of one sample inputs may share memory, which the format refuses.
        tensors = {
            f"{m}/{name}": tensor.clone(memory_format=torch.contiguous_format)
            for m, raw in enumerate(batches)
            for name, tensor in raw.items()
        }
        try:
            data = safetensors.torch.save(tensors)
            if len(data) > self._most_bytes:
                raise ValueError(f"it has {len(data)} bytes, and at most {self._most_bytes} are kept of all steps")
            self._make_room(step, len(data))
            disk.write_whole(self._path(step), data)
        except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
            self._warn(REFUSED, step=step, error=str(error))
            return
        self._sizes[step] = len(data)
        self._bytes += len(data)
        self._warned.discard(REFUSED)

    def _make_room(self, step: int, size: int) -> None:
        """Forget what cannot be asked for again, and then, with a word, what can."""
        if step % LOOK_FOR_ROOM == 0:
            floor = self._floor()
            for old in list(itertools.takewhile(lambda s: s < floor, self._sizes)):
                self._forget(old)
        while self._sizes and (self._bytes + size > self._most_bytes or len(self._sizes) >= self._most_steps):
            old = next(iter(self._sizes))
            self._forget(old)
            self._warn(FORGOTTEN, step=old, at_most_bytes=self._most_bytes, hint="take a smaller checkpoint_every")

    def _forget(self, step: int) -> None:
        self._bytes -= self._sizes.pop(step)
        with contextlib.suppress(OSError):  # a disk that cannot be written
            disk.remove(self._path(step))

    def _warn(self, event: str, **about: Any) -> None:
        if event not in self._warned:
            log.warning(event, **about)
        self._warned.add(event)
