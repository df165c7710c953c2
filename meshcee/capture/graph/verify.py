"""Whether a program from the network means what it says: one pass over meta tensors, which cost no memory.

The idea: a receiver sizes its buffers by the shapes that a program declares, and its device runs what the nodes compute.
So the two must agree, and every tensor on the way must be of bearable size, before a single byte is allocated for it.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch

from meshcee.capture.graph.analysis import quiet, resolve
from meshcee.capture.graph.program import Free, Node, Program, Value
from meshcee.errors import GraphError

__all__ = ["MAX_ELEMENTS", "prepare", "verify_program"]

MAX_ELEMENTS = 1 << 40  # of one tensor at the hint below
MAX_PARTS = 4096  # outputs of one node
MAX_RECURRENT_LAYERS = 256
_HINT = 2  # samples
_META = torch.device("meta")


def prepare() -> None:
    """Import what kernels for the meta device import on first use, 80 MiB of modules in seconds: to be called by whoever
    will read strangers' graphs, before the first comes."""
    importlib.import_module("torch._dynamo")


def verify_program(program: Program) -> None:
    """Raises GraphError where a node computes something else than its declared value, or too much."""
    with quiet(), torch.no_grad():
        values: list[Any] = [
            entry.laid_out(torch.empty(entry.value.sizes(_HINT), dtype=entry.value.dtype, device=_META))
            for entry in program.inputs
        ]
        for i, node in enumerate(program.nodes):
            _check_parts(node, values)
            try:
                out = _called(program, node, values)
            except Exception as error:  # whatever a kernel says of nonsense
                raise GraphError(f"node {i} ({node.operator.name}) cannot run: {type(error).__name__}") from error
            _check_value(i, node.value, out)
            values.append(out)


def _called(program: Program, node: Node, values: list[Any]) -> Any:
    """As `_call`. Kernels for the meta device choose other strides than a device's: a view that these do not allow is tried on
    tensors that lie in memory as the program says."""
    try:
        return _call(node, values)
    except RuntimeError:
        if not node.operator.aliases:
            raise
    laid = list(values)
    for number in node.refs:
        order = program.value(number).order
        if isinstance(laid[number], torch.Tensor) and sorted(order) == list(range(laid[number].dim())):
            inverse = [order.index(d) for d in range(len(order))]
            laid[number] = laid[number].permute(order).contiguous().permute(inverse)
    return _call(node, laid)


def _call(node: Node, values: list[Any]) -> Any:
    """The node on the meta device: what it would make, without making it."""
    operator = node.operator
    args = [_META if isinstance(a, torch.device) else resolve(a, values) for a in node.args]
    kwargs = {k: resolve(v, values) for k, v in node.kwargs.items()}
    if "Device" in operator.argument_types and operator.argument_types.index("Device") >= len(args):
        kwargs[operator.argument_names[operator.argument_types.index("Device")]] = _META
    elif operator.is_aten and not any(isinstance(values[r], torch.Tensor) for r in node.refs):
        raise ValueError("makes a tensor of nothing on a device of its own choice")
    return operator.call(*args, **kwargs)


def _check_value(i: int, value: Value, out: Any) -> None:
    tensors = out if isinstance(out, list | tuple) else [out]
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and math.prod(max(s, 1) for s in tensor.shape) > MAX_ELEMENTS:
            raise GraphError(f"node {i} makes a tensor of more than {MAX_ELEMENTS} elements")
    if value.multiple:
        good = isinstance(out, list | tuple) and all(isinstance(t, torch.Tensor | None) for t in out)
    elif value.is_tensor:
        good = isinstance(out, torch.Tensor) and value.admits(out) and _fits(out, value)
    else:
        good = isinstance(out, int | float | bool) and abs(out) < 1 << 63
    if not good:
        raise GraphError(f"node {i} does not compute the value that it declares")


def _fits(out: torch.Tensor, value: Value) -> bool:
    """Sizes of samples are those of the hint; sizes that vary are within the limit."""
    rows = zip(out.shape, value.sizes(_HINT), value.shape)
    return all(size <= most if isinstance(d, Free) else size == most for size, most, d in rows)


def _check_parts(node: Node, values: list[Any]) -> None:
    """Nodes whose work grows with a number rather than with a tensor, before they are run even on fake tensors."""
    name = node.operator.name.split(".")[1] if node.operator.is_aten else ""
    numbers = [a for a in node.args if type(a) is int]
    sizes = [s for r in node.refs if isinstance(values[r], torch.Tensor) for s in values[r].shape]
    longest = max(sizes, default=0)
    parts = 0
    if name in ("split", "unsafe_split", "split_with_sizes"):
        parts = longest // max(numbers[0], 1) if numbers else 0
    elif name in ("chunk", "unsafe_chunk", "tensor_split", "hsplit", "vsplit", "dsplit"):
        parts = min(max([longest, *numbers]), max(numbers, default=longest))
    elif node.value.multiple and name == "unbind":
        parts = longest
    if parts > MAX_PARTS:
        raise GraphError(f"{node.operator.name} makes {parts} tensors, more than {MAX_PARTS}")
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu") and any(not 0 < n <= MAX_RECURRENT_LAYERS for n in numbers):
        raise GraphError(f"{node.operator.name} has an impossible number of layers")
