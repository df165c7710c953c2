"""capture(job): the model of a job as programs, block costs and state.

The idea: the training graph decides what a block is. The evaluation graph of the same model is laid over the same
blocks, by the parameters that its nodes use. So one placement of the parameters serves both graphs.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence, Set
from typing import Any

import structlog
import torch
from torch import nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from meshcee.capture.costs import costs_of
from meshcee.capture.export import EXAMPLES, Branch, refuse_settings
from meshcee.capture.graph import Batch, Dim, Program, teach_shapes
from meshcee.capture.initial_state import InitialState
from meshcee.capture.modules import refuse_modules, warn_of_eval
from meshcee.capture.outputs import put_together
from meshcee.capture.programs import Given, Programs, watched
from meshcee.capture.trial import as_trained, example_of, own_sizes, refuse_dtypes, refuse_types
from meshcee.capture.unread import ask_others, refuse_told_beside, unread
from meshcee.capture.with_loss import WithLoss
from meshcee.errors import CaptureError, UsageError
from meshcee.events import Event
from meshcee.figures import BlockCost
from meshcee.files.tensor_files import Checkpoint, Layout, OnDemand
from meshcee.job import Job, check_is_job
from meshcee.reach.modules import HALVES, entries, in_full, put_others
from meshcee.sampling import data as data_rules
from meshcee.sampling import generators_put_back, inputs_of_one, leaving_nothing, look_anew, probes

__all__ = ["Capture", "capture", "watch_sizes"]

log = structlog.get_logger()

_PROBED = 16  # samples whose shapes are compared, to find sizes that vary


@dataclasses.dataclass(frozen=True)
class Capture:
    """A captured job. `state` holds full-precision tensors, each once; `aliases` names the other names of tied ones.

    `state` may make or read a tensor when it is asked for it: take one at a time, and sizes from `layout`.
    """

    train: Program
    evaluate: Program | None
    costs: tuple[BlockCost, ...]
    state: Mapping[str, torch.Tensor]
    layout: Layout  # name in `state` -> type and shape
    aliases: dict[str, str]  # other name -> the name in `state`
    param_order: tuple[str, ...]  # in which clip_grad_norm_ combines norms: that of named_parameters, type by type
    persistent: tuple[str, ...]  # names of `state` that the model's state_dict has
    output_form: Any = None  # of what the evaluation outputs behind the loss are put together to
    terms: tuple[str, ...] = ()  # what a step tells of beside the loss: the names of the outputs of training behind it
    took_s: float = 0.0  # the capture
    rounded: Mapping[str, torch.dtype] = dataclasses.field(default_factory=dict)  # buffers, as the plain loop has them
    built: nn.Module | None = None  # what the job's function built, with stand-ins for its large tensors
    branches: tuple[tuple[Branch, ...], ...] = ((), ())  # on sizes, of each of the programs

    @property
    def programs(self) -> tuple[Program, ...]:
        """That of training, and that of evaluation where there is one."""
        return (self.train, self.evaluate) if self.evaluate is not None else (self.train,)

    @property
    def state_bytes(self) -> int:
        """Of parameters and buffers, in full precision."""
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.layout.values())

    @property
    def plain_layout(self) -> Layout:
        """As `layout`, with the types of the plain loop: in bf16 its buffers are rounded, and parameters have masters in full."""
        return {name: (self.rounded.get(name, dtype), shape) for name, (dtype, shape) in self.layout.items()}

    def over(self, kept: Mapping[str, torch.Tensor]) -> Capture:
        """The same with a state that was kept: members are sent all buffers in the types of `layout`, and round them."""

        def read(name: str) -> torch.Tensor:
            tensor = kept[name]
            return tensor.to(self.layout[name][0]) if name in self.rounded else tensor

        return dataclasses.replace(self, state=OnDemand(kept, read))

    @staticmethod
    def inputs_of(batch: tuple[Any, Any]) -> dict[str, torch.Tensor]:
        """The raw inputs of the programs for a stacked (x, y)."""
        return data_rules.inputs_of(batch)

    def misfit(self, inputs: Mapping[str, torch.Tensor], *, forward_only: bool = False) -> str | None:
        """Which of these raw inputs of a micro-batch the graph does not hold for, and what to do."""
        chosen = forward_only and self.evaluate is not None
        program = self.programs[chosen]
        if program.samples and (counts := {tensor.shape[0] for tensor in inputs.values()} - {program.samples}):
            return (
                f"a micro-batch of {min(counts)}, and the model, or its loss, holds for {program.samples} samples alone: give a "
                f"multiple of {program.samples}, the job's micro_batch_size, or write it alike for any number"
            )
        if said := next(filter(None, (branch.misfit(inputs) for branch in self.branches[chosen])), None):
            return said
        for name, value in ((entry.name, entry.value) for entry in program.inputs if entry.kind == "raw"):
            given = inputs.get(name)
            if given is not None and given.dim() == len(value.shape) and (least := value.short_of(given.shape)):
                return (
                    f"{name} is {_said(given.dtype, given.shape)}, and the model takes another way for lengths under {least}: "
                    f"pad to {least}, or write it for all lengths"
                )
            if given is None or not value.admits(given):
                sized = given is not None and given.dtype == value.dtype
                padded, typed = (
                    ("eval_data", "eval_data the types of data") if forward_only else ("all", "all samples one type")
                )
                advice = f"begin data with such a sample, or pad {padded} to one length" if sized else f"give {typed}"
                return (
                    f"{name} is {'missing' if given is None else _said(given.dtype, given.shape)}, and in the samples that capture "
                    f"looked at (the first, and some all over the data) {_said(value.dtype, value.shape)}: {advice}"
                )
        return None

    def output_of(self, tensors: Sequence[torch.Tensor | None]) -> Any:
        """The model's output as a metric expects it, from the evaluation outputs behind the loss.

        Tensors, tuples, lists, named tuples and constants stay what they are; mappings and dataclasses allow both
        `out.logits` and `out["logits"]`.
        """
        return put_together(self.output_form, iter(tensors))

    def state_dict(self, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """A state as the plain loop leaves it, for `load_state_dict`: persistent entries under all their names, read on demand."""
        names = {n: n for n in self.persistent}
        names |= {other: name for other, name in self.aliases.items() if name in names}

        def read(name: str) -> torch.Tensor:
            tensor = state[names[name]]
            return tensor.to(self.rounded.get(names[name], tensor.dtype))

        return OnDemand(names, read)


def _said(dtype: torch.dtype | None, shape: Sequence[Dim]) -> str:
    """A tensor's type and shape for people: "int64 (samples, up to 96)"."""
    words = []
    for size in shape:
        if isinstance(size, int):
            words.append(str(size))
        elif isinstance(size, Batch):
            words.append("samples" if size.scale == 1 else f"{size.scale} x samples")
        else:
            words.append(f"up to {size.limit}{' x samples' if size.batch else ''}")
    return f"{str(dtype).removeprefix('torch.')} ({', '.join(words)})"


def _constructed(job: Job) -> tuple[nn.Module, Any]:
    from meshcee.capture.recipes import construct

    def built() -> nn.Module:
        model = job.model()
        if (
            job.precision == "bf16"
            and isinstance(model, nn.Module)
            and any(t.dtype in HALVES for _, t in entries(model))
        ):
            put_others(model, lambda t: in_full(t.detach()))  # torch cannot convert modules of fake tensors
        return model

    return construct(built, job.seed)


@generators_put_back()  # forward may seed or draw, and so may the function that builds the model
def capture(job: Job, *, evaluate: bool | None = None, predicts: bool = False) -> Capture:
    """Export, cut and price the job's model. `evaluate` asks for the evaluation program too (default: if eval_data); where it
    `predicts`, that gives the model's outputs, and a number in the place of the loss.
    """
    check_is_job(job)
    look_anew(job)
    refuse_settings(job.optimizer)
    job.optimizer.build({})  # or torch refuses an option once all else is done
    try:
        with leaving_nothing(job):
            return _capture(job, evaluate, predicts)
    except (CaptureError, UsageError) as error:
        from meshcee.sampling.odd import odd_one

        if odd := odd_one(job, _PROBED):  # which the example may be
            error.args = (f"{error}; besides, {odd}", *error.args[1:])
        raise


def _capture(job: Job, evaluate: bool | None, predicts: bool) -> Capture:
    start_s = time.perf_counter()
    teach_shapes()
    model, recorder = (job.model, None) if isinstance(job.model, nn.Module) else _constructed(job)
    refuse_modules(model, job.loss)
    warn_of_eval(model)
    names, aliases = _names(model)
    tensors = {n: t.detach() for n, t in entries(model) if n not in aliases}
    elsewhere = sorted({t.device.type for t in tensors.values()} - {"cpu"})
    if elsewhere and recorder is None:
        if "meta" in elsewhere:
            raise UsageError(
                "the model is on the meta device, where weights have no numbers; give a function that makes it, with "
                "Job(weights=...) if they lie in a checkpoint"
            )
        raise UsageError(f"the model is on {elsewhere[0]}; give it on the CPU: model.cpu()")
    if sparse := next((n for n, t in tensors.items() if t.layout != torch.strided), None):
        raise CaptureError(
            f"{sparse!r} is sparse, and graphs have dense tensors only: register {sparse}.to_dense(), in "
            f"a class that is not yours by model.{sparse} = model.{sparse}.to_dense()"
        )
    widens = job.precision == "bf16" and any(t.dtype in HALVES for t in tensors.values())
    layout = {
        n: (torch.float32 if widens and t.dtype in HALVES else t.dtype, tuple(t.shape)) for n, t in tensors.items()
    }
    job.optimizer.check({names[n]: layout[names[n]][0] for n, p in model.named_parameters() if p.requires_grad})
    for why in job.optimizer.unmet([n for n, _ in model.named_parameters()], aliases):
        log.warning(Event.GROUP_UNMET, why=why)
    persistent = dict.fromkeys(n for n in model.state_dict(keep_vars=True) if n in names)
    state: Mapping[str, torch.Tensor] = InitialState(tensors, recorder) if recorder else tensors
    if widens:  # never all of it at once
        state = OnDemand(tensors, lambda name: in_full(tensors[name]))
    if job.weights is not None:
        from meshcee.capture.recipes import from_checkpoint

        state = from_checkpoint(Checkpoint.at(job.weights), {n: names[n] for n in persistent}, layout, state)
    with unread(job.model):
        samples = [sample for sample, _ in probes(job, _PROBED)]
        probed = [inputs_of_one(job, sample) for sample in samples]
    refuse_dtypes(probed[0])
    varying = data_rules.varying(probed)
    # What blocks cost is priced by the example: of several sizes the largest, since memory must hold it.
    sizes = [sum(tensor.numel() for tensor in inputs.values()) for inputs in probed]
    largest = samples[sizes.index(max(sizes)) if varying else 0]
    views = recorder.views if recorder else ()
    given = Given(job, model, recorder is not None, names, layout, tensors, views, samples[0], largest, probed, varying)
    example = given.example(EXAMPLES)
    ask_others(job, example[1])
    if clash := min(data_rules.inputs_of(example).keys() & layout.keys(), default=None):
        raise CaptureError(
            f"{clash!r} of the model has the name of an input, as x and y are what data gives: rename {clash.split('.')[0]!r} in "
            "the model"
        )
    if recorder is None and job.precision != "bf16":
        refuse_types(model, job, example)
    programs = Programs(given)
    training = programs.training()
    evaluates = evaluate if evaluate is not None else job.eval_data is not None
    evaluation = programs.evaluation(training, predicts=predicts) if evaluates else None
    count = evaluation.program.samples if evaluation is not None else 0
    if count and job.eval_data is not None and (rest := len(job.eval_data) % count):
        raise UsageError(
            f"the model in eval mode, or its loss, holds for micro-batches of {count} samples alone, and eval_data has {rest} more "
            "than a multiple of them: leave these out, or write it alike for any number"
        )
    program, analysis = training.program, training.analysis
    refuse_told_beside(job, samples[-1], _PROBED, training.changed)
    reached = analysis.reached(program.nodes, program.outputs[0])
    found = Capture(
        train=program,
        evaluate=evaluation.program if evaluation else None,
        costs=costs_of(program, analysis),
        state=state,
        layout=layout,
        aliases=aliases,
        param_order=_norm_order(model, layout, {x.name for n, x in enumerate(program.inputs) if n in reached}),
        persistent=tuple(n for n in layout if n in persistent),
        output_form=evaluation.form if evaluation else None,
        terms=training.terms,
        took_s=time.perf_counter() - start_s,
        rounded=training.rounded,
        built=None if recorder is None else model,
        branches=(training.branches, evaluation.branches if evaluation else ()),
    )
    for inputs in probed:
        if missing := [x.name for x in program.inputs if x.kind == "raw" and x.name not in inputs]:
            raise UsageError(
                f"Job.collate makes {', '.join(inputs)} of one sample, and {missing[0]} of {program.samples or EXAMPLES}: let it "
                "give the same for any number of samples"
            )
        if any(x.kind == "raw" and x.value.short_of(inputs[x.name].shape) for x in program.inputs):
            given_so = {name: t[:1].expand(program.samples or 1, *t.shape[1:]) for name, t in inputs.items()}
            raise CaptureError(f"a sample of data: {found.misfit(given_so)}")
    return found


@generators_put_back()
def watch_sizes(job: Job, captured: Capture, sizes: Sequence[int]) -> None:
    """Raises CaptureError where forward does something else than the graph with so many samples, by names on fake tensors.

    For sizes that a plan chose: `capture` has looked at the job's own.
    """
    sizes = [size for size in sizes if size not in own_sizes(job)]
    model = job.model if isinstance(job.model, nn.Module) else captured.built
    if not sizes or model is None or captured.train.samples:
        return
    example = example_of(job, probes(job, 1)[0][0])
    names = _names(model)[0]
    with as_trained(model, job):
        watched(WithLoss(model, job, example, evaluate=False), job, example, names, sizes)(captured.train)


def _norm_order(model: nn.Module, layout: Layout, reached: Set[str]) -> tuple[str, ...]:
    """As named_parameters; where types are mixed, in the groups that clip_grad_norm_ makes of the gradients. What no gradient flows
    to has none, and the first gradient's type says which group comes first."""
    names = [name for name, _ in model.named_parameters()]
    trained = [name for name in names if name in reached]
    parts: list[torch.Tensor | None] = [torch.empty(0, dtype=layout[name][0]) for name in trained]
    groups = list(_group_tensors_by_device_and_dtype([parts], with_indices=True).values()) if parts else []
    if len(groups) < 2:
        return tuple(names)
    others = [name for name in names if name not in set(trained)]
    return (*(trained[i] for _, places in groups for i in places), *others)


def _names(model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Every name -> the first name of the same tensor; and the aliases alone."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in entries(model)}
    return names, {name: target for name, target in names.items() if name != target}
