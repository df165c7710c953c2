"""Where autocast is on: the types that it gives to what operators read, as operators of their own.

The idea: torch decides by lists, at every call, which operators get their inputs in 16 bits and which in 32. A graph has no such
mode: each conversion is a node of its own, and so all devices do the same. Which ones there are torch itself says: an operator of
the graph runs once on fake tensors, and what converts is noted. What torch composes of other operators is taken apart where some
of these convert.

A weight that needs a gradient is converted once for the whole time that autocast is on, as torch keeps it: its gradients add up
in 16 bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from meshcee.capture.export.modes import AUTOCAST_OFF, AUTOCAST_ON, SINCE, does_nothing
from meshcee.capture.export.refusals import instead, where
from meshcee.capture.graph import quiet
from meshcee.errors import CaptureError
from meshcee.files.tensor_files import byte_view

__all__ = ["with_conversions"]

_CONVERTS = torch.ops.aten._to_copy.default
Conversions = dict[int, torch.dtype]  # of operands, by their place
_MOST_NUMBERS = 1 << 22  # that an operator is tried with
_DEEPEST = 8  # how often an operator is taken apart


def with_conversions(graph: Any) -> None:
    """Give a graph the conversions of where autocast is on. Raises CaptureError where that cannot be."""
    on: list[_Mode] = []
    known: dict[Any, Conversions | None] = {}
    since = 0
    for place, node in enumerate(list(graph.nodes)):
        if node.target is AUTOCAST_ON:
            device, dtype, enabled, keeps = node.args
            since = since if on else place
            if enabled and device != "cpu":
                raise does_nothing(device, next((str(where(n)) for n in list(graph.nodes)[place:] if where(n)), ""))
            mode = _Mode(dtype if enabled else None, since if keeps else None, known)
            if device != "cpu":  # it is off there, and here what is on goes on
                mode = on[-1] if on else _Mode(None, None, known)
            on.append(mode)
        elif node.target is AUTOCAST_OFF:
            on.pop()
        elif on and on[-1].dtype is not None and getattr(node.target, "namespace", "") == "aten":
            on[-1].convert(graph, node)


@dataclasses.dataclass
class _Mode:
    dtype: torch.dtype | None
    since: int | None  # None: torch keeps no converted weights
    known: dict[Any, Conversions | None]  # what is converted, by the operator and its operands

    def convert(self, graph: Any, node: Any, depth: int = 0) -> None:
        leaves, spec = tree_flatten((node.args, node.kwargs))
        entering = self._entering(node.target, leaves, spec)
        if entering is not None:
            with graph.inserting_before(node):
                for place, dtype in entering.items():
                    leaves[place] = self._conversion(graph, node, leaves[place], dtype)
            node.args, node.kwargs = tree_unflatten(leaves, spec)
            return
        parts = self._taken_apart(graph, node, leaves, spec) if depth < _DEEPEST else ()
        if not parts:
            advice = instead(where(node), "leave autocast for it: with torch.autocast('cpu', enabled=False)")
            raise CaptureError(
                f"operation {node.target}{where(node)} converts inside of itself under autocast; {advice}"
            )
        for part in parts:
            self.convert(graph, part, depth + 1)

    def _conversion(self, graph: Any, node: Any, given: Any, dtype: torch.dtype) -> Any:
        made = graph.call_function(torch.ops.aten.to.dtype, (given, dtype))
        made.meta = dict(node.meta)
        held = given.meta["val"]
        with held.fake_mode:
            made.meta["val"] = held.to(dtype)
        if self.since is not None and dtype == self.dtype:
            made.meta[SINCE] = self.since
        return made

    def _taken_apart(self, graph: Any, node: Any, leaves: Sequence[Any], spec: TreeSpec) -> list[Any]:
        """In the place of a node, the operators that torch composes it of; none where it does not, or makes several tensors."""
        name = node.target.name()
        is_composed = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        if not is_composed or not isinstance(node.meta["val"], torch.Tensor):
            return []
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.fx.Node)]

        def composed(*given: Any) -> Any:
            filled = dict(zip(places, given))
            args, kwargs = tree_unflatten([filled.get(place, leaf) for place, leaf in enumerate(leaves)], spec)
            with torch._C.DisableTorchFunction():  # or the operator itself is noted
                return node.target.decompose(*args, **kwargs)

        held = [leaves[place].meta["val"] for place in places]
        mode = next(value.fake_mode for value in held if isinstance(value, FakeTensor))
        with mode, self._on():
            parts = make_fx(composed, pre_dispatch=True)(*held).graph
        copies: dict[Any, Any] = dict(
            zip((n for n in parts.nodes if n.op == "placeholder"), (leaves[p] for p in places))
        )
        made = []
        with graph.inserting_before(node):
            for part in parts.nodes:
                if part.op == "call_function":
                    copies[part] = graph.node_copy(part, lambda n: copies[n])
                    copies[part].meta = {**node.meta, "val": part.meta["val"]}
                    made.append(copies[part])
        output = next(n for n in parts.nodes if n.op == "output").args[0]
        node.replace_all_uses_with(copies[output])
        graph.erase_node(node)
        return made

    def _entering(self, target: Any, leaves: Sequence[Any], spec: TreeSpec) -> Conversions | None:
        """The operands that are converted before anything else is done, in torch's order; None where that is not all."""
        values = [leaf.meta.get("val") if isinstance(leaf, torch.fx.Node) else leaf for leaf in leaves]
        if not any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in values):
            return {}
        told = tuple(_told(value) for value in values)
        key = (self.dtype, target, str(spec), told)
        if key not in self.known:
            with FakeTensorMode():
                given = [_as_told(*each) if isinstance(each, tuple) else each for each in told]
                with self._on():
                    done = _done(target, given, spec)
                self.known[key] = found = _explained(done, target, given, spec)
            if found == {} and self._hides(target, told, spec):
                self.known[key] = None
        return self.known[key]

    def _hides(self, target: Any, told: Sequence[Any], spec: TreeSpec) -> bool:
        """Whether numbers are others under autocast, though no conversion was seen: some kernels call operators of their own."""
        if (
            "empty" in target.name()
            or sum(math.prod(each[1]) for each in told if isinstance(each, tuple)) > _MOST_NUMBERS
        ):
            return False
        results = []
        for mode in (contextlib.nullcontext(), self._on()):
            generator = torch.Generator().manual_seed(0)
            args, kwargs = tree_unflatten(
                [_example(e[0], e[1], e[2], generator) if isinstance(e, tuple) else e for e in told], spec
            )
            with torch.random.fork_rng(devices=[]), torch.no_grad(), mode:
                torch.manual_seed(0)
                try:
                    results.append(tree_leaves(target(*args, **kwargs)))
                except Exception:  # operators raise what they like, of numbers that mean nothing
                    return False
        tensors = [[leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] for leaves in results]
        return any(a.dtype != b.dtype or byte_view(a) != byte_view(b) for a, b in zip(*tensors, strict=True))

    def _on(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", self.dtype, cache_enabled=False)


@dataclasses.dataclass(frozen=True)
class _Call:
    """One operator of those that another is made of."""

    what: tuple[Any, ...]  # its name, and the types of its tensors
    place: int | None = None  # of the operand that it converts
    dtype: torch.dtype | None = None


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, given: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given = given
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if call.namespace != "prim":
            tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
            made = _Call((str(call), *(tensor.dtype for tensor in tensors)))
            if call is _CONVERTS and kwargs.get("dtype") is not None:
                place = next((n for n, one in enumerate(self.given) if one is args[0]), None)
                made = dataclasses.replace(made, place=place, dtype=kwargs["dtype"])
            self.calls.append(made)
        return call(*args, **kwargs)


def _done(target: Any, given: Sequence[Any], spec: TreeSpec) -> list[_Call]:
    """What an operator is made of, as far as it comes: without autocast it fails on operands of several types."""
    args, kwargs = tree_unflatten(list(given), spec)
    noting = _Noting(given)
    with quiet(), contextlib.suppress(Exception), noting:  # operators raise what they like
        target(*args, **kwargs)
    return list(noting.calls)


def _explained(done: Sequence[_Call], target: Any, given: Sequence[Any], spec: TreeSpec) -> Conversions | None:
    """By which conversions of operands the operator does the same without autocast; None where that is not so."""
    if not any(call.dtype for call in done) or _names(_done(target, given, spec)) == _names(done):
        return {}
    first = next((call.dtype for call in done if call.place is not None), None)
    entering: Conversions = {}
    rest = []
    for call in done:
        if first is not None and call.place is not None and call.dtype == first and call.place not in entering:
            entering[call.place] = first
        else:
            rest.append(call)
    converted = [one.to(entering[place]) if place in entering else one for place, one in enumerate(given)]
    return entering if _names(_done(target, converted, spec)) == _names(rest) else None


def _names(calls: Sequence[_Call]) -> list[tuple[Any, ...]]:
    return [call.what for call in calls]


def _told(value: Any) -> Any:
    """A tensor's type, sizes and strides in the example; a size as a number."""
    if isinstance(value, torch.Tensor):
        return value.dtype, _numbers(value.shape), _numbers(value.stride())
    return _number(value) if isinstance(value, torch.SymInt) else value


def _as_told(dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


def _example(
    dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], generator: torch.Generator
) -> torch.Tensor:
    """Numbers between 0.5 and 1.5; integers are 0, so that they may be places."""
    length = 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
    numbers = torch.rand(length, generator=generator) + 0.5 if dtype.is_floating_point else torch.zeros(length)
    return numbers.to(dtype).as_strided(shape, strides)


def _numbers(sizes: Sequence[Any]) -> tuple[int, ...]:
    return tuple(_number(size) for size in sizes)


def _number(size: Any) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    return 1 if size.node.hint is None else int(size.node.hint)  # what follows from values is refused
