"""JSON as every parser reads it, for --json and the files of a run.

The idea: Python writes a NaN as a bare word that no other program accepts; a loss or metric may be one, so it becomes null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["dumps"]


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
