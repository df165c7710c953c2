"""Which arguments an allowed operator may have: types by its schema, numbers and words by allowed.toml, and a few shapes.

The idea: torch checks most arguments before it follows them, but not how often it would count, and not everywhere. So each
argument is looked at before the operator is called even on meta tensors. A number must be within bounds that belong to its
name. A word must be on a list. A few kernels trust shapes: the shapes for these kernels are checked here.
"""

from __future__ import annotations

import cmath
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from meshcee.capture.graph.operators import ALLOWED, FUNCTION, Operator
from meshcee.errors import GraphError

__all__ = ["EQUATION", "MAX_DIMS", "MAX_PARTS", "WORDS", "check_call", "checked_again", "is_recurrent"]

MAX_DIMS = 16
MAX_PARTS = 4096  # outputs of one node, tensors or long lists of one argument
_MAX_SCALE = 1024.0  # of an image, up or down
_MAX_STEPS = 100_000  # of all layers and ways of one recurrent node, each of up to 17 kernels
EQUATION = re.compile(r"[A-Za-z,. ]{1,64}(->[A-Za-z. ]{0,32})?")
WORDS = frozenset(word for words in ALLOWED["words"].values() for word in words)

_INTEGERS: Mapping[str, Sequence[int]] = ALLOWED["integers"]
_INTEGERS_OF: Mapping[str, Mapping[str, Sequence[int]]] = ALLOWED["integers_of"]
_NOT_FINITE = frozenset(ALLOWED["floats"]["any"])
_FINITE = tuple(ALLOWED["floats"]["finite"])
_OFF = frozenset(ALLOWED["flags"]["off"])
_LONG = frozenset(ALLOWED["lists"]["long"])


def check_call(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises GraphError, which says what is wrong with the arguments: meta tensors, numbers, words and lists of them."""
    if not operator.is_aten:
        if operator.name != FUNCTION:  # which the decoder has looked at, and verify.py goes through
            _check_arithmetic(operator.name, args)
        return
    given = dict(zip(operator.argument_names, args)) | dict(kwargs)
    for name, kind in zip(operator.argument_names, operator.schema_types):
        if name in given:
            _check(operator.name, name, kind, given[name])
    base = operator.name.split(".")[1]
    if base in _PARTS:
        parts = _PARTS[base](given)
        if parts > MAX_PARTS:
            raise GraphError(f"it makes {parts} tensors, more than {MAX_PARTS}")
    if base in _SHAPES:
        _SHAPES[base](operator.name, given)


def checked_again(operator: Operator, computed: bool) -> Callable[..., Any]:
    """The operator's call, behind `check_call` where sizes that were not verified may break a rule: GraphError.

    Those are the rules for shapes, and for numbers if the graph has `computed` some. A view makes nothing, and torch holds
    its numbers against what is there; so a model's most frequent calls stay as they are.
    """
    base = operator.name.split(".")[1] if operator.is_aten else ""
    view = operator.aliases and not operator.mutates
    if operator.name in ("getitem", FUNCTION) or (
        operator.is_aten and base not in _PARTS and (view or not (computed or base in _SHAPES))
    ):
        return operator.call

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            check_call(operator, args, kwargs)
        except GraphError as error:
            raise GraphError(f"a call of {operator.name} is refused: {error}") from error
        return operator.call(*args, **kwargs)

    return call


def is_recurrent(operator: Operator) -> bool:
    """Whether it walks the steps of its input: as many kernels as steps, and one step is like the next."""
    return operator.is_aten and _SHAPES.get(operator.name.split(".")[1]) is _check_recurrent


def _check_arithmetic(name: str, args: Sequence[Any]) -> None:
    """Python would multiply lists too, compare tensors, and make numbers of any length."""
    if name == "getitem":
        good = len(args) == 2 and isinstance(args[0], list | tuple) and type(args[1]) is int
    else:
        good = all(isinstance(a, int | float) and abs(a) < 1 << 63 for a in args)
    if not good:
        raise GraphError("it computes with more than numbers of 64 bits")


def _check(operator: str, name: str, kind: str, value: Any) -> None:
    if kind.startswith("Optional["):
        if value is None:
            return
        kind = kind[len("Optional[") : -1]
    if kind.startswith("List["):
        kind = kind[len("List[") : -1]
        if isinstance(value, list | tuple):
            most = MAX_PARTS if kind.endswith("Tensor") or name in _LONG else 2 * MAX_DIMS
            if len(value) > most:
                raise GraphError(f"its {name} has {len(value)} entries, more than {most}")
            for item in value:
                _check(operator, name, kind, item)
            return
    _one(operator, name, kind, value)


def _one(operator: str, name: str, kind: str, value: Any) -> None:
    """One value of one of the types that a schema may name."""
    if kind == "Tensor":
        good = isinstance(value, torch.Tensor | int | float | complex)
    elif kind in ("int", "SymInt"):
        good = type(value) is int
        least, most = _INTEGERS_OF.get(operator, {}).get(name) or _INTEGERS.get(name, (0, -1))
        if good and not least <= value <= most:
            raise GraphError(f"its {name} is {value}, not between {least} and {most}")
    elif kind in ("number", "float"):
        good = isinstance(value, int | float | (complex if kind == "number" else float))
        free = name in _NOT_FINITE if kind == "float" else not operator.startswith(_FINITE)
        if good and not free and not cmath.isfinite(value):
            raise GraphError(f"its {name} is {value}, which is not finite")
    elif kind == "bool":
        good = isinstance(value, bool)
        if value and name in _OFF:
            raise GraphError(f"its {name} is set")
    elif kind == "str":
        good = isinstance(value, str)
        known = EQUATION.fullmatch(value) if good and name == "equation" else value in ALLOWED["words"].get(name, ())
        if not known:
            raise GraphError(f"its {name} is {str(value)[:40]!r}, which is not on its list of words")
    else:
        good = isinstance(value, _ENUMERATIONS.get(kind, ()))
    if not good:
        raise GraphError(f"its {name} is no {kind}")


# What the decoder knows members of: see meshcee/capture/graph/encoding.py.
_ENUMERATIONS: Mapping[str, tuple[type, ...]] = {
    "ScalarType": (torch.dtype,),
    "MemoryFormat": (torch.memory_format,),
    "Layout": (torch.layout,),
    "Device": (torch.device,),
}


def _length(given: Mapping[str, Any]) -> int:
    """Of the dimension that is split; 0 where there is none, which torch refuses."""
    shape, dim = given["self"].shape, given.get("dim", 0)
    return shape[dim] if -len(shape) <= dim < len(shape) else 0


def _pieces(given: Mapping[str, Any]) -> int:
    size = given.get("split_size", given.get("split_sizes", 1))
    return len(size) if isinstance(size, list | tuple) else _length(given) // max(size, 1)


def _sections(given: Mapping[str, Any]) -> int:
    count = given.get("sections", given.get("chunks", 1))
    return count if isinstance(count, int) else len(given["indices"]) + 1


# How many tensors an operator makes, as its numbers say.
_PARTS: dict[str, Callable[[Mapping[str, Any]], int]] = {
    **dict.fromkeys(("split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes"), _pieces),
    **dict.fromkeys(("chunk", "unsafe_chunk", "tensor_split", "hsplit", "vsplit", "dsplit"), _sections),
    "unbind": _length,
}


def _check_weight_norm(operator: str, given: Mapping[str, Any]) -> None:
    """The kernel for the first or the last dimension takes the number of norms on trust, and divides by the rows' length."""
    v, g, dim = given["v"], given["g"], given.get("dim", 0)
    norms = tuple(size if d == dim else 1 for d, size in enumerate(v.shape))
    if min(v.dim(), v.numel()) < 1 or g.dtype != v.dtype or (dim in (0, v.dim() - 1) and tuple(g.shape) != norms):
        raise GraphError("its norms do not fit its weights")


def _check_scales(operator: str, given: Mapping[str, Any]) -> None:
    """The kernel reads where the scale says, whatever the sizes are."""
    given = dict(given)
    sizes = list(given[next(iter(given))].shape[2:])
    out = given.get("output_size")
    factors = given.get("scale_factors") or [
        given.get(k) for k in ("scales", "scales_d", "scales_h", "scales_w") if k in given
    ]
    if len(factors) not in (0, len(sizes)):
        raise GraphError("it has another number of scales than of dimensions")
    for place, (scale, size) in enumerate(zip(factors, sizes)):
        if scale is None:
            continue
        if not 1 / _MAX_SCALE <= scale <= _MAX_SCALE:
            raise GraphError(f"its scale is {scale}, not between 1/{_MAX_SCALE:.0f} and {_MAX_SCALE:.0f}")
        if out is not None and abs(out[place] - size * scale) > 1:
            raise GraphError(f"its scale of {scale} does not make {out[place]} of {size}")


def _check_recurrent(operator: str, given: Mapping[str, Any]) -> None:
    """The kernels take weights off their list one by one, without a look at its end."""
    gates = {"lstm": 4, "gru": 3}.get(operator.split(".")[1], 1)
    entry, params, layers = given["input"], given["params"], given["num_layers"]
    hidden = given["hx"] if isinstance(given["hx"], list | tuple) else [given["hx"]]
    ways = 2 if given["bidirectional"] else 1
    if len(hidden) != (2 if gates == 4 else 1) or entry.dim() != 3 or any(h.dim() != 3 for h in hidden):
        raise GraphError("its states do not fit its input")
    width, shown = hidden[-1].shape[2], hidden[0].shape[2]
    batch = entry.shape[0 if given["batch_first"] else 1]
    shapes: list[tuple[int, ...]] = []
    for layer in range(layers):
        size = entry.shape[2] if layer == 0 else shown * ways
        one: list[tuple[int, ...]] = [(gates * width, size), (gates * width, shown)]
        one += [(gates * width,)] * 2 if given["has_biases"] else []
        one += [(shown, width)] if shown != width else []
        shapes += one * ways
    states = [(layers * ways, batch, h.shape[2]) for h in hidden]
    if [tuple(p.shape) for p in params] != shapes or [tuple(h.shape) for h in hidden] != states:
        raise GraphError("its weights or states do not have the shapes that its layers need")
    if (steps := entry.shape[1 if given["batch_first"] else 0] * layers * ways) > _MAX_STEPS:
        raise GraphError(f"it walks {steps} steps in all its layers, more than {_MAX_STEPS}")


def _check_cell(operator: str, given: Mapping[str, Any]) -> None:
    """A bias of any shape ends the process on meta tensors."""
    entry, w_ih, w_hh = given["input"], given["w_ih"], given["w_hh"]
    biases = [b for name in ("b_ih", "b_hh") if (b := given.get(name)) is not None]
    fit = w_ih.dim() == 2 and all(b.shape == w_ih.shape[:1] and b.dtype == w_ih.dtype for b in biases)
    if not fit or len(biases) == 1 or {entry.dtype, w_hh.dtype} != {w_ih.dtype}:
        raise GraphError("its weights and biases do not fit one another")


def _check_median(operator: str, given: Mapping[str, Any]) -> None:
    """The kernel (torch 2.13) takes a dimension that repeats one row for one with rows, and returns what lies behind it."""
    if any(stride == 0 and size > 1 for size, stride in zip(given["self"].shape, given["self"].stride())):
        raise GraphError("it reads a tensor that repeats itself; make it contiguous before")


def _check_pad(operator: str, given: Mapping[str, Any]) -> None:
    """A circle that is also cropped leaves memory unwritten (torch 2.13)."""
    if given.get("mode") == "circular" and min(given["pad"], default=0) < 0:
        raise GraphError("it crops what it pads in a circle; slice it before")


def _check_target(operator: str, given: Mapping[str, Any]) -> None:
    if given["target"].shape != given["self"].shape:  # of some the kernel gives out memory that it did not write
        raise GraphError("its target has another shape than its input")


def _check_rows(operator: str, given: Mapping[str, Any]) -> None:
    """The kernel (torch 2.13) adds up over no rows, and does not write the sum."""
    if given["self"].numel() == 0:
        raise GraphError("its input is empty")


def _check_view(operator: str, given: Mapping[str, Any]) -> None:
    """Kernels take it for granted that a flag is 0 or 1."""
    if given.get("dtype") == torch.bool:
        raise GraphError("it looks at numbers as flags")


_SHAPES: dict[str, Callable[[str, Mapping[str, Any]], None]] = {
    "_weight_norm": _check_weight_norm,
    "binary_cross_entropy": _check_target,
    "multilabel_margin_loss": _check_rows,
    "pad": _check_pad,
    "view": _check_view,
    **dict.fromkeys(("median", "nanmedian"), _check_median),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _check_cell),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _check_recurrent),
    **{n.split(".")[1]: _check_scales for n in ALLOWED["overloads"] if n.split(".")[1].startswith("upsample_")},
}
