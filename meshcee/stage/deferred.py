"""Weight gradients put off: what splits a backward pass into B and W without doing any of it twice.

The idea: only the operators that take a parameter (or something computed from parameters alone) next to an activation
have work for W. Each of them runs as a small graph of its own inside one autograd node. B asks the small graph for the
activation's gradient and notes the gradient that arrived; the rest of the stage's graph is then free. W is one backward
pass over all small graphs together with whatever is computed from parameters alone. Autograd runs nodes in the reverse
order of their making, so each parameter's gradient is summed in the order of the eager backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from meshcee.capture.graph import Node, Ref, StageSpec

__all__ = ["Deferral", "Tape", "Template"]

# Operators that torch composes of others, and that read each tensor argument once: the gradient arrives in one piece,
# as from an operator with a formula of its own. One that reads its input twice would give the sum of two pieces where
# the eager pass adds them one by one.
_READ_ONCE = frozenset(
    f"aten.{name}"
    for name in (
        *("linear.default", "matmul.default", "einsum.default", "layer_norm.default", "group_norm.default"),
        *("batch_norm.default", "conv1d.default", "conv2d.default", "conv3d.default", "conv1d.padding"),
        *("conv2d.padding", "conv3d.padding", "conv_transpose1d.default", "conv_transpose2d.input"),
        *("conv_transpose3d.input", "instance_norm.default", "prelu.default", "where.ScalarSelf", "where.ScalarOther"),
        *("multiply.Tensor", "subtract.Tensor", "true_divide.Tensor", "concat.default", "concatenate.default"),
    )
)

# Operators whose kernel for the CPU ends the process (torch 2.13, channels last) if it is asked for the gradients of weights
# alone: B asks for all of them, and W adds up what B has found.
_AT_ONCE = frozenset({"aten.group_norm.default", "aten.native_group_norm.default"})


@dataclass
class Tape:
    """What B of one micro-batch leaves for W: outputs of small graphs and the gradients that arrived there."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)


class Deferral:
    """The deferred operators of a stage. `calls` replaces operators by value number when the stage is built.

    `possible` is False when an operator cannot be deferred (or is in `replaced`, so has another callable already); then B
    and W must both walk the whole graph. `instead` has functions of the same arguments in place of operators.
    """

    def __init__(
        self,
        spec: StageSpec,
        device: torch.device,
        replaced: frozenset[int] = frozenset(),
        instead: Mapping[int, Callable[..., Any]] | None = None,
    ) -> None:
        self.instead = instead or {}
        self.calls: dict[int, Callable[..., Any]] = {}
        self.possible = True
        self.weights: frozenset[int] = frozenset()
        self.tape: Tape | None = None  # of the forward pass that is running
        trainable = {number for number, entry in spec.inputs if entry.trainable}
        data = {n for n, v in zip(spec.received_numbers, spec.received) if v.requires_grad}
        weights = set(trainable)
        made = {number for number, _ in spec.nodes}
        written = _written(spec)
        for number, node in spec.nodes:
            if node.no_grad:  # what is written in place stays what it is
                for target in _targets(node, node.writes):
                    for kind in (data, weights):
                        kind |= {number} if target in kind else set()
            if node.no_grad or not (node.value.requires_grad or node.value.multiple):
                continue  # indices that activations chose carry no gradient: what they pick from a parameter is W's
            reads_data = any(r in data for r in node.refs)
            reads_weights = any(r in weights for r in node.refs)
            if _changes_what_its_target_is(node, (data, weights), made):
                self.possible = False  # every other view of that memory would have to be told
                self.calls.clear()
                return
            if reads_data and reads_weights:
                if device.type == "cpu" and _is_composed_norm(node):
                    self.calls[number] = _NormCall(self, number, node, frozenset(data)).run
                elif _can_wait(node) and number not in replaced:
                    self.calls[number] = _Call(self, number, node, frozenset(data), number in written).run
                else:
                    self.possible = False
                    self.calls.clear()
                    return
            if reads_data:
                data.add(number)
            elif reads_weights:
                weights.add(number)
        # What is computed from parameters alone is a root of W when it leaves the stage.
        self.weights = frozenset(weights)


def _written(spec: StageSpec) -> set[int]:
    """The values whose memory a later node writes, as they were made or through a view."""
    found, viewed = set(), dict[int, int]()  # a view -> what it is a view of
    for number, node in spec.nodes:
        for target in _targets(node, {*node.operator.aliases, *node.writes}):
            viewed[number] = viewed.get(target, target)
        found |= {viewed.get(target, target) for target in _targets(node, node.writes)}
    return found


def _targets(node: Node, places: Iterable[int]) -> list[int]:
    """The values that stand at these places of a node's arguments."""
    given = [node.args[place] for place in places if place < len(node.args)]
    return [one.index for one in given if isinstance(one, Ref)]


def _changes_what_its_target_is(node: Node, kinds: tuple[Set[int], Set[int]], made: Set[int]) -> bool:
    """Whether the node writes into a tensor something that this one did not depend on: activations, or parameters."""
    return any(
        target in made and any(target not in kind and any(r in kind for r in node.refs) for kind in kinds)
        for target in _targets(node, node.writes)
    )


def _can_wait(node: Node) -> bool:
    operator = node.operator
    if not operator.is_aten or operator.num_outputs != 1 or node.value.multiple or not node.value.is_tensor:
        return False
    if any(place < len(node.args) and place == 0 for place in node.writes):
        return False
    name = operator.name.removeprefix("aten.").removesuffix(".default")
    composed = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CompositeImplicitAutograd")
    return operator.name in _READ_ONCE or not composed


class Template:
    """The arguments of a node, which the values of its references fill."""

    def __init__(self, node: Node, call: Callable[..., Any]) -> None:
        self.call = call
        self.order = {number: place for place, number in enumerate(dict.fromkeys(node.refs))}
        self.args, self.kwargs = node.args, node.kwargs

    def run(self, *values: Any) -> Any:
        """Called by the stage with the values of the node's references, each once."""
        return self.compute(list(values))

    def compute(self, values: list[Any]) -> torch.Tensor:
        fill = self._fill
        out: torch.Tensor = self.call(
            *(fill(a, values) for a in self.args), **{k: fill(v, values) for k, v in self.kwargs.items()}
        )
        return out

    def _fill(self, argument: Any, values: list[Any]) -> Any:
        if isinstance(argument, Ref):
            return values[self.order[argument.index]]
        if isinstance(argument, list | tuple):
            return [self._fill(a, values) for a in argument]
        return argument


class _Call(Template):
    """One deferred operator. `is_written`: in place, later."""

    def __init__(
        self, deferral: Deferral, number: int, node: Node, data: frozenset[int], is_written: bool = False
    ) -> None:
        super().__init__(node, deferral.instead.get(number, node.call))
        self.is_written, self.gives_view = is_written, False
        self.deferral = deferral
        self.data = tuple(place for number, place in self.order.items() if number in data)
        self.at_once = node.operator.name in _AT_ONCE

    def run(self, *values: Any) -> Any:
        return self.apply(values)

    def apply(self, values: tuple[Any, ...]) -> Any:
        out = _Deferred.apply(self, values, *(values[p] for p in self.data))  # type: ignore[no-untyped-call]
        # A product of three dimensions is a view of one of two. Autograd copies the gradient of a view that was written, so the
        # others get one with other strides.
        return out.view_as(out) if self.is_written and self.gives_view else out


def _is_composed_norm(node: Node) -> bool:
    """Whether this is an RMS norm that computes x / rms(x) in x's precision and multiplies by its weight at the end."""
    if node.operator.name != "aten.rms_norm.default":
        return False
    return len(node.args) > 2 and isinstance(node.args[2], Ref) and node.value.dtype in (torch.float32, torch.float64)


class _NormCall(_Call):
    """RMS norm reads its input twice; only the product with its weight is deferred, the rest stays where it is."""

    def __init__(self, deferral: Deferral, number: int, node: Node, data: frozenset[int]) -> None:
        super().__init__(deferral, number, node, data)
        self.input, self.weight = (self.order[a.index] for a in node.args[0:3:2])
        self.data = (0,)

    def run(self, *values: Any) -> Any:
        normed = self.call(values[self.input], self.args[1], None, *self.args[3:], **self.kwargs)
        return self.apply((normed, values[self.weight]))

    def compute(self, values: list[Any]) -> torch.Tensor:
        out: torch.Tensor = values[0] * values[1]
        return out


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, values: tuple[Any, ...], *data: torch.Tensor) -> torch.Tensor:
        inner = list(values)
        leaves = []
        for place, tensor in zip(call.data, data):
            leaf = tensor.detach()
            if tensor.requires_grad:
                leaf.requires_grad_()
            leaves.append(leaf)
            inner[place] = leaf
        ctx.weights = []
        with torch.enable_grad():
            for place, tensor in enumerate(values) if call.at_once else ():
                if place not in call.data and isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    # A view is a node of its own: W adds what comes through it in the order of making, behind a partial.
                    inner[place] = tensor.view_as(tensor)
                    ctx.weights.append(inner[place])
            out = call.compute(inner)
        call.gives_view = out._is_view()
        ctx.out, ctx.leaves, ctx.tape = out, leaves, call.deferral.tape
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        wanted, weights, tape = [leaf for leaf in ctx.leaves if leaf.requires_grad], ctx.weights, ctx.tape
        if wanted and weights:
            both = torch.autograd.grad(ctx.out, [*wanted, *weights], grad)
            tape.outputs += weights
            tape.grads += both[len(wanted) :]
            found = iter(both)
        else:
            found = iter(
                torch.autograd.grad(ctx.out, wanted, grad, retain_graph=True, allow_unused=True) if wanted else ()
            )
            tape.outputs.append(ctx.out)
            tape.grads.append(grad)
        result = [next(found) if leaf.requires_grad else None for leaf in ctx.leaves]
        del ctx.out, ctx.leaves, ctx.weights
        return (None, None, *result)
