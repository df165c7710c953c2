"""A Program: a model's forward pass as data, node by node in eager execution order, already cut into blocks.

The idea: values are numbered (inputs first, then one per node), a node may only refer to smaller numbers, and blocks
never decrease along the nodes. So a run of blocks is a run of nodes, and nothing here needs a module, a name or code.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from meshcee.capture.operators import Operator
from meshcee.errors import GraphError
from meshcee.strides import laid_out

if TYPE_CHECKING:
    from meshcee.capture.slicing import StageSpec

__all__ = ["Batch", "Dim", "Free", "Input", "Node", "Program", "Ref", "Value"]


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

    With `batch` both are per sample: the size is that much times the number of samples, at most.
    """

    limit: int
    usual: int
    batch: bool = False


Dim = int | Batch | Free


@dataclass(frozen=True)
class Value:
    """What one value is: a tensor (dtype, shape), a Python integer (dtype None), or several outputs (`multiple`).

    `order` lists the dimensions from the slowest to the fastest in memory. On the wire a tensor has its dimensions in that
    order (`wire_shape`), so a transposed or channels-last activation is contiguous there. Gaps between rows travel beside
    it, with the tensor (`peers/tensors.py`), and so do the strides of a gradient, which may be others.
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
        return fixed and all(s <= d.limit * (batch if d.batch else 1) for s, d in free if isinstance(d, Free))

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
    strides: tuple[int, ...] = ()  # in memory, where they are not those of a contiguous tensor (meshcee/strides.py)

    @property
    def name(self) -> str:
        return self.value.name

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as it lies in the memory of eager code; it travels and is kept as a contiguous one."""
        return laid_out(tensor, self.strides) if self.strides else tensor.contiguous()


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

    def names(self, kind: str) -> tuple[str, ...]:
        return tuple(i.name for i in self.inputs if i.kind == kind)

    def slice(self, first: int, end: int) -> StageSpec:
        """Blocks [first, end) as a stage."""
        from meshcee.capture.slicing import slice_program

        return slice_program(self, first, end)


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
    names = node.operator.argument_names

    def given(name: str, default: Any) -> Any:
        position = names.index(name) if name in names else -1
        if 0 <= position < len(node.args):
            return node.args[position]
        return node.kwargs.get(name, default)

    if node.operator.name == "aten.scaled_dot_product_attention.default":
        return bool(given("dropout_p", 0.0))
    if "train" in names and ("p" in names or "dropout" in names):
        return bool(given("train", True)) and bool(given("p", given("dropout", 0.0)))
    if "training" in names:
        return bool(given("training", True))
    return True
