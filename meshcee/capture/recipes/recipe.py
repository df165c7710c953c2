"""How one tensor is made: a few calls of operators that initialise, in order, over storages of stated size.

The idea: what a constructor did to one parameter is far smaller than the parameter, and replayed from the same state of
the generator it gives the same bits. The owner replays every call of its own constructor. A recipe that the owner sends is
restricted to an allow-list, as graphs are. A receiver first replays the recipe on the meta device, which costs no memory.
Every size must be the declared one, and every view must lie within its storage. The bytes that live at once must be a small
multiple of the result's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import torch
from torch.utils._pytree import tree_flatten, tree_map

from meshcee.capture.graph import quiet
from meshcee.errors import CaptureError, GraphError
from meshcee.files.tensor_files import byte_view

__all__ = ["Call", "Const", "Recipe", "View", "covers", "decode", "fresh"]

VERSION = 1
MAX_BYTES = 4 << 20
MAX_CALLS = 256
MAX_STORAGES = 256
MAX_DIMS = 16
MAX_LIVE = 8  # bytes that live at once, as a multiple of the result's
SLACK_BYTES = 1 << 20
MAX_CONSTANT_BYTES = 64 << 10
STATE_BYTES = torch.Generator().get_state().numel()

_IN_PLACE = (
    *("zero_.default", "fill_.Scalar", "fill_.Tensor", "copy_.default"),
    *("normal_.default", "uniform_.default", "bernoulli_.float", "exponential_.default"),
    *("mul_.Tensor", "mul_.Scalar", "add_.Tensor", "add_.Scalar", "sub_.Tensor", "sub_.Scalar", "div_.Tensor"),
    *("div_.Scalar", "pow_.Scalar", "log_.default", "exp_.default", "sqrt_.default", "neg_.default", "erfinv_.default"),
    *("clamp_.default", "clamp_min_.default", "clamp_max_.default"),
)
_MAKING = (
    *("zeros.default", "ones.default", "full.default", "zeros_like.default", "ones_like.default", "full_like.default"),
    *("new_zeros.default", "new_ones.default", "new_full.default", "eye.default", "eye.m"),
    *("arange.default", "arange.start", "arange.start_step", "linspace.default"),
    *("clone.default", "_to_copy.default", "tril.default", "triu.default", "cat.default", "repeat.default"),
    *("mul.Tensor", "mul.Scalar", "add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "div.Tensor", "div.Scalar"),
    *("pow.Tensor_Scalar", "pow.Scalar", "exp.default", "log.default", "sin.default", "cos.default", "sqrt.default"),
    *("neg.default", "reciprocal.default", "rsqrt.default", "abs.default", "where.self", "where.ScalarSelf"),
    *("lt.Scalar", "lt.Tensor", "le.Scalar", "le.Tensor", "gt.Scalar", "gt.Tensor", "ge.Scalar", "ge.Tensor"),
    *("eq.Scalar", "bitwise_or.Tensor", "bitwise_and.Tensor", "bitwise_not.default", "logical_not.default"),
)


def _find(names: Sequence[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        packet, _, overload = name.partition(".")
        found[name] = getattr(getattr(torch.ops.aten, packet), overload)
    return found


_OPERATORS: dict[str, Callable[..., Any]] = {**_find(_IN_PLACE), **_find(_MAKING)}
_NAMES = {function: name for name, function in _OPERATORS.items()}
_DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
_FORMATS = {str(f).removeprefix("torch."): f for f in (torch.contiguous_format, torch.preserve_format)}
_LEFT_OUT = frozenset({"device", "layout", "pin_memory", "generator", "non_blocking"})


@dataclass(frozen=True)
class View:
    """A tensor argument: a view of storage `slot`; stride and offset in elements."""

    slot: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def end_bytes(self) -> int:
        """Where the last element ends in the storage."""
        if 0 in self.size:
            return 0
        last = self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Const:
    """A tensor that no call of the recipe makes. `version` is that of a tensor which is referred to, not copied."""

    tensor: torch.Tensor
    version: int = -1


@dataclass(frozen=True)
class Call:
    """One operator call. `makes` has the storage of each tensor that it returns, None for those written in place."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    makes: tuple[int | None, ...]
    state: torch.Tensor | None  # of the generator, before a random call
    reads: frozenset[int] = frozenset()  # storages whose earlier content matters
    replaces: frozenset[int] = frozenset()  # storages of whose earlier content nothing is left

    @property
    def slots(self) -> frozenset[int]:
        """All storages that the call touches."""
        given = tree_flatten((self.args, dict(self.kwargs)))[0]
        return frozenset({a.slot for a in given if isinstance(a, View)} | {s for s in self.makes if s is not None})


def covers(view: View, nbytes: int) -> bool:
    """Whether the view is all of its storage, each element once."""
    return math.prod(view.size) * view.dtype.itemsize == nbytes and not view.offset and view.end_bytes() == nbytes


def fresh(nbytes: int, *, zeros: bool) -> torch.UntypedStorage:
    """A new storage on the CPU."""
    make = torch.zeros if zeros else torch.empty
    return make(nbytes, dtype=torch.uint8).untyped_storage()


@dataclass(frozen=True)
class Recipe:
    """Storages by number with their bytes, calls in order, and the storage that is wanted of it all.

    A storage that no call makes begins blank: as zeros.
    """

    storages: Mapping[int, int]
    calls: tuple[Call, ...]
    result: int

    def run_storage(self) -> torch.UntypedStorage:
        """Replay; every storage is dropped after its last use."""
        last = {slot: i for i, call in enumerate(self.calls) for slot in call.slots}
        live: dict[int, torch.UntypedStorage] = {}
        for i, call in enumerate(self.calls):
            for slot in call.slots - live.keys() - set(call.makes):
                live[slot] = fresh(self.storages[slot], zeros=slot not in call.replaces)
            kwargs = {name: _given(a, live) for name, a in call.kwargs.items()}
            if call.state is not None:
                kwargs["generator"] = torch.Generator().set_state(call.state)
            out = call.function(*(_given(a, live) for a in call.args), **kwargs)
            live |= {s: t.untyped_storage() for s, t in zip(call.makes, _tensors(out), strict=True) if s is not None}
            del out, kwargs
            for slot in call.slots:
                if last[slot] == i and slot != self.result:
                    del live[slot]
        return live[self.result] if self.result in live else fresh(self.storages[self.result], zeros=True)

    def tensor(self, view: View) -> torch.Tensor:
        """Replay, and take what is wanted. Raises GraphError if a call refuses its arguments."""
        try:
            return view.on(self.run_storage())
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise GraphError(f"a recipe for weights cannot be followed: {str(error)[:200]}") from error

    # -- on the wire ---------------------------------------------------------------------------------------------------

    def encode(self, view: View) -> bytes | None:
        """As data, or None if it needs an operator or an argument that a receiver would refuse."""
        number = {slot: i for i, slot in enumerate(sorted(self.storages))}
        calls = []
        for call in self.calls:
            if call.function not in _NAMES:
                return None
            try:
                args = [_encoded(a, number) for a in call.args]
                kwargs = {
                    k: _encoded(a, number) for k, a in call.kwargs.items() if k not in _LEFT_OUT and a is not None
                }
            except ValueError:
                return None
            makes = [None if slot is None else number[slot] for slot in call.makes]
            state = None if call.state is None else call.state.numpy().tobytes()
            calls.append([_NAMES[call.function], args, kwargs, makes, state])
        sizes = [self.storages[slot] for slot in sorted(self.storages)]
        data: bytes = msgpack.packb([VERSION, sizes, calls, number[self.result], _encoded(view, number)["v"]])
        try:
            decode(data, view.dtype, view.size)
        except GraphError:
            return None  # too long, or larger on the way than a receiver bears
        return data


def decode(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> tuple[Recipe, View]:
    """A recipe for a tensor of this type and shape, checked; GraphError before any memory is spent on it."""
    if len(data) > MAX_BYTES:
        raise GraphError(f"a recipe for weights has {len(data)} bytes, more than {MAX_BYTES}")
    try:
        version, sizes, calls, result, view = msgpack.unpackb(
            data, raw=False, strict_map_key=True, max_array_len=4096, max_map_len=64, max_ext_len=0
        )
        if version != VERSION:
            raise GraphError("a recipe for weights has another version; use one version of meshcee on all peers")
        if not 1 <= len(sizes) <= MAX_STORAGES or len(calls) > MAX_CALLS:
            raise GraphError("a recipe for weights is too long")
        storages = {i: _count(size) for i, size in enumerate(sizes)}
        wanted = _view(view, storages)
        if (wanted.dtype, wanted.size, wanted.slot) != (dtype, tuple(shape), result):
            raise GraphError("a recipe for weights makes another tensor than the graph needs")
        recipe = Recipe(storages, tuple(_call(call, storages) for call in calls), wanted.slot)
    except GraphError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise GraphError(f"a recipe for weights is malformed: {type(error).__name__}") from error
    except msgpack.UnpackException as error:
        raise GraphError("a recipe for weights is not well-formed") from error
    _check_live(recipe, MAX_LIVE * math.prod(shape) * dtype.itemsize + SLACK_BYTES)
    _check_sizes(recipe)
    return recipe, wanted


def _check_live(recipe: Recipe, limit_bytes: int) -> None:
    """What is held at once; storages appear in the call that first touches them and leave after the last."""
    rows = [call.slots for call in recipe.calls]
    last = {slot: i for i, row in enumerate(rows) for slot in row}
    live = {recipe.result}
    for i, row in enumerate(rows):
        live |= row
        if sum(recipe.storages[slot] for slot in live) > limit_bytes:
            raise GraphError("a recipe for weights would hold far more than the weights")
        live = {slot for slot in live if last.get(slot, i) > i or slot == recipe.result}


def _check_sizes(recipe: Recipe) -> None:
    """A run over meta tensors: every storage that a call makes has the size that was declared, and is made once."""
    used: set[int] = set()
    with quiet(), torch.no_grad():
        for call in recipe.calls:
            kwargs = {name: _meta(a) for name, a in call.kwargs.items()}
            if "device" in (a.name for a in call.function._schema.arguments):  # type: ignore[attr-defined]
                kwargs["device"] = torch.device("meta")
            try:
                out = _tensors(call.function(*map(_meta, call.args), **kwargs))
            except Exception as error:  # whatever a kernel says of nonsense
                raise GraphError(f"a call of {call.function} in a recipe cannot run: {type(error).__name__}") from error
            in_place = call.function in _WRITING
            if len(out) != len(call.makes) or any((slot is None) != in_place for slot in call.makes):
                raise GraphError(f"a call of {call.function} in a recipe returns something else than it declares")
            views = call.slots - set(call.makes)
            for slot, tensor in zip(call.makes, out, strict=True):
                if slot is not None:
                    if slot in used | views or tensor.untyped_storage().nbytes() != recipe.storages[slot]:
                        raise GraphError(f"a call of {call.function} in a recipe makes something else than it declares")
                    used.add(slot)
            used |= call.slots


_WRITING = frozenset(_OPERATORS[name] for name in _IN_PLACE)


def _call(encoded: Any, storages: Mapping[int, int]) -> Call:
    name, args, kwargs, makes, state = encoded
    if name not in _OPERATORS:
        raise GraphError(f"operator {str(name)[:80]!r} is not one that recipes may hold")
    function = _OPERATORS[name]
    schema = function._schema  # type: ignore[attr-defined]
    known = {a.name for a in schema.arguments} - _LEFT_OUT
    if not isinstance(args, list) or len(args) > len(schema.arguments) or not set(kwargs) <= known:
        raise GraphError(f"{name} is called in a recipe with arguments that it does not have")
    random = torch.Tag.nondeterministic_seeded in function.tags  # type: ignore[attr-defined]
    if random != (state is not None) or (random and (type(state) is not bytes or len(state) != STATE_BYTES)):
        raise GraphError(f"{name} in a recipe needs the generator's state, and only random operators do")
    given = None
    if random:
        given = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        try:
            torch.Generator().set_state(given)
        except RuntimeError as error:
            raise GraphError("a recipe for weights holds an impossible state of a generator") from error
    made = tuple(None if slot is None else _slot(slot, storages) for slot in makes)
    if len(set(made) - {None}) != len([slot for slot in made if slot is not None]):
        raise GraphError(f"{name} in a recipe makes one storage twice")
    return Call(
        function,
        tuple(_decoded(a, storages, 0) for a in args),
        {k: _decoded(a, storages, 0) for k, a in kwargs.items()},
        made,
        given,
    )


def _encoded(argument: Any, number: Mapping[int, int]) -> Any:
    if isinstance(argument, View):
        dtype = str(argument.dtype).removeprefix("torch.")
        return {"v": [number[argument.slot], dtype, list(argument.size), list(argument.stride), argument.offset]}
    if isinstance(argument, Const):
        tensor = argument.tensor
        if argument.version != -1 or tensor.nbytes > MAX_CONSTANT_BYTES:
            raise ValueError("a large constant")
        return {"c": [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), bytes(byte_view(tensor))]}
    if isinstance(argument, list | tuple):
        return [_encoded(a, number) for a in argument]
    if isinstance(argument, torch.dtype):
        return {"t": str(argument).removeprefix("torch.")}
    if isinstance(argument, torch.memory_format):
        return {"f": str(argument).removeprefix("torch.")}
    if argument is None or isinstance(argument, bool | int | float):
        return argument
    raise ValueError(f"an argument of type {type(argument).__name__}")


def _decoded(encoded: Any, storages: Mapping[int, int], depth: int) -> Any:
    if encoded is None or isinstance(encoded, bool | int | float):
        return encoded
    if isinstance(encoded, list) and depth < 2:
        return [_decoded(e, storages, depth + 1) for e in encoded]
    if isinstance(encoded, dict) and len(encoded) == 1:
        [(tag, what)] = encoded.items()
        if tag == "v":
            return _view(what, storages)
        if tag == "c":
            return _constant(what)
        if tag == "t":
            return _DTYPES[what]
        if tag == "f":
            return _FORMATS[what]
    raise GraphError("a recipe for weights holds an argument of an unknown type")


def _view(encoded: Any, storages: Mapping[int, int]) -> View:
    slot, dtype, size, stride, offset = encoded
    if len(size) > MAX_DIMS or len(size) != len(stride):
        raise GraphError("a recipe for weights holds an impossible shape")
    view = View(
        _slot(slot, storages), _DTYPES[dtype], tuple(map(_count, size)), tuple(map(_count, stride)), _count(offset)
    )
    if max(view.end_bytes(), math.prod(view.size) * view.dtype.itemsize) > storages[view.slot]:
        raise GraphError("a recipe for weights reaches outside of its storage")
    return view


def _constant(encoded: Any) -> Const:
    name, size, data = encoded
    dtype, shape = _DTYPES[name], tuple(map(_count, size))
    if len(shape) > MAX_DIMS or type(data) is not bytes or len(data) > MAX_CONSTANT_BYTES:
        raise GraphError("a recipe for weights holds a constant that is too large")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise GraphError("a recipe for weights holds a constant without the bytes that its shape says")
    if not data:
        return Const(torch.empty(shape, dtype=dtype))
    return Const(torch.frombuffer(bytearray(data), dtype=dtype).view(shape))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 48:
        raise GraphError("a recipe for weights holds a size that is not a sensible number")
    return value


def _slot(value: Any, storages: Mapping[int, int]) -> int:
    if type(value) is not int or value not in storages:
        raise GraphError("a recipe for weights refers to a storage that it does not have")
    return value


def _given(argument: Any, live: Mapping[int, torch.UntypedStorage]) -> Any:
    def one(a: Any) -> Any:
        if isinstance(a, View):
            return a.on(live[a.slot])
        if isinstance(a, Const):
            if a.version not in (-1, a.tensor._version):
                raise CaptureError("Job.model() changed a large tensor it had copied; give the built module instead")
            return a.tensor
        return a

    return tree_map(one, argument)


def _meta(argument: Any) -> Any:
    def one(a: Any) -> Any:
        if isinstance(a, View):
            return torch.empty_strided(a.size, a.stride, dtype=a.dtype, device="meta")
        return a.tensor.to("meta") if isinstance(a, Const) else a

    return tree_map(one, argument)


def _tensors(out: Any) -> list[torch.Tensor]:
    return [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]
