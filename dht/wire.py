"""Reading msgpack from strangers: a value has the exact type, size and range that was asked for, or it is refused.

The idea: `Fields` wraps a decoded map and hands out checked values one by one; whatever is not asked for is ignored, so
that a newer peer's records can be read by an older one.
"""

from __future__ import annotations

import math
from typing import Any

import msgpack

from meshcee.errors import ProtocolError

__all__ = ["Fields", "unpack"]

_MISSING = object()


def unpack(data: bytes, max_bytes: int, what: str) -> Any:
    """One msgpack value; ProtocolError when it is too large or none."""
    if len(data) > max_bytes:
        raise ProtocolError(f"{what} has {len(data)} bytes, more than {max_bytes}")
    try:
        return msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:  # ExtraData, nesting, bad UTF-8
        raise ProtocolError(f"{what} is not valid msgpack: {error}") from error


class Fields:
    """A map from the network; `what` names it in errors."""

    def __init__(self, value: Any, what: str) -> None:
        if type(value) is not dict or not all(type(key) is str for key in value):
            raise ProtocolError(f"{what} is not a map")
        self._value: dict[str, Any] = value
        self._what = what

    def _get(self, name: str, kind: type, optional: bool) -> Any:
        value = self._value.get(name, _MISSING)
        if value is None and optional:
            return None
        if type(value) is not kind:
            raise ProtocolError(f"{self._what}: {name} is missing or not {kind.__name__}")
        return value

    def text(self, name: str, max_chars: int = 128) -> str:
        value: str = self._get(name, str, False)
        if len(value) > max_chars or not value.isprintable():  # printed in terminals: no escape sequences
            raise ProtocolError(f"{self._what}: {name} must be printable and have at most {max_chars} characters")
        return value

    def optional_text(self, name: str, max_chars: int = 128) -> str | None:
        return None if self._value.get(name) is None else self.text(name, max_chars)

    def flag(self, name: str) -> bool:
        value: bool = self._get(name, bool, False)
        return value

    def count(self, name: str, least: int = 0, most: int = (1 << 63) - 1) -> int:
        value: int = self._get(name, int, False)
        if not least <= value <= most:
            raise ProtocolError(f"{self._what}: {name} = {value} is not between {least} and {most}")
        return value

    def optional_count(self, name: str) -> int | None:
        return None if self._value.get(name) is None else self.count(name)

    def number(self, name: str) -> float:
        value = self._value.get(name, _MISSING)
        if type(value) is int and abs(value) < 1 << 63:
            value = float(value)
        if type(value) is not float or not math.isfinite(value):
            raise ProtocolError(f"{self._what}: {name} is not a finite number")
        return value

    def optional_number(self, name: str) -> float | None:
        return None if self._value.get(name) is None else self.number(name)

    def sequence(self, name: str, most: int) -> list[Any]:
        value: list[Any] = self._get(name, list, False)
        if len(value) > most:
            raise ProtocolError(f"{self._what}: {name} has {len(value)} entries, more than {most}")
        return value

    def texts(self, name: str, most: int, max_chars: int) -> tuple[str, ...]:
        items = self.sequence(name, most)
        return tuple(Fields({name: item}, self._what).text(name, max_chars) for item in items)

    def inner(self, name: str) -> Fields:
        return Fields(self._value.get(name), f"{self._what}: {name}")

    def optional_inner(self, name: str) -> Fields | None:
        return None if self._value.get(name) is None else self.inner(name)
