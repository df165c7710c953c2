"""Errors of the user's own code, told in one sentence: what was called, where it failed, and with what.

The idea: `data[i]`, a loss or a metric may raise anything. Whoever calls such code does so inside of `calling`, so that people
read the line of their own file and not ours. The error itself stays the cause; MESHCEE_LOG=debug prints its traceback.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshcee.errors import MeshceeError, UsageError

__all__ = ["calling", "place_of"]

_ROOT = Path(__file__).resolve().parents[1]
_OURS = tuple(f"{_ROOT / package}/" for package in ("meshcee", "dht", "peers"))
_LIBRARIES = tuple(f"{sysconfig.get_path(kind)}/" for kind in ("stdlib", "purelib", "platlib"))


def place_of(error: BaseException) -> str:
    """ " at FILE:LINE" of the innermost line of the user's own, else of a library's; "" when it is none of Python's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*_OURS, "<"))]
    own = [f for f in frames if not f.filename.startswith(_LIBRARIES)]
    return f" at {(own or frames)[-1].filename}:{(own or frames)[-1].lineno}" if frames else ""


@contextmanager
def calling(what: str | Callable[[], str]) -> Iterator[None]:
    """Around a call of the user's code: UsageError names `what` (a function is called only then), the place and the error."""
    try:
        yield
    except MeshceeError:
        raise
    except Exception as error:
        name = what if isinstance(what, str) else what()
        told = f"{type(error).__name__}: {error}".rstrip(": ")
        raise UsageError(f"{name} failed{place_of(error)}: {told}") from error
