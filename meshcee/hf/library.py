"""The library that this room speaks for: whether it is here, and of a version whose rules are known.

The idea: what a batch's loss is divided by has changed between versions of transformers. An older one is refused, as its numbers
would be others.
"""

from __future__ import annotations

import importlib
from typing import Any

from meshcee.errors import UsageError

__all__ = ["transformers"]

OLDEST = (5, 23)


def transformers() -> Any:
    """The module. UsageError, in one sentence, where it is missing, broken or too old."""
    try:
        found = importlib.import_module("transformers")
        version = str(found.__version__)
        importlib.import_module("transformers.trainer")
    except (ImportError, RuntimeError, AttributeError) as error:
        why = str(error).strip().partition("\n")[0]
        raise UsageError(f"meshcee.hf needs transformers with accelerate ({why}): pip install 'meshcee[hf]'") from error
    if tuple(int(n) for n in version.split(".")[:2] if n.isdecimal()) < OLDEST:
        raise UsageError(
            f"meshcee.hf needs transformers {OLDEST[0]}.{OLDEST[1]} or newer, and {version} is here: "
            "pip install 'meshcee[hf]'"
        )
    return found
