"""An autograd.Function of the user's, traced with its backward pass: peers then run both, and none of the user's code.

The idea: torch.export would trace forward alone, and autograd would derive the gradient of that. So while the model is traced,
`apply` is ours. It calls forward without recording, takes a stand-in for each gradient that will arrive, and calls backward with
the stand-ins. Two operators of ours mark in the graph where backward begins, and what belongs to the function. From there the
flattener (flatten.py) cuts backward out, as a program of its own.

`Function.apply` itself is changed, by its code: a name that a module has given to `MyFunction.apply` leads there, too.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function, FunctionCtx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from meshcee.capture.export.refusals import instead
from meshcee.capture.graph import Input, Node, Program, Ref, Value, is_random
from meshcee.errors import CaptureError
from meshcee.reach import Remembered
from meshcee.user_code import Place, place_in

__all__ = ["BEGINS", "ENDS", "backward_program", "renumbered", "traced_functions"]

_LIBRARY: Any = torch.library.Library("meshcee", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("backward_begins(Tensor[] outputs) -> Tensor[]")
_LIBRARY.define("function_ends(Tensor[] outputs, Tensor[] inputs, Tensor[] grads, int[] fixed) -> Tensor[]")
_LIBRARY.impl("backward_begins", lambda outputs: [torch.empty_like(t) for t in outputs], "CompositeExplicitAutograd")
_LIBRARY.impl("function_ends", lambda outputs, *_: [_like(t) for t in outputs], "CompositeExplicitAutograd")
BEGINS, ENDS = torch.ops.meshcee.backward_begins.default, torch.ops.meshcee.function_ends.default
_NOT_THE_USERS = ("torch._", "torch.utils.checkpoint")  # torch's own, whose forward says all that a graph needs


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


class _Context(FunctionCtx):
    """What forward leaves for backward: all that it saves is a value of the graph."""

    to_save: tuple[Any, ...] = ()
    materialize_grads = True
    dirty_tensors: tuple[Any, ...] = ()
    non_differentiable: tuple[Any, ...] = ()

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self.to_save

    saved_variables = saved_tensors  # as it was called before torch 1.5


@contextlib.contextmanager
def traced_functions(*, backward: bool = True) -> Iterator[None]:
    """In this thread, every autograd.Function is traced, with its backward pass or, for an evaluation, without."""
    with _LOCK:
        _TRACING[threading.get_ident()] = backward
        _APPLY.__code__ = _OURS
    try:
        yield
    finally:
        with _LOCK:
            del _TRACING[threading.get_ident()]
            if not _TRACING:
                _APPLY.__code__ = _EAGER.__code__


def _called(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_ours = threading.get_ident() in _TRACING and not cls.__module__.startswith(_NOT_THE_USERS)
    return _traced(cls, args, kwargs) if is_ours else _EAGER(cls, *args, **kwargs)


def _instead() -> Any:
    """A function whose code fits into `Function.apply`: it has the one cell that `super()` needs there."""
    __class__ = None

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from meshcee.capture.export.functions import _called

        assert __class__
        return _called(cls, args, kwargs)

    return apply


_LOCK, _TRACING = threading.Lock(), dict[int, bool]()  # the threads that trace, and whether they want backward passes
_APPLY: Any = Function.apply.__func__  # type: ignore[attr-defined]
_EAGER = types.FunctionType(_APPLY.__code__, _APPLY.__globals__, "apply", _APPLY.__defaults__, _APPLY.__closure__)
_OURS = _instead().__code__


def _traced(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The outputs of a call, as the graph has them. Forward and backward get views: a tensor that torch converts to what it is
    already would stand for the result from then on, elsewhere in the model too.
    """
    is_apart = cls.setup_context is not Function.setup_context
    if is_apart:
        bound = inspect.signature(cls.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        args = bound.args
    needs = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    records = torch.is_grad_enabled() and any(needs) and _TRACING[threading.get_ident()]
    ctx, given = _Context(needs), tuple(map(_view, args)) if records else args
    with torch.no_grad():
        made = cls.forward(*given) if is_apart else cls.forward(ctx, *given)
        if is_apart:
            cls.setup_context(ctx, given, made)
    if not records:
        return made
    several = made if isinstance(made, tuple) else (made,)
    tensors = [t for t in several if isinstance(t, torch.Tensor)]
    fixed = [i for i, t in enumerate(tensors) if _gets_no_gradient(t, ctx)]
    _refuse(cls, ctx, len(tensors) - len(fixed))
    with torch.no_grad(), _after_forward():
        outputs = list(map(_view, tensors))
        arriving = iter(BEGINS(outputs))
        grads = _backward(cls, ctx, args, [next(arriving) if isinstance(t, torch.Tensor) else None for t in several])
    ways = [(a, g) for a, g, needed in zip(args, grads, needs) if needed and g is not None]
    if not ways:
        raise CaptureError(f"backward of {_named(cls)} returns no gradient: write x.detach() in its place")
    left = iter(ENDS(outputs, [a for a, _ in ways], [g for _, g in ways], fixed))
    found = [next(left) if isinstance(t, torch.Tensor) else t for t in several]
    for place, tensor in enumerate(t for t in found if isinstance(t, torch.Tensor)):
        tensor.requires_grad_(place not in fixed)
    return tuple(found) if isinstance(made, tuple) else found[0]


def _after_forward() -> contextlib.AbstractContextManager[Any]:
    """A plain loop calls backward() where autocast is off again."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else contextlib.nullcontext()


def _view(it: Any) -> Any:
    return it.view_as(it) if isinstance(it, torch.Tensor) else it


def _backward(cls: Any, ctx: _Context, args: tuple[Any, ...], arriving: Sequence[Any]) -> tuple[Any, ...]:
    """The gradients of the inputs. CaptureError where backward changes something of Python's, which is put back."""
    call = cls.vjp if cls.backward is Function.backward else cls.backward
    within: Any = (cls, call, *(a for a in args if not isinstance(a, torch.Tensor)))
    with _disable_current_modes():  # what is there is no part of the graph
        before = _Within(nn.Module(), within)
    try:
        with _Contiguous():
            grads = call(ctx, *arriving)
    finally:
        with _disable_current_modes():
            places = before.changed(_Within(nn.Module(), within, keeps=False))
            before.put_back()
    if places:
        raise CaptureError(
            f"backward of {_named(cls)} changes {places[0]}: peers keep nothing of Python's from pass to pass, so the mesh would "
            "train something else; compute it in forward, and keep it in a buffer"
        )
    return grads if isinstance(grads, tuple) else (grads,)


class _Within(Remembered):
    """What a backward pass can reach by name."""

    def _of_tensor(self, tensor: torch.Tensor) -> Any:
        return id(tensor), tensor._version


class _Contiguous(TorchFunctionMode):
    """Gradients may arrive in any strides, and the stand-ins have one kind: `contiguous` is in the graph even where it does
    nothing here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous and len(args) == 1 and not kwargs:
            return args[0].clone(memory_format=torch.contiguous_format)
        return func(*args, **(kwargs or {}))


def _gets_no_gradient(tensor: torch.Tensor, ctx: _Context) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) or any(t is tensor for t in ctx.non_differentiable)


def _refuse(cls: Any, ctx: _Context, count: int) -> None:
    why = ""
    if ctx.dirty_tensors:
        why = "changes its input in place (mark_dirty); return a new tensor"
    elif not ctx.materialize_grads and count > 1:
        why = "wants None for gradients that do not arrive; leave set_materialize_grads out"
    elif cls.backward is Function.backward and cls.vjp is Function.vjp:
        why = "has no backward"
    if why:
        raise CaptureError(f"{_named(cls)} {why}")


def _named(cls: Any) -> str:
    return f"the autograd.Function {cls.__qualname__}{_place(cls)}"


def _place(function: type) -> Place:
    with contextlib.suppress(OSError, TypeError):
        lines, first = inspect.getsourcelines(function)
        return place_in([(inspect.getsourcefile(function) or "", first, lines[0])])
    return Place()


def backward_program(
    inner: dict[int, Node], outputs: Sequence[Value], grads: Sequence[int], values: Sequence[Value]
) -> tuple[list[int], Program]:
    """The values that a backward pass reads, and the pass as a program of these and of the outputs' gradients.

    inner   its nodes by number, in order; they refer to the gradients as -1, -2, ...
    grads   numbers of what it computes
    values  of all that was there before, by number
    """
    needed = set(grads)
    for number in reversed(inner):
        if number in needed or inner[number].writes or is_random(inner[number]):
            needed |= {number, *inner[number].refs}
    saved = sorted(number for number in needed if number >= 0 and number not in inner)
    order = [*saved, *range(-1, -1 - len(outputs), -1), *(number for number in inner if number in needed)]
    places = {number: place for place, number in enumerate(order)}
    given = [*(values[number] for number in saved), *outputs]
    inputs = tuple(Input("raw", replace(v, name=f"i{place}", requires_grad=False)) for place, v in enumerate(given))
    nodes = []
    for place, number in enumerate(order[len(given) :]):
        node = renumbered(inner[number], places)
        nodes.append(replace(node, value=replace(node.value, name=f"n{place}"), no_grad=False))
    program = Program(inputs, tuple(nodes), tuple(places[number] for number in grads), 1)
    if (bad := program.changing()) is not None:
        does = "draws random numbers" if is_random(bad) else f"writes in place what it is given ({bad.operator.name})"
        advice = "draw them in forward" if is_random(bad) else "write to a clone() of it"
        raise CaptureError(f"backward of an autograd.Function {does}{bad.at}; {instead(Place(bad.at), advice)}")
    return saved, replace(program, nodes=tuple(replace(node, scope="", at="") for node in nodes))


def renumbered(node: Node, places: Mapping[int, int]) -> Node:
    """The node, which refers to these numbers in place of its own."""
    args = _renumbered(node.args, places)
    return replace(node, args=args, kwargs={k: _renumbered(v, places) for k, v in node.kwargs.items()})


def _renumbered(argument: Any, places: Mapping[int, int]) -> Any:
    if isinstance(argument, Ref):
        return Ref(places[argument.index])
    if isinstance(argument, list):
        return [_renumbered(a, places) for a in argument]
    if isinstance(argument, tuple):
        return tuple(_renumbered(a, places) for a in argument)
    return argument
