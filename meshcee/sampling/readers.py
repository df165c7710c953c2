"""Samples that other processes read ahead of the step that needs them: `Job(workers=N)`.

The idea: torch's DataLoader has the processes and their queues. A sample is what (seed, step, index) says, whoever reads it, so no
number depends on how many processes there are, or on when they read. They start by spawn and not by fork, as this process has
threads; so the data travels once to each of them, and its classes must be found by name.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from meshcee.errors import MeshceeError, UsageError
from meshcee.job import Job
from meshcee.sampling.again import alike
from meshcee.sampling.data import batch_of, inputs_of
from meshcee.sampling.source import indices_of, source_of
from meshcee.user_code import GUARD, JOB_FILE, import_job_file

__all__ = ["Readers"]

LAST = -100  # behind what multiprocessing itself does at the end, of which a queue's last words (-5) are the latest
MOST_OF_A_CORE = 8  # processes
AHEAD = 2  # micro-batches that each process has read before they are asked for, at most


class Readers:
    """Of one run. The processes start with the first `take`, and end with `close` or with this process."""

    def __init__(self, job: Job) -> None:
        _refuse_what_was_typed_in(job)
        self._job = job
        self._lock = threading.Lock()  # an epoch that has ended may still be reading beside the next one
        self._order = _Order(job)
        self._loader: DataLoader[Any] | None = None
        self._batches: Iterator[Any] = iter(())
        self._next = 0  # the step whose micro-batches come next
        if job.workers > MOST_OF_A_CORE * (count := os.cpu_count() or 1):
            raise UsageError(
                f"workers={job.workers} are more than {MOST_OF_A_CORE} for each of {count} cores: try workers={count}"
            )
        self._untried = job.workers  # processes of which no micro-batch was held against this one's

    def take(self, step: int, micro_batch: int) -> list[tuple[Any, Any]] | None:
        """The stacked micro-batches of a step; None for one that is over, which the caller reads by itself.

        One thread at a time takes; who asks for the same step meanwhile gets None. UsageError: what a read has raised, data that
        cannot travel, or samples that this process reads otherwise.
        """
        with self._lock:
            return self._take(step, micro_batch)

    def _take(self, step: int, micro_batch: int) -> list[tuple[Any, Any]] | None:
        if self._loader is not None and step < self._next:
            return None
        if self._loader is None or step > self._next:
            self._order.begin, self._order.micro_batch = step, micro_batch
            self._start()
        try:
            found = [next(self._batches) for _ in range(self._job.batch_size // micro_batch)]
        except RuntimeError as error:
            mend = GUARD if self._untried == self._job.workers and JOB_FILE not in sys.modules else "try workers=0"
            raise UsageError(
                f"a process that reads data has ended ({error}); what it said stands above: {mend}, or try workers=0, which reads "
                "in this one"
            ) from error
        self._next = step + 1
        for one in found:
            if isinstance(one, _Failed):
                raise UsageError(one.text)
        for k, one in enumerate(found[: self._untried]):  # the processes take turns, so each is among the first
            self._compare(step, k * micro_batch, micro_batch, one)
            self._untried -= 1
        return found

    def _compare(self, step: int, first: int, size: int, found: tuple[Any, Any]) -> None:
        """UsageError where this process reads these samples otherwise, and the same twice: else again.py has told of them."""

        def here() -> dict[str, torch.Tensor]:
            return inputs_of(source_of(self._job).batch(step, first, first + size))

        if not alike(inputs_of(found), own := here()) and alike(own, here()):
            raise UsageError(
                f"workers={self._job.workers}: a process that reads gives another data[i] than this one: make what it reads in "
                "the data's `__init__`, or seed it"
            )

    def _start(self) -> None:
        if self._loader is None:
            self._loader = DataLoader(
                _Reads(self._job.data, self._job.seed, self._job.collate),
                batch_size=None,  # what is asked for is a micro-batch already
                sampler=self._order,
                collate_fn=_as_it_is,
                num_workers=self._job.workers,
                prefetch_factor=AHEAD,
                persistent_workers=True,
                multiprocessing_context="spawn",
                worker_init_fn=_Begin(),
                generator=torch.Generator(),  # or the process's own would be drawn from
            )
        try:
            self._batches = iter(self._loader)
        except Exception as error:  # whatever pickle raises
            raise UsageError(
                f"workers={self._job.workers}: the data cannot be given to another process ({type(error).__name__}: {error}): "
                "define its class at the top of the file, and collate too, open files in it when they are first read, or leave "
                "workers out"
            ) from error

    def close(self) -> None:
        """Takes up to some seconds, until each process has ended."""
        self._loader, self._batches = None, iter(())


def _refuse_what_was_typed_in(job: Job) -> None:
    """UsageError for code of a notebook, or of standard input: no other process can import it."""
    for what, it in (("data", job.data), ("collate", job.collate)):
        made = it if isinstance(it, types.FunctionType) else type(it)
        if made.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
            raise UsageError(
                f"workers={job.workers} reads in other processes, which import {made.__name__} of {what} from its file, and what "
                "was typed in has none: write it into a file and import it from there, or leave workers out"
            )


class _Order(torch.utils.data.Sampler[Any]):
    """(step, first, indices) of each micro-batch, from step `begin` to the end of the job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.begin, self.micro_batch = 0, job.batch_size

    def __iter__(self) -> Iterator[tuple[int, int, list[int]]]:
        for step in range(self.begin, self._job.steps):
            drawn = indices_of(self._job, step)
            for first in range(0, len(drawn), self.micro_batch):
                yield step, first, drawn[first : first + self.micro_batch]


class _Reads(Dataset[Any]):
    """The job's data, to be asked for micro-batches."""

    def __init__(self, data: Any, seed: int, collate: Callable[[list[Any]], Any] | None) -> None:
        self._file = _File()  # first: it is there before the classes of what follows are looked for
        self._data, self._seed, self._collate = data, seed, collate

    def __getitem__(self, asked: Any) -> Any:
        step, first, indices = asked
        try:
            return batch_of(self._data, indices, self._seed, step, first, collate=self._collate)
        except MeshceeError as error:
            return _Failed(str(error))


class _File:
    """The job's file, which the command line has imported; another process imports it when it meets this."""

    def __reduce__(self) -> tuple[Any, ...]:
        module = sys.modules.get(JOB_FILE)
        return (_imported, (str(module.__file__),)) if module is not None else (_File, ())


def _imported(path: str) -> _File:
    if JOB_FILE not in sys.modules:
        import_job_file(path)
    return _File()


class _Failed:
    def __init__(self, text: str) -> None:
        self.text = text


class _Begin:
    """What a process does first: as many threads as here, so that a sample has the same bits; Ctrl-C is for the owner.

    It ends without Python's own shutdown, in which torch's threads abort a process now and then (seen with 2.13).
    """

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()

    def __call__(self, number: int) -> None:
        from meshcee.files.steady import steady_output

        steady_output()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        torch.set_num_threads(self._threads)
        Finalize(None, _end, exitpriority=LAST)


def _end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _as_it_is(batch: Any) -> Any:
    return batch
