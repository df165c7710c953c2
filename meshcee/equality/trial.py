"""Whether the groups of a plan compute what one device would: tried by the owner on a few samples before it offers.

The idea: shapes cannot tell whether samples influence one another (a normalisation over the batch, rows in another
order, a mean that counts something else). So each stage that several members share runs once as a whole and once in
parts, and what leaves it, the generator's state and the loss included, must agree. A loss that is no mean over samples has
whole batches, where the job leaves their size to the plan.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog
import torch

from meshcee.capture import Capture, Program, StageSpec
from meshcee.capture.graph.draws import whole_draws
from meshcee.capture.graph.rows import divided, why_unsplit
from meshcee.equality.sizes import forward_s
from meshcee.errors import GraphError, PlanError, UsageError
from meshcee.events import Event
from meshcee.files import limits
from meshcee.job import At, Job
from meshcee.plan import Member, Pipeline, Plan, Stage
from meshcee.role import Piece, loss_shares, rows_of
from meshcee.sampling import batched, inputs_of, probes, read, rebuild
from meshcee.stage import Boundary, StageRunner

__all__ = ["check_sharing", "in_whole_batches", "why_not_shared"]

log = structlog.get_logger()

SEED, LOOK_S = 1, 2.0
_FAILING = (UsageError, PlanError, GraphError, RuntimeError, ValueError, IndexError)  # in a part of a micro-batch
TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.05, torch.float32: 1e-3, torch.float64: 1e-6}  # relative


def check_sharing(job: Job, captured: Capture, plan: Plan) -> None:
    """Raises PlanError naming the blocks that cannot be shared by samples, or the loss that is no mean of its parts."""
    for pipeline in plan.pipelines:
        widest = max(len(stage.members) for stage in pipeline.stages)
        if widest == 1:
            continue
        samples = widest + 1
        batch = batched(_first(job, samples), job.seed, collate=job.collate)
        tried = [_with_samples(stage, samples) for stage in pipeline.stages]
        for program in captured.programs:
            _check_program(job, captured, program, tried, batch, samples)


def _first(job: Job, count: int) -> list[Any]:
    """Samples that lie beside each other: those far apart are alike in data that repeats itself."""
    if job.streams:
        return [sample for sample, _ in probes(job, count)]
    return read(job.data, (i % len(job.data) for i in range(count)), job.seed)


def why_not_shared(job: Job, captured: Capture) -> str:
    """Why a planner should keep off groups, "" where any of this job's stages may be shared: each block is tried as one."""
    stages = [
        Stage(k, k + 1, (Member(f"{k}a", 1), Member(f"{k}b", 1)), window=1, live_cap=1)
        for k in range(captured.train.num_blocks)
    ]
    try:
        check_sharing(job, captured, Plan(2, (Pipeline(1, tuple(stages)),)))
    except PlanError as error:
        return str(error)
    return ""


def in_whole_batches(job: Job, captured: Capture) -> Job:
    """The job, with whole batches as micro-batches where it says no size and the loss is no mean over samples.

    In-batch negatives are such a loss, and means by weights of classes. Batch statistics are left to `remarks`. Where a job says
    a size, a warning tells of a loss that adds over samples: a micro-batch counts by its share of the batch.
    """
    program, told = captured.train, job.micro_batch_size is not None
    samples = min(job.batch_size, 8 if 16 * forward_s(captured) <= LOOK_S else 2)
    means = job.reduction == "mean" and job.weight is None
    if told and not (samples > 2 and means and job.micro_batch_size != job.batch_size):
        return job
    looks = job.verify and not isinstance(job.data, At) and 3 * captured.state_bytes <= limits.free_bytes()
    if samples < 2 or not looks or program.samples or program.slice(0, program.num_blocks).mutated:
        return job
    last = max(1, 3 * samples // 8)
    parts_of = (Member("a", samples - last), Member("b", last))
    stage = Stage(0, program.num_blocks, parts_of, window=1, live_cap=1)
    rows = rows_of(stage, samples)
    try:
        batch = batched(_first(job, samples), job.seed, collate=job.collate)
        one = _One(job, captured, program, stage, samples)
        raw = captured.inputs_of(batch)
        whole, *parts = [one.run(raw, [], SEED, part)[2][0] for part in ((0, samples), *rows)]
        loss = one.added(parts, rows, batch)
    except _FAILING:  # the look before the first step says more
        return job
    rounds = any(node.value.dtype in (torch.bfloat16, torch.float16) for node in program.nodes)
    within = TOLERANCE[whole.dtype] * (1.0 if rounds else 0.1)
    if _agree(loss, whole, within):
        return job
    if told:
        if _agree(sum(map(float, parts)), whole, within):
            log.warning(Event.ADDS_UP, micro_batch_size=job.micro_batch_size, batch_size=job.batch_size)
        return job
    log.warning(Event.WHOLE_BATCHES, of=float(whole), parts=loss, micro_batch_size=job.batch_size)
    return replace(job, micro_batch_size=job.batch_size)


def _agree(loss: float, whole: torch.Tensor, within: float) -> bool:
    return abs(loss - float(whole)) <= within * max(abs(float(whole)), 1e-3) or not bool(whole.isfinite())


def _with_samples(stage: Stage, samples: int) -> Stage:
    """The same group with unequal shares of so many samples."""
    width = len(stage.members)
    shares = [samples - width + 1, *[1] * (width - 1)]
    return replace(stage, members=tuple(Member(m.peer, n) for m, n in zip(stage.members, shares)))


def _check_program(
    job: Job, captured: Capture, program: Program, stages: Sequence[Stage], batch: tuple[Any, Any], samples: int
) -> None:
    raw = captured.inputs_of(batch)
    rng: Any = SEED
    received: Sequence[Any] = []
    last_group = max(i for i, stage in enumerate(stages) if len(stage.members) > 1)
    for stage in stages[: last_group + 1]:
        one = _One(job, captured, program, stage, samples)
        if len(stage.members) > 1 and not one.trains and one.spec.uses_random:
            raise PlanError(
                f"{one.where} cannot be shared by samples: evaluation draws random numbers there; use one device"
            )
        sent, after, outputs = one.run(raw, received, rng, (0, samples))
        if len(stage.members) > 1:
            one.check(raw, received, rng, (sent, after, outputs), batch)
        received, rng = sent, after


class _One:
    """One stage of a program, run on this machine with the captured weights."""

    def __init__(self, job: Job, captured: Capture, program: Program, stage: Stage, samples: int) -> None:
        self.job, self.program, self.stage, self.samples = job, program, stage, samples
        self.trains, self._micro = program is captured.train, itertools.count()
        self.spec: StageSpec = program.slice(stage.first, stage.end)
        self.state = {name: captured.state[name] for name in self.spec.state_names()}
        self.where = f"blocks {stage.first}..{stage.end - 1} ({captured.costs[stage.first].name} on)"

    def run(self, raw: Mapping[str, torch.Tensor], received: Sequence[Any], rng: Any, rows: tuple[int, int]) -> Any:
        """(sent, generator's state, outputs) for these rows; `received` are theirs alone."""
        part = rows != (0, self.samples) and self.spec.uses_random
        draws = whole_draws(self.program, self.stage.first, self.stage.end, rows, self.samples) if part else None
        runner = self._runner(draws) if part else self._whole
        own = {v.name: raw[v.name][rows[0] : rows[1]] for v in self.spec.raw_inputs}
        if not self.trains:
            return runner.evaluate(own, received)
        return runner.forward(0 if part else next(self._micro), own, received, rng)

    @functools.cached_property
    def _whole(self) -> StageRunner:
        return self._runner(None)

    def _runner(self, draws: Any) -> StageRunner:
        evaluate = None if self.trains else self.spec
        return StageRunner(self.spec, self.state, self.job.optimizer, evaluate=evaluate, split=False, draws=draws)

    def check(
        self,
        raw: Mapping[str, torch.Tensor],
        received: Sequence[Any],
        rng: Any,
        whole: tuple[Sequence[Any], Any, Sequence[torch.Tensor]],
        batch: tuple[Any, Any],
    ) -> None:
        if why := why_unsplit(self.program, self.stage.first, self.stage.end):
            raise PlanError(f"{self.where} cannot be shared by samples: {why}; give them to one device")
        before = Boundary(self.spec.received, divided(self.program, self.spec.received_numbers))
        after = Boundary(self.spec.sent, divided(self.program, self.spec.sent_numbers))
        rows = rows_of(self.stage, self.samples)
        all_rows = (0, self.samples)
        pieces = [Piece(peer, *own, own) for peer, own in zip(self.stage.peers, rows)]
        parts = {}
        frames = before.split(received, rng, all_rows, pieces)
        for piece, frame in zip(pieces, frames):
            source = Piece("whole", piece.first, piece.end, all_rows)
            mine, state = before.join({"whole": frame}, piece.rows, [source])
            parts[piece.peer] = self.run(raw, mine, state, piece.rows)
        joined, _ = after.join({peer: [*part[0], None] for peer, part in parts.items()}, all_rows, pieces)
        for value, ours, theirs in zip(self.spec.sent, joined, whole[0], strict=True):
            self._compare(value.name, ours, theirs)
        if any(not _same_state(part[1], whole[1]) for part in parts.values()):
            raise PlanError(f"{self.where} cannot be shared by samples: parts draw other random numbers than the whole")
        if self.spec.is_last:
            self._compare_outputs([part[2] for part in parts.values()], whole[2], rows, batch)

    def added(self, losses: Sequence[torch.Tensor], rows: Sequence[tuple[int, int]], batch: tuple[Any, Any]) -> float:
        """What the losses of these rows count for, together."""
        shares = loss_shares(self.job, rows, lambda first, end: _rows(batch[1], first, end))
        return sum(float(loss) * share for loss, share in zip(losses, shares) if share)

    def _compare_outputs(
        self,
        parts: Sequence[Sequence[torch.Tensor]],
        whole: Sequence[torch.Tensor],
        rows: Sequence[tuple[int, int]],
        batch: tuple[Any, Any],
    ) -> None:
        loss = self.added([part[0] for part in parts], rows, batch)
        if not _agree(loss, whole[0], TOLERANCE[whole[0].dtype]):
            raise PlanError(
                f"the loss of a micro-batch ({float(whole[0]):.6g}) is not what its parts' losses add up to ({loss:.6g}): say "
                "what its mean counts with Job(weight=...), or Job(reduction='sum'), or give the last stage to one device"
            )
        cuts = divided(self.program, self.program.outputs[1:]) if not self.trains else ()
        for i, cut in enumerate(cuts, 1):
            column = [part[i] for part in parts]
            joined = column[0] if cut.dim is None else torch.cat(column, cut.dim)
            self._compare(f"output {i - 1}", joined, whole[i])

    def _compare(self, name: str, ours: Any, theirs: Any) -> None:
        error = _relative_error(ours, theirs)
        floating = isinstance(theirs, torch.Tensor) and theirs.is_floating_point()
        if error > (TOLERANCE.get(theirs.dtype, 0.05) if floating else 0.0):
            raise PlanError(
                f"{self.where} cannot be shared by samples: {name} of a part differs from the whole by {error:.2g}, so samples "
                "influence one another there; give these blocks to one device"
            )


def _relative_error(ours: Any, theirs: Any) -> float:
    if not isinstance(theirs, torch.Tensor):
        return float(ours != theirs)
    if ours.shape != theirs.shape or not torch.equal(ours.isfinite(), theirs.isfinite()):
        return float("inf")
    a, b = (torch.where(t.isfinite(), t, 0).double() for t in (ours, theirs))
    size = float(torch.linalg.vector_norm(b))
    return float(torch.linalg.vector_norm(a - b)) / max(size, 1e-12)


def _same_state(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return torch.equal(ours, theirs)
    return bool(ours is theirs or ours == theirs)


def _rows(y: Any, first: int, end: int) -> Any:
    """These rows of stacked targets."""
    return rebuild(y, "y", {name: tensor[first:end] for name, tensor in inputs_of((None, y)).items()})
