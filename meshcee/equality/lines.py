"""Which line of the user's did it, found by running it again under Python's own tracer.

The idea: a value that changed (an attribute, a closure's counter, a generator's seed) can be looked at. So look at the value
after every line of the user's code. The first line after which the value has changed is the one. The search is slow, and only
ever run when something is wrong.
"""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["at", "line_that", "users"]

_PACKAGE = Path(__file__).parents[1]
_OURS = f"{_PACKAGE}/", f"{_PACKAGE.parent / 'peers'}/"
_JOBS = str(_PACKAGE / "_demo_job.py")  # a user's file that lies with ours
_LIBRARY = re.compile(r"/torch/|^<")
_STANDARD = sysconfig.get_path("stdlib")


def users(file: str) -> bool:
    """Whether a file's code is the user's, or that of a library which the user's model is from."""
    standard = file.startswith(_STANDARD) and "-packages/" not in file
    return not standard and not _LIBRARY.search(file) and (file == _JOBS or not file.startswith(_OURS))


def at(file: str, line: int) -> str:
    """ " at FILE:LINE `code`", as all our errors say it."""
    return f" at {file}:{line} `{linecache.getline(file, line).strip()}`"


def line_that(holds: Callable[[], bool], run: Callable[[], Any]) -> str:
    """The first line of the user's after which `holds()`, in words, or "". What `run` raises ends the search."""
    last: list[tuple[str, int]] = []
    found: list[tuple[str, int]] = []

    def look(frame: Any, event: str, _: Any) -> Any:
        if found:
            return None
        if last and holds():
            found.append(last[0])
            return None
        last[:] = [(frame.f_code.co_filename, frame.f_lineno)]
        return look

    def enter(frame: Any, event: str, _: Any) -> Any:
        return look if not found and users(frame.f_code.co_filename) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        run()
    except Exception:  # the pass that is looked for may itself be what fails
        pass
    finally:
        sys.settrace(before)
    if not found and last and holds():
        found.append(last[0])
    return at(*found[0]) if found else ""
