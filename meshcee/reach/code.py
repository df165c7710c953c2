"""Whose code something is, and what code names."""

from __future__ import annotations

import dis
import functools
import sys
import types
from typing import Any

from meshcee.user_code import is_ours, library_of

__all__ = ["is_users", "is_users_file", "line_of", "method_of", "names_in", "slots_of"]


def is_users_file(file: str | None) -> bool:
    """Neither ours, nor Python's, nor an installed library's."""
    return file is not None and not is_ours(file) and not library_of(file)


def is_users(made: Any) -> bool:
    """Whether a class, a function or a module is of a file of the user's, or of what was typed in."""
    if isinstance(made, types.ModuleType):
        return is_users_file(getattr(made, "__file__", None))
    if made.__module__ == "__main__":
        return True
    if isinstance(made, types.FunctionType):
        return is_users_file(made.__code__.co_filename)
    return is_users_file(getattr(sys.modules.get(made.__module__ or ""), "__file__", None))


def names_in(code: types.CodeType | None) -> list[str]:
    """The globals and attributes that code and the functions in it name, each once."""
    if code is None:
        return []
    inner = [name for c in code.co_consts if isinstance(c, types.CodeType) for name in names_in(c)]
    return [*dict.fromkeys([*code.co_names, *inner])]


def method_of(held: Any) -> Any:
    """The function of what stands in a class, a cache around it included; None where it is none of Python's."""
    held = held.fget if isinstance(held, property) else held
    held = held.__func__ if isinstance(held, staticmethod | classmethod) else held
    return held if isinstance(held, types.FunctionType | functools._lru_cache_wrapper) else None


def slots_of(kind: type) -> list[str]:
    """By the names that they have outside of the class."""
    found: list[str] = []
    for one in kind.__mro__:
        named = vars(one).get("__slots__", ())
        for name in (named,) if isinstance(named, str) else tuple(named):
            is_private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{one.__name__.lstrip('_')}{name}" if is_private else name)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def line_of(code: Any, name: str, *, stored_only: bool = False) -> str:
    """ " at FILE:LINE" where the code stores this name; else where it uses it; else where it begins. Or "", if `stored_only`."""
    if not isinstance(code, types.CodeType) or is_ours(code.co_filename):
        return ""
    stored, used, line = 0, 0, code.co_firstlineno
    for step in dis.get_instructions(code):
        line = step.starts_line or line
        if step.argval == name:
            used = used or line
            stored = stored or (line if step.opname.startswith("STORE") else 0)
    if stored_only and not stored:
        return ""
    return f" at {code.co_filename}:{stored or used or code.co_firstlineno}"
