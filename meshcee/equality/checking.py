"""Whether a job trains as the plain loop does: some of its steps, computed both ways in this process and compared bit for bit.

The idea: the plain loop is `meshcee.plain`'s own; beside it run stages of every asked number, without a mesh. Where the two
part, the last addition is to blame. First come the samples, which may be others when the samples are read again (the data). Then
come one stage (the capture), several stages (the cut), and the coding of the tensors that cross between stages (the codec).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshcee.capture import Capture, capture
from meshcee.eager import PlainStep, plain_steps
from meshcee.equality.net import examine
from meshcee.equality.watch import digest
from meshcee.errors import UnequalError, UsageError
from meshcee.job import Job, check_is_job
from meshcee.sampling import leaving_nothing, unrepeatable
from meshcee.stage.chain import Chain, split_blocks
from meshcee.user_code import calling

__all__ = ["STAGES", "STEPS", "Checked", "check", "refuse"]

STAGES = (1, 2, 3, 5)
STEPS = 3
ROUNDING = frozenset({"bf16", "int8", "int4"})  # "auto" rounds between regions, and here is one


@dataclass(frozen=True)
class Checked:
    """What was compared. Where something differs, `differs` says what, and `blame` whose doing it is."""

    stages: tuple[int, ...]
    losses: list[float]  # of the steps that were trained, in the plain loop
    differs: str = ""
    blame: str = ""  # "data", "capture", "cut" or "codec"
    notes: tuple[str, ...] = ()  # what was not looked at

    @property
    def equal(self) -> bool:
        return not self.differs


@dataclass(frozen=True)
class _Step:
    """One step of either side; tensors as fingerprints, so that one model is in memory at a time."""

    losses: list[torch.Tensor]
    grads: Mapping[str, Any]
    state: Mapping[str, Any]


@torch.random.fork_rng(devices=[])
def check(
    job: Job,
    stages: Sequence[int] | int = STAGES,
    steps: int | None = None,
    *,
    captured: Capture | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Checked:
    """Train some steps (3 unless given) in the plain loop and on each number of stages, all in this process; compare every loss,
    gradient, weight and buffer. What every run looks at before its first step is looked at first, for whole micro-batches.

    Raises CaptureError where the model cannot be captured at all.
    """
    check_is_job(job)
    stages = (stages,) if isinstance(stages, int) else stages
    steps = min(STEPS if steps is None else steps, job.steps)
    if steps < 1 or not stages or min(stages) < 1:
        raise UsageError("check at least one step, on at least one stage")
    if (why := unrepeatable(job)) is not None:
        return Checked((), [], why, "data")
    captured = captured or capture(job)
    job = replace(job, micro_batch_size=job.micro_batch_size or job.batch_size)
    say(f"captured {job.name}: {len(captured.costs)} blocks in {captured.took_s:.1f} s")
    most = captured.train.num_blocks
    counts = tuple(sorted({min(n, most) for n in (1, *stages)}))  # one stage tells the capture from the cut
    notes = [f"the model has {most} block{'s' * (most > 1)}, and can have no more stages"] if max(stages) > most else []
    assert job.micro_batch_size is not None
    cuts = [tuple(split_blocks(most, n)) for n in counts]
    try:
        examine(job, captured, [job.micro_batch_size], cuts, budget_s=float("inf"), say=notes.append)
    except UnequalError as error:
        return Checked(counts, [], str(error), error.blame, tuple(notes))
    say("a micro-batch through the module and through the stages is equal, forwards and backwards")
    plain, losses = [], []
    with leaving_nothing(job):
        for told in _each(plain_steps(job, steps)):
            plain.append(_Step(told.losses, _digests(told.grads), _state(job, captured, told.state_dict)))
            losses.append(told.loss)
            say(f"plain loop: loss {told.loss:.6g} in step {told.step + 1}")
    codec = job.codec if job.codec in ROUNDING | {"lossless"} and max(counts) > 1 else ""
    runs = [*((n, "none") for n in counts), *([(max(counts), codec)] if codec else [])]
    for count, by in runs:
        name = f"{count} stage{'s' if count > 1 else ''}" + (f", codec {by}" if by != "none" else "")
        for step, (ours, theirs) in enumerate(zip(_trained(job, captured, count, by, steps), plain)):
            if differs := _difference(captured, ours, theirs):
                blame = "codec" if by != "none" else "cut" if count > 1 else "capture"
                why = ", which rounds" if by in ROUNDING else ""
                return Checked(counts, losses, f"step {step + 1}, {name}{why}: {differs}", blame, tuple(notes))
        say(f"{name}: equal in {steps} step{'s' if steps > 1 else ''}")
    return Checked(counts, losses, notes=tuple(notes))


def _each(steps: Iterator[PlainStep]) -> Iterator[PlainStep]:
    """The same; UsageError where the user's code fails on the way."""
    while True:
        with calling("the model or the loss, in the plain loop,"):
            if (told := next(steps, None)) is None:
                return
        yield told


def _trained(job: Job, captured: Capture, count: int, codec: str, steps: int) -> Iterator[_Step]:
    applied: dict[str, Any] = {}

    def hear(grads: Mapping[str, torch.Tensor]) -> None:
        applied.clear()
        applied.update(_digests(grads))

    chain = Chain(job, captured, count, "fused", codec=codec)
    chain.hear = hear
    with leaving_nothing(job):
        for step in range(steps):
            losses = chain.run_step(step)
            yield _Step(losses, applied, _state(job, captured, chain.state()))


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (tensor.dtype, digest(tensor)) for name, tensor in tensors.items()}


def _state(job: Job, captured: Capture, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """In bf16 whoever does not train a tensor may hold it in full, or rounded as it is computed with."""
    full = {e.name for e in captured.train.inputs if e.trainable or e.value.dtype != torch.bfloat16}
    full |= {other for other, name in captured.aliases.items() if name in full}
    rounds = job.precision == "bf16"
    return _digests(
        {n: t.bfloat16() if rounds and t.is_floating_point() and n not in full else t for n, t in state.items()}
    )


def _difference(captured: Capture, ours: _Step, theirs: _Step) -> str:
    """The first thing that is not equal, in the order in which it is computed, and after which operation."""
    for micro, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        if digest(a) != digest(b):
            return f"the loss of micro-batch {micro + 1} is {float(a):.9g} instead of {float(b):.9g}, after the forward pass"
    for name in reversed(captured.param_order):
        if ours.grads.get(name) != theirs.grads.get(name):
            return f"the gradient of {name!r}{_used(captured, name)} differs, after the backward pass"
    for name, seen in theirs.state.items():
        if ours.state.get(name) != seen:
            return f"{name!r}{_used(captured, name)} differs, after the optimizer's step"
    return ""


def _used(captured: Capture, name: str) -> str:
    program = captured.train
    readers = (
        n for n in program.nodes if any(program.value(r).name == name for r in n.refs if r < len(program.inputs))
    )
    return next((f", used{node.at}," for node in readers if node.at), "")


def refuse(checked: Checked) -> None:
    """Raise UnequalError where something differs."""
    if not checked.equal:
        raise UnequalError(f"not equal to the plain loop, by the {checked.blame}: {checked.differs}")
