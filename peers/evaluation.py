"""Evaluation: what the owner feeds when nothing is trained, with which weights, and what is made of what comes back.

The idea: one forward-only walk over the same offers, links and stages as training, so that it needs no machinery of
its own: only a feed of one walk, and a place for the outputs.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from meshcee.capture import Batch, Capture
from meshcee.capture.rows import divided
from meshcee.errors import ProtocolError, UsageError
from meshcee.job import Job
from peers.feed import Feed
from peers.messages import Step
from peers.walk import Walk

__all__ = ["EvaluationFeed", "Predictions", "averaged", "joined", "measured", "with_state"]


class EvaluationFeed(Feed):
    """One walk over the whole of `job.eval_data`, in its order."""

    def __init__(self, job: Job, capture: Capture, micro_batch: int) -> None:
        super().__init__(job, capture, micro_batch)
        if job.eval_data is None:
            raise UsageError("there is nothing to evaluate: give data, or set eval_data in the job")

    def walks(self) -> Iterator[Step]:
        yield self._evaluation(0, 0)


def measured(
    job: Job, captured: Capture, feed: Feed, spec: Step, micro: int, values: Sequence[Any]
) -> dict[str, float]:
    """The loss and the job's own metrics of one micro-batch of an evaluation, from [loss, *outputs]."""
    if not values or not isinstance(values[0], torch.Tensor) or values[0].numel() != 1:
        raise ProtocolError("what an evaluation returns begins with the loss")
    found = {"loss": float(values[0])}
    if not job.metrics:
        return found
    output = captured.output_of(values[1:])
    _, target = feed.samples(spec, micro)
    for name, metric in job.metrics.items():
        try:
            found[name] = float(metric(output, target))
        except Exception as error:
            raise UsageError(f"metric {name!r} failed: {type(error).__name__}: {error}") from error
    return found


def joined(
    job: Job,
    captured: Capture,
    feed: Feed,
    spec: Step,
    micro: int,
    parts: Sequence[Sequence[Any] | None],
    rows: Sequence[tuple[int, int]],
) -> list[Any]:
    """[loss, *outputs] of a whole micro-batch from those of the members of a group; None for one without rows."""
    found = [part for part in parts if part is not None]
    if len(found) == 1:
        return list(found[0])
    assert captured.evaluate is not None
    program = captured.evaluate
    cuts = divided(program, program.outputs[1:])
    columns = list(zip(*found, strict=True))
    if len(columns) != len(program.outputs) or not all(isinstance(v, torch.Tensor) for part in found for v in part):
        raise ProtocolError("what an evaluation returns is the loss and the model's outputs")
    shares = [s for s, part in zip(feed.parts(spec, micro, rows), parts) if part is not None]
    values = [
        sum(loss.double() * share for loss, share in zip(columns[0], shares) if share)
    ]  # one without targets is NaN
    for column, cut in zip(columns[1:], cuts):
        values.append(column[0] if cut.dim is None else torch.cat(column, cut.dim))
    return values


def averaged(feed: Feed, walk: Walk) -> dict[str, float]:
    """Each metric averaged over the evaluation's samples; "loss" is always there."""
    totals: dict[str, float] = {}
    count = 0
    for micro in range(walk.spec.num_micro):
        size = feed.size(walk.spec, micro)
        count += size
        for name, value in walk.outputs[micro].items():
            totals[name] = totals.get(name, 0.0) + value * size
    return {name: value / count for name, value in totals.items()}


def with_state(captured: Capture, state: Mapping[str, torch.Tensor] | None) -> Capture:
    """The same graphs over these weights, as a `state_dict` names them; None keeps those of the model."""
    if state is None:
        return captured
    found: dict[str, torch.Tensor] = {}
    for name in captured.persistent:
        if name not in state:
            raise UsageError(f"the state has no entry {name!r}; give a whole state_dict of this model")
        given, (dtype, shape) = state[name].detach(), captured.layout[name]
        if given.dtype != dtype or tuple(given.shape) != shape:
            raise UsageError(
                f"{name!r} is {given.dtype}{tuple(given.shape)} in the state and {dtype}{shape} in the "
                "model; give a state_dict of this model"
            )
        found[name] = given
    return replace(captured, state=ChainMap(found, captured.state))  # type: ignore[arg-type]


class Predictions:
    """The model's outputs of each micro-batch as they arrive, and all of them as one."""

    def __init__(self, captured: Capture) -> None:
        assert captured.evaluate is not None
        program = captured.evaluate
        for value in map(program.value, program.outputs[1:]):
            if value.shape[:1] != (Batch(1),):
                raise UsageError(
                    f"the model's output {value.name!r} has no first dimension of samples; return one row for each"
                )
        self._captured = captured
        self._parts: dict[int, list[torch.Tensor]] = {}

    def hear(self, micro: int, values: list[Any]) -> None:
        """Loss and outputs of one micro-batch."""
        self._parts[micro] = values[1:]

    def output(self) -> Any:
        """What the model would return for all samples at once, in their order."""
        columns = zip(*(self._parts[micro] for micro in sorted(self._parts)), strict=True)
        try:
            return self._captured.output_of([torch.cat(column) for column in columns])
        except RuntimeError as error:
            raise UsageError(
                f"outputs of different sizes cannot be one tensor: {error}; predict samples of one size at a time"
            ) from error
