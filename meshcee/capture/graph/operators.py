"""Which operators a graph may hold, and how they are found by name.

The idea: an operator is allowed if its full name stands in allowed.toml, which people review; what its arguments may be stands
there too (meshcee/capture/graph/rules.py). Besides these there is arithmetic on sizes, FUNCTION, and nothing else; a name from
the network is looked up, never evaluated.

FUNCTION is an autograd.Function. Its forward is ordinary nodes without a gradient. FUNCTION gives the outputs of that forward a
gradient: its backward is a program of its own.
"""

from __future__ import annotations

import functools
import operator
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshcee.capture.graph.guards import GUARDED, teach_shapes
from meshcee.errors import GraphError

__all__ = [
    "ALLOWED",
    "FUNCTION",
    "Operator",
    "find_operator",
    "given_to_write",
    "operator_name",
    "places_written",
    "without_out",
]

ALLOWED: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("allowed.toml").read_text())


def _sym_min(a: int, b: int) -> int:
    return min(a, b)


def _sym_max(a: int, b: int) -> int:
    return max(a, b)


FUNCTION = "function.apply"

# Arithmetic on sizes: Python integers in, a Python number out. `getitem` takes one output of several.
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "int.add": operator.add,
    "int.sub": operator.sub,
    "int.mul": operator.mul,
    "int.floordiv": operator.floordiv,
    "int.mod": operator.mod,
    "int.truediv": operator.truediv,
    "int.neg": operator.neg,
    "int.eq": operator.eq,
    "int.ne": operator.ne,
    "int.lt": operator.lt,
    "int.le": operator.le,
    "int.gt": operator.gt,
    "int.ge": operator.ge,
    "int.min": _sym_min,
    "int.max": _sym_max,
    "int.float": float,
    "int.int": int,
    "getitem": operator.getitem,
}
_ARITHMETIC_NAMES: dict[Any, str] = {f: name for name, f in _ARITHMETIC.items()} | {
    torch.sym_min: "int.min",
    torch.sym_max: "int.max",
    torch.sym_float: "int.float",
    torch.sym_int: "int.int",
}


class _Function(torch.autograd.Function):
    """Tensors that are there already get a gradient: what `backward`, a program, computes of theirs."""

    @staticmethod
    def forward(ctx: Any, given: tuple[Any, ...], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, saved, fixed, ctx.backward_program = given
        ctx.save_for_backward(*(value if isinstance(value, torch.Tensor) else None for value in saved))
        ctx.sizes = [value for value in saved if not isinstance(value, torch.Tensor)]
        made = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(*(made[place] for place in fixed))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        sizes = iter(ctx.sizes)
        saved = [next(sizes) if tensor is None else tensor for tensor in ctx.saved_tensors]
        return (None, *ctx.backward_program.run([*saved, *grads]))


def _apply(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    saved: Sequence[Any],
    fixed: Sequence[int],
    backward: Any,
) -> list[torch.Tensor]:
    """The outputs, whose gradients go to the inputs by `backward`; it gets what is saved, then the outputs' gradients.

    saved  tensors and sizes
    fixed  places of outputs that have no gradient
    """
    return list(_Function.apply((outputs, saved, fixed, backward), *inputs))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Operator:
    """An allowed operator: its wire name, what to call, and what its schema says."""

    name: str
    call: Callable[..., Any]
    argument_names: tuple[str, ...] = ()
    argument_types: tuple[str, ...] = ()  # of one: what a list of it holds
    schema_types: tuple[str, ...] = ()  # in full: "Optional[List[int]]"
    mutates: tuple[int, ...] = ()  # positions of arguments that it may write in place; Node.writes: of a call
    aliases: tuple[int, ...] = ()  # positions of arguments whose memory an output may share
    random: bool = False
    num_outputs: int = 1

    @property
    def is_aten(self) -> bool:
        return self.name.startswith("aten.")


def operator_name(target: Any) -> str | None:
    """The wire name of what a graph calls, or None when there is none."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    try:
        return _ARITHMETIC_NAMES.get(target)
    except TypeError:
        return None


def places_written(schema: Any) -> tuple[int, ...]:
    """The arguments that a call may write in place. Batch norm writes its statistics, and its schema does not say so."""
    said = tuple(i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    return said or tuple(i for i, a in enumerate(schema.arguments) if a.name in ("running_mean", "running_var"))


def given_to_write(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call that it may write in place: of tensors, or of what stands for them in a graph."""
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, args)) | dict(kwargs)
    return [given.get(names[place]) for place in places_written(operator._schema)]


@functools.lru_cache(maxsize=4096)
def find_operator(name: str) -> Operator:
    """The operator of this wire name; raises GraphError when it is not allowed or does not exist."""
    if name in _ARITHMETIC:
        return Operator(name, _ARITHMETIC[name])
    if name == FUNCTION:
        of_function = ("outputs", "inputs", "saved", "fixed", "backward")
        return Operator(name, _apply, of_function, ("Tensor", "Tensor", "Tensor", "int", "Program"), aliases=(0,))
    if name not in ALLOWED["overloads"]:
        why = next((f": {why}" for why, names in ALLOWED["refused"].items() if name in names), "")
        raise GraphError(f"operator {name[:80]!r} is not on the allow-list{why}")
    _, base, overload_name = name.split(".")
    try:
        overload = getattr(getattr(torch.ops.aten, base), overload_name)
    except AttributeError as error:
        raise GraphError(f"torch here has no operator {name!r}; use one version of torch on all peers") from error
    schema = overload._schema
    full = [str(argument.real_type) for argument in schema.arguments]
    shared = set().union(*(r.alias_info.before_set for r in schema.returns if r.alias_info is not None))
    mutates = places_written(schema)
    aliases = tuple(
        i for i, a in enumerate(schema.arguments) if a.alias_info is not None and (a.alias_info.before_set & shared)
    )
    names = [a.name for a in schema.arguments]
    if torch.Tag.maybe_aliasing_or_mutating in overload.tags:  # dropout that is off returns its input
        aliases = aliases or (0,)
    if name in GUARDED:
        teach_shapes()
    return Operator(
        name=name,
        call=GUARDED.get(name, overload),
        argument_names=tuple(names),
        argument_types=tuple(_base_type(kind) for kind in full),
        schema_types=tuple(full),
        mutates=mutates,
        aliases=aliases,
        random=torch.Tag.nondeterministic_seeded in overload.tags,
        num_outputs=len(schema.returns),
    )


def without_out(target: Any) -> Any:
    """The overload that returns what this one writes to its one `out`; None if there is none."""
    if not isinstance(target, torch._ops.OpOverload) or "out" not in target._overloadname.split("_"):
        return None
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments if not a.is_out]
    for name in target._overloadpacket.overloads():  # type: ignore[no-untyped-call]
        other = getattr(target._overloadpacket, name)
        arguments = other._schema.arguments
        same = [(a.name, str(a.type)) for a in arguments[: len(wanted)]] == wanted
        if same and all(a.has_default_value() and not a.is_out for a in arguments[len(wanted) :]):
            return other
    return None


def _base_type(text: str) -> str:
    """ "Optional[List[Tensor]]" -> "Tensor"."""
    while (inner := re.fullmatch(r"(?:Optional|List)\[(.*)\]", text)) is not None:
        text = inner[1]
    return text
