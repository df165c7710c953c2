"""What reading the user's data leaves in Python's objects: taken before data is looked at, compared, and put back.

The idea: a run looks at samples before its first step. A set that counts its reads, that keeps what it has read, or that draws from
a generator of its own must not notice. So the containers and numbers that the set and its functions can reach are taken with their
content, shallowly, and put back. Large arrays and objects of libraries are passed over: what changes there is seen only by what
comes of it (again.py). An iterator that has moved cannot be put back, so it is refused. Where a first read has opened a file or
loaded a large table, all that it made from nothing stays, since to make it again may take long.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from meshcee.errors import UsageError
from meshcee.job import Job
from meshcee.reach import (
    RANDOM,
    Backup,
    Content,
    attribute_of,
    content_of,
    is_users,
    method_of,
    names_in,
    slots_of,
    variable_of,
)
from meshcee.sampling.order import GENERATORS

__all__ = ["Traces", "leaving_nothing"]

FEW = 10_000  # items of a container; more are data, and nothing changes inside of them
MOST = 50_000  # objects that are visited
ARRAY_BYTES, MOST_BYTES = 1 << 20, 64 << 20  # of an array that is taken, and of all
MAX_DEPTH = 8
_CONTAINERS = (dict, list, deque, tuple)
_SIMPLE = (type(None), bool, int, float, complex, str, bytes)
_MOVED = (
    "what reads data moves on an iterator that it holds ({}), which nothing can put back or bring where it was: let data[i], "
    "collate and iter(data) make their iterators themselves, or count in an attribute"
)


@contextlib.contextmanager
def leaving_nothing(job: Job) -> Iterator[Traces]:
    """Around what reads the job's data before its first step."""
    with GENERATORS:  # nobody reads meanwhile
        traces = Traces(job)
    try:
        yield traces
    finally:
        with GENERATORS:
            traces.put_back()


class Traces:
    """What the job's data, its collate function and its sampler can write, as it is now."""

    def __init__(self, job: Job) -> None:
        self._kept: list[Backup] = []
        self._made: list[Callable[[], Iterable[Any]]] = []  # what is there now where there was nothing
        self._keeps_made = False
        self._met: dict[int, Any] = {}  # alive while ids are compared
        self._left_bytes = MOST_BYTES
        self._iterators: list[tuple[Any, Any]] = []  # and how far each has come
        roots = (job.data, job.eval_data, job.collate, job.sampler, job.weight)
        self._each((root for root in roots if type(root) not in (list, tuple)), 0)  # to read those runs no code

    @property
    def has_changed(self) -> bool:
        return any(kept.has_changed for kept in self._kept)

    def refuse_moved(self) -> None:
        """UsageError where an iterator has come further."""
        if moved := next((it for it, before in self._iterators if _reached(it) != before), None):
            kind = type(moved).__name__
            raise UsageError(_MOVED.format(kind if type(moved).__module__ == "builtins" else f"itertools.{kind}"))

    def put_back(self, *, all_of_it: bool = False) -> None:
        """`all_of_it`: also what a first read has opened or loaded."""
        self._keeps_made = not all_of_it and any(_takes_long(now) for made in self._made for now in made())
        for kept in self._kept:
            kept.put_back()

    def _each(self, items: Iterable[Any], depth: int) -> None:
        for item in items:
            self._visit(item, depth + 1)

    def _visit(self, it: Any, depth: int) -> None:
        is_seen = isinstance(it, (*_SIMPLE, types.ModuleType)) or id(it) in self._met
        if is_seen or depth > MAX_DEPTH or len(self._met) > MOST:
            return
        self._met[id(it)] = it
        if (content := content_of(it)) is not None and self._has_room(content.nbytes):
            self._kept.append(Backup(content))
        if isinstance(it, _CONTAINERS) and len(it) <= FEW:
            self._each(list(dict.values(it) if isinstance(it, dict) else it), depth)
        if _is_iterator(it):
            self._iterators.append((it, _reached(it)))
        elif isinstance(it, functools._lru_cache_wrapper):
            self._visit(it.__wrapped__, depth)
        elif isinstance(it, functools.partial):
            self._each((it.func, it.args, it.keywords), depth)
        elif isinstance(it, types.MethodType):
            self._each((it.__self__, it.__func__), depth)
        elif isinstance(it, types.BuiltinMethodType):  # as random.Random(0).random
            self._visit(it.__self__, depth)
        elif isinstance(it, SynchronizedBase):
            self._visit(it.get_obj(), depth)
        elif isinstance(it, types.FunctionType):
            self._function(it, depth)
        elif isinstance(it, type):
            self._class(it, depth)
        elif isinstance(it, Dataset | nn.Module | types.SimpleNamespace) or _leads_on(type(it)):
            self._attributes(getattr(it, "__dict__", {}), depth)
            for name in slots_of(type(it)):
                self._place(attribute_of(it, name), depth)
            self._class(type(it), depth)

    def _attributes(self, held: dict[str, Any], depth: int) -> None:
        before = dict(held)

        def made() -> dict[str, Any]:
            return {key: now for key, now in dict(held).items() if now is not None and before.get(key) is None}

        def put(_: Any) -> None:
            now = before | (made() if self._keeps_made else {})
            held.clear()
            held.update(now)

        self._made.append(lambda: made().values())
        content = content_of(held)
        assert content is not None
        self._kept.append(Backup(content._replace(put=put)))
        self._each(before.values(), depth)

    def _has_room(self, nbytes: int) -> bool:
        found = nbytes <= min(ARRAY_BYTES, self._left_bytes)
        self._left_bytes -= nbytes if found else 0
        return found

    def _function(self, function: types.FunctionType, depth: int) -> None:
        """What it closes over, and names of its module's variables."""
        if not _leads_on(function):
            return
        self._visit(vars(function), depth)
        for cell in function.__closure__ or ():
            content = content_of(cell)
            assert content is not None
            self._place(content, depth)
        self._each((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()), depth)
        variables = function.__globals__ if is_users(function) else {}
        for name in names_in(function.__code__):
            if name in variables:
                self._place(variable_of(variables, name), depth)

    def _class(self, cls: type, depth: int) -> None:
        """What the user's classes hold for all of their objects, and what their methods name."""
        for each in cls.__mro__ if is_users(cls) else ():
            for key, item in list(vars(each).items()) if is_users(each) else ():
                if (method := method_of(item)) is not None:
                    self._visit(method, depth + 1)
                elif not key.startswith("__") and not hasattr(type(item), "__get__"):
                    self._place(attribute_of(each, key), depth)

    def _place(self, content: Content, depth: int) -> None:
        """A variable: what it refers to, and what lies in there."""
        item = content.look()
        if isinstance(item, types.ModuleType):
            return

        def put(before: Any) -> None:
            content.put(content.look() if item is None and self._keeps_made else before)

        self._made.append(lambda: [] if item is not None else [content.look()])
        self._kept.append(Backup(content._replace(put=put)))
        self._visit(item, depth + 1)


def _is_iterator(it: Any) -> bool:
    """Of Python's own kinds: those of others are objects like all."""
    return isinstance(it, Iterator) and type(it).__module__ in ("builtins", "itertools")


def _reached(it: Any) -> Any:
    """How far an iterator has come: another value once it has moved."""
    if isinstance(it, types.GeneratorType):
        held = {} if it.gi_frame is None else it.gi_frame.f_locals
        return it.gi_frame is None, it.gi_frame and it.gi_frame.f_lasti, [_reached(one) for one in held.values()]
    if not _is_iterator(it):
        return it if isinstance(it, _SIMPLE) else None
    if (left := operator.length_hint(it, -1)) >= 0:
        return left
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.14 has this no more
        try:
            return [_reached(one) for part in it.__reduce__()[1:] if type(part) is tuple for one in part]
        except TypeError:
            return None


def _leads_on(made: Any) -> bool:
    """Whether something of the user's may lie behind it, as behind what meshcee.hf makes of a set."""
    return (made.__module__ or "").startswith("meshcee.") or is_users(made)


def _takes_long(made: Any) -> bool:
    """Whether to open or to load it again may take long."""
    if isinstance(made, (*_SIMPLE, types.FunctionType, types.MethodType, type, RANDOM)):
        return False
    if isinstance(made, np.ndarray | torch.Tensor):
        return made.nbytes > ARRAY_BYTES
    if type(made) in (*_CONTAINERS, set):
        return len(made) > FEW
    return not _leads_on(type(made))
