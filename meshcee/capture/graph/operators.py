"""Which operators a graph may hold, and how they are found by name.

The idea: an operator is allowed if it is an aten overload that torch itself ships, all of whose arguments are tensors,
numbers and enumerations, and whose name is not on a short list of what reaches outside a tensor: storage, files,
generators, pointers, other libraries. Besides these there is arithmetic on sizes, and nothing else; a name from the
network is looked up, never evaluated.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from meshcee.capture.graph.experts import grouped_mm, teach_shapes
from meshcee.errors import GraphError

__all__ = ["Operator", "find_operator", "operator_name", "without_out"]

_ATEN = re.compile(
    r"aten\.([a-z][A-Za-z0-9_]*|__[a-z]+__|_[a-z][a-z0-9_]*)\.([A-Za-z][A-Za-z0-9_]*)"
)  # .T, .mT and .mH have capitals


def _sym_min(a: int, b: int) -> int:
    return min(a, b)


def _sym_max(a: int, b: int) -> int:
    return max(a, b)


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

# Schema types an argument may have: tensors, numbers, flags, enumerations, and strings that are enumerations
# (rounding modes, paddings). Generators must be left out; storages, streams, names, custom classes are refused.
_ARGUMENT_TYPES = frozenset(
    {"Tensor", "number", "int", "SymInt", "float", "bool", "str", "Device", "ScalarType", "Layout", "MemoryFormat"}
)
_ARGUMENT_TYPES_LEFT_OUT = frozenset({"Generator"})

# Public operators that reach outside the tensors they are given (storage, files, strides, pointers, other libraries),
# whose output size depends on data, or that read memory which nobody wrote.
_FORBIDDEN = re.compile(
    r"""
    from_file | [sg]et_.* | set | .*resize.* | .*storage.* | data | data_ptr | .*quantize.* | quantized_.* | .*fbgemm.* | q_.*
    | .*sparse.* | .*nested.* | .*mkldnn.* | miopen.* | cudnn_.* | record_stream | rename.* | refine_names | align_.*
    | .*pin_memory | is_.* | retains?_grad | requires_grad_ | .*backward.* | item | tolist | equal | allclose
    | nonzero.* | masked_select.* | .*unique.* | empty.* | new_empty.* | as_strided.* | swap.* | output_nr
    | .*_copy | .*_out | .*_jvp | .*fused_(adam|sgd).* | lift | special_.*_polynomial_.* | sym_storage_offset
    """,
    re.VERBOSE,
)
_ALLOWED = frozenset({"index_copy", "lift_fresh_copy", "expand_copy", "masked_scatter"})
# Operators whose name begins with an underscore are internal, and check less; these appear in captured graphs.
_ALLOWED_INTERNAL = frozenset(
    {
        "_softmax", "_log_softmax", "_to_copy", "_unsafe_view", "_weight_norm", "_convolution", "_shape_as_tensor",
        "_grouped_mm",
    }
)  # fmt: skip
# What is called in place of an operator that trusts the values of its arguments.
_GUARDED: dict[str, Callable[..., Any]] = {"aten._grouped_mm.default": grouped_mm}


@dataclass(frozen=True)
class Operator:
    """An allowed operator: its wire name, what to call, and what its schema says."""

    name: str
    call: Callable[..., Any]
    argument_names: tuple[str, ...] = ()
    argument_types: tuple[str, ...] = ()
    mutates: tuple[int, ...] = ()  # positions of arguments written in place
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


@functools.lru_cache(maxsize=4096)
def find_operator(name: str) -> Operator:
    """The operator of this wire name; raises GraphError when it is not allowed or does not exist."""
    if name in _ARITHMETIC:
        return Operator(name, _ARITHMETIC[name])
    matched = _ATEN.fullmatch(name)
    if matched is None or not _is_allowed(matched[1]) or "out" in matched[2].split("_"):
        raise GraphError(f"operator {name[:80]!r} is not on the allow-list")
    try:
        overload = getattr(getattr(torch.ops.aten, matched[1]), matched[2])
    except AttributeError as error:
        raise GraphError(f"torch here has no operator {name[:80]!r}; use one version of torch on all peers") from error
    if not isinstance(overload, torch._ops.OpOverload):
        raise GraphError(f"operator {name[:80]!r} is not on the allow-list")
    schema = overload._schema
    types = []
    for argument in schema.arguments:
        kind = _base_type(argument.real_type)
        if kind not in _ARGUMENT_TYPES | _ARGUMENT_TYPES_LEFT_OUT:
            raise GraphError(f"operator {name!r} takes a {kind}, which a graph may not hold")
        types.append(kind)
    shared = set().union(*(r.alias_info.before_set for r in schema.returns if r.alias_info is not None))
    mutates = tuple(i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    aliases = tuple(
        i for i, a in enumerate(schema.arguments) if a.alias_info is not None and (a.alias_info.before_set & shared)
    )
    names = [a.name for a in schema.arguments]
    if {"running_mean", "running_var"} <= set(names):  # batch norm writes them; its schema does not say so
        mutates = mutates or (names.index("running_mean"), names.index("running_var"))
    elif torch.Tag.maybe_aliasing_or_mutating in overload.tags:  # dropout that is off returns its input
        aliases = aliases or (0,)
    if name in _GUARDED:
        teach_shapes()
    return Operator(
        name=name,
        call=_GUARDED.get(name, overload),
        argument_names=tuple(names),
        argument_types=tuple(types),
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


def _is_allowed(base: str) -> bool:
    if base.startswith("_"):
        return base in _ALLOWED_INTERNAL or (base.startswith("__") and base.endswith("__"))
    return base in _ALLOWED or not _FORBIDDEN.fullmatch(base)


def _base_type(kind: Any) -> str:
    """ "Optional[List[Tensor]]" -> "Tensor"."""
    text = str(kind)
    while (inner := re.fullmatch(r"(?:Optional|List)\[(.*)\]", text)) is not None:
        text = inner[1]
    return text
