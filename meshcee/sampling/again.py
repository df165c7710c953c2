"""Whether data is the same when it is read again: looked at before the start, on a few samples.

The idea: most data can be read again, as its generators are seeded (order.py), and nothing is kept. What reads a clock, the network
or a generator of its own is found out here, and what a run feeds of it is kept (fed.py).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import structlog
import torch

from meshcee.errors import MeshceeError, UsageError
from meshcee.events import Event
from meshcee.files.tensor_files import byte_view, flat_bytes
from meshcee.job import At, Job
from meshcee.reach import Reached
from meshcee.sampling.data import batched, inputs_of
from meshcee.sampling.order import NO_STEP, drawn, read
from meshcee.sampling.source import few_of, inputs_of_one, probes
from meshcee.sampling.traces import Traces, leaving_nothing
from meshcee.user_code import as_number, calling

__all__ = ["FED", "MOST_BYTES", "Reading", "alike", "check_samples", "repeats", "sample_digests", "unrepeatable"]

log = structlog.get_logger()

FED = "fed"  # the folder, in a run's
MOST_BYTES = 4 << 30
LOOKED_AT = 16  # samples that are read twice
AT_LEAST = 4  # of them, when they take longer than
LOOK_S = 1.0
ALONE_S = 0.02
COLLATE, WEIGHT = "Job.collate", "Job.weight"

Raw = Mapping[str, torch.Tensor]  # inputs of one micro-batch by name


def repeats(job: Job, *, keeps: bool, begins: int = 0) -> bool:
    """Whether a few samples are what they were when they are read again. If not, a warning says what it costs; `keeps`: the run
    has a folder. UsageError for an audit, which reads them again. Data that waits to be told its epoch is warned of too.

    begins  steps that an earlier process has done: data that keeps something from read to read begins that anew, with a warning
    """
    if hasattr(job.data, "set_epoch") and not job.streams:
        log.warning(
            "data.set_epoch is never called, as data[i] is read ahead and in any order: let Job(sampler=FUNCTION) give other "
            "indices in each data epoch and data[i] take its epoch from i, or give an IterableDataset, which is told its epoch"
        )
    why = unrepeatable(job)
    if begins and (why is not None or _keeps_state(job)):
        log.warning(
            "data keeps something from one read to the next, as a generator of its own or a count, and begins that anew: from step "
            f"{begins + 1} on its samples may be others than those of a run that did not stop"
        )
    if why is None:
        return True
    if job.audit:
        raise UsageError(
            "an audit reads samples of steps again, and this data gives other ones then: let data[i] depend "
            "on i and torch's generators alone, or leave audit out"
        )
    with leaving_nothing(job):
        step_bytes = job.batch_size * sum(tensor.nbytes for tensor in _sample(job, 0).values())
    cost = f"all that is fed is kept on the disk, {step_bytes:,} bytes a step and at most {MOST_BYTES:,}"
    log.warning(f"{why}; {cost if keeps else 'this run has no folder to keep it, so a lost peer ends the run'}")
    return False


def unrepeatable(job: Job) -> str | None:
    """Why data is another one when it is read again, and what to write: a few samples are, in another order. None if it is not.

    UsageError for a sampler whose order does not repeat, and for a set that keeps what it has drawn or what follows from the order
    of its reads. Such a sample is what the first read of all has made of it, and that may be no read of a step.
    """
    with leaving_nothing(job) as traces:
        found = _unrepeatable(job, traces)
        traces.refuse_moved()
        if job.weight:
            _check_weight(job)
        return found


def _keeps_state(job: Job) -> bool:
    """Whether each read changes what the data or its functions keep, as a generator of their own or a count.

    A process that goes on with a run begins that anew. What is kept of a first read alone, as in a cache, does not count.
    """
    if job.streams:  # hashes in the checkpoint tell whether one goes on as it did
        return False
    indices = [k * len(job.data) // AT_LEAST for k in range(AT_LEAST)]
    with leaving_nothing(job):
        for i in indices:
            _sample(job, i)
        traces = Traces(job)
        for i in indices:
            _sample(job, i)
        return traces.has_changed


def _check_weight(job: Job) -> None:
    """UsageError for a weight that is another one when it is asked again: nobody knows how often it is asked."""
    assert job.weight is not None
    targets = [few_of(job, sample, 1)[1] for sample, _ in probes(job, AT_LEAST)]
    with calling("Job.weight"):
        once = [as_number("Job.weight", job.weight(y)) for y in targets]
        traces = Traces(job)
        again = [as_number("Job.weight", job.weight(y)) for y in targets]
    if once != again or traces.has_changed:
        raise UsageError(
            "Job.weight keeps something from one call to the next, or draws, and it is called in any order and more than once: let "
            "it follow from y alone"
        )


def _unrepeatable(job: Job, traces: Traces) -> str | None:
    if job.sampler is not None:
        from meshcee.sampling.sampler import check_repeats

        check_repeats(job)
    if job.streams:
        from meshcee.sampling.stream import check_begins_anew, first_of, read_first

        looks = [first_of(job), read_first(job.data, job.seed)]
        if traces.has_changed:  # the first of these was read before what it left was put back
            looks.append(read_first(job.data, job.seed))
        if any(look.in_threads for look in looks):
            return _IN_THREADS
        for i, samples in enumerate(zip(*(look.samples for look in looks))):
            once, *others = [inputs_of_one(job, sample) for sample, _ in samples]
            if not all(alike(once, other) for other in others):
                return _ANOTHER.format(i)
        check_begins_anew(job)
        return None
    indices = sorted({k * len(job.data) // LOOKED_AT for k in range(LOOKED_AT)})
    first: dict[int, Raw] = {}
    began_s = time.monotonic()
    drawing = set()
    for i in indices:
        looked = _Drawing(job.data)
        first[i] = _sample(job, i, looked)
        drawing |= {i} if looked.has_drawn else set()
        if len(first) >= AT_LEAST and time.monotonic() - began_s > LOOK_S:
            break
    for i in reversed(first):
        looked = _Drawing(job.data)
        if not alike(first[i], _sample(job, i, looked)):
            return _ANOTHER.format(i)
        if i in drawing and not looked.has_drawn:
            raise UsageError(_KEPT.format(i))
    if traces.has_changed:
        later = {i: _sample(job, i, step=0) for i in first}
        traces.put_back(all_of_it=True)
        for i in reversed(first):
            if not alike(later[i], _sample(job, i, step=0)):
                raise UsageError(_BY_ORDER.format(i))
    return None


class _Drawing:
    """Data that tells whether its last read has drawn random numbers."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.has_drawn = False

    def __getitem__(self, index: int) -> Any:
        before = drawn()
        found = self._data[index]
        self.has_drawn = drawn() != before
        return found


def sample_digests(job: Job) -> dict[str, str]:
    """Of a few of these samples by index, and of a micro-batch of them (COLLATE) with its weight (WEIGHT), to compare two runs by.
    None of a stream, or of data elsewhere.
    """
    if job.streams or isinstance(job.data, At):
        return {}
    indices = sorted({k * len(job.data) // LOOKED_AT for k in (0, LOOKED_AT // 2, LOOKED_AT - 1)})
    with leaving_nothing(job):
        found = {str(i): _digest(_sample(job, i)) for i in indices}
        if job.collate or job.weight:
            samples = read(job.data, indices[: job.batch_size], job.seed)
            try:
                batch = batched(samples, job.seed, collate=job.collate)
            except UsageError:  # no micro-batch has these side by side
                batch = few_of(job, samples[0], 1)
            found[COLLATE] = _digest(inputs_of(batch))
            if job.weight:
                with calling("Job.weight"):
                    found[WEIGHT] = repr(as_number("Job.weight", job.weight(batch[1])))
    return found


class Reading:
    """What a job's samples are read with, `more` of it by other names: who changes that while others are read ahead is refused."""

    def __init__(self, job: Job, more: Mapping[str, Any] | None = None) -> None:
        own = {"collate": job.collate, "weight": job.weight, "sampler": job.sampler, "data": job.data}
        self._job = job
        self._roots = {**(more or {}), **own, "eval_data": job.eval_data}
        self._digests: Mapping[str, str] | None = None
        self._is_told = False

    @property
    def is_elsewhere(self) -> bool:
        """In other processes, which never see a change."""
        return self._job.workers > 0

    @contextmanager
    def by(self, who: str, *, is_late: bool, why: str = "") -> Iterator[None]:
        """Around a call of the user's. `is_late`: UsageError where samples are others behind it, with what to do; a change that
        shows in none of a few samples is told of once."""
        if self._is_told or (self._digests is None and not is_late and self._job.sampler is None):
            yield
            return
        self._digests = self._digests or (sample_digests(self._job) if is_late else None)
        before = Reached(self._roots)
        yield
        after = Reached(self._roots)
        if not (places := before.changed(after)):
            return
        time.sleep(ALONE_S)
        by_itself = {*after.changed(Reached(self._roots))}  # as of a thread of the data's
        if not (places := [place for place in places if place not in by_itself]):
            return
        if not is_late and not any(place.endswith("sampler") for place in places):  # orders are drawn before
            self._digests = None
        elif is_late and sample_digests(self._job) != self._digests:
            why = _ELSEWHERE.format(self._job.workers) if self.is_elsewhere else why or _LATE
            raise UsageError(f"{who} changes {places[0]}, with which samples are read, and {why}")
        else:
            log.warning(Event.READING_CHANGED, callback=who, changed=places[0])
            self._is_told = True


def _digest(inputs: Raw) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(inputs.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(byte_view(tensor.cpu()))
    return digest.hexdigest()


def check_samples(own: Mapping[str, str], run: Mapping[str, str]) -> None:
    """UsageError where a run had other samples. It has no digests if it is older, or its data did not repeat: then it passes."""
    other = next((i for i, digest in own.items() if run.get(i, digest) != digest), None)
    if other in (COLLATE, WEIGHT):
        raise UsageError(
            f"the run was made with another {other}, which gives something else for the same samples here: resume it with the job "
            "that it was started with, or start a new run"
        )
    if other is not None:
        raise UsageError(
            f"the run was made with other samples: data[{other}] is another one here; give the same data, seeded if it is "
            "drawn, and computed by the same kind of processor and number of threads, or start a new run"
        )


_LATE = (
    'steps to come have been read by then: change it in on_step of a meshcee.Callback whose class has waits = "steps"; then it '
    "counts from the next step on"
)
_ELSEWHERE = (
    "the {} processes that read them never see it: leave workers (dataloader_num_workers) out, and change it in on_step of a "
    'meshcee.Callback whose class has waits = "steps"'
)
_ANOTHER = (
    "data[{}] is another sample when it is read again: it must draw from `random`, `numpy.random` or torch's own "
    "generator only"
)
_KEPT = (
    "data[{}] draws random numbers when it is read first, and not when it is read again: no run could go on with what it keeps; "
    "draw in every read, or draw all of it before the job is made; if another thread of yours draws meanwhile, let that one wait"
)
_BY_ORDER = (
    "data[{}] depends on the samples that were read before it, as where draws are kept or a vocabulary grows: no run could go on "
    "with the same samples; make such things before the job, and let data[i] depend on i and on what it draws alone"
)
_IN_THREADS = (
    "data draws in threads of its own, at times that no seed decides: let what draws come last, as in "
    "stream.shuffle(buffer_size=1000).map(augment)"
)


def _sample(job: Job, index: int, data: Any = None, step: int = NO_STEP) -> Raw:
    if job.streams:
        from meshcee.sampling.stream import first_of

        return inputs_of_one(job, first_of(job).samples[index][0])
    try:
        return inputs_of_one(job, read(job.data if data is None else data, [index], job.seed, step)[0])
    except MeshceeError:
        raise
    except Exception as error:
        raise UsageError(f"data[{index}] failed: {type(error).__name__}: {error}") from error


def alike(one: Raw, other: Raw) -> bool:
    """Whether two micro-batches are the same by bytes: what is not a number equals itself."""
    return one.keys() == other.keys() and all(
        a.dtype == (b := other[name]).dtype and a.shape == b.shape and torch.equal(flat_bytes(a), flat_bytes(b))
        for name, a in one.items()
    )
