"""Evaluation: what the owner feeds when nothing is trained, with which weights, and what is made of what comes back.

The idea: one forward-only round over the same offers, links and stages as training, so that it needs no machinery of
its own. There is only a feed of one round, and a place for the outputs.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from meshcee.capture import Batch, Capture
from meshcee.capture.graph import Value
from meshcee.capture.graph.rows import divided
from meshcee.errors import ProtocolError, UsageError
from meshcee.job import Job
from meshcee.role import Place, rows_of
from meshcee.stage import tensors
from meshcee.user_code import as_number, calling
from peers.owner.answers import Answers
from peers.owner.feed import Feed
from peers.transport import Frame
from peers.wire import Round, need

__all__ = ["EvaluationFeed", "Outputs", "Predictions", "averaged", "with_state"]


WEIGHT = ""  # beside the names of metrics: what Job.weight gives for a micro-batch


class EvaluationFeed(Feed):
    """One round over the whole of `job.eval_data`, in its order."""

    def __init__(self, job: Job, capture: Capture, micro_batch: int) -> None:
        super().__init__(job, capture, micro_batch)
        if job.eval_data is None:
            raise UsageError("there is nothing to evaluate: give data, or set eval_data in the job")

    def rounds(self) -> Iterator[Round]:
        yield self._evaluation(0, 0)


class Outputs:
    """The outputs of evaluations as they arrive, measured once all rows of a micro-batch are here; none is kept.

    `in_users_thread` runs what is the user's: metrics and weights. `hear` gets (micro, [loss, *outputs]).
    """

    def __init__(
        self,
        job: Job,
        captured: Capture,
        feed: Feed,
        in_users_thread: Callable[..., Awaitable[Any]],
        hear: Callable[[int, list[Any]], None] | None = None,
    ) -> None:
        self._job = job
        self._captured = captured
        self._feed = feed
        self.in_users_thread = in_users_thread
        self._hear = hear

    async def take(self, answers: Answers, place: Place, frame: Frame) -> bool:
        """What one member of the last stage has of a micro-batch; whether that was the last of it."""
        micro = answers.new(place, frame.header)
        parts = answers.rows.setdefault(micro, {})
        rows = rows_of(place.stage, self._feed.size(answers.round, micro))
        first, end = rows[place.member]
        values = tensors.unpack(need(frame.header, "tensors", list), frame.payloads)
        parts[place.member] = self._declared(values, end - first)
        if len(parts) < sum(first < end for first, end in rows):
            return False
        values, answers.outputs[micro] = await self.in_users_thread(self._measured, answers.round, micro, parts, rows)
        del answers.rows[micro]
        if self._hear is not None:
            self._hear(micro, values)
        return True

    def _declared(self, values: list[Any], samples: int) -> list[Any]:
        """The same, if they are what the graph says: the user's metric is not to blame for what a member makes up."""
        program = self._captured.evaluate
        assert program is not None
        said = [program.value(number) for number in program.outputs]
        if len(values) != len(said) or not all(_is_of(samples, *pair) for pair in zip(values, said, strict=True)):
            raise ProtocolError(
                "what it returned of an evaluation is not what the graph says: the loss, then the outputs"
            )
        return values

    def _measured(
        self, round: Round, micro: int, parts: Mapping[int, Sequence[Any]], rows: Sequence[tuple[int, int]]
    ) -> tuple[list[Any], dict[str, float]]:
        """[loss, *outputs] of the micro-batch, its loss and the job's own metrics."""
        target = self._feed.target(round, micro)  # not read again: it may be another one
        values = self._joined(target, parts, rows)
        found = {"loss": float(values[0])}
        if self._job.weight is not None:
            with calling("Job.weight"):
                found[WEIGHT] = as_number("Job.weight", self._job.weight(target))
        if not self._job.metrics:
            return values, found
        output = self._captured.output_of(values[1:])
        for name, metric in self._job.metrics.items():
            with calling(f"metric {name!r}"):
                measured = metric(output, target)
            found[name] = as_number(f"metric {name!r}", measured)
        return values, found

    def _joined(self, target: Any, parts: Mapping[int, Sequence[Any]], rows: Sequence[tuple[int, int]]) -> list[Any]:
        """Of the whole micro-batch, from those of the members of a group that have rows of it."""
        if len(rows) == 1:
            return list(parts[0])
        assert self._captured.evaluate is not None
        program = self._captured.evaluate
        cuts = divided(program, program.outputs[1:])
        columns = list(zip(*(parts[k] for k in sorted(parts)), strict=True))
        shares = self._feed.target_shares(target, rows)
        # The loss of a part without targets is 0 / 0.
        loss = sum(loss.double() * shares[k] for k, loss in zip(sorted(parts), columns[0]) if shares[k])
        whole = [c[0] if cut.dim is None else torch.cat(c, cut.dim) for c, cut in zip(columns[1:], cuts)]
        return [torch.as_tensor(loss), *whole]


def _is_of(samples: int, tensor: Any, said: Value) -> bool:
    """Whether this is such a value, of so many samples."""
    right = isinstance(tensor, torch.Tensor) and said.admits(tensor)
    return right and all(n == d.scale * samples for n, d in zip(tensor.shape, said.shape) if isinstance(d, Batch))


def averaged(job: Job, feed: Feed, answers: Answers) -> dict[str, float]:
    """Each metric averaged over the evaluation's samples; "loss" is always there, and of sums too the mean per sample.

    With Job.weight the loss is averaged by it, as in training. So a micro-batch that weighs nothing is left out: its loss is 0 / 0.
    """
    totals: dict[str, float] = {}
    counts: dict[str, float] = {}
    for micro in range(answers.round.num_micro):
        size = feed.size(answers.round, micro)
        weight = answers.outputs[micro].get(WEIGHT, float(size))
        for name, value in answers.outputs[micro].items():
            share = float(size) if name != "loss" else weight
            if name != WEIGHT and share:
                times = 1.0 if name == "loss" and job.reduction == "sum" else share
                totals[name] = totals.get(name, 0.0) + value * times
                counts[name] = counts.get(name, 0.0) + share
    return {"loss": math.nan} | {name: value / counts[name] for name, value in totals.items()}


def with_state(captured: Capture, state: Mapping[str, torch.Tensor] | None) -> Capture:
    """The same graphs over these weights, as a `state_dict` names them; None keeps those of the model."""
    if state is None:
        return captured
    if not isinstance(state, Mapping):
        raise UsageError(
            f"state is a state_dict, as result.state_dict or model.state_dict(); got {type(state).__name__}"
        )
    found: dict[str, torch.Tensor] = {}
    for name in captured.persistent:
        if name not in state:
            raise UsageError(f"the state has no entry {name!r}; give a whole state_dict of this model")
        if not isinstance(state[name], torch.Tensor):
            raise UsageError(
                f"{name!r} is a {type(state[name]).__name__} in the state: give tensors, as a state_dict has"
            )
        given, (dtype, shape) = state[name].detach(), captured.layout[name]
        if given.dtype not in (dtype, captured.rounded.get(name)) or tuple(given.shape) != shape:
            raise UsageError(
                f"{name!r} is {given.dtype}{tuple(given.shape)} in the state and {dtype}{shape} in the "
                "model; give a state_dict of this model"
            )
        found[name] = given
    for name, given in state.items():
        own = captured.aliases.get(name, name)
        if own not in found:
            raise UsageError(
                f"the state has an entry {name!r}, which the model has not; give a state_dict of this model"
            )
        if own != name and not (isinstance(given, torch.Tensor) and torch.equal(given.detach(), found[own])):
            raise UsageError(
                f"{name!r} and {own!r} are one tensor in the model and differ in the state; give a state_dict of this model"
            )
    return captured.over(ChainMap(found, captured.state))  # type: ignore[arg-type]


class Predictions:
    """The model's outputs of each micro-batch as they arrive, and all of them as one."""

    def __init__(self, captured: Capture) -> None:
        assert captured.evaluate is not None
        program = captured.evaluate
        values = map(program.value, program.outputs[1:])
        rows = program.samples or Batch(1)
        self._has_rows = [value.shape[:1] == (rows,) for value in values]  # others, as a loss, are left out
        if not any(self._has_rows):
            raise UsageError("the model's output has no first dimension of samples; return one row for each")
        self._captured = captured
        self._parts: dict[int, list[torch.Tensor]] = {}

    def hear(self, micro: int, values: list[Any]) -> None:
        """Loss and outputs of one micro-batch."""
        self._parts[micro] = values[1:]

    def output(self) -> Any:
        """What the model would return for all samples at once, in their order."""
        columns = zip(*(self._parts[micro] for micro in sorted(self._parts)), strict=True)
        try:
            return self._captured.output_of(
                [torch.cat(column) if has else None for column, has in zip(columns, self._has_rows, strict=True)]
            )
        except RuntimeError as error:
            raise UsageError(
                f"outputs of different sizes cannot be one tensor: {error}; predict samples of one size at a time"
            ) from error
