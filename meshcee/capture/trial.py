"""The user's model on a few samples, without any capture: as the plain loop has it, and what fails there already.

The idea: what export says of a model that cannot run at all helps nobody. So a model whose capture fails is tried as it is, and
its own error is told.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from meshcee.capture.export import EXAMPLES
from meshcee.capture.graph.encoding import DTYPES
from meshcee.errors import CaptureError, UsageError
from meshcee.job import Job
from meshcee.reach import Remembered
from meshcee.reach.modules import (
    compute_in_full,
    entries,
    give_memory,
    halve,
    into_training,
    on_loan,
    outermost,
    put_others,
)
from meshcee.sampling import data as data_rules
from meshcee.sampling import few_of
from meshcee.user_code import calling

__all__ = [
    "as_trained",
    "example_of",
    "own_sizes",
    "refuse_dtypes",
    "refuse_failing",
    "refuse_types",
]


@contextlib.contextmanager
def as_trained(model: nn.Module, job: Job) -> Iterator[Remembered]:
    """The model itself, in train mode and in the job's precision, as the plain loop has it; then all of the user's is as it was."""
    with on_loan(model):
        if job.precision == "bf16" and any(isinstance(tensor, FakeTensor) for _, tensor in entries(model)):
            _round_fakes(model, job.keep_fp32)
        elif job.precision == "bf16":
            halve(model, job.keep_fp32)
        into_training(model)
        before = Remembered(model, job.loss)
        try:
            yield before
        finally:
            before.put_back()


def _round_fakes(model: nn.Module, keep_fp32: Sequence[str]) -> None:
    """As `halve`, for fake tensors, whose modules torch cannot convert: others take their places."""
    kept = outermost(model, keep_fp32)
    spared = {id(tensor) for module in kept for _, tensor in entries(module)}
    put_others(model, lambda t: t.detach().bfloat16() if t.is_floating_point() and id(t) not in spared else t.detach())
    compute_in_full(kept)


def example_of(job: Job, sample: Any) -> tuple[Any, Any]:
    """A small micro-batch, of one sample several times."""
    return few_of(job, sample, EXAMPLES)


def own_sizes(job: Job) -> list[int]:
    micro = job.micro_batch_size or job.batch_size
    return [size for size in (micro, job.batch_size % micro) if size]


def _eagerly(model: nn.Module, job: Job, example: tuple[Any, Any]) -> None:
    """Of what cannot be captured: UsageError if it fails on the same samples without any capture, as it will elsewhere."""
    hushed = contextlib.redirect_stdout(io.StringIO())  # it has printed and warned already
    with (
        torch.random.fork_rng(devices=[]),
        hushed,
        warnings.catch_warnings(action="ignore"),
        as_trained(model, job),
        job.autocast(),
    ):
        give_memory(model)
        try:
            with calling("the model"):
                output = data_rules.call_model(model, example[0])
        except UsageError as error:
            if not (isinstance(error.__cause__, TypeError) and re.search(r"forward\(\) .*argument", str(error))):
                raise
            raise UsageError(
                f"{error}; of data[i] -> (x, y) the model is called as model(x), as model(*x) for a tuple, as model(**x) for a "
                "dict: give x what forward takes"
            ) from error.__cause__
        what = f"the loss, a class and not {job.loss.__name__}()," if isinstance(job.loss, type) else "the loss"
        with calling(what):
            job.loss(output, example[1])


def refuse_failing(model: nn.Module, job: Job, sample: Any) -> None:
    """UsageError of a model that fails without any capture, too, and CaptureError where the number of samples alone is why."""
    try:
        _eagerly(model, job, example_of(job, sample))
    except UsageError as error:
        own = own_sizes(job)[0]
        try:
            _eagerly(model, job, data_rules.batched([sample] * own, job.seed, collate=job.collate))
        except UsageError as other:
            if str(other) == str(error):
                raise error from error.__cause__
            raise UsageError(
                f"{other}: so it is with micro-batches of {own} samples; if it is written for another number, say this as "
                "micro_batch_size in the job"
            ) from other.__cause__
        raise CaptureError(
            f"{error}: so it is with {EXAMPLES} samples, as a model is tried, and with {own} it works; a graph is for any number "
            "of samples, so take sizes from x.shape[0]"
        ) from error


def refuse_types(model: nn.Module, job: Job, example: tuple[Any, Any]) -> None:
    """A model that fails on numbers of another type than its weights, and not on the same in theirs: fakes do not tell of it."""
    weights = {p.dtype for p in model.parameters() if p.is_floating_point()}
    inputs = data_rules.inputs_of(example)
    other = {n: t for n, t in inputs.items() if t.is_floating_point() and t.dtype not in weights}
    if len(weights) != 1 or not other:
        return
    try:
        _eagerly(model, job, example)
    except UsageError as error:
        (wanted,) = weights
        given = inputs | {n: t.to(wanted) for n, t in other.items()}
        x, y = example
        try:
            _eagerly(model, job, (data_rules.rebuild(x, "x", given), data_rules.rebuild(y, "y", given)))
        except UsageError:
            raise error from error.__cause__
        kind = str(wanted).removeprefix("torch.")
        gives = ", ".join(f"{n} in {str(t.dtype).removeprefix('torch.')}" for n, t in other.items())
        raise UsageError(
            f"data gives {gives}, and the model's weights are {kind}: "
            f"give {kind}, by .to(torch.{kind}) or numpy's .astype({kind!r}), or a Python number by torch.tensor(...) ({error})"
        ) from error


def refuse_dtypes(inputs: Mapping[str, torch.Tensor]) -> None:
    """UsageError for samples in a type that graphs do not have."""
    for name, tensor in inputs.items():
        if tensor.dtype not in DTYPES.values():
            kind = str(tensor.dtype).removeprefix("torch.")
            other = "float32" if tensor.is_floating_point() else "int32"
            raise UsageError(
                f"data gives {name} in {kind}, which peers do not take: give {other}, by .to(torch.{other}) or .astype('{other}')"
            )
