"""The programs of a job's model: for any number of samples, or for the one of its micro-batches.

The idea: a graph for any number is tried first. What forward does for one number alone, such as a loop over the samples or a hidden
state of 32 rows, gives a graph for that number.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.utils._pytree import tree_leaves

from meshcee.capture.costs import work_of
from meshcee.capture.export import (
    EXAMPLES,
    Branch,
    Exported,
    Watch,
    asked_for_masks,
    explain,
    export_module,
    find_cuts,
    named_cuts,
    overlap,
    peers_default,
    positions,
    refuse_aliases,
    refuse_idle,
    refuse_overlaps,
    refuse_shared,
    settled,
)
from meshcee.capture.graph import Analysis, Node, NodeRefused, Program, find_recomputed
from meshcee.capture.graph.encoding import decode_program, encode_program
from meshcee.capture.trial import as_trained, own_sizes, refuse_failing
from meshcee.capture.with_loss import WithLoss
from meshcee.config import Limits
from meshcee.errors import CaptureError, GraphError, MeshceeError
from meshcee.files.tensor_files import Layout
from meshcee.job import Job
from meshcee.reach import Remembered
from meshcee.sampling import data as data_rules
from meshcee.sampling import few_of

__all__ = ["Evaluation", "Given", "Programs", "Training", "watched"]

T = TypeVar("T")
_MOST_ADVISED = 64  # samples: a graph for one number may have a node for each


@dataclasses.dataclass(frozen=True)
class Given:
    """A job's model and samples, as every try has them."""

    job: Job
    model: nn.Module
    is_built: bool  # by the job's function, with stand-ins for large tensors
    names: Mapping[str, str]  # of parameters and buffers -> the first name of the same tensor
    layout: Layout
    tensors: Mapping[str, torch.Tensor]
    views: Sequence[tuple[str, torch.Tensor]]  # of these tensors, outside of the module's own lists
    first: Any  # a sample
    largest: Any
    probed: Sequence[Mapping[str, torch.Tensor]]  # raw inputs of single samples
    varying: Set[tuple[str, int]]

    def example(self, count: int) -> tuple[Any, Any]:
        """A small micro-batch, of one sample several times."""
        return few_of(self.job, self.largest, count)


@dataclasses.dataclass(frozen=True)
class Training:
    """The program of training."""

    program: Program
    analysis: Analysis
    branches: tuple[Branch, ...]
    rebound: tuple[str, ...]  # buffers that forward assigns
    rounded: Mapping[str, torch.dtype]  # buffers, as the plain loop has them
    terms: tuple[str, ...]

    @property
    def changed(self) -> set[str]:
        """Names of the state that training changes."""
        return {x.name for x in self.program.inputs if x.trainable or x.mutated}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The program of evaluation."""

    program: Program
    branches: tuple[Branch, ...]
    form: Any  # of what the outputs behind the loss are put together to


class Programs:
    """Of a model: each for any number of samples, or else for that of the job's micro-batches."""

    def __init__(self, given: Given) -> None:
        self._given = given

    def training(self) -> Training:
        """Raises CaptureError where there is no such program."""
        return self._either(self._training)

    def evaluation(self, training: Training, *, predicts: bool = False) -> Evaluation:
        """On the blocks of training; where it `predicts`, without the loss, which may hold for another number of samples."""
        return self._either(lambda samples: self._evaluation(samples, training, predicts))

    def _either(self, trace: Callable[[int], T]) -> T:
        """`trace(0)` is for any number of samples. Where a graph would be there for one number, and the job says none, the error
        says so."""
        job = self._given.job
        try:
            return trace(0)
        except CaptureError as error:
            first = error
        if not self._given.is_built and job.precision != "bf16":
            try:
                refuse_failing(self._given.model, job, self._given.first)
            except CaptureError as error:
                first = error
        samples = job.micro_batch_size or next(
            n for n in range(min(job.batch_size, _MOST_ADVISED), 0, -1) if not job.batch_size % n
        )
        try:
            found = trace(samples)
        except CaptureError:
            if job.micro_batch_size is not None:
                raise
            raise first from first.__cause__
        if job.micro_batch_size is not None:
            return found
        raise CaptureError(
            f"{first}; or say how many samples a micro-batch has, as in Job(micro_batch_size={samples}): the graph is then for "
            "so many alone"
        ) from first

    def _training(self, samples: int) -> Training:
        given, job = self._given, self._given.job
        example = given.example(samples or EXAMPLES)
        with as_trained(given.model, job) as before:
            wrap = WithLoss(given.model, job, example, evaluate=False)
            watch = watched(wrap, job, example, given.names, [] if samples else own_sizes(job))
            rounded = _rounded(given)
            with asked_for_masks() as asked:
                exported = self._export(wrap, example, samples)
            asked.put(exported)
            refuse_idle(asked, given.probed[0])
            _refuse_branches(exported.branches, given.probed)
            program, analysis = _cut(exported, job.cuts)
            before.put_back()
            _accepted(program)
            found = Training(program, analysis, exported.branches, wrap.rebound, rounded, wrap.seen.terms)
            self._refuse_aliases(exported, found.changed)
            watch(program)
            refuse_overlaps(given.tensors, found.changed)
            refuse_shared((program,), data_rules.inputs_of(example), self._held())
        return found

    def _evaluation(self, samples: int, training: Training, predicts: bool) -> Evaluation:
        from meshcee.capture.evaluated import Evaluated

        given, job = self._given, self._given.job
        example = given.example(samples or EXAMPLES)
        with as_trained(given.model, job):
            evaluated = Evaluated(given.model)
            with evaluated.looked_at():
                wrap = WithLoss(given.model, job, example, evaluate=True, predicts=predicts)
                wrap.rebound = training.rebound
                with contextlib.suppress(Exception):  # whatever the user's code raises: export says more
                    looked_at = WithLoss(given.model, job, example, evaluate=True, predicts=predicts)
                    wrap.rebound = _watch(looked_at, job, example, given.names).assigned()
                with asked_for_masks() as asked:
                    exported = self._export(wrap, example, samples)
                asked.put(exported)
                program = _overlay(exported, training.program)
                self._refuse_aliases(exported, training.changed)
                _accepted(program)
                form, inputs = wrap.seen.form, data_rules.inputs_of(example)
                evaluated.compare(lambda: wrap(*inputs.values()), program, inputs, given.names)
            refuse_shared((program,), data_rules.inputs_of(example), self._held())
        return Evaluation(program, exported.branches, form)

    def _export(self, wrap: WithLoss, example: tuple[Any, Any], samples: int) -> Exported:
        job, names = self._given.job, self._given.names

        def name_of(target: str) -> str:
            return names[target.removeprefix("model.")]

        most = samples or job.micro_batch_size or job.batch_size
        inputs, varying = data_rules.inputs_of(example), self._given.varying
        return export_module(wrap, inputs, name_of, varying, most, evaluates=wrap.evaluates, fixed=samples > 0)

    def _refuse_aliases(self, exported: Exported, changed: Set[str]) -> None:
        own = (*self._given.tensors.items(), *self._given.views)
        refuse_aliases(exported.constants, [(name, tensor) for name, tensor in own if name in changed])

    def _held(self) -> set[str]:
        """Inputs that `collate` gives as views of what outlives a micro-batch: of its samples, or of what it holds itself."""
        job, given = self._given.job, list[torch.Tensor]()

        def noted(rows: list[Any]) -> Any:
            parts = tree_leaves(rows)
            given.extend(torch.as_tensor(part) for part in parts if hasattr(part, "__array__"))  # tensors and arrays
            assert job.collate is not None
            return job.collate(rows)

        found = set()
        for count in (1, EXAMPLES) if job.collate else ():
            one, again = (
                data_rules.inputs_of(few_of(dataclasses.replace(job, collate=noted), self._given.first, count))
                for _ in range(2)
            )
            found |= {
                name for name, tensor in one.items() if any(overlap(tensor, other) for other in (again[name], *given))
            }
        return found


def _watch(wrap: WithLoss, job: Job, example: tuple[Any, Any], names: Mapping[str, str]) -> Watch:
    inputs = data_rules.inputs_of(example)
    return Watch(
        wrap,
        inputs,
        lambda path: names[path.removeprefix("model.")],
        lambda: Remembered(wrap.model, job.loss),
        len(next(iter(inputs.values()))),
    )


def watched(
    wrap: WithLoss, job: Job, example: tuple[Any, Any], names: Mapping[str, str], sizes: Sequence[int]
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


def _by_value(error: BaseException | None) -> bool:
    """Whether this came of a question that only real values answer."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # and sympy: peers need neither

    while error is not None and not isinstance(error, GuardOnDataDependentSymNode | DynamicOutputShapeException):
        error = error.__cause__
    return error is not None


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
    chosen = named_cuts(nodes, live, cuts) if cuts else find_cuts(inputs, nodes, live, work_of(inputs, nodes, analysis))
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


def _rounded(given: Given) -> dict[str, torch.dtype]:
    """Buffers of the model, as it is trained, that have another type than in `layout`."""
    model, names, layout = given.model, given.names, given.layout
    buffers = {names[name]: buffer.dtype for name, buffer in model.named_buffers(remove_duplicate=False)}
    trained = {names[name] for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: dtype for name, dtype in buffers.items() if name not in trained and dtype != layout[name][0]}
