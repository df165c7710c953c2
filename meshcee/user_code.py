"""Errors of the user's own code, told in one sentence: what was called, where it failed, and with what.

The idea: `data[i]`, a loss or a metric may raise anything. Whoever calls such code does so inside of `calling`, so that people
read the line of their own file and not ours. The error itself stays the cause; MESHCEE_LOG=debug prints its traceback.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import multiprocessing
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from meshcee.errors import MeshceeError, UsageError

__all__ = [
    "GUARD",
    "JOB_FILE",
    "RAISED",
    "Place",
    "as_number",
    "avoided",
    "calling",
    "import_job_file",
    "is_ours",
    "library_of",
    "place_in",
    "place_of",
    "refuse_in_reader",
    "thread_left",
    "under_way",
]

_under_way: dict[int, str | Callable[[], str]] = {}  # by thread: what runs there of the user's
RAISED = (Exception, SystemExit)  # by the user's code: it may want to end the process, and ends the job
_ROOT = Path(__file__).resolve().parents[1]
_OURS = tuple(f"{_ROOT / package}/" for package in ("meshcee", "dht", "peers"))
_LIBRARIES = tuple(f"{sysconfig.get_path(kind)}/" for kind in ("stdlib", "purelib", "platlib"))

GUARD = 'put all that trains under `if __name__ == "__main__":`'
JOB_FILE = "job_file"  # the name under which the command line imports a job's file


def import_job_file(path: str) -> ModuleType:
    """Run the file as the module `JOB_FILE`, with its folder to import from and no arguments. Raises what it raises.

    The folder stays at the end of sys.path: functions of the file may import from there when somebody calls them.
    """
    spec = importlib.util.spec_from_file_location(JOB_FILE, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[JOB_FILE] = importlib.util.module_from_spec(spec)
    folder = str(Path(path).parent.resolve())
    sys.path.insert(0, folder)
    arguments, sys.argv = sys.argv, [path]  # those are the command's
    try:
        spec.loader.exec_module(module)
    finally:
        sys.argv = arguments
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)
    return module


def place_of(error: BaseException) -> str:
    """ " at FILE:LINE" of the innermost line of the user's own, else of a library's; "" where none has a part in it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_ours(f.filename)]
    own = [f for f in frames if not f.filename.startswith(_LIBRARIES)]
    return f" at {(own or frames)[-1].filename}:{(own or frames)[-1].lineno}" if frames else ""


@dataclass(frozen=True)
class Place:
    """Where something happens: `text` begins with a blank, and is empty if nobody knows. `library` is whose code it is, if not
    the user's own."""

    text: str = ""
    library: str = ""

    def __str__(self) -> str:
        return self.text


def place_in(frames: Sequence[tuple[str, int, str]]) -> Place:
    """From (file, line, code), innermost last: the user's own line, and behind it the library's that it led to."""
    frames = [f for f in frames if not is_ours(f[0])]
    own = [f for f in frames if not _library(f[0])[0]]
    text = f" at {own[-1][0]}:{own[-1][1]} `{own[-1][2].strip()}`" if own else ""
    if not frames or not (library := _library(frames[-1][0])[0]):
        return Place(text)
    file, line, code = frames[-1]
    return Place(f"{text} in {library} ({_library(file)[1]}:{line} `{code.strip()}`)", library)


def avoided(library: str) -> str:
    """What to do about code that a user cannot write otherwise."""
    return f"peers cannot run this part of {library}: see whether its configuration has another way{_HINTS.get(library, '')}"


_HINTS = {"torch_geometric": " (often add_self_loops=False, with the loops among the edges that you give)"}


def library_of(file: str) -> str:
    """The installed library that a file belongs to; "" if it is nobody's."""
    return _library(file)[0] if file else ""


@functools.lru_cache(maxsize=4096)  # asked for each frame of each operator that a captured model calls
def is_ours(file: str) -> bool:
    """Whether a file is meshcee's, torch's or Python's own, which tells a user nothing."""
    if "/site-packages/" in file or not file.startswith(("<", *_OURS, _LIBRARIES[0])):
        return _library(file)[0] in ("torch", "sympy")  # in which torch computes sizes
    return True


@functools.lru_cache(maxsize=4096)
def _library(file: str) -> tuple[str, str]:
    """The installed library that a file belongs to, and the file's path in there; ("", ...) if it is nobody's."""
    top = Path(file)
    while (top.parent / "__init__.py").exists():
        top = top.parent
    installed = top.parent.name in ("site-packages", "dist-packages")
    if not installed and not any(top.parent.glob(f"{top.stem}-*.dist-info")):
        return "", file
    return top.stem, str(Path(file).relative_to(top)) if Path(file) != top else top.name


@contextmanager
def calling(what: str | Callable[[], str]) -> Iterator[None]:
    """Around a call of the user's code: UsageError names `what` (a function is called only then), the place and the error."""
    me = threading.get_ident()
    outer = _under_way.get(me)
    _under_way[me] = what
    try:
        yield
    except MeshceeError:
        raise
    except RAISED as error:
        name = what if isinstance(what, str) else what()
        told = f"{type(error).__name__}: {error}".rstrip(": ")
        raise UsageError(f"{name} failed{place_of(error)}: {told}") from error
    finally:
        if outer is None:
            del _under_way[me]
        else:
            _under_way[me] = outer


def as_number(what: str, given: Any) -> float:
    """What the user's code has returned where one number is wanted: a Python number, or a tensor that holds one."""
    try:
        return float(given)
    except (TypeError, ValueError, RuntimeError) as error:
        shape = f" of shape {tuple(given.shape)}" if hasattr(given, "shape") else ""
        raise UsageError(
            f"{what} returns a {type(given).__name__}{shape}, and shall return one number for the samples it is given: "
            "a mean over them, as (output.argmax(-1) == target).float().mean()"
        ) from error


def refuse_in_reader() -> None:
    """UsageError in a process that Python has spawned and that runs the user's file anew, as those of `workers` do."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(f"this process reads data for another one, and runs your file anew: {GUARD}")


def thread_left() -> str:
    """Where a thread of the user's is, without which Python does not end this process; "" where there is none."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon and thread.ident in frames:
            stack = traceback.extract_stack(frames[thread.ident])
            if place := str(place_in([(f.filename, f.lineno or 0, f.line or "") for f in stack])):
                return place
    return ""


def under_way() -> str:
    """Which call of the user's code has not returned, with the line where it is now; "" where none is under way."""
    threads = sys._current_frames()
    for thread, what in list(_under_way.items()):  # the first of them has waited longest
        stack = traceback.extract_stack(threads[thread]) if thread in threads else ()
        inside = itertools.dropwhile(lambda f: not f.filename.startswith(_OURS), stack)  # before is the program's own
        place = place_in([(f.filename, f.lineno or 0, f.line or "") for f in inside])
        return (what if isinstance(what, str) else what()) + str(place)
    return ""
