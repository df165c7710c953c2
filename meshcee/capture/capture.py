"""capture(job): the model of a job as programs, block costs and state.

The idea: the training graph decides what a block is. The evaluation graph of the same model is laid over the same
blocks, by the parameters that its nodes use. So one placement of the parameters serves both graphs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import structlog
import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype
from torch.utils._pytree import tree_leaves

from meshcee.capture.asserts import Asserts
from meshcee.capture.export import (
    EXAMPLES,
    Branch,
    Exported,
    Watch,
    asked_for_masks,
    causal_masks,
    explain,
    export_module,
    faithful,
    find_cuts,
    keeping,
    named_cuts,
    one_by_one,
    overlap,
    peers_default,
    positions,
    refuse_aliases,
    refuse_idle,
    refuse_overlaps,
    refuse_settings,
    refuse_shared,
    settled,
    sizes_that_vary,
)
from meshcee.capture.graph import Analysis, Batch, Dim, Input, Node, NodeRefused, Program, find_recomputed, teach_shapes
from meshcee.capture.graph.encoding import decode_program, encode_program
from meshcee.capture.initial_state import InitialState
from meshcee.capture.modules import refuse_modules, warn_of_eval
from meshcee.capture.outputs import check_terms, no_loss, put_together, taken_apart
from meshcee.capture.trial import as_trained, example_of, own_sizes, refuse_dtypes, refuse_failing, refuse_types
from meshcee.capture.unread import ask_others, refuse_told_beside, unread
from meshcee.config import Limits
from meshcee.eager import HALVES, entries, in_full, original_of, put_others
from meshcee.errors import CaptureError, GraphError, MeshceeError, UsageError
from meshcee.events import Event
from meshcee.figures import BlockCost
from meshcee.files.tensor_files import Checkpoint, Layout, OnDemand
from meshcee.job import Job, check_is_job, parts_of
from meshcee.reach import Remembered
from meshcee.sampling import data as data_rules
from meshcee.sampling import few_of, generators_put_back, inputs_of_one, leaving_nothing, look_anew, probes

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


class _WithLoss(nn.Module):
    """The model and the loss as one module over flat inputs; bf16 models get their floating inputs in bf16."""

    def __init__(self, model: nn.Module, job: Job, example: tuple[Any, Any], evaluate: bool) -> None:
        super().__init__()
        self.model = model
        self._job = job
        self._example = example
        self.evaluates = evaluate
        self._places = {id(own := original_of(tensor)): (own, name) for name, tensor in entries(model)}
        self._real = {} if job.weights else dict(model.named_buffers())
        self.rebound: tuple[str, ...] = ()  # buffers that forward assigns
        # An object: torch.export puts attributes back as they were.
        self.seen = types.SimpleNamespace(form=None, terms=())

    def forward(self, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, y = self._example
        tensors = dict(zip(data_rules.inputs_of(self._example), flat, strict=True))
        if self._job.precision == "bf16":
            tensors = {
                n: t.to(torch.bfloat16) if n.split(".")[0] == "x" and t.is_floating_point() else t
                for n, t in tensors.items()
            }
        told = faithful(self.model, self._replaced(), evaluate=self.evaluates)
        masks, asserts = causal_masks(self.model, self._real), Asserts()
        asked, lists = asserts.answered(), one_by_one()
        with (
            keeping(self, self.rebound),
            sizes_that_vary(),
            asked,
            lists,
            told,  # the first to hear of a call, as it looks who calls
            masks,
            _as_in_eager(),
            self._job.autocast(),
        ):
            output = data_rules.call_model(self.model, data_rules.rebuild(x, "x", tensors))
            loss, terms = parts_of(self._job.loss(output, data_rules.rebuild(y, "y", tensors)))
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            raise CaptureError(f"loss(output, target) {no_loss(loss, output, x)}")
        if not self.evaluates:
            self.seen.terms = check_terms(terms)
            return (asserts.upon(loss), *terms.values())
        found: list[torch.Tensor] = []
        self.seen.form = taken_apart(output, found)
        return (asserts.upon(loss), *found)

    def _replaced(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """The model's own tensors by id, which lists and closures hold, with what stands in their places while it is traced.

        Where forward assigns, such a list goes on to hold the first tensor.
        """
        now = {name: tensor for name, tensor in entries(self.model) if f"model.{name}" not in self.rebound}
        for tensor, name in self._places.values():
            for key, value in vars(tensor).items() if name in now else ():  # marks of the user's, as p.decays
                vars(now[name]).setdefault(key, value)
        held = ((key, tensor, name) for key, (tensor, name) in self._places.items() if name in now)
        return {key: (tensor, now[name]) for key, tensor, name in held if now[name] is not tensor}


@contextlib.contextmanager
def _as_in_eager() -> Iterator[None]:
    """Models must not see that they are exported: some then take another path (an explicit mask for a causal flag).

    Nor that they are evaluated: torch's encoder has fused kernels for that, where no gradient is wanted.
    """
    flags = {
        f: getattr(torch.compiler, f)
        for f in ("_is_exporting_flag", "_is_compiling_flag")
        if hasattr(torch.compiler, f)
    }
    for flag in flags:
        setattr(torch.compiler, flag, False)
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for flag, value in flags.items():
            setattr(torch.compiler, flag, value)


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
def capture(job: Job, *, evaluate: bool | None = None) -> Capture:
    """Export, cut and price the job's model. `evaluate` asks for the evaluation program too (default: if eval_data)."""
    check_is_job(job)
    look_anew(job)
    refuse_settings(job.optimizer)
    job.optimizer.build({})  # or torch refuses an option once all else is done
    try:
        with leaving_nothing(job):
            return _capture(job, evaluate)
    except (CaptureError, UsageError) as error:
        from meshcee.sampling.odd import odd_one

        if odd := odd_one(job, _PROBED):  # which the example may be
            error.args = (f"{error}; besides, {odd}", *error.args[1:])
        raise


def _capture(job: Job, evaluate: bool | None) -> Capture:
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
        raise CaptureError(f"{sparse!r} is sparse, and graphs have dense tensors only: register {sparse}.to_dense()")
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
    example = example_of(job, samples[sizes.index(max(sizes)) if varying else 0])
    ask_others(job, example[1])
    if clash := min(data_rules.inputs_of(example).keys() & layout.keys(), default=None):
        raise CaptureError(
            f"{clash!r} of the model has the name of an input, as x and y are what data gives: rename {clash.split('.')[0]!r} in "
            "the model"
        )
    most = job.micro_batch_size or job.batch_size
    if recorder is None and job.precision != "bf16":
        refuse_types(model, job, example)
    try:
        with as_trained(model, job) as before:
            rounded = _rounded(model, names, layout)
            train_wrap = _WithLoss(model, job, example, evaluate=False)
            watch = _watched(train_wrap, job, example, names, own_sizes(job))
            with asked_for_masks() as asked:
                exported = _export(train_wrap, example, names, varying, most)
            refuse_idle(asked, probed[0])
            branches = [exported.branches]
            _refuse_branches(exported.branches, probed)
            program, analysis = _cut(exported, job.cuts)
            before.put_back()
            _accepted(program)
            changed = {x.name for x in program.inputs if x.trainable or x.mutated}
            own = [(n, t) for n, t in (*tensors.items(), *(recorder.views if recorder else ())) if n in changed]
            refuse_aliases(exported.constants, own)
            watch(program)
            refuse_overlaps(tensors, changed)
            evaluation: Program | None = None
            form: Any = None
            if evaluate if evaluate is not None else job.eval_data is not None:
                from meshcee.capture.evaluated import Evaluated

                evaluated = Evaluated(model)
                with evaluated.looked_at():
                    eval_wrap = _WithLoss(model, job, example, evaluate=True)
                    eval_wrap.rebound = train_wrap.rebound
                    with contextlib.suppress(Exception):  # whatever the user's code raises: export says more
                        looked_at = _WithLoss(model, job, example, evaluate=True)
                        eval_wrap.rebound = _watch(looked_at, job, example, names).assigned()
                    exported = _export(eval_wrap, example, names, varying, most)
                    branches.append(exported.branches)
                    evaluation = _overlay(exported, program)
                    refuse_aliases(exported.constants, own)
                    _accepted(evaluation)
                    form, inputs = eval_wrap.seen.form, data_rules.inputs_of(example)
                    evaluated.compare(lambda: eval_wrap(*inputs.values()), evaluation, inputs, names)
            programs = (program, evaluation) if evaluation else (program,)
            refuse_shared(programs, data_rules.inputs_of(example), _held(job, samples[0]))
    except CaptureError:
        if recorder is None and job.precision != "bf16":
            refuse_failing(model, job, samples[0])
        raise
    refuse_told_beside(job, samples[-1], _PROBED, changed)
    reached = analysis.reached(program.nodes, program.outputs[0])
    found = Capture(
        train=program,
        evaluate=evaluation,
        costs=_costs(program, analysis),
        state=state,
        layout=layout,
        aliases=aliases,
        param_order=_norm_order(model, layout, {x.name for n, x in enumerate(program.inputs) if n in reached}),
        persistent=tuple(n for n in layout if n in persistent),
        output_form=form,
        terms=train_wrap.seen.terms,
        took_s=time.perf_counter() - start_s,
        rounded=rounded,
        built=None if recorder is None else model,
        branches=tuple(branches),
    )
    for inputs in probed:
        if missing := [x.name for x in program.inputs if x.kind == "raw" and x.name not in inputs]:
            raise UsageError(
                f"Job.collate makes {', '.join(inputs)} of one sample, and {missing[0]} of {EXAMPLES}: let it give the same for "
                "any number of samples"
            )
        if any(x.kind == "raw" and x.value.short_of(inputs[x.name].shape) for x in program.inputs):
            raise CaptureError(f"a sample of data: {found.misfit(inputs)}")
    return found


@generators_put_back()
def watch_sizes(job: Job, captured: Capture, sizes: Sequence[int]) -> None:
    """Raises CaptureError where forward does something else than the graph with so many samples, by names on fake tensors.

    For sizes that a plan chose: `capture` has looked at the job's own.
    """
    sizes = [size for size in sizes if size not in own_sizes(job)]
    model = job.model if isinstance(job.model, nn.Module) else captured.built
    if not sizes or model is None:
        return
    example = example_of(job, probes(job, 1)[0][0])
    names = _names(model)[0]
    with as_trained(model, job):
        _watched(_WithLoss(model, job, example, evaluate=False), job, example, names, sizes)(captured.train)


def _watch(wrap: _WithLoss, job: Job, example: tuple[Any, Any], names: Mapping[str, str]) -> Watch:
    return Watch(
        wrap,
        data_rules.inputs_of(example),
        lambda path: names[path.removeprefix("model.")],
        lambda: Remembered(wrap.model, job.loss),
        EXAMPLES,
    )


def _watched(
    wrap: _WithLoss, job: Job, example: tuple[Any, Any], names: Mapping[str, str], sizes: Sequence[int]
) -> Callable[[Program], None]:
    """Has forward called before export, and returns the check of what export makes of it, for so many samples.

    What is found before is told after, since export says more of what it cannot do at all.
    """
    watch = _watch(wrap, job, example, names)
    found: Exception | None = None
    try:
        wrap.rebound = watch.eager()
        if wrap.rebound:
            watch.eager()
    except Exception as error:  # torch and the user's code raise what they like
        found = error

    def check(program: Program) -> None:
        if _by_value(found):  # an assertion on values, which export can leave out and fake tensors cannot answer
            return
        if found is not None:
            raise found if isinstance(found, MeshceeError) else explain(found) from found
        watch.compare(program, sizes)

    return check


def _held(job: Job, sample: Any) -> set[str]:
    """Inputs that `collate` gives as views of what outlives a micro-batch: of its samples, or of what it holds itself."""
    given: list[torch.Tensor] = []

    def noted(rows: list[Any]) -> Any:
        parts = tree_leaves(rows)
        given.extend(torch.as_tensor(part) for part in parts if hasattr(part, "__array__"))  # tensors and arrays
        assert job.collate is not None
        return job.collate(rows)

    found = set()
    for count in (1, EXAMPLES) if job.collate else ():
        one, again = (
            data_rules.inputs_of(few_of(dataclasses.replace(job, collate=noted), sample, count)) for _ in range(2)
        )
        found |= {
            name for name, tensor in one.items() if any(overlap(tensor, other) for other in (again[name], *given))
        }
    return found


def _by_value(error: BaseException | None) -> bool:
    """Whether this came of a question that only real values answer."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # and sympy: peers need neither

    while error is not None and not isinstance(error, GuardOnDataDependentSymNode | DynamicOutputShapeException):
        error = error.__cause__
    return error is not None


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


def _rounded(model: nn.Module, names: Mapping[str, str], layout: Layout) -> dict[str, torch.dtype]:
    """Buffers of the model, as it is trained, that have another type than in `layout`."""
    buffers = {names[name]: buffer.dtype for name, buffer in model.named_buffers(remove_duplicate=False)}
    trained = {names[name] for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: dtype for name, dtype in buffers.items() if name not in trained and dtype != layout[name][0]}


def _names(model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Every name -> the first name of the same tensor; and the aliases alone."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in entries(model)}
    return names, {name: target for name, target in names.items() if name != target}


def _export(
    wrap: _WithLoss, example: tuple[Any, Any], names: Mapping[str, str], varying: Set[tuple[str, int]], most: int
) -> Exported:
    def name_of(target: str) -> str:
        return names[target.removeprefix("model.")]

    return export_module(wrap, data_rules.inputs_of(example), name_of, varying, most, evaluates=wrap.evaluates)


def _refuse_branches(branches: Sequence[Branch], probed: Iterable[Mapping[str, torch.Tensor]]) -> None:
    """Raise CaptureError where a sample takes another way than the example, as a branch on its length says."""
    if said := next(filter(None, (branch.misfit(inputs) for inputs in probed for branch in branches)), None):
        raise CaptureError(f"a sample of data: {said}")


def _cut(exported: Exported, cuts: Sequence[str]) -> tuple[Program, Analysis]:
    inputs, nodes, outputs, analysis = settled(exported)
    base = len(inputs)
    if not analysis.requires_grad[outputs[0]]:
        raise CaptureError("the loss depends on no trainable parameter; set requires_grad on what is to be trained")
    nodes = [
        dataclasses.replace(n, value=dataclasses.replace(n.value, requires_grad=True))
        if analysis.requires_grad[base + i] and n.value.is_tensor
        else n
        for i, n in enumerate(nodes)
    ]
    recomputed = find_recomputed(inputs, nodes, analysis)
    live = positions(inputs, nodes, outputs, analysis, recomputed)
    chosen = named_cuts(nodes, live, cuts) if cuts else find_cuts(inputs, nodes, live, _work(inputs, nodes, analysis))
    block, marks = 0, set(chosen)
    placed: list[Node] = []
    for i, node in enumerate(nodes):
        block += i in marks
        placed.append(dataclasses.replace(node, block=block))
    return Program(tuple(inputs), tuple(placed), tuple(outputs), len(chosen) + 1, recomputed), analysis


def _accepted(program: Program) -> None:
    """What every peer will ask of the graph is asked here, where the user's line is known."""
    graph = encode_program(program)
    try:
        with peers_default():
            decode_program(graph, Limits(graph_bytes=max(len(graph), 1)))
    except NodeRefused as error:
        node = program.nodes[error.position]
        set_here = torch.get_default_dtype() != torch.float32
        advice = (
            "give it a dtype, as peers do not know of torch.set_default_dtype()" if set_here else "write it otherwise"
        )
        raise CaptureError(
            f"operation {node.operator.name}{node.at} cannot run on a peer: {error.why}; {advice}"
        ) from error
    except GraphError as error:
        raise CaptureError(f"the model's graph cannot run on a peer: {error}") from error


def _work(inputs: Sequence[Input], nodes: Sequence[Node], analysis: Analysis) -> list[float]:
    """A node's share of the FLOPs plus its share of the parameter bytes, which count wherever they are used."""
    flops = sum(analysis.flops) or 1.0
    parameters = [0.0] * len(nodes)
    for number, entry in enumerate(inputs):
        if entry.kind in ("parameter", "buffer"):
            for position in analysis.users[number]:
                parameters[position] += entry.value.nbytes(1)
    total = sum(parameters) or 1.0
    return [f / flops + p / total for f, p in zip(analysis.flops, parameters)]


def _overlay(exported: Exported, train: Program) -> Program:
    """The evaluation program on the training program's blocks."""
    holds: dict[str, list[int]] = {}
    for node in train.nodes:
        for r in node.refs:
            if r < len(train.inputs) and train.inputs[r].kind in ("parameter", "buffer"):
                blocks = holds.setdefault(train.inputs[r].name, [])
                if not blocks or blocks[-1] != node.block:
                    blocks.append(node.block)
    written = {x.name for x in train.inputs if x.mutated}
    changed = written | {x.name for x in train.inputs if x.trainable}
    own, nodes, outputs, analysis = settled(exported, changed)
    for number, position in analysis.written.items():
        if own[number].mutated:
            raise CaptureError(
                f"model.eval() changes {own[number].name!r}{nodes[position].at}, and training would go on with that; change it "
                "only `if self.training`, or leave out eval_data"
            )
    recomputed = find_recomputed([dataclasses.replace(x, mutated=x.name in written) for x in own], nodes, analysis)
    current, base = 0, len(own)
    placed = []
    for i, node in enumerate(nodes):
        if base + i not in recomputed:
            held = [own[r].name for r in node.refs if r < base and own[r].kind in ("parameter", "buffer")]
            for name in held:
                current = next((b for b in holds.get(name, ()) if b >= current), train.num_blocks)
                if current == train.num_blocks:
                    raise _misplaced(name, node, name in holds)
            for name in changed.intersection(held):  # up to date only in the stages that hold it
                if current not in holds[name]:
                    raise _misplaced(name, node, True)
        # As in training: it says which activations a codec may touch. Nothing is differentiated in an evaluation.
        value = dataclasses.replace(node.value, requires_grad=analysis.requires_grad[base + i] and node.value.is_tensor)
        placed.append(dataclasses.replace(node, block=current, no_grad=False, value=value))
    kinds = {x.name: x.kind for x in train.inputs}  # a parameter that training writes in place is a buffer there
    inputs = tuple(dataclasses.replace(x, trainable=False, kind=kinds.get(x.name, x.kind)) for x in own)
    return Program(inputs, tuple(placed), tuple(outputs), train.num_blocks, recomputed)


def _misplaced(name: str, node: Node, trained: bool) -> CaptureError:
    how = "in another order than model.train()" if trained else "which model.train() does not"
    return CaptureError(f"model.eval() uses {name!r}{node.at}, {how}; leave out eval_data")


def _costs(program: Program, analysis: Analysis) -> tuple[BlockCost, ...]:
    base = len(program.inputs)
    costs = []
    seen: set[int] = set()
    for b in range(program.num_blocks):
        spec = program.slice(b, b + 1)
        inside = [i for i, n in enumerate(program.nodes) if n.block == b]
        own = []
        for number in dict.fromkeys(r for i in inside for r in program.nodes[i].refs):
            if number < base and program.inputs[number].kind in ("parameter", "buffer") and number not in seen:
                seen.add(number)
                own.append(program.inputs[number])
        costs.append(
            BlockCost(
                name=_block_name([program.nodes[i] for i in inside], base),
                flops=sum(analysis.flops[i] for i in inside),
                parameter_bytes=sum(p.value.nbytes(1) for p in own),
                trainable_bytes=sum(p.value.nbytes(1) for p in own if p.trainable),
                activation_bytes=int(sum(analysis.saved_bytes[i] for i in inside)),
                boundary_bytes=sum(v.nbytes(1, usual=True) for v in spec.sent),
                boundary_grad_bytes=sum(v.nbytes(1, usual=True) for v in spec.sent if v.requires_grad),
                parameters=tuple(spec.parameters),
                full_bytes=sum(p.value.nbytes(1) for p in own if p.trainable and p.value.dtype == torch.float32),
            )
        )
    return tuple(costs)


def _block_name(nodes: Sequence[Node], base: int) -> str:
    """The modules a block covers: their common path, or "first..last"; those with parameters speak for the rest."""
    weighted = [n for n in nodes if any(r < base for r in n.refs)]
    paths = [p for n in (weighted or nodes) if (p := n.scope.split("@")[0])]
    if not paths:
        return "loss"
    split = [p.split(".") for p in paths]
    shared = []
    for level in zip(*split):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    # "model" or "model.layers" alone would say nothing: then the ends of the range do.
    if shared and (len(set(paths)) == 1 or any(part.isdigit() for part in shared)):
        return ".".join(shared)
    skip = max(len(shared) - 1, 0)
    return f"{paths[0]}..{'.'.join(split[-1][skip:])}"
