"""Which samples a step sees, and how each is read.

The idea: both are pure functions. Which samples: of (seed, length, batch size, step). What `data[i]` draws from Python's,
numpy's and torch's generators: of (seed, step, index). So any step can be had again at any time, by the owner after a restart
and by a plain loop that checks it:

    indices = draw(job.seed, len(job.data), job.batch_size, step)
    samples = read(job.data, indices, job.seed, step)

What makes a batch of samples (`Job.collate`) draws by (seed, step, place of its first sample in the step).
"""

from __future__ import annotations

import copy
import functools
import hashlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from meshcee.errors import NotNowError, UsageError
from meshcee.files.layout import copied
from meshcee.user_code import calling

__all__ = [
    "GENERATORS",
    "KERNELS",
    "NO_STEP",
    "Same",
    "collated",
    "draw",
    "drawn",
    "generators_put_back",
    "read",
    "seed_generators",
]

NO_STEP = -1  # of reads that belong to no step of training: evaluation, and looks at what samples are like

# Whoever seeds this process's generators, or draws from them, holds this meanwhile: the owner's samples are read beside the
# stages that this process computes.
GENERATORS = threading.RLock()


LONGEST_CALL_S = 600.0  # that an export waits for a device


class _Kernels:
    """Which kernels torch takes in this process: torch.export changes that for all threads, and others round otherwise.

    So no device of this process computes meanwhile.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._computing, self._exporting = set[int](), 0  # the first by thread

    @contextmanager
    def used(self) -> Iterator[None]:
        """A device computes. Who waits for `GENERATORS` in there has `paused`: an export may hold them."""
        within = threading.get_ident() in self._computing
        if not within:
            self._begin()
        try:
            yield
        finally:
            if not within:
                self._end()

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._end()
        try:
            yield
        finally:
            self._begin()

    @contextmanager
    def changed(self) -> Iterator[None]:
        """An export, once no device computes; one that would begin waits. NotNowError where that lasts too long."""
        with self._changed:
            self._exporting += 1
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: not self._computing, LONGEST_CALL_S):
                    raise NotNowError(
                        f"a device of this process has computed for {LONGEST_CALL_S:.0f} s without an end, and a capture beside it "
                        "would change its kernels: capture in another process, or once it is done"
                    )
            yield
        finally:
            with self._changed:
                self._exporting -= 1
                self._changed.notify_all()

    def _begin(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._exporting)
            self._computing.add(threading.get_ident())

    def _end(self) -> None:
        self.let_go(threading.get_ident())

    def let_go(self, thread: int) -> None:
        """What this thread still computes counts no more."""
        with self._changed:
            self._computing.discard(thread)
            self._changed.notify_all()


KERNELS = _Kernels()


def drawn() -> tuple[Any, ...]:
    """What is another one once the process's generators have drawn."""
    numpy = np.random.get_state(legacy=False)
    numbers = [np.asarray(held).tobytes() for held in numpy["state"].values()]
    return random.getstate(), numbers, numpy["has_gauss"], torch.default_generator.get_state().numpy().tobytes()


class Same:
    """Equal to itself alone, whatever the user's object says of equality: a key of what was made of it."""

    def __init__(self, it: Any) -> None:
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.it is other.it

    def __hash__(self) -> int:
        return id(self.it)


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, length: int, data_epoch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + data_epoch) % (1 << 63))
    order = torch.randperm(length, generator=generator)
    return order.to(torch.int32) if length < 1 << 31 else order


def draw(seed: int, length: int, batch_size: int, step: int) -> list[int]:
    """Indices of the step's samples: a new permutation each data epoch, the incomplete last batch dropped."""
    per_epoch = length // batch_size
    data_epoch, position = divmod(step, per_epoch)
    order = _permutation(seed, length, data_epoch)
    drawn: list[int] = order[position * batch_size : (position + 1) * batch_size].tolist()
    return drawn


def read(data: Any, indices: Iterable[int], seed: int, step: int = NO_STEP, *, name: str = "data") -> list[Any]:
    """`data[i]` for each index, with `random`, `numpy.random` and torch's CPU generator seeded by (seed, step, i).

    The caller's own generators are afterwards as they were. Without a step the samples are those of evaluations. It costs
    some 10 microseconds a sample and 0.3 milliseconds a call. What a read raises is a UsageError with `name`, index and step.
    """
    found: list[Any] = []
    i = -1

    def asked() -> str:
        return f"{name}[{i}]" + (f" of step {step + 1}" if step != NO_STEP else "")

    with generators_put_back(), calling(asked):
        for i in indices:
            seed_generators(seed, step, i)
            found.append(data[i])
    return found


def collated(
    collate: Callable[[list[Any]], Any], samples: Sequence[Any], seed: int, step: int, first: int, *, name: str = "data"
) -> Any:
    """What the user's `collate` makes of a micro-batch; `first` is the place of its first sample in the step, or evaluation.

    It is given copies, which it may change: a sample may be kept, and be in a batch again.
    """

    def asked() -> str:
        when = "" if step == NO_STEP else f" of step {step + 1}"
        return f"Job.collate of samples {first + 1} to {first + len(samples)}{when} of {name}"

    with generators_put_back(), calling(asked):
        seed_generators(seed, step, first, "batch")
        found = collate([_copy_of(sample, {}) for sample in samples])
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise UsageError(f"{asked()} returned a {type(found).__name__}; it must return a pair (x, y)")
    return found


_NEVER_CHANGED = {str, bytes, int, float, bool, type(None)}


def _copy_of(value: Any, known: dict[int, Any]) -> Any:
    """Through plain trees: deepcopy would copy what a whole tensor lies in, of which a sample is a view. `known`: by id."""
    if type(value) in _NEVER_CHANGED:
        return value
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, torch.Tensor):
        found: Any = copied(value.detach()).requires_grad_(value.requires_grad)
    elif type(value) is dict:
        found = {key: _copy_of(one, known) for key, one in value.items()}
    elif type(value) in (list, tuple):
        found = type(value)([_copy_of(one, known) for one in value])
    else:
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
        for one in (*inside, *getattr(value, "__dict__", {}).values()):
            if isinstance(one, torch.Tensor):
                _copy_of(one, known)
        try:
            found = copy.deepcopy(value, known)
        except Exception:  # what cannot be known, as an open file: collate has it itself
            found = value
    known[id(value)] = found
    return found


def seed_generators(seed: int, step: int, index: int, of: str = "sample") -> None:
    """For who holds `generators_put_back`."""
    digest = hashlib.sha256(f"meshcee {of}:{seed}:{step}:{index}".encode()).digest()
    random.seed(int.from_bytes(digest[:8], "big"))
    np.random.seed(int.from_bytes(digest[8:12], "big"))
    # Not torch.manual_seed, which visits every backend: that takes ten times as long as all of this.
    torch.default_generator.manual_seed(int.from_bytes(digest[16:24], "big") >> 1)


@contextmanager
def generators_put_back() -> Iterator[None]:
    """Holds `GENERATORS`; afterwards the process's generators are as they were."""
    with GENERATORS:
        states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.default_generator.set_state(states[2])
