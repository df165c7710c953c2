"""Reading what others have sent: a value has the type, the range and the size that its class declares, or it is refused.

The idea: limits stand in the annotations of the class that is read, so there is one reader and nothing to forget in it. A bool
is no int, a text is no number, a field that the class does not have is passed over, so that a newer peer is understood.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgpack
import msgspec
from msgspec import Meta

from meshcee.errors import ProtocolError

__all__ = [
    "Count",
    "Finite",
    "Name",
    "NotNegative",
    "Ordinal",
    "ShortText",
    "Small",
    "plain",
    "read",
    "refuse_deep",
    "refuse_unprintable",
    "unpack",
]

T = TypeVar("T")

Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
NotNegative = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Small = Annotated[int, Meta(ge=0, le=1 << 53)]  # of epochs and elections: exact in every language's JSON
Ordinal = Annotated[int, Meta(ge=1, le=1 << 53)]
Name = Annotated[str, Meta(max_length=128)]
ShortText = Annotated[str, Meta(max_length=64)]

DEEPEST = 64  # of lists and maps in one another: each level costs whoever walks a value some of the interpreter's stack

_SCALARS = (str, int, float, bool, bytes, type(None))
_BYTES = (bytes, bytearray, memoryview)  # read as they are: a text is not decoded into them
_known: set[Any] = set()  # types that msgspec knows whole
_learning = threading.RLock()


def unpack(data: Any, max_bytes: int, what: str) -> Any:
    """One msgpack value; ProtocolError when it is too large, nested too deep, or none. A list in it is no longer than the data."""
    if len(data) > max_bytes:
        raise ProtocolError(f"{what} has {len(data)} bytes, more than {max_bytes}")
    try:
        value = msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:  # ExtraData, nesting, bad UTF-8
        raise ProtocolError(f"{what} is not valid msgpack: {error}") from error
    refuse_deep(value, what)
    return value


def refuse_deep(value: Any, what: str) -> None:
    """ProtocolError where lists and maps stand in one another too deep for a walk that calls itself."""
    level = [value]
    for _ in range(DEEPEST + 1):
        nested = [one for one in level if type(one) in (list, dict)]
        if not nested:
            return
        level = [inner for one in nested for inner in (one.values() if type(one) is dict else one)]
    raise ProtocolError(f"{what} has lists or maps nested more than {DEEPEST} deep")


def plain(value: Any) -> Any:
    """What `read` reads: maps, lists and scalars for a value of dataclasses, and of classes that have `to_json`."""
    return msgspec.to_builtins(value, builtin_types=_BYTES, enc_hook=lambda one: one.to_json())


def read(value: Any, kind: type[T], what: str, *, defaults: bool = False) -> T:
    """Plain data as a value of this type, a dataclass as a rule; ProtocolError says which field of `what` is wrong.

    defaults  whether what a class has a default for may be left out: in files that people write
    """
    try:
        found = _converted(value, kind)
        missing = None if defaults else _left_out(value, found)
    except (msgspec.ValidationError, RecursionError) as error:
        said, _, path = str(error).rpartition(" - at `")
        said, path = (said, path.strip("`").removeprefix("$.") + ": ") if said else (path, "")
        said = "Unknown value" if said.startswith("Invalid enum value") else said  # which may be of any length
        raise ProtocolError(f"{what}: {path}{said[:1].lower()}{said[1:]}") from error
    if missing:
        raise ProtocolError(f"{what}: {missing} is missing")
    return found


def _converted(value: Any, kind: type[T]) -> T:
    """msgspec notes a type at its first use, before it knows the type whole: another thread would follow what is not there yet."""
    with contextlib.nullcontext() if kind in _known else _learning:
        try:
            return msgspec.convert(value, kind, builtin_types=_BYTES, dec_hook=lambda kind, one: kind.from_json(one))
        finally:
            _known.add(kind)


def _left_out(told: Any, found: Any) -> str | None:
    """The first field that a class gave its default instead."""
    pairs: Iterable[tuple[Any, Any]] = ()
    if dataclasses.is_dataclass(found) and isinstance(told, Mapping):
        names = [field.name for field in dataclasses.fields(found)]
        if absent := [name for name in names if name not in told]:
            return absent[0]
        pairs = ((told[name], getattr(found, name)) for name in names)
    elif isinstance(found, tuple | list) and isinstance(told, Sequence):
        pairs = zip(told, found)
    elif isinstance(found, Mapping):
        pairs = ((told[key], one) for key, one in found.items())
    inner = ((one, read) for one, read in pairs if type(read) not in _SCALARS)
    return next((missing for one, read in inner if (missing := _left_out(one, read))), None)


def refuse_unprintable(value: Any, what: str) -> None:
    """Terminals will show these texts: no dataclass or tuple in it holds an escape sequence, or ProtocolError."""
    if isinstance(value, str) and not value.isprintable():
        raise ProtocolError(f"{what} must be printable")
    for one in value if isinstance(value, tuple) else ():
        refuse_unprintable(one, what)
    for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        refuse_unprintable(getattr(value, field.name), f"{what}: {field.name}")
