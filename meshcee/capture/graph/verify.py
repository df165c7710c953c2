"""Whether a program from the network means what it says: one pass over meta tensors, which cost no memory.

The idea: a receiver sizes its buffers by the shapes that a program declares, and its device runs what the nodes compute.
So the two must agree, and every tensor on the way must be of bearable size, before a single byte is allocated for it. Each
call is held against the rules first, and while it runs, whatever it calls in turn is counted and measured. What other sizes
than the hint below may break is held against the rules again when a stage runs (`Node.call`).
"""

from __future__ import annotations

import importlib
import math
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshcee.capture.graph.analysis import quiet, resolve
from meshcee.capture.graph.guards import teach_shapes
from meshcee.capture.graph.operators import FUNCTION, Operator
from meshcee.capture.graph.program import Free, Input, Node, Program, Value
from meshcee.capture.graph.rules import check_call, is_recurrent
from meshcee.errors import GraphError

__all__ = ["MAX_ELEMENTS", "Measure", "NodeRefused", "prepare", "verify_program"]

MAX_ELEMENTS = 1 << 40  # of one tensor, at the hint below
MAX_CALLS = 20_000  # of kernels, by one node
MAX_RANK = 64  # dimensions on the way to a value; torch itself counts no further
_HINT = 2  # samples
_META = torch.device("meta")


class NodeRefused(GraphError):
    """One node of a program is refused: its position among the nodes, and why."""

    def __init__(self, position: int, operator: str, why: str) -> None:
        super().__init__(f"node {position} ({operator}): {why}")
        self.position, self.why = position, why


def prepare() -> None:
    """Import what kernels for the meta device import on first use. A process that will read strangers' graphs calls this function
    before the first graph comes.

    Torch would import its compiler, too, 35 MiB in a second, when the first mode or optimizer asks that it be left out of the
    compiler's sight. Nothing is compiled in such a process, so a stand-in answers those requests.
    """
    sys.modules.setdefault(_Uncompiled.NAME, _Uncompiled(_Uncompiled.NAME))
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    teach_shapes()


class _Uncompiled(types.ModuleType):
    """In the place of `torch._dynamo` where nothing is compiled. Whoever asks for more than is here gets the real module."""

    NAME = "torch._dynamo"

    @staticmethod
    def disable(function: Any, recursive: bool = True, **_: Any) -> Any:
        """The function, which no compiler sees in any case."""
        return function

    @staticmethod
    def graph_break() -> None:
        """Nothing: there is no graph."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(self.NAME) is self:
            del sys.modules[self.NAME]
        return getattr(importlib.import_module(self.NAME), name)


def verify_program(program: Program) -> None:
    """Raises GraphError where a node computes something else than its declared value, or too much."""
    with quiet(), torch.no_grad(), Measure() as measure:
        _follow(program, [_given(entry, _HINT) for entry in program.inputs], measure)


def _follow(program: Program, inputs: Sequence[Any], measure: Measure) -> list[Any]:
    """The outputs for these inputs; a function's backward pass is followed where the function stands."""
    values: dict[int, Any] = dict(enumerate(inputs))
    for position, node in enumerate(program.nodes):
        measure.begin()
        try:
            out = _called(program, node, values, _HINT)
            _check_value(node.value, out, _HINT)
            if node.operator.name == FUNCTION:
                _check_backward(node, values, measure)
        except GraphError as error:
            raise NodeRefused(position, node.operator.name, str(error)) from error
        except Exception as error:  # whatever a kernel says of nonsense
            why = f"it fails ({type(error).__name__}: {str(error).strip().split(chr(10))[0][:200]})"
            raise NodeRefused(position, node.operator.name, why) from error
        values[len(program.inputs) + position] = out
    return [values[number] for number in program.outputs]


def _check_backward(node: Node, values: Mapping[int, Any], measure: Measure) -> None:
    outputs, inputs, saved = (resolve(argument, values) for argument in node.args[:3])
    backward: Program = node.kwargs["backward"]
    given = [*saved, *(torch.empty_like(output) for output in outputs)]
    for entry, value in zip(backward.inputs, given, strict=True):
        _check_value(entry.value, value, _HINT)
    for tensor, grad in zip(inputs, _follow(backward, given, measure), strict=True):
        ends = zip(reversed(tensor.shape), reversed(grad.shape))
        if grad.dim() < tensor.dim() or any(
            size not in (1, more) for size, more in ends
        ):  # autograd adds up what is more
            raise GraphError(
                f"its backward makes a gradient of {list(grad.shape)} for an input of {list(tensor.shape)}"
            )


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, torch.Tensor)]


def _given(entry: Input, batch: int) -> torch.Tensor:
    return entry.laid_out(torch.empty(entry.value.sizes(batch), dtype=entry.value.dtype, device=_META))


def _laid(value: Value, batch: int) -> torch.Tensor:
    return value.from_wire(torch.empty(value.wire_shape(batch), dtype=value.dtype, device=_META))


class Measure(TorchDispatchMode):
    """Sees every kernel that a call leads to: none makes too large a tensor, and there are not too many."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.begin()

    def begin(self) -> None:
        self.calls = self.largest_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if self.calls > MAX_CALLS:
            raise GraphError(f"it calls more than {MAX_CALLS} kernels")
        out = func(*args, **(kwargs or {}))
        _check_size(out)
        # Some kernels go through all dimensions of a tensor that is empty by one of them.
        made = [
            t.untyped_storage().nbytes() or math.prod(max(s, 1) for s in t.shape) * t.itemsize for t in _tensors(out)
        ]
        self.largest_bytes = max([self.largest_bytes, *made])
        return out


def _check_size(out: Any) -> None:
    for tensor in _tensors(out):
        if tensor.dim() > MAX_RANK or math.prod(max(s, 1) for s in tensor.shape) > MAX_ELEMENTS:
            raise GraphError(f"it makes a tensor of more than {MAX_ELEMENTS} elements, or {MAX_RANK} dimensions")


def _called(program: Program, node: Node, values: Mapping[int, Any], batch: int) -> Any:
    """As `_call`. Kernels for the meta device choose other strides than a device's: a view that these do not allow is tried on
    tensors that lie in memory as the program says."""
    try:
        return _call(node, values)
    except ZeroDivisionError:  # the rule of meta tensors for one value in each channel; a kernel computes it
        if node.operator.name != "aten.batch_norm.default":
            raise
        return _laid(node.value, batch)
    except RuntimeError:
        if not node.operator.aliases:
            raise
    laid = dict(values)
    for number in node.refs:
        order = program.value(number).order
        if isinstance(laid[number], torch.Tensor) and sorted(order) == list(range(laid[number].dim())):
            inverse = [order.index(d) for d in range(len(order))]
            laid[number] = laid[number].permute(order).contiguous().permute(inverse)
    return _call(node, laid)


def _call(node: Node, values: Mapping[int, Any]) -> Any:
    """The node on the meta device: what it would make, without making it."""
    operator = node.operator
    args = [_META if isinstance(a, torch.device) else resolve(a, values) for a in node.args]
    kwargs = {k: resolve(v, values) for k, v in node.kwargs.items()}
    check_call(operator, args, kwargs)
    if is_recurrent(operator):
        return _first_step(operator, dict(zip(operator.argument_names, args)) | kwargs)
    if "Device" in operator.argument_types and operator.argument_types.index("Device") >= len(args):
        kwargs[operator.argument_names[operator.argument_types.index("Device")]] = _META
    elif operator.is_aten and not any(isinstance(values[r], torch.Tensor) for r in node.refs):
        raise GraphError("it makes a tensor of nothing on a device of its own choice")
    return operator.call(*args, **kwargs)


def _first_step(operator: Operator, given: Mapping[str, Any]) -> Any:
    """A recurrent layer on the first step of its input alone, and its output as it is of all steps."""
    entry, time = given["input"], 1 if given["batch_first"] else 0
    output, *states = operator.call(**{**given, "input": entry.narrow(time, 0, min(1, entry.shape[time]))})
    sizes = [entry.shape[d] if d == time else size for d, size in enumerate(output.shape)]
    return [output.new_empty(sizes), *states]


def _check_value(value: Value, out: Any, batch: int) -> None:
    _check_size(out)
    if value.multiple:
        good = isinstance(out, list | tuple) and all(isinstance(t, torch.Tensor | None) for t in out)
    elif value.is_tensor:
        good = isinstance(out, torch.Tensor) and value.admits(out) and _fits(out, value, batch)
    else:
        good = isinstance(out, int | float | bool) and abs(out) < 1 << 63
    if not good:
        raise GraphError("it does not compute the value that it declares")


def _fits(out: torch.Tensor, value: Value, batch: int) -> bool:
    """Sizes of samples are those of the micro-batch; sizes that vary are within the limit."""
    rows = zip(out.shape, value.sizes(batch), value.shape)
    return all(size <= most if isinstance(d, Free) else size == most for size, most, d in rows)
