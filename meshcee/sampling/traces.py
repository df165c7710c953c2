"""What reading the user's data leaves in Python's objects: taken before data is looked at, compared, and put back.

The idea: a run looks at samples before its first step. A set that counts its reads, that keeps what it has read, or that draws from
a generator of its own must not notice. So the containers and numbers that the set and its functions can reach are taken with their
content, shallowly, and put back. Large arrays and objects of libraries are passed over: what changes there is seen only by what
comes of it (again.py). Where a first read has opened a file or loaded a large table, all that it made from nothing stays, since to
make it again may take long.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from meshcee.files.tensor_files import flat_bytes
from meshcee.job import Job
from meshcee.sampling.order import GENERATORS
from meshcee.user_code import is_ours, library_of

__all__ = ["Traces", "leaving_nothing"]

FEW = 10_000  # items of a container; more are data, and nothing changes inside of them
MOST = 50_000  # objects that are visited
ARRAY_BYTES, MOST_BYTES = 1 << 20, 64 << 20  # of an array that is taken, and of all
MAX_DEPTH = 8
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_LISTS = (list, deque)
_SIMPLE = (type(None), bool, int, float, complex, str, bytes)
_LruCache = type(functools.lru_cache(len))


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
        # Of each whether it is another one, and how to put it back.
        self._held: list[tuple[Callable[[], bool], Callable[[], Any]]] = []
        self._made: list[Callable[[], Iterable[Any]]] = []  # what is there now where there was nothing
        self._keeps_made = False
        self._met: dict[int, Any] = {}  # alive while ids are compared
        self._left_bytes = MOST_BYTES
        roots = (job.data, job.eval_data, job.collate, job.sampler)
        self._each((root for root in roots if type(root) not in (list, tuple)), 0)  # to read those runs no code

    @property
    def has_changed(self) -> bool:
        return any(is_other() for is_other, _ in self._held)

    def put_back(self, *, all_of_it: bool = False) -> None:
        """`all_of_it`: also what a first read has opened or loaded."""
        self._keeps_made = not all_of_it and any(_takes_long(now) for made in self._made for now in made())
        for is_other, put in self._held:
            if is_other():
                put()

    def _hold(
        self, look: Callable[[], Any], put: Callable[[Any], Any], same: Callable[[Any, Any], Any] = operator.eq
    ) -> None:
        now = look()
        self._held.append((lambda: not same(look(), now), lambda: put(now)))

    def _each(self, items: Iterable[Any], depth: int) -> None:
        for item in items:
            self._visit(item, depth + 1)

    def _visit(self, it: Any, depth: int) -> None:
        if (
            depth > MAX_DEPTH
            or len(self._met) > MOST
            or isinstance(it, (*_SIMPLE, types.ModuleType))
            or id(it) in self._met
        ):
            return
        self._met[id(it)] = it
        if type(it) in (*_DICTS, *_LISTS, tuple):
            self._container(it, depth)
        elif type(it) is set:
            self._hold(lambda: set(it), functools.partial(_refill, it))
        elif isinstance(it, np.ndarray):
            if it.flags.writeable and self._has_room(it.nbytes):
                self._hold(it.copy, functools.partial(np.copyto, it), lambda a, b: a.tobytes() == b.tobytes())
        elif isinstance(it, torch.Tensor):
            if type(it) is torch.Tensor and it.layout == torch.strided and self._has_room(it.nbytes):
                self._hold(lambda: it.detach().clone(), it.data.copy_, _same_numbers)
        elif isinstance(it, random.Random):
            self._hold(it.getstate, it.setstate)
        elif isinstance(it, np.random.Generator):
            self._hold(
                lambda: it.bit_generator.state, functools.partial(setattr, it.bit_generator, "state"), _same_text
            )
        elif isinstance(it, np.random.RandomState):
            self._hold(it.get_state, it.set_state, _same_text)
        elif isinstance(it, torch.Generator):
            self._hold(it.get_state, it.set_state, torch.equal)
        elif isinstance(it, _LruCache):
            self._cache(it)
            self._visit(it.__wrapped__, depth)
        elif isinstance(it, functools.partial):
            self._each((it.func, it.args, it.keywords), depth)
        elif isinstance(it, types.MethodType):
            self._each((it.__self__, it.__func__), depth)
        elif isinstance(it, types.FunctionType):
            self._function(it, depth)
        elif isinstance(it, type):
            self._class(it, depth)
        elif isinstance(getattr(it, "__dict__", None), dict) and (isinstance(it, Dataset) or _leads_on(type(it))):
            self._attributes(it.__dict__, depth)
            self._class(type(it), depth)

    def _attributes(self, held: dict[str, Any], depth: int) -> None:
        before = dict(held)

        def made() -> dict[str, Any]:
            return {key: now for key, now in dict(held).items() if now is not None and before.get(key) is None}

        self._made.append(lambda: made().values())
        self._hold(
            lambda: dict(held), lambda _: _refill(held, before | (made() if self._keeps_made else {})), _same_items
        )
        self._each(before.values(), depth)

    def _has_room(self, nbytes: int) -> bool:
        found = nbytes <= min(ARRAY_BYTES, self._left_bytes)
        self._left_bytes -= nbytes if found else 0
        return found

    def _container(self, it: Any, depth: int) -> None:
        if type(it) in _DICTS:
            self._hold(lambda: dict(it), functools.partial(_refill, it), _same_items)
        elif type(it) in _LISTS:
            self._hold(lambda: list(it), functools.partial(_refill, it), _same_order)
        if len(it) <= FEW:
            self._each(list(it.values() if isinstance(it, dict) else it), depth)

    def _cache(self, cached: Any) -> None:
        """What it holds cannot be read: it can be emptied again alone."""
        if not cached.cache_info().currsize:
            self._hold(lambda: cached.cache_info().currsize, lambda _: cached.cache_clear())

    def _function(self, function: types.FunctionType, depth: int) -> None:
        """What it closes over, and names of its module's variables."""
        if not _leads_on(function):
            return
        for cell in function.__closure__ or ():
            look, put = (functools.partial(how, cell, "cell_contents") for how in (getattr, setattr))
            with contextlib.suppress(ValueError):  # not yet assigned
                self._place(look, put, depth)
        self._each(function.__defaults__ or (), depth)
        variables = function.__globals__ if _is_users(function) else {}
        for name in _names(function.__code__):
            if name in variables:
                self._place(
                    functools.partial(variables.get, name), functools.partial(variables.__setitem__, name), depth
                )

    def _class(self, cls: type, depth: int) -> None:
        """What the user's classes hold for all of their objects, and what their methods name."""
        for each in cls.__mro__ if _is_users(cls) else ():
            for key, item in list(vars(each).items()) if _is_users(each) else ():
                if isinstance(item, types.FunctionType | _LruCache):
                    self._visit(item, depth + 1)
                elif isinstance(item, property | staticmethod | classmethod):
                    self._visit(item.fget if isinstance(item, property) else item.__func__, depth + 1)
                elif not key.startswith("__"):
                    self._place(functools.partial(vars(each).get, key), functools.partial(setattr, each, key), depth)

    def _place(self, look: Callable[[], Any], put: Callable[[Any], Any], depth: int) -> None:
        """A variable: what it refers to, and what lies in there."""
        if not isinstance(item := look(), types.ModuleType):
            self._made.append(lambda: [] if item is not None else [look()])
            self._hold(look, lambda _: put(look() if item is None and self._keeps_made else item), operator.is_)
            self._visit(item, depth + 1)


def _leads_on(made: Any) -> bool:
    """Whether something of the user's may lie behind it, as behind what meshcee.hf makes of a set."""
    return (made.__module__ or "").startswith("meshcee.") or _is_users(made)


def _is_users(made: Any) -> bool:
    """Whether a class or function is of the user's own file."""
    module = made.__module__
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return module == "__main__" or (file is not None and not is_ours(file) and not library_of(file))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


_GENERATORS = random.Random | np.random.Generator | np.random.RandomState | torch.Generator


def _takes_long(made: Any) -> bool:
    """Whether to open or to load it again may take long."""
    if isinstance(made, (*_SIMPLE, types.FunctionType, types.MethodType, type, _GENERATORS)):
        return False
    if isinstance(made, np.ndarray | torch.Tensor):
        return made.nbytes > ARRAY_BYTES
    if type(made) in (*_DICTS, *_LISTS, tuple, set):
        return len(made) > FEW
    return not _leads_on(type(made))


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(content)


def _same_items(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return len(now) == len(before) and all(key in before and before[key] is value for key, value in now.items())


def _same_order(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _same_text(now: Any, before: Any) -> bool:
    return repr(now) == repr(before)


def _same_numbers(now: torch.Tensor, before: torch.Tensor) -> bool:
    return torch.equal(flat_bytes(now), flat_bytes(before))
