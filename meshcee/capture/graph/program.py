"""A Program: a model's forward pass as data, node by node in eager execution order, already cut into blocks.

The idea: values are numbered (inputs first, then one per node), a node may only refer to smaller numbers, and blocks
never decrease along the nodes. So a run of blocks is a run of nodes, and nothing here needs a module, a name or code.

A run of blocks is a stage (`StageSpec`): what comes in, what goes out, and the callable that computes it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from meshcee.capture.graph.guards import ASSERT, ATTENTION
from meshcee.capture.graph.operators import Operator, find_operator
from meshcee.capture.graph.rules import checked_again
from meshcee.capture.graph.strides import contiguous
from meshcee.errors import GraphError, PlanError
from meshcee.files.layout import laid_out, placed

__all__ = [
    "VIEWS",
    "Batch",
    "Dim",
    "Free",
    "Input",
    "Node",
    "Program",
    "Ref",
    "StageSpec",
    "Value",
    "samples_of",
    "slice_program",
]


VIEWS = ("getitem", "aten.einsum.default", "aten.broadcast_tensors.default")  # whose schemas do not say so


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to value number `index` inside a node's arguments."""

    index: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A size that is `scale` times the number of samples of the micro-batch."""

    scale: int = 1


@dataclass(frozen=True, slots=True)
class Free:
    """A size that varies between micro-batches (a sequence's length), at most `limit`; `usual` is for costs.

    With `batch` all are per sample: the size is that much times the number of samples, at most. Under `least` the model
    takes another way than the graph. That is for the owner to ask, and is not sent.
    """

    limit: int
    usual: int
    batch: bool = False
    least: int = field(default=0, compare=False)


Dim = int | Batch | Free


@dataclass(frozen=True)
class Value:
    """What one value is: a tensor (dtype, shape), a Python integer (dtype None), or several outputs (`multiple`).

    `order` lists the dimensions from the slowest to the fastest in memory. On the wire a tensor has its dimensions in that
    order (`wire_shape`), so a transposed or channels-last activation is contiguous there. Gaps between rows travel beside
    it, with the tensor (`meshcee/stage/tensors.py`), and so do the strides of a gradient, which may be others.
    """

    name: str
    dtype: torch.dtype | None
    shape: tuple[Dim, ...] = ()
    order: tuple[int, ...] = ()
    requires_grad: bool = False
    multiple: bool = False

    @property
    def is_tensor(self) -> bool:
        return self.dtype is not None

    def sizes(self, batch: int, *, usual: bool = False) -> tuple[int, ...]:
        """The shape for this many samples; sizes that vary are at their limit, or as usual."""
        out = []
        for d in self.shape:
            if isinstance(d, Batch):
                out.append(d.scale * batch)
            elif isinstance(d, Free):
                out.append((d.usual if usual else d.limit) * (batch if d.batch else 1))
            else:
                out.append(d)
        return tuple(out)

    def wire_shape(self, batch: int) -> tuple[int, ...]:
        """As `sizes`, in the order in which the tensor travels."""
        sizes = self.sizes(batch)
        return tuple(sizes[d] for d in self.order)

    def nbytes(self, batch: int, *, usual: bool = False) -> int:
        """Bytes of the tensor for a micro-batch of this many samples, at most or as usual; integers cost none."""
        return 0 if self.dtype is None else math.prod(self.sizes(batch, usual=usual)) * self.dtype.itemsize

    def admits(self, tensor: torch.Tensor, *, on_wire: bool = False) -> bool:
        """Whether a tensor has this type and shape for some number of samples."""
        if tensor.dtype != self.dtype or tensor.dim() != len(self.shape):
            return False
        sizes = list(tensor.shape)
        if on_wire:
            sizes = [sizes[self.order.index(d)] for d in range(len(sizes))]
        samples = {size / d.scale for size, d in zip(sizes, self.shape) if isinstance(d, Batch) and d.scale}
        if len(samples) > 1 or any(s != int(s) for s in samples):
            return False
        batch = int(next(iter(samples), 1 << 32))
        fixed = all(size == d for size, d in zip(sizes, self.shape) if isinstance(d, int))
        free = zip(sizes, self.shape)
        fits = all(s <= d.limit * (batch if d.batch else 1) for s, d in free if isinstance(d, Free))
        return fixed and fits and not self.short_of(sizes)

    def short_of(self, sizes: Sequence[int]) -> int:
        """The length under which the model takes another way, if a tensor of these sizes is shorter; else 0."""
        each = zip(sizes, self.shape)
        return max((d.least for size, d in each if isinstance(d, Free) and size < d.least), default=0)

    def to_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        """With its dimensions in memory order; no copy."""
        return tensor.detach().permute(self.order)

    def from_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        inverse = [0] * len(self.order)
        for position, dim in enumerate(self.order):
            inverse[dim] = position
        return tensor.permute(inverse)


@dataclass(frozen=True)
class Input:
    """A value that a program does not compute: "raw" (fed by the owner), "parameter", "buffer" or "constant"."""

    kind: str
    value: Value
    trainable: bool = False
    mutated: bool = False  # a buffer that the forward pass changes (batch norm)
    persistent: bool = True  # part of the model's state_dict
    data: torch.Tensor | None = None  # of a constant
    strides: tuple[int, ...] = ()  # in memory, where they are not a contiguous tensor's (strides.py)
    offset: int = 0  # where it begins in the memory of eager code (`offset_of`)

    @property
    def name(self) -> str:
        return self.value.name

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as it lies in the memory of eager code; it travels and is kept as a contiguous one."""
        return laid_out(tensor, self.strides) if self.strides else tensor.contiguous()

    def placed(self, tensor: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
        """The same, and it begins as there."""
        return placed(tensor, self.strides or contiguous(tensor.shape), self.offset, copy=copy)


def samples_of(inputs: Iterable[Input]) -> int:
    """`Program.samples`, from its inputs: a size of samples is a number in a graph for one number alone."""
    sizes = (entry.value.shape[0] for entry in inputs if entry.kind == "raw" and entry.value.shape)
    return next((size for size in sizes if isinstance(size, int)), 0)


@dataclass(frozen=True)
class Node:
    """One operator call. Arguments hold Refs, numbers, strings of enumerations, dtypes, and lists of those."""

    operator: Operator
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Value
    block: int = 0
    no_grad: bool = False
    scope: str = ""  # the module it came from, for names of blocks
    at: str = ""  # the user's line, for errors; neither this nor the scope is sent

    @functools.cached_property
    def refs(self) -> tuple[int, ...]:
        """Numbers of the values that this node reads, in argument order."""
        found: list[int] = []
        collect_refs(self.args, found)
        collect_refs(tuple(self.kwargs.values()), found)
        return tuple(found)

    @functools.cached_property
    def writes(self) -> tuple[int, ...]:
        """Positions of arguments that this call writes.

        A norm only reads its statistics where its flag for them is the constant False. A flag that is computed may be True.
        """
        names = self.operator.argument_names
        if "running_var" in names:
            after = names.index("running_var") + 1  # `training` of batch norm, `use_input_stats` of instance norm
            if self.argument(names[after]) is False:
                return ()
        return self.operator.mutates

    def argument(self, name: str, default: Any = None) -> Any:
        """The argument of this name in the operator's schema; the default where it has none, or none is given."""
        names = self.operator.argument_names
        position = names.index(name) if name in names else -1
        return self.args[position] if 0 <= position < len(self.args) else self.kwargs.get(name, default)

    @functools.cached_property
    def call(self) -> Callable[..., Any]:
        """The operator's call, which raises GraphError where arguments break a rule for other sizes than were verified."""
        kinds, names = self.operator.argument_types, self.operator.argument_names
        given = [*zip(kinds, self.args), *((kinds[names.index(name)], value) for name, value in self.kwargs.items())]
        computed: list[int] = []
        collect_refs([argument for kind, argument in given if kind != "Tensor"], computed)
        return checked_again(self.operator, bool(computed))

    def run(self, values: Mapping[int, Any], device: torch.device) -> Any:
        """The call, with these values by number."""
        kwargs = {k: _linked(v, values, device) for k, v in self.kwargs.items()}
        return self.call(*(_linked(a, values, device) for a in self.args), **kwargs)


@dataclass(frozen=True)
class Program:
    """Inputs, nodes in execution order, outputs. `recomputed[i]` says that node i may run again in any stage.

    A training program has one output, the loss; an evaluation program has the loss and the model's output tensors.
    """

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    num_blocks: int
    recomputed: frozenset[int] = field(default=frozenset())  # value numbers

    def __post_init__(self) -> None:
        block = 0
        for i, node in enumerate(self.nodes):
            number = len(self.inputs) + i
            if any(not 0 <= r < number for r in node.refs):
                raise GraphError(f"node {i} refers to a value that does not exist yet")
            if not block <= node.block < self.num_blocks:
                raise GraphError(f"node {i}: its block {node.block} is out of order")
            block = node.block
        if not self.outputs or any(not 0 <= o < len(self.inputs) + len(self.nodes) for o in self.outputs):
            raise GraphError("the outputs of a program must be values of it")

    def value(self, index: int) -> Value:
        if index < len(self.inputs):
            return self.inputs[index].value
        return self.nodes[index - len(self.inputs)].value

    @property
    def uses_random(self) -> bool:
        return any(is_random(node) for node in self.nodes)

    @property
    def samples(self) -> int:
        """The one number of samples that the graph is for; 0 where it is for any."""
        return samples_of(self.inputs)

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """The outputs for these inputs, where they are: of the backward pass of a function, in which nothing is recorded."""
        values = dict(enumerate(inputs))
        device = next(value.device for value in inputs if isinstance(value, torch.Tensor))
        for number, node in enumerate(self.nodes, len(inputs)):
            values[number] = node.run(values, device)
        return [values[number] for number in self.outputs]

    def changing(self) -> Node | None:
        """The first node that draws, or writes what an input holds or may hold."""
        own: set[int] = set()  # values in memory of their own
        for number, node in enumerate(self.nodes, len(self.inputs)):
            names = node.operator.argument_names
            written = [node.argument(names[place]) for place in node.writes]
            if is_random(node) or any(not isinstance(w, Ref) or w.index not in own for w in written):
                return node
            shared = [node.argument(names[place]) for place in node.operator.aliases]
            if node.operator.name in VIEWS:
                shared = list(map(Ref, node.refs))
            if all(isinstance(s, Ref) and s.index in own for s in shared):
                own.add(number)
        return None

    def names(self, kind: str) -> tuple[str, ...]:
        return tuple(i.name for i in self.inputs if i.kind == kind)

    def slice(self, first: int, end: int) -> StageSpec:
        """Blocks [first, end) as a stage."""
        return slice_program(self, first, end)

    @property
    def asserted(self) -> list[str]:
        """The user's lines whose conditions it asserts, as far as they are known here."""
        count, found = len(self.inputs), []
        waiting = [n.refs[0] for n in self.nodes if n.operator.name == ASSERT]
        while waiting:
            node = self.nodes[waiting.pop() - count]
            if "and" in node.operator.name:
                waiting += node.refs
            else:
                found.append(node.at)
        return found[::-1]

    def unasserted(self) -> Program:
        """The same for numbers that mean nothing: no assert on values looks at them."""
        clone = find_operator("aten.clone.default")
        free = (replace(n, operator=clone, args=n.args[-1:]) if n.operator.name == ASSERT else n for n in self.nodes)
        return replace(self, nodes=tuple(free))


def collect_refs(argument: Any, into: list[int]) -> None:
    if isinstance(argument, Ref):
        into.append(argument.index)
    elif isinstance(argument, tuple | list):
        for item in argument:
            collect_refs(item, into)


def is_random(node: Node) -> bool:
    """Whether the node draws from the generator. Dropout that is off, or has probability 0, does not."""
    if not node.operator.random:
        return False
    given = node.argument
    if node.operator.name == ATTENTION:
        return bool(given("dropout_p", 0.0))
    names = node.operator.argument_names
    if "train" in names and ("p" in names or "dropout" in names):
        return bool(given("train", True)) and bool(given("p", given("dropout", 0.0)))
    if "training" in names:
        return bool(given("training", True))
    return True


@dataclasses.dataclass(frozen=True)
class StageSpec:
    """Blocks [first, end) of a program.

    The callable that `build` returns takes, flat and in this order, `raw_inputs`, `received`, `parameters`, `buffers`,
    and returns `sent` followed by `outputs` (present in the last stage only).
    """

    first: int
    end: int
    num_blocks: int
    raw_inputs: tuple[Value, ...]
    received: tuple[Value, ...]
    sent: tuple[Value, ...]
    outputs: tuple[Value, ...]
    parameters: tuple[str, ...]
    trainable: tuple[str, ...]
    buffers: tuple[str, ...]
    mutated: tuple[str, ...]  # buffers that the forward pass writes
    uses_random: bool
    later_random: bool  # whether a later stage draws: the generator's state must be handed on
    holders: Mapping[str, tuple[int, ...]]  # trainable parameter -> the blocks that use it, over the whole program
    inputs: tuple[tuple[int, Input], ...]  # (value number, input) of everything the nodes read
    nodes: tuple[tuple[int, Node], ...]
    sent_numbers: tuple[int, ...]
    output_numbers: tuple[int, ...]
    received_numbers: tuple[int, ...]

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.num_blocks

    def shared(self, stages: Sequence[tuple[int, int]]) -> dict[str, tuple[int, ...]]:
        """Trainable parameters that other stages hold too -> indices of all stages that do, ascending."""
        found = {}
        for name in self.trainable:
            at = tuple(i for i, (a, b) in enumerate(stages) if any(a <= block < b for block in self.holders[name]))
            if len(at) > 1:
                found[name] = at
        return found

    def state_names(self) -> tuple[str, ...]:
        return (*self.parameters, *self.buffers)

    def build(
        self, device: torch.device | str = "cpu", calls: Mapping[int, Callable[..., Any]] | None = None
    ) -> Callable[..., tuple[Any, ...]]:
        """The stage as a function, generated by torch.fx from operators that were looked up, with our own names.

        `calls` replaces the node of a value number by a function of the values that the node reads, each once.
        """
        device = torch.device(device)
        graph = fx.Graph()
        made: dict[int, Any] = {}
        root = torch.nn.Module()
        by_kind: dict[str, list[tuple[int, Input]]] = {k: [] for k in ("raw", "parameter", "buffer", "constant")}
        for number, entry in self.inputs:
            by_kind[entry.kind].append((number, entry))
        for i, (number, _) in enumerate(by_kind["raw"]):
            made[number] = graph.placeholder(f"raw{i}")
        for i, number in enumerate(self.received_numbers):
            made[number] = graph.placeholder(f"received{i}")
        for kind in ("parameter", "buffer"):
            for i, (number, _) in enumerate(by_kind[kind]):
                made[number] = graph.placeholder(f"{kind}{i}")
        for i, (number, entry) in enumerate(by_kind["constant"]):
            assert entry.data is not None
            root.register_buffer(f"constant{i}", entry.placed(entry.data.to(device)))
            made[number] = graph.get_attr(f"constant{i}")
        enabled = True
        for number, node in self.nodes:
            if node.no_grad == enabled:
                enabled = not node.no_grad
                graph.call_function(torch._C._set_grad_enabled, (enabled,))
            if calls is not None and number in calls:
                made[number] = graph.call_function(calls[number], tuple(made[r] for r in dict.fromkeys(node.refs)))
                continue
            programs = {k: v for k, v in node.kwargs.items() if isinstance(v, Program)}  # torch.fx would not take them
            made[number] = graph.call_function(
                functools.update_wrapper(functools.partial(node.call, **programs), node.call)
                if programs
                else node.call,
                tuple(_linked(a, made, device) for a in node.args),
                {k: _linked(v, made, device) for k, v in node.kwargs.items() if k not in programs},
            )
        if not enabled:
            graph.call_function(torch._C._set_grad_enabled, (True,))
        graph.output(tuple(made[n] for n in (*self.sent_numbers, *self.output_numbers)))
        module = fx.GraphModule(root, graph)
        graph.owning_module = None  # or the two would refer to each other, and constants outlive the stage
        return module


def _linked(argument: Any, made: Mapping[int, Any], device: torch.device) -> Any:
    if isinstance(argument, Ref):
        return made[argument.index]
    if isinstance(argument, list | tuple):
        return [_linked(a, made, device) for a in argument]
    if isinstance(argument, torch.device):
        return device  # a graph names no device of its own
    return argument


def slice_program(program: Program, first: int, end: int) -> StageSpec:
    if not 0 <= first < end <= program.num_blocks:
        raise PlanError(f"blocks [{first}, {end}) are not within 0..{program.num_blocks}")
    base = len(program.inputs)
    block = [*[-1] * base, *(n.block for n in program.nodes)]
    last = _last_blocks(program)
    last_stage = end == program.num_blocks

    def carried(cut: int) -> tuple[int, ...]:
        made = range(base, base + len(program.nodes))
        return tuple(n for n in made if block[n] < cut <= last[n] and n not in program.recomputed)

    received = carried(first)
    sent = () if last_stage else carried(end)
    outputs = program.outputs if last_stage else ()
    needed = set(outputs)
    run: list[int] = []
    for number in range(base + len(program.nodes) - 1, base - 1, -1):
        node = program.nodes[number - base]
        inside = first <= node.block < end
        # Inside the stage everything runs (random draws and writes included); before it, only what must be redone.
        if (inside and number not in program.recomputed) or (number in needed and number in program.recomputed):
            run.append(number)
            needed.update(node.refs)
    run.reverse()
    made_here = set(run) | set(received)
    assert all(n in made_here for n in sent), "liveness lost a value"
    inputs = tuple((i, program.inputs[i]) for i in range(base) if i in needed)
    holders: dict[str, set[int]] = {}
    for node in program.nodes:
        for r in node.refs:
            if r < base and program.inputs[r].trainable:
                holders.setdefault(program.inputs[r].name, set()).add(node.block)

    def of(kind: str) -> tuple[Input, ...]:
        return tuple(entry for _, entry in inputs if entry.kind == kind)

    return StageSpec(
        first=first,
        end=end,
        num_blocks=program.num_blocks,
        raw_inputs=tuple(entry.value for entry in of("raw")),
        received=tuple(program.value(n) for n in received),
        sent=tuple(program.value(n) for n in sent),
        outputs=tuple(program.value(n) for n in outputs),
        parameters=tuple(entry.name for entry in of("parameter")),
        trainable=tuple(entry.name for entry in of("parameter") if entry.trainable),
        buffers=tuple(entry.name for entry in of("buffer")),
        mutated=tuple(entry.name for entry in of("buffer") if entry.mutated),
        uses_random=any(is_random(program.nodes[n - base]) for n in run),
        later_random=any(is_random(n) for n in program.nodes if n.block >= end),
        holders={name: tuple(sorted(holders[name])) for entry in of("parameter") if (name := entry.name) in holders},
        inputs=inputs,
        nodes=tuple((n, program.nodes[n - base]) for n in run),
        sent_numbers=sent,
        output_numbers=outputs,
        received_numbers=received,
    )


def _last_blocks(program: Program) -> list[int]:
    """The last block that reads each value, through recomputed ones too; outputs are read by the last block."""
    base = len(program.inputs)
    last = [-1] * (base + len(program.nodes))
    for number in program.outputs:
        last[number] = program.num_blocks - 1
    for number in range(base + len(program.nodes) - 1, base - 1, -1):
        node = program.nodes[number - base]
        # A recomputed value runs where it is read, not in its own block.
        at = last[number] if number in program.recomputed else node.block
        for r in node.refs:
            last[r] = max(last[r], at)
    return last
