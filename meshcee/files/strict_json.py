"""JSON as every parser reads it, for --json and the files of a run.

The idea: Python writes a NaN as a bare word that no other program accepts; a loss or metric may be one, so it becomes null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["dumps", "loads", "number"]


def dumps(value: Any, **options: Any) -> str:
    """json.dumps with null for NaN and infinities."""
    return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def number(told: float | None) -> float:
    """What `dumps` was given, as far as null tells: NaN."""
    return math.nan if told is None else told


def loads(text: str | bytes) -> Any:
    """json.loads of a file that somebody else may have written. NaN, infinities and deep nesting are a ValueError too."""
    try:
        return json.loads(text, parse_constant=_refused, parse_float=_number)
    except RecursionError as error:
        raise ValueError("its lists and objects are nested too deep") from error


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large")
    return value
