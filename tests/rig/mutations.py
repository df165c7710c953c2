"""Every way in which one field of a message can be wrong: left out, of another type, too large, nested, not a number.

The idea: the message is plain data, so each place in it is found by walking, and no field can be forgotten in a test.
`mutated` changes one place at random instead, and bytes too.
"""

from __future__ import annotations

import json
import math
import random
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest

from meshcee.errors import MeshceeError, ProtocolError

__all__ = ["MOST_BYTES", "check_every_field", "mutated", "mutations"]

MOST_BYTES = 4 << 20  # that reading one small message may take, whatever is wrong in it
_DEEP: list[Any] = []
for _ in range(200):
    _DEEP = [_DEEP]
_SMALL = [None, True, 7, -1, 1 << 62, (1 << 64) - 1, 0.5, math.nan, math.inf, "x", "\x1b[2J", b"x", [], {}, {"x": {}}]
_WRONG: dict[str, Any] = {repr(value): value for value in _SMALL}
_WRONG |= {"a long text": "x" * 70_000, "a long list": [0] * 70_000, "a deep list": _DEEP}
_WRONG |= {"a large map": {str(k): 0 for k in range(10_000)}}


def _refused(old: Any, new: Any) -> bool:
    """Whether this in place of that is wrong wherever it stands: a bool for a number, a text for a list..."""
    if old is None or (isinstance(old, float) and type(new) is int):
        return False  # may be of any type when it is there; an integer is a number
    return type(old) is not type(new) or (type(new) is float and not math.isfinite(new))


def mutations(value: Any, path: str = "") -> Iterator[tuple[str, Any, bool]]:
    """(where and what, the message with that one change, whether it must be refused)."""
    places = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in list(places):
        where = f"{path}.{key}"

        def at(new: Any, key: Any = key) -> Any:
            copy = value.copy()
            copy[key] = new
            return copy

        if isinstance(value, dict):
            yield f"{where} left out", {k: v for k, v in value.items() if k != key}, True
        for said, new in _WRONG.items():
            yield f"{where} = {said}", at(new), _refused(one, new)
        yield from ((said, at(new), refused) for said, new, refused in mutations(one, where))


def check_every_field(
    message: Any,
    reading: Callable[[Any], object],
    *,
    refusals: type[MeshceeError] | tuple[type[MeshceeError], ...] = ProtocolError,
    free: tuple[str, ...] = (),
) -> None:
    """Read the message with each change; it is refused in one line, or is valid where the change may be.

    free   beginnings of what need not be refused: fields that may be left out, or of another type
    """
    reading(message)
    accepted: list[str] = []
    told: list[str] = []

    def peak_bytes(said: str, changed: Any, wrong: bool) -> int:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            reading(changed)
        except refusals as error:
            told.append(str(error))
        except BaseException as error:
            pytest.fail(f"{said}: {error!r}")
        else:
            accepted.extend([said] if wrong and not said.startswith(free) else [])
        return tracemalloc.get_traced_memory()[1] - before

    tracemalloc.start()
    try:
        for case in mutations(message):  # twice at most: other threads of a test's process take memory too
            assert peak_bytes(*case) < MOST_BYTES or peak_bytes(*case) < MOST_BYTES, case[0]
    finally:
        tracemalloc.stop()
    assert accepted == [], accepted
    long = [text[:200] for text in told if "\n" in text or len(text) > 500]
    assert long == [], long


# What readers of bytes stumble over: ends of ranges, lengths that are claimed, and texts that a screen might obey.
_NUMBERS = (0, 1, -1, 127, 128, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
_FLOATS = (0.0, -0.0, 5e-324, 1e-9, 1.0, 1e9, 1e308, -1.0, math.nan, math.inf, -math.inf)
_TEXTS = (
    "",
    "\0",
    "\x1b]0;x\x07",
    "\u202egnp",
    "[red]x[/red]",
    "<script>alert(1)</script>",
    "../../x",
    "12D3KooW",
    "\ud7ff",
)
_BYTES = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x91" * 600,
    b"\xc1",
    b"\0" * 9,
    b"[" * 3000,
)


def mutated(value: Any, draw: random.Random) -> Any:
    """The value with one change at random. What holds msgpack or JSON is mostly changed inside, and packed again."""
    if isinstance(value, bytes | str) and draw.random() < 0.7:
        for unpack, pack in ((msgpack.unpackb, msgpack.packb), (json.loads, _json)):
            try:
                tree = unpack(value)
                if isinstance(tree, dict | list):
                    found = pack(mutated(tree, draw))
                    return found if isinstance(value, bytes) else found.decode()
            except (ValueError, TypeError, OverflowError, RecursionError):
                continue
    if isinstance(value, dict | list | tuple) and value and draw.random() < 0.9:
        return _within(list(value) if isinstance(value, tuple) else value.copy(), draw)
    if draw.random() < 0.4:
        return draw.choice((*_SMALL, "x" * 7000, [0] * 7000, {str(k): 0 for k in range(1000)}, _DEEP))
    if isinstance(value, bytes):
        return _scrambled(value, draw)
    if isinstance(value, str):
        at = draw.randrange(len(value) + 1)
        return draw.choice((value[:at] + draw.choice(_TEXTS) + value[at:], draw.choice(_TEXTS), value[:at], value * 40))
    if isinstance(value, int | float) and not isinstance(value, bool):
        near = (value + 1, value - 1, -value, value * 2)
        found = draw.choice((*near, *_NUMBERS) if isinstance(value, int) else (*near, *_FLOATS))
        return found if isinstance(found, float) or -(1 << 63) <= found < 1 << 64 else 0
    return draw.choice((*_NUMBERS, *_FLOATS, *_TEXTS))


def _json(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def _within(value: Any, draw: random.Random) -> Any:
    """One part of it changed, gone, doubled or in another one's place."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, other = draw.choice(keys), draw.choice(keys)
    what = draw.random()
    if what < 0.8:
        value[key] = mutated(value[key], draw)
    elif what < 0.87:
        del value[key]
    elif what < 0.94:
        value[key], value[other] = value[other], value[key]
    elif isinstance(value, dict):
        value[draw.choice(_TEXTS)] = value[key]
    else:
        value[key:key] = [value[other]] * draw.choice((1, 1, 100))
    return value


def _scrambled(data: bytes, draw: random.Random) -> bytes:
    at, end = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    what = draw.randrange(6)
    if what == 0:
        return data[:at] + data[end:]
    if what == 1:
        return data[:end] + data[at:]
    if what == 2:
        return data[:at] + draw.choice(_BYTES) + data[at:]
    if what == 3:
        return data[:at]
    if what == 4:
        return draw.randbytes(draw.randrange(200))
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 4))):
        if found:
            found[draw.randrange(len(found))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
    return bytes(found)
