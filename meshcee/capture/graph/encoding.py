"""A program as bytes, and back without trust.

The idea: msgpack of plain lists, nothing that could run. The decoder counts before it builds: bytes, values, sizes. The
decoder looks operators up on the allow-list, and gives every value its own name. The decoder accepts only numbers,
flags, known enumerations and references to earlier values as arguments. Whatever is wrong raises GraphError and nothing else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import msgpack
import torch

from meshcee.capture.graph.operators import FUNCTION, Operator, find_operator
from meshcee.capture.graph.program import Batch, Dim, Free, Input, Node, Program, Ref, Value, is_random
from meshcee.capture.graph.rules import EQUATION, MAX_DIMS, MAX_PARTS, WORDS
from meshcee.capture.graph.strides import canonical
from meshcee.capture.graph.verify import MAX_ELEMENTS, NodeRefused, verify_program
from meshcee.config import Limits
from meshcee.errors import GraphError
from meshcee.files.layout import GRAIN_BYTES
from meshcee.files.tensor_files import byte_view

__all__ = ["DTYPES", "decode_program", "encode_program"]

VERSION = 2
MAX_VALUES = 200_000
MAX_BLOCKS = 4096
MAX_CONSTANT_BYTES = 4 << 20  # of all constants
MAX_LIST = MAX_PARTS
MAX_NAME = 512
MAX_INTEGER = 1 << 63

DTYPES = {
    str(d).removeprefix("torch."): d
    for d in [
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.complex64, torch.complex128),
    ]
}
_FORMATS = {
    str(f).removeprefix("torch."): f
    for f in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
}
_LAYOUTS = {"strided": torch.strided}
_KINDS = ("raw", "parameter", "buffer", "constant")


def encode_program(program: Program) -> bytes:
    packed: bytes = msgpack.packb(_document(program), use_bin_type=True)
    return packed


def _document(program: Program) -> list[Any]:
    names: dict[str, int] = {}
    nodes = []
    for node in program.nodes:
        operator = names.setdefault(node.operator.name, len(names))
        nodes.append(
            [
                operator,
                [_encode_argument(a) for a in node.args],
                {k: _encode_argument(v) for k, v in node.kwargs.items()},
                _encode_value(node.value),
                node.block,
                node.no_grad,
            ]
        )
    inputs = [
        [
            _KINDS.index(x.kind),
            x.name,
            _encode_value(x.value),
            x.trainable,
            x.mutated,
            x.persistent,
            None if x.data is None else _to_bytes(x.data),
            list(x.strides),
            *([x.offset] if x.offset else []),
        ]
        for x in program.inputs
    ]
    return [
        VERSION,
        list(names),
        inputs,
        nodes,
        list(program.outputs),
        program.num_blocks,
        sorted(program.recomputed),
    ]


def decode_program(data: bytes, limits: Limits | None = None, *, checked: bool = False) -> Program:
    """The program, or GraphError; about 0.3 ms a node, and a small multiple of the bytes' length in memory.

    checked  whether these bytes have passed before, in another process: then no operator is called
    """
    limits = limits or Limits()
    if len(data) > limits.graph_bytes:
        raise GraphError(f"a graph of {len(data)} bytes is larger than the {limits.graph_bytes} that are accepted")
    try:
        document = msgpack.unpackb(
            data, raw=False, strict_map_key=True, max_array_len=MAX_VALUES, max_map_len=MAX_LIST, max_ext_len=0
        )
    except (ValueError, msgpack.UnpackException, RecursionError, OverflowError) as error:
        raise GraphError(f"a graph is not well-formed: {type(error).__name__}") from error
    try:
        program = _program(document)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise GraphError(f"a graph is malformed: {error!r}"[:200]) from error
    if not checked:
        verify_program(program)
    return program


def _program(document: Any, *, inner: bool = False) -> Program:
    """`inner`: the backward pass of a function. Its inputs are values of the program around it, sizes too."""
    if not isinstance(document, list) or not document or document[0] != VERSION:
        raise GraphError("a graph has another version; use one version of meshcee on all peers")
    _, names, inputs, nodes, outputs, num_blocks, recomputed = document
    if len(inputs) + len(nodes) > MAX_VALUES:
        raise GraphError(f"a graph has more than {MAX_VALUES} values")
    if _integer(num_blocks) < 1 or num_blocks > MAX_BLOCKS:
        raise GraphError(f"a graph has {num_blocks} blocks, more than {MAX_BLOCKS} or none")
    if inner and FUNCTION in names:
        raise GraphError("the backward pass of a function holds another")
    operators = [find_operator(_string(n, 128)) for n in names]
    made_inputs = _inputs(inputs, inner)
    base = len(made_inputs)
    made_nodes: list[Node] = []
    for i, (operator, *rest) in enumerate(nodes):
        called = operators[_index(operator, len(operators))]
        try:
            made_nodes.append(_node(i, called, rest, made_inputs))
        except GraphError as error:
            raise NodeRefused(i, called.name, str(error)) from error
    numbers = frozenset(_index(r, base + len(made_nodes)) for r in recomputed)
    for number in numbers:
        if number < base or made_nodes[number - base].writes or is_random(made_nodes[number - base]):
            raise GraphError(f"value {number} cannot be recomputed by every stage")
    ends = tuple(_index(o, base + len(made_nodes)) for o in outputs)
    made = Program(tuple(made_inputs), tuple(made_nodes), ends, num_blocks, numbers)
    if inner and (num_blocks > 1 or numbers or made.changing() is not None):
        raise GraphError("the backward pass of a function draws, writes what it is given, or has blocks")
    return made


def _node(i: int, operator: Operator, encoded: Any, inputs: Sequence[Input]) -> Node:
    args, kwargs, value, block, no_grad = encoded
    number = len(inputs) + i
    kwargs, given = dict(kwargs), {}
    if operator.name == FUNCTION:
        given = {"backward": _program(kwargs.pop("backward"), inner=True)}
    if not isinstance(args, list) or len(args) > MAX_LIST:
        raise GraphError("it has no list of arguments, or one that is too long")
    node = Node(
        operator=operator,
        args=tuple(_argument(a, number, 0) for a in args),
        kwargs={_string(k, 64): _argument(v, number, 0) for k, v in kwargs.items()} | given,
        value=_value(value, f"n{i}"),
        block=_integer(block),
        no_grad=_flag(no_grad),
    )
    _check_call(node, inputs)
    return node


def _inputs(entries: Any, inner: bool) -> list[Input]:
    made: list[Input] = []
    names: set[str] = set()
    spent = 0
    for kind, name, value, trainable, mutated, persistent, data, strides, *rest in entries:
        which = _KINDS[_index(kind, len(_KINDS))]
        given = _value(value, _string(name, MAX_NAME))
        if given.name in names or (given.dtype is None and not inner) or (inner and which != "raw"):
            raise GraphError(f"input {given.name[:80]!r} appears twice or is not a tensor")
        names.add(given.name)
        tensor = None
        if which == "constant":
            size = given.nbytes(1)
            if not isinstance(data, bytes) or len(data) != size or not all(isinstance(d, int) for d in given.shape):
                raise GraphError(f"constant {given.name[:80]!r} does not have the bytes that its shape says")
            spent += size
            if spent > MAX_CONSTANT_BYTES:
                raise GraphError(f"a graph holds more than {MAX_CONSTANT_BYTES} bytes of constants; make them buffers")
            tensor = _from_bytes(data, given)
        elif data is not None:
            raise GraphError(f"input {given.name[:80]!r} is no constant and must not bring data")
        if _flag(mutated) and which != "buffer":
            raise GraphError(f"only buffers may be written, not {given.name[:80]!r}")
        if _flag(trainable) and which != "parameter":
            raise GraphError(f"only parameters may be trained, not {given.name[:80]!r}")
        offset = sum(map(_integer, rest))
        if (
            len(rest) > 1
            or not 0 <= offset < GRAIN_BYTES
            or (offset and (which == "raw" or given.dtype is None or offset % given.dtype.itemsize))
        ):
            raise GraphError(f"input {given.name[:80]!r} cannot begin where it says")
        lies = _strides(which, given, strides), offset
        made.append(Input(which, given, trainable, mutated, _flag(persistent), tensor, *lies))
    return made


def _strides(kind: str, value: Value, given: Any) -> tuple[int, ...]:
    """None, or those that a tensor of this shape may have."""
    if not isinstance(given, list) or any(type(s) is not int or not 0 <= s < MAX_INTEGER for s in given):
        raise GraphError(f"input {value.name[:80]!r} has strides that are no numbers")
    shape = value.sizes(1)
    if given and (kind == "raw" or len(given) != len(shape) or canonical(shape, given) != tuple(given)):
        raise GraphError(f"input {value.name[:80]!r} has strides that its shape cannot have")
    return tuple(given)


def _check_call(node: Node, inputs: Sequence[Input]) -> None:
    """Argument count and names by the schema; writes only to values of the program and to buffers marked so."""
    operator = node.operator
    if operator.name == FUNCTION:
        _check_function(node)
        return
    if not operator.is_aten:
        if node.kwargs or not 1 <= len(node.args) <= 2 or any(isinstance(a, list | str) for a in node.args):
            raise GraphError(f"{operator.name} takes one or two numbers or values")
        return
    if len(node.args) > len(operator.argument_names) or not set(node.kwargs) <= set(operator.argument_names):
        raise GraphError(f"{operator.name} is called with arguments that it does not have")
    for place, kind in enumerate(operator.argument_types):
        name = operator.argument_names[place]
        given = node.args[place] if place < len(node.args) else node.kwargs.get(name)
        if kind == "Generator" and given is not None:
            raise GraphError(f"{operator.name} must draw from the default generator")
        if place in node.writes and isinstance(given, Ref) and given.index < len(inputs):
            entry = inputs[given.index]
            if not entry.mutated:
                raise GraphError(f"{operator.name} writes to {entry.name[:80]!r}, which is not marked so")


def _check_function(node: Node) -> None:
    """Lists of values, and a backward pass that takes and makes as many."""
    outputs, inputs, saved, fixed = node.args
    backward: Program = node.kwargs["backward"]
    for values in (outputs, inputs, saved):
        if not isinstance(values, list) or not all(isinstance(value, Ref) for value in values):
            raise GraphError("a function takes lists of values")
    counts = len(backward.inputs) == len(saved) + len(outputs) and len(backward.outputs) == len(inputs)
    places = isinstance(fixed, list) and all(type(place) is int and 0 <= place < len(outputs) for place in fixed)
    if not (counts and places and outputs and inputs and node.kwargs.keys() == {"backward"}):
        raise GraphError("a function does not fit its backward pass")


def _encode_argument(argument: Any) -> Any:
    """Numbers and None stand for themselves, lists are [items], the rest is {tag: what}."""
    if isinstance(argument, Ref):
        return {"r": argument.index}
    if isinstance(argument, list | tuple):
        return [_encode_argument(a) for a in argument]
    if isinstance(argument, torch.dtype):
        return {"t": str(argument).removeprefix("torch.")}
    if isinstance(argument, torch.memory_format):
        return {"f": str(argument).removeprefix("torch.")}
    if isinstance(argument, torch.layout):
        return {"l": str(argument).removeprefix("torch.")}
    if isinstance(argument, Program):
        return _document(argument)
    if isinstance(argument, complex):
        return {"c": [argument.real, argument.imag]}
    if isinstance(argument, torch.device):
        return {"d": 0}  # the device of the stage, whichever it is
    return argument


def _argument(encoded: Any, number: int, depth: int) -> Any:
    if encoded is None or isinstance(encoded, bool | float):
        return encoded
    if isinstance(encoded, int):
        if abs(encoded) >= MAX_INTEGER:
            raise GraphError("a graph holds an integer of more than 64 bits")
        return encoded
    if isinstance(encoded, str):
        if encoded not in WORDS and not EQUATION.fullmatch(encoded):
            raise GraphError(f"a graph holds the string {encoded[:80]!r}, which no operator is known to take")
        return encoded
    if isinstance(encoded, list):
        if depth >= 2 or len(encoded) > MAX_LIST:
            raise GraphError("a graph holds a list that is too long or too deep")
        return [_argument(e, number, depth + 1) for e in encoded]
    if isinstance(encoded, dict) and len(encoded) == 1:
        [(tag, what)] = encoded.items()
        if tag == "r":
            return Ref(_index(what, number))
        if tag == "t":
            return DTYPES[what]
        if tag == "f":
            return _FORMATS[what]
        if tag == "l":
            return _LAYOUTS[what]
        if tag == "c" and isinstance(what, list) and [type(part) for part in what] == [float, float]:
            return complex(*what)
        if tag == "d":
            return torch.device("cpu")
    raise GraphError("a graph holds an argument of an unknown type")


def _encode_value(value: Value) -> list[Any]:
    if value.dtype is None:
        return [1 if value.multiple else 0]
    shape = [_encode_dim(d) for d in value.shape]
    order = [] if value.order == tuple(range(len(value.order))) else list(value.order)
    return [2, str(value.dtype).removeprefix("torch."), shape, order, value.requires_grad]


def _encode_dim(dim: Dim) -> Any:
    if isinstance(dim, Batch):
        return [dim.scale]
    return [dim.limit, dim.usual, dim.batch] if isinstance(dim, Free) else dim


def _dim(encoded: Any) -> Dim:
    if not isinstance(encoded, list):
        return _size(encoded)
    if len(encoded) == 1:
        return Batch(_size(encoded[0]))
    limit, usual, batch = encoded
    return Free(_size(limit), _size(usual), _flag(batch))


def _size(value: Any) -> int:
    if _integer(value) < 0:
        raise GraphError("a graph holds a negative size")
    return int(value)


def _value(encoded: Any, name: str) -> Value:
    if encoded in ([0], [1]):
        return Value(name, None, multiple=encoded == [1])
    tag, dtype, shape, order, requires_grad = encoded
    if tag != 2 or not isinstance(shape, list) or len(shape) > MAX_DIMS:
        raise GraphError(f"value {name[:80]!r} has no valid shape")
    dims = tuple(_dim(d) for d in shape)
    value = Value(name, DTYPES[dtype], dims)
    if math.prod(s for s in value.sizes(1) if s) > MAX_ELEMENTS:
        raise GraphError(f"value {name[:80]!r} has more than {MAX_ELEMENTS} elements")
    given = tuple(order) or tuple(range(len(dims)))
    if sorted(given) != list(range(len(dims))):
        raise GraphError(f"value {name[:80]!r} has an impossible memory order")
    return dataclasses.replace(value, order=given, requires_grad=_flag(requires_grad))


def _to_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(byte_view(tensor.cpu()))


def _from_bytes(data: bytes, value: Value) -> torch.Tensor:
    assert value.dtype is not None
    if not data:
        return torch.empty(value.sizes(1), dtype=value.dtype)
    return torch.frombuffer(bytearray(data), dtype=value.dtype).view(value.sizes(1))


def _integer(value: Any) -> int:
    if type(value) is not int or abs(value) >= MAX_INTEGER:
        raise GraphError(f"expected an integer in a graph, got {str(value)[:40]!r}")
    return value


def _index(value: Any, count: int) -> int:
    if not 0 <= _integer(value) < count:
        raise GraphError(f"a graph refers to number {value} of {count}")
    return int(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise GraphError(f"expected a flag in a graph, got {str(value)[:40]!r}")
    return value


def _string(value: Any, limit: int) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= limit:
        raise GraphError(f"expected a string of at most {limit} characters in a graph")
    return value
