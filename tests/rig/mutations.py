"""Every way in which one field of a message can be wrong: left out, of another type, too large, nested, not a number.

The idea: the message is plain data, so each place in it is found by walking, and no field can be forgotten in a test.
"""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from meshcee.errors import MeshceeError, ProtocolError

__all__ = ["MOST_BYTES", "check_every_field", "mutations"]

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
