"""The product with one line changed: how a regression test shows that it fails without its fix.

The idea: a claim that a test would have found the bug is worth nothing unless it is run. The line is quoted, so whoever rewrites
it must say again which line the story hangs on.
"""

from __future__ import annotations
import __future__

import contextlib
import gc
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

__all__ = ["Changed", "breaks", "changed"]

Place = Callable[..., Any] | ModuleType  # a function, or a class or a module that has the function
Changed = tuple[Place, str, str]  # where, a part of the source, what stands there instead


def functions(place: Place) -> Iterator[FunctionType]:
    """A function itself, the methods of a class, or the functions of a module."""
    if isinstance(place, FunctionType):
        yield place
        return
    for one in vars(place).values():
        function = one.fget if isinstance(one, property) else getattr(one, "__func__", one)
        if isinstance(function, FunctionType) and function.__module__ == getattr(place, "__module__", place.__name__):
            yield function


@contextlib.contextmanager
def changed(place: Place, line: str, instead: str) -> Iterator[None]:
    """Inside, the one function or method there that has `line`, and has it once, runs with it replaced."""
    sources = {function: textwrap.dedent(inspect.getsource(function)) for function in functions(place)}
    found_in = [function for function, source in sources.items() for _ in range(source.count(line))]
    assert len(found_in) == 1, f"{line!r} is not in {place.__name__} once: quote the line that it has become"
    (function,) = found_in
    source = sources[function]
    code = compile(source.replace(line, instead), "<changed>", "exec", __future__.annotations.compiler_flag, True)
    found: dict[str, Any] = {}
    exec(code, function.__globals__, found)
    whole = function.__code__
    function.__code__ = found[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = whole


def breaks(story: Callable[[], object]) -> bool:
    """Whether a story ends badly, in whatever way; what it leaves open is cleared away."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        try:
            story()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # groups of pytest's own failures are no Exception
            return True
        finally:
            gc.collect()
    return False
