"""Samples of an iterable set: a torch IterableDataset, a stream of `datasets`, torchdata's StatefulDataLoader, any iterable.

The idea: a step has the next `batch_size` samples, and the set's end begins the next data epoch (an incomplete batch is dropped).
Sample k of data epoch e is read under generators seeded by (seed, e, k). Where each step began is marked: by the set's own state if
it has one that is plain data and brings it back, else by a count. So a step that is over can be read again, here or by
another process that a checkpoint gave its mark. A mark also knows the step's samples by a hash: where a state brings back
others, as that of a shuffle buffer does, the set is read from its beginning.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import structlog
import torch
import xxhash

from meshcee.errors import UsageError
from meshcee.fields import Count, ShortText, read
from meshcee.files import dumps, loads
from meshcee.files.tensor_files import byte_view
from meshcee.job import Job
from meshcee.sampling.data import batched
from meshcee.sampling.order import Same, generators_put_back, seed_generators
from meshcee.sampling.threads import watched
from meshcee.sampling.traces import Traces
from meshcee.user_code import calling

__all__ = ["OTHERS", "READ_AGAIN", "UNUSED", "Stream", "check_begins_anew", "first_of", "forget_first", "read_first"]

log = structlog.get_logger()

LOOKED_AT = 16  # samples, before the start
MOST_BEFORE, MOST_BEFORE_S = 1000, 0.5  # samples that are read before a second data epoch is looked at
RECENT = 3  # steps whose samples are in memory: the one that is read, and two that are under way before it
MOST_MARKS = 1024
MOST_STATES = 64  # of these marks that hold a state
MOST_SETS = 8  # that this process remembers
MOST_STATE_CHARACTERS = 1 << 18
CLOSE_S = 2.0
READ_AGAIN = (
    "samples of data were read again, from its beginning; state_dict() and load_state_dict() of a set save this"
)
OTHERS = "the state of data brings back other samples than before: it is read from its beginning"
UNUSED = "the state of data is not used: a run that goes on reads it again from its beginning"
_END = object()


@dataclass(frozen=True)
class Mark:
    """Where a step begins: after `position` samples of a data epoch. `check` is the hash of its samples, once they are read."""

    data_epoch: Count
    position: Count
    state: str = ""  # of the set there, as JSON; "" where samples are counted from its beginning
    check: ShortText = ""


class Stream:
    """Of one run. One thread at a time reads; whoever comes meanwhile waits, and finds what was read."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._marks: dict[int, Mark] = {0: Mark(0, 0)}  # by step, in order
        self._recent: dict[int, list[Any]] = {}
        self._restores: bool | None = None  # whether the set's own state brings it back; not known before it is tried
        self._data: Any = None  # a copy of the set, being read
        self._samples: Iterator[Any] | None = None
        self._next = self._data_epoch = self._position = 0  # the step whose samples come next, and where they are
        self._opened = Mark(0, 0)  # where this reading of the set began
        self._began: object = None  # as `_Known.began`, when this reading began

    def samples(self, step: int, first: int, end: int) -> list[Any]:
        with self._lock:
            if step not in self._recent:
                with generators_put_back():
                    self._go_to(step)
                    self._recent[step] = self._read_step(needed=True)
                for old in list(self._recent)[:-RECENT]:
                    del self._recent[old]
            return self._recent[step][first:end]

    def batch(self, step: int, first: int, end: int) -> tuple[Any, Any]:
        found, job = self.samples(step, first, end), self._job
        try:
            return batched(found, job.seed, step, first, collate=job.collate)
        except UsageError as error:
            raise UsageError(f"data, samples {first + 1} to {end} of step {step + 1}: {error}") from error

    def state(self, step: int) -> dict[str, Any]:
        if step not in self._marks:
            return {}
        if self._marks[step].state and not self._marks[step].check:
            # A run that was stopped, or is over and may get more steps: what it would have read next tells whether the state is
            # right. Of a set without a state nothing is read, as its next samples may be others when it goes on.
            with contextlib.suppress(UsageError):
                self.samples(step, 0, 1)
        mark = self._marks[step]
        return asdict(mark if mark.check else replace(mark, state=""))

    def go_on(self, step: int, state: Mapping[str, Any]) -> None:
        if state:
            self._marks[step] = read(dict(state), Mark, "the place in the data", defaults=True)

    def close(self) -> None:
        """Lets go of the set, unless a read of it does not return."""
        if self._lock.acquire(timeout=CLOSE_S):
            self._samples = self._data = None
            self._lock.release()

    # -- reading -------------------------------------------------------------------------------------------------------

    def _go_to(self, step: int) -> None:
        """To where this step begins, from the nearest mark before it."""
        if self._restores is None:
            self._restores = _restores(Same(self._job.data), self._job.seed)
        known = max(at for at in self._marks if at <= step)
        ahead = known > self._next and self._marks[known].state  # there at once; else as near from here
        if self._samples is None or step < self._next or ahead or self._is_moved():
            self._next = known
            self._open(self._marks[known])
        while self._next < step:
            self._read_step(needed=False)

    def _is_moved(self) -> bool:
        """Whether somebody else began to read the set since, which puts the parts that its copies share somewhere else."""
        data = self._job.data
        return hasattr(data, "load_state_dict") and _known(Same(data)).began is not self._began

    def _open(self, mark: Mark) -> None:
        state = mark.state if self._restores else ""
        self._data, self._samples = _begin(self._job.data, self._job.seed, mark.data_epoch, state)
        self._began = _known(Same(self._job.data)).began
        self._opened = mark if state else Mark(mark.data_epoch, 0)
        self._data_epoch, self._position = mark.data_epoch, self._opened.position
        if self._position < mark.position:
            began_s = time.monotonic()
            for _ in range(self._position, mark.position):
                if self._sample() is _END:
                    raise UsageError(
                        f"data has ended after {self._position} samples, and {mark.position} of them were read before: give the "
                        "set that the run was started with"
                    )
            log.warning(READ_AGAIN, samples=mark.position, seconds=round(time.monotonic() - began_s, 1))

    def _sample(self) -> Any:
        seed_generators(self._job.seed, self._data_epoch, self._position)
        assert self._samples is not None
        with calling(lambda: f"data, sample {self._position + 1} of data epoch {self._data_epoch + 1},"):
            found = next(self._samples, _END)
        self._position += found is not _END
        return found

    def _read_step(self, *, needed: bool) -> list[Any]:
        """The samples of the next step. Those that were others before are an error where they are needed."""
        step, before = self._next, self._marks.get(self._next)
        mark = before or Mark(self._data_epoch, self._position, self._state())
        found = self._batch()
        check = _fingerprint(found)
        if mark.check and mark.check != check:
            if self._opened.state:
                self._restores = False
                log.warning(OTHERS, step=step)
                self._open(mark)
                return self._read_step(needed=needed)
            if needed:
                raise UsageError(
                    f"data does not give the samples of step {step + 1} again: give the set that the run was started with, in an "
                    "order that repeats"
                )
        self._marks[step] = replace(mark, check=mark.check or check)
        for old in list(itertools.islice(self._marks, 1, max(1, len(self._marks) - MOST_MARKS))):
            del self._marks[old]
        states = [at for at, one in self._marks.items() if one.state]
        if len(states) > MOST_STATES:  # of the older half the one whose neighbours are nearest: far back some are left
            least = min(range(1, MOST_STATES // 2), key=lambda i: states[i + 1] - states[i - 1])
            del self._marks[states[least]]
        self._next += 1
        self._marks.setdefault(self._next, Mark(self._data_epoch, self._position, self._state()))
        return found

    def _batch(self) -> list[Any]:
        found: list[Any] = []
        while len(found) < self._job.batch_size:
            if (sample := self._sample()) is not _END:
                found.append(sample)
                continue
            if self._position < self._job.batch_size:
                raise UsageError(
                    f"data has ended after {self._position} samples in data epoch {self._data_epoch + 1}, fewer than "
                    f"batch_size={self._job.batch_size}: make iter(data) begin anew each time, or take a smaller batch"
                )
            found.clear()  # the last batch is incomplete
            self._open(Mark(self._data_epoch + 1, 0))
        return found

    def _state(self) -> str:
        """Of the set, where it is now; "" where it has none that can be kept."""
        if not self._restores or not self._position:
            return ""
        if self._position == self._opened.position:
            return self._opened.state
        return _state_of(self._data)


def _begin(data: Any, seed: int, data_epoch: int, state: str = "") -> tuple[Any, Iterator[Any]]:
    """A copy of the set that is read from the beginning of a data epoch, or from this state of its own; and its samples.

    The copy shares its parts with others, which may have been put somewhere else. So it is put to the beginning too.
    For who holds the generators: what iter() itself draws follows from (seed, data epoch).
    """
    found = _copied(data)
    with calling(f"data, in data epoch {data_epoch + 1},"):
        _known(Same(data)).began = object()
        if not state and (initial := _initial(Same(data), seed)):
            found.load_state_dict(loads(initial))
        return found, _iterated(found, seed, data_epoch, state)


def _iterated(found: Any, seed: int, data_epoch: int, state: str = "") -> Iterator[Any]:
    if hasattr(found, "set_epoch"):
        found.set_epoch(data_epoch)
    if state:
        found.load_state_dict(loads(state))
    seed_generators(seed, data_epoch, 0, "set")
    return iter(found)


def _copied(data: Any) -> Any:
    """So that the user's object stays where it was."""
    try:
        found = object.__new__(type(data))  # not copy.copy, by which streams of `datasets` share all that they have
        vars(found).update(vars(data))
    except TypeError:
        return data
    return found


class _Known:
    """What this process remembers of a set."""

    def __init__(self) -> None:
        self.initial: dict[int, str] = {}  # its state before anybody has read, by the seed
        self.began: object = None  # of who began to read it last


@functools.lru_cache(maxsize=MOST_SETS)
def _known(data: Same) -> _Known:
    return _Known()


def _initial(data: Same, seed: int) -> str:
    """Its state before anybody has read, as JSON; "" where it has none, or none that can be kept."""
    if not hasattr(data.it, "state_dict") or not hasattr(data.it, "load_state_dict"):
        return ""
    known = _known(data).initial
    if seed not in known:
        if before := next(iter(known.values()), ""):  # it was read with another seed: its parts are put back
            _copied(data.it).load_state_dict(loads(before))
        seed_generators(seed, 0, 0, "set")
        known[seed] = _state_of(_copied(data.it))
    return known[seed]


def _state_of(data: Any) -> str:
    """As JSON, if that gives it back as it is."""
    with calling("data.state_dict()"):
        state = data.state_dict()
    try:
        text = dumps(state)
        same = len(text) <= MOST_STATE_CHARACTERS and loads(text) == state
    except (TypeError, ValueError, RecursionError):
        return ""
    return text if same and state is not None else ""


@functools.lru_cache(maxsize=MOST_SETS)
def _restores(same: Same, seed: int) -> bool:
    """Whether a set that was put back to its own state goes on as it did; tried on its first samples."""
    if not hasattr(same.it, "load_state_dict"):
        return False
    looked_at = _first_of(same, seed)
    if looked_at.in_threads:
        return False  # what was fed is kept
    first = [_fingerprint(sample) for sample, _ in looked_at.samples]
    half, why = len(first) // 2, "state_dict() is no plain data of JSON"
    data, samples = _begin(same.it, seed, 0)
    _marked(samples, seed, 0, half)
    if _initial(same, seed) and (text := _state_of(data)):
        there = _marked(_begin(same.it, seed, 0, text)[1], seed, half, len(first))
        if _marked(_begin(same.it, seed, 0)[1], seed, 0, half) != first[:half]:
            raise UsageError(
                "data does not begin anew once load_state_dict() was called: let state_dict() say, before the first sample, how to "
                "get there, or leave the two out"
            )
        lost = "it does not bring back the next samples, as of a set that shuffles in a buffer"
        why = "" if there == first[half:] else lost
    if why:
        log.warning(UNUSED, why=why)
    return not why


def _marked(samples: Iterator[Any], seed: int, begin: int, end: int) -> list[str]:
    """The hashes of samples of the first data epoch. For who holds the generators."""
    return [_fingerprint(sample) for sample, _ in itertools.islice(_read(samples, seed, begin), end - begin)]


class First(NamedTuple):
    """The first samples of a stream as training reads them, each with the seconds that it took."""

    samples: list[tuple[Any, float]]
    in_threads: bool  # whether a thread that the set has begun drew from the generators


def read_first(data: Any, seed: int) -> First:
    with generators_put_back(), watched() as drawers:
        found = list(itertools.islice(_read(_begin(data, seed, 0)[1], seed), LOOKED_AT))
    if not found:
        raise UsageError("data gives no samples: make iter(data) begin anew each time")
    return First(found, drawers.found)


def check_begins_anew(job: Job) -> None:
    """UsageError where a set that has been read gives other samples than a fresh copy of it: a run reads copies, a plain loop the
    set itself. A short set is read to its end first.
    """
    data, seed = job.data, job.seed
    with generators_put_back():
        read_before, samples = _begin(data, seed, 0)
        began_s = time.monotonic()
        for count, _ in enumerate(_read(samples, seed)):
            if count >= MOST_BEFORE or time.monotonic() - began_s > MOST_BEFORE_S:
                if hasattr(data, "load_state_dict"):  # it may go on from there, and begin anew after its end alone
                    return
                break
        shared = Traces(job)
        goes_on = _marked(_iterated(read_before, seed, 1), seed, 0, LOOKED_AT)
        shared.put_back()
        anew = _marked(_begin(data, seed, 1)[1], seed, 0, LOOKED_AT)
    if goes_on != anew:
        raise UsageError(
            "data gives other samples when iter(data) is called once more, as where it counts its data epochs, and a run could not "
            "go on where it stopped: let set_epoch(epoch) say which data epoch it is, and let iter(data) begin anew each time"
        )


def _read(samples: Iterator[Any], seed: int, begin: int = 0) -> Iterator[tuple[Any, float]]:
    """For who holds the generators."""
    for position in itertools.count(begin):
        began_s = time.perf_counter()
        seed_generators(seed, 0, position)
        with calling(f"data, sample {position + 1} of data epoch 1,"):
            sample = next(samples, _END)
        if sample is _END:
            return
        yield sample, time.perf_counter() - began_s


def first_of(job: Job) -> First:
    """The same, read once a job: looking at samples must not disturb who reads them."""
    return _first_of(Same(job.data), job.seed)


def forget_first() -> None:
    """A stream is looked at again: it may have changed since an earlier job had it."""
    _first_of.cache_clear()


@functools.lru_cache(maxsize=MOST_SETS)
def _first_of(data: Same, seed: int) -> First:
    return read_first(data.it, seed)


def _fingerprint(sample: Any) -> str:
    """Of what a sample holds, as far as it is plain: tensors, arrays, texts, numbers, and what holds them."""
    digest = xxhash.xxh3_128()
    _feed(digest.update, sample)
    return digest.hexdigest()


def _feed(update: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, tuple | list):
        update(f"[{len(value)}".encode())
        for one in value:
            _feed(update, one)
    elif isinstance(value, torch.Tensor):
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        update(byte_view(value.cpu()))
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        _feed(update, value.tolist())
    elif isinstance(value, str | bytes | int | float | None):
        update(repr(value).encode())
    else:
        update(type(value).__name__.encode())
        update(value.tobytes() if hasattr(value, "tobytes") else b"")  # an array, an image
