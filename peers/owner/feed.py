"""What the owner feeds: the rounds of a job in order, and the raw inputs of each micro-batch.

The idea: every step can be drawn again at any time, by (seed, step) or from where a stream was marked, so nothing is kept but the
current batch. Of data that is not the same when it is read again, what was fed is (meshcee/sampling/fed.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import structlog
import torch
from torch import nn

from meshcee.callbacks import Callback, Control, Listeners
from meshcee.capture import Capture
from meshcee.capture.export import Unchanged
from meshcee.capture.unread import ReadsTold, unread
from meshcee.errors import JoinError, MeshceeError, ProtocolError, UsageError
from meshcee.events import Event
from meshcee.job import At, Job, shares_of
from meshcee.optim import HyperSchedule
from meshcee.plan import Plan, Stage
from meshcee.role import loss_shares, rows_of
from meshcee.sampling import (
    NO_STEP,
    Reading,
    batch_of,
    few_of,
    indices_of,
    inputs_of,
    leaving_nothing,
    probes,
    rebuild,
    source_of,
)
from meshcee.user_code import as_number, calling, under_way
from peers.wire import Round

if TYPE_CHECKING:
    from meshcee.sampling.fed import Fed
    from meshcee.sampling.readers import Readers
    from peers.mesh_view import MeshView
    from peers.owner.supplier import Supplier, Supply

__all__ = ["EVERY_S", "Feed", "Portion", "Stalls", "Steering"]

log = structlog.get_logger()

LOOKS_EVERY = 50  # times as long as it takes to look at what the user's code may change
WATCHED_EVERY = (
    16  # steps for one in which a mode sees whether data reads weights: operators take a little longer in it
)
MOST_FED = 2  # steps that are under way before the one that is read


class Portion(NamedTuple):
    """One pipeline's slice of a round. `shares[k][m]` weighs the loss of micro-batch m that member k of its last stage has."""

    round: Round
    shares: tuple[tuple[float, ...], ...]


class Steering:
    """Of one run, over all its epochs: what its steps are stepped with, the callbacks that may change that, who reads ahead."""

    def __init__(self, job: Job, callbacks: Sequence[Callback] = (), *, saves: bool = False) -> None:
        self.hyper = HyperSchedule(job.optimizer, job.schedule)
        metrics = ("loss", *job.metrics) if job.eval_data is not None else ()
        self.control = Control(job.name, metrics=metrics, saves=saves, evaluates=0 < job.eval_every < job.steps)
        self._has_schedule = job.schedule is not None  # which counts
        self.listeners = Listeners(callbacks, self.control)
        self._job = job
        self.source = source_of(job)
        self._unchanged: Callable[[], None] | None = None
        self._looks_at_s = 0.0
        self.readers: Readers | None = None
        self.supplier: Supplier | None = None
        if isinstance(job.data, At):
            from peers.owner.supplier import Supplier

            self.supplier = Supplier(job)
        if job.workers:
            from meshcee.sampling.readers import Readers

            self.readers = Readers(job)

    @functools.cached_property
    def structure(self) -> tuple[Any, Any]:
        """A batch: all samples have its structure. Found once in a run: later, a read of an epoch that has ended may be under way,
        and would lose what it has counted.
        """
        with leaving_nothing(self._job):
            ((sample, _),) = probes(self._job, 1)
            return few_of(self._job, sample, 1)

    def check(self) -> None:
        """Before all else: UsageError for a schedule that the job outlasts, or of callbacks that hear of nothing in this run."""
        with unread(self._job.model):
            HyperSchedule(self._job.optimizer, self._job.schedule).check(self._job.steps)
        if (call := self.listeners.event("on_begin")) is not None:
            call()
        if self._job.metrics and self._job.eval_data is None:
            log.warning(Event.NEVER_EVALUATED, metrics=sorted(self._job.metrics))

    def begin(self, captured: Capture) -> None:
        """Before the first step: what runs between steps may not change what the model and the loss compute with any more."""
        self.listeners.reading = Reading(self._job)
        self.control.terms = captured.terms
        written = {entry.name for entry in captured.train.inputs if entry.mutated}
        self._unchanged = unchanged = Unchanged(self._job, written)
        if isinstance(self._job.model, nn.Module):
            self.listeners.around = ReadsTold(self._job.model, unchanged.tell_written)

    def look(self, last: bool = False) -> None:
        """Between two steps: UsageError if the user's code, whichever it was, has changed what the model and the loss compute with.
        Takes little of the time, but looks behind the last step."""
        began_s = time.monotonic()
        if self._unchanged is not None and (last or began_s >= self._looks_at_s):
            self._unchanged()
            now_s = time.monotonic()
            self._looks_at_s = now_s + LOOKS_EVERY * (now_s - began_s)

    def step(self, report: Any) -> Callable[[], None] | None:
        """Callbacks hear of it. Behind them is a look where one step is left: what changes after the last one changes nothing."""
        call = self.listeners.step(report)
        if call is None or report.step != self._job.steps - 2:
            return call

        def heard() -> None:
            call()
            self.look(last=True)

        return heard

    async def meet(
        self, agent: MeshView, members: Collection[str], how_to_go_on: Callable[[JoinError, str], str]
    ) -> None:
        """Before an epoch of these members: find who has the data, where the owner has not."""
        if self.supplier is not None:
            await self.supplier.meet(agent, members, how_to_go_on)

    def close(self) -> None:
        """Nothing is read any more. Takes up to some seconds."""
        self.source.close()
        if self.readers is not None:
            self.readers.close()

    def options(self, step: int) -> tuple[dict[str, Any], ...]:
        """Of each parameter group. What is asked of the run from now on counts for later steps."""
        self.control.begin(step)
        if self._has_schedule and self.control.is_set(step):
            log.warning(Event.SCHEDULE_OVER, step=step + 1)
            self._has_schedule = False
        return self.control.options(step, self.hyper.at(step))


class Feed:
    """Rounds of one epoch, from step `start` on. `micro_batch` is fixed by the first plan. `fed`: where samples are that must not
    be read twice; `steering`: the run's; `in_order`: each sample is another one when it is read at another time.
    """

    def __init__(
        self,
        job: Job,
        capture: Capture,
        micro_batch: int,
        start: int = 0,
        fed: Fed | None = None,
        steering: Steering | None = None,
        in_order: bool = False,
    ) -> None:
        if job.batch_size % micro_batch:
            raise UsageError(f"batch_size={job.batch_size} must be a multiple of the micro-batch size {micro_batch}")
        if job.eval_data is not None and not len(job.eval_data):
            raise UsageError("eval_data is empty; give it samples or leave it out")
        self._job = job
        self._capture = capture
        self._micro_batch = micro_batch
        self.start = start
        self._fed = fed
        once = fed is not None or job.workers > 0 or job.streams
        self._reads_whole = once or in_order or job.collate is not None
        self._whole: dict[int, list[tuple[Any, Any]]] = {}  # micro-batches of steps that are read once: those being fed
        self._keeps_targets = bool(job.metrics) or job.weight is not None
        self._targets: dict[tuple[int, int], Any] = {}  # of evaluations that are under way, by round and micro-batch
        self.steering = steering or Steering(job)
        self.supply: Supply | None = None  # of training, where the data is elsewhere
        self._was_idle = False  # for a step whose weights are all 0
        self.weighed: dict[int, float] = {}  # of steps that are fed: what Job.weight adds up to
        self._reported = -1  # the last step that was
        self._was_reported = asyncio.Event()

    def evaluates_after(self, step: int) -> bool:
        every = self._job.eval_every
        return self._job.eval_data is not None and (
            step + 1 == self._job.steps
            or (every > 0 and (step + 1) % every == 0)
            or self.steering.control.evaluates_after(step)
        )

    def rounds(self) -> Iterator[Round]:
        """Steps, and after some of them an evaluation over the whole of `eval_data`."""
        number = 0
        for step in range(self.start, self._job.steps):
            yield Round(number, step, self._weights(step), self.steering.options(step))
            number += 1
            self.steering.look()
            if self.evaluates_after(step):
                yield self._evaluation(number, step)
                number += 1
        self.steering.look(last=True)

    def _evaluation(self, number: int, step: int) -> Round:
        samples = len(self._job.eval_data)
        count, tail = -(-samples // self._micro_batch), samples % self._micro_batch
        return Round(number, step, (1.0,) * count, forward_only=True, tail=tail or None)

    def reported(self, step: int) -> None:
        """Callbacks have heard of it, and of its evaluation."""
        self._reported = step
        self._was_reported.set()

    async def wait(self, round: Round) -> None:
        """Behind what was fed last: until callbacks have heard of it, where one wants that."""
        waits, step = self.steering.listeners.waits, round.step
        last = round.forward_only or not self.evaluates_after(step)  # one report tells of a step and its evaluation
        if last and (waits == "steps" or (waits == "evaluations" and round.forward_only)):
            while self._reported < step:
                self._was_reported.clear()
                await self._was_reported.wait()

    def size(self, round: Round, micro: int) -> int:
        """Samples in a micro-batch: the last one of an evaluation may be smaller."""
        return round.samples(micro, self._micro_batch)

    def samples(self, round: Round, micro: int, rows: tuple[int, int] | None = None) -> tuple[Any, Any]:
        """The stacked (x, y) of one micro-batch, or of some of its rows."""
        if round.forward_only:
            return self._evaluated(micro, rows)
        watched = (
            round.step % WATCHED_EVERY == WATCHED_EVERY - 1
        )  # data may read weights late, as from a second data epoch on
        with unread(self._job.model if watched else None):
            return self._training_samples(round, micro, rows)

    def _training_samples(self, round: Round, micro: int, rows: tuple[int, int] | None) -> tuple[Any, Any]:
        first, size = micro * self._micro_batch, self._micro_batch
        if not self._reads_whole:
            begin, end = rows or (0, size)
            return self.steering.source.batch(round.step, first + begin, first + end)
        if round.step not in self._whole:
            self._whole = {s: kept for s, kept in self._whole.items() if s >= round.step - MOST_FED}
            self._whole[round.step] = self._read_once(round.step)
        return _rows_of(self._whole[round.step][micro], rows)

    def _read_once(self, step: int) -> list[tuple[Any, Any]]:
        """All micro-batches of a step, by other processes or here; of samples that must not be read twice, what was fed."""
        readers, source, size = self.steering.readers, self.steering.source, self._micro_batch

        def read_now() -> list[tuple[Any, Any]]:
            found = readers.take(step, size) if readers is not None else None
            if found is None:
                found = [source.batch(step, k, k + size) for k in range(0, self._job.batch_size, size)]
            return found

        if self._fed is None:
            return read_now()
        fed = self._fed.batches(step, lambda: [inputs_of(batch) for batch in read_now()])
        x, y = self.steering.structure
        return [(rebuild(x, "x", raw), rebuild(y, "y", raw)) for raw in fed]

    def _evaluated(self, micro: int, rows: tuple[int, int] | None) -> tuple[Any, Any]:
        job, first = self._job, micro * self._micro_batch
        indices: Sequence[int] = range(first, min(first + self._micro_batch, len(job.eval_data)))
        if rows is not None and job.collate is None:
            indices, rows = indices[rows[0] : rows[1]], None
        batch = batch_of(job.eval_data, indices, job.seed, NO_STEP, first, name="eval_data", collate=job.collate)
        return _rows_of(batch, rows)

    def indices(self, round: Round, micro: int) -> list[int]:
        """Of the samples of a micro-batch of training."""
        first = micro * self._micro_batch
        return indices_of(self._job, round.step)[first : first + self._micro_batch]

    def blamed(self, raised: MeshceeError, round: Round, micro: int) -> MeshceeError:
        """What a micro-batch has raised on a member's device, with its samples, or the error of the user's own code."""
        from meshcee.equality import blamed

        batch, first = None, micro * self._micro_batch
        if self.supply is None or round.forward_only:
            with contextlib.suppress(MeshceeError):  # of data that is another when it is read again
                batch = self.samples(round, micro)
        rows = first, first + self.size(round, micro)
        return blamed(self._job, self._capture, raised, batch, round.step, rows, evaluate=round.forward_only)

    def inputs(self, round: Round, micro: int) -> Mapping[str, torch.Tensor]:
        """The raw inputs of one micro-batch by the names that the graph gives them. UsageError where the graph has other sizes."""
        batch = self.samples(round, micro)
        found = self._capture.inputs_of(batch)
        if said := self._capture.misfit(found, forward_only=round.forward_only):
            what = f"step {round.step + 1}{', evaluation' if round.forward_only else ''}, micro-batch {micro + 1}"
            raise UsageError(f"{what}: {said}")
        if round.forward_only and self._keeps_targets:
            # Cloned: a loss may write there.
            own = {name: tensor.clone() for name, tensor in inputs_of((None, batch[1])).items()}
            self._targets[round.number, micro] = rebuild(batch[1], "y", own)
        return found

    def target(self, round: Round, micro: int) -> Any:
        """The y of a micro-batch of an evaluation as `inputs` has read it, once; None where neither metrics nor weights need it.

        ProtocolError where it was not read: then nobody can have computed with it.
        """
        if not self._keeps_targets:
            return None
        if (round.number, micro) not in self._targets:
            raise ProtocolError(f"it answered for micro-batch {micro} of round {round.number}, which was not fed yet")
        return self._targets.pop((round.number, micro))

    def portions(self, round: Round, plan: Plan, counts: Sequence[int] = ()) -> tuple[Portion, ...]:
        """For each pipeline its part of the round: of a step so many micro-batches, if they are not to be the plan's."""
        found = []
        shares = plan.shares_of(round.num_micro)
        if counts and not round.forward_only:
            shares = tuple(pairwise(accumulate(counts, initial=0)))
        for pipeline, (first, end) in zip(plan.pipelines, shares):
            found.append(Portion(round.slice(first, end), self._shares(round, pipeline.stages[-1], first, end)))
        return tuple(found)

    def _shares(self, round: Round, stage: Stage, first: int, end: int) -> tuple[tuple[float, ...], ...]:
        """For each member of a last stage, what the loss of its rows of each of these micro-batches counts for."""
        if len(stage.members) == 1:
            return (round.weights[first:end],)
        columns = []
        for micro in range(first, end):
            rows = rows_of(stage, self.size(round, micro))
            columns.append([round.weights[micro] * share for share in self.row_shares(round, micro, rows)])
        return tuple(zip(*columns, strict=True))

    def row_shares(self, round: Round, micro: int, rows: Sequence[tuple[int, int]]) -> list[float]:
        """What the loss of each of these parts of a micro-batch counts for in the loss of the whole."""
        return loss_shares(self._job, rows, lambda *part: self.samples(round, micro, part)[1])

    def target_shares(self, target: Any, rows: Sequence[tuple[int, int]]) -> list[float]:
        """The same of a target that is here."""
        return loss_shares(self._job, rows, lambda *part: _rows_of((None, target), part)[1])

    def _weights(self, step: int) -> tuple[float, ...]:
        """What each micro-batch's loss is multiplied by (DESIGN: n_m / N, 1 for sums, or the job's own weights)."""
        count = self._job.batch_size // self._micro_batch
        if self._job.reduction == "sum":
            return (1.0,) * count
        if self._job.weight is None:
            return (self._micro_batch / self._job.batch_size,) * count
        round = Round(0, step, (1.0,) * count)
        targets = [self.samples(round, m)[1] for m in range(count)]
        with calling(f"Job.weight of step {step + 1}"):
            own = [as_number("Job.weight", self._job.weight(target)) for target in targets]
        total = self.weighed[step] = sum(own)
        if not any(own) and not self._was_idle:
            self._was_idle = True
            log.warning(Event.NOTHING_COUNTS, step=step + 1)
        if any(own) and not total > 0:
            raise UsageError(f"the weights of step {step + 1} add up to {total}; Job.weight gives no number below 0")
        return tuple(shares_of(own))


def _rows_of(batch: tuple[Any, Any], rows: tuple[int, int] | None) -> tuple[Any, Any]:
    if rows is None:
        return batch
    part = {name: tensor[rows[0] : rows[1]] for name, tensor in inputs_of(batch).items()}
    return rebuild(batch[0], "x", part), rebuild(batch[1], "y", part)


T = TypeVar("T")

EVERY_S = 60.0


class Stalls:
    """Of one run. `tell` hears of a call that takes longer than `EVERY_S`, once in that time, however many wait for it."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self._quiet_until_s = 0.0  # by the loop's clock

    async def watch(self, future: asyncio.Future[T]) -> T:
        """What it gives; it is cancelled with whoever waits."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            while not (await asyncio.wait({future}, timeout=EVERY_S))[0]:
                if loop.time() >= self._quiet_until_s:
                    self._quiet_until_s = loop.time() + EVERY_S / 2
                    self.tell(
                        f"training waits for {under_way() or 'code of the job'}, which has not returned for "
                        f"{loop.time() - began_s:.0f} s; Ctrl-C twice ends the run"
                    )
            return future.result()
        finally:
            future.cancel()
