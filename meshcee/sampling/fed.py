"""What a run was fed, for data that is not the same when it is read again: steps that may be computed again see it again.

The idea: most data can be read again, as its generators are seeded (order.py), and nothing is kept. What reads a clock,
the network or a generator of its own is found out before the start (again.py). From then on a step's samples lie on the
owner's disk before anybody computes on them, and stay until no checkpoint is left that training could go back to.

    fed/step-00000040.safetensors     "0/x", "0/y", "1/x", ...: the raw inputs of each micro-batch

Kernels round by strides, too, and by where memory begins. The file's metadata has both of each tensor where they are not usual.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import structlog
import torch

from meshcee.errors import UsageError
from meshcee.files import disk
from meshcee.files.layout import offset_of, placed
from meshcee.files.strict_json import dumps, loads
from meshcee.sampling.again import MOST_BYTES

__all__ = ["Fed"]

log = structlog.get_logger()

MOST_STEPS = 10_000
LOOK_FOR_ROOM = 16  # steps from one look at the checkpoints to the next
BEGINNING = "step-"
SUFFIX = ".safetensors"
REFUSED = "what a step was fed could not be kept: if it must be computed again, the run ends"
FORGOTTEN = "what early steps were fed is kept no longer: if they must be computed again, the run ends"

Raw = Mapping[str, torch.Tensor]  # inputs of one micro-batch by name


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
            data = self._path(step).read_bytes()
            tensors = safetensors.torch.load(data)
            strides = loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
            for name, tensor in tensors.items():
                micro, _, own = name.partition("/")
                told = loads(strides[name]) if name in strides else tensor.stride()
                *lies, offset = told if len(told) > tensor.dim() else (*told, 0)  # older versions told no offset
                tensor = placed(tensor, lies, offset)
                found.setdefault(int(micro), {})[own] = tensor
            return [found[micro] for micro in range(len(found))]
        except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
            log.warning("what a step was fed cannot be read", step=step, error=str(error))
            self._forget(step)
            return None

    def _save(self, step: int, batches: list[Raw]) -> None:
        # Cloned: of one sample inputs may share memory, which the format refuses.
        given = {f"{m}/{name}": tensor for m, raw in enumerate(batches) for name, tensor in raw.items()}
        tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in given.items()}
        lies = {name: (*tensor.stride(), offset_of(tensor)) for name, tensor in given.items()}
        told = {name: dumps(own) for name, own in lies.items() if own != (*tensors[name].stride(), 0)}
        try:
            data = safetensors.torch.save(tensors, told)
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
