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
from typing import Any

__all__ = ["Changed", "breaks", "changed"]

Changed = tuple[Callable[..., Any], str, str]  # a function, a part of its source, what stands there instead


@contextlib.contextmanager
def changed(function: Callable[..., Any], line: str, instead: str) -> Iterator[None]:
    """Inside, this function or method runs with `line`, which occurs in it once, replaced."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, (
        f"{line!r} is not in {function.__qualname__} once: quote the line that it has become"
    )
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
