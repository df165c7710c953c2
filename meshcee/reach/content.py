"""What one Python object holds by itself: how to look at that, whether it is the same, and how to put it back in place.

The idea: containers are looked at shallowly, item by item and by identity. The methods that do so are Python's own: those of a
derived class are the user's code, and nobody calls them here.
"""

from __future__ import annotations

import array
import collections
import ctypes
import functools
import operator
import random
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from meshcee.files.tensor_files import flat_bytes

__all__ = ["RANDOM", "Backup", "Content", "attribute_of", "content_of", "is_generator", "variable_of"]

RANDOM = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
_SEQUENCES: tuple[Any, ...] = (list, collections.deque, bytearray)
_OF_C: Any = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure)  # as multiprocessing.Value and Array hold
_ABSENT: Any = object()


class Content(NamedTuple):
    look: Callable[[], Any]  # a copy, where the object is written in place
    put: Callable[[Any], Any]
    is_same: Callable[[Any, Any], bool] = operator.eq
    nbytes: int = 0  # of numbers that a look copies


class Backup:
    """A content as it is now."""

    def __init__(self, content: Content) -> None:
        self._content, self._before = content, content.look()

    @property
    def has_changed(self) -> bool:
        return not self._content.is_same(self._content.look(), self._before)

    def put_back(self) -> None:
        if self.has_changed:
            self._content.put(self._before)


def is_generator(it: Any) -> bool:
    """Of random numbers, with a state."""
    return isinstance(it, RANDOM) and not isinstance(it, random.SystemRandom)


def content_of(it: Any) -> Content | None:
    """None where the object is not one that is written in place, or where only what it refers to can be written."""
    if isinstance(it, dict):
        mapping: Any = collections.OrderedDict if isinstance(it, collections.OrderedDict) else dict
        return Content(lambda: list(mapping.items(it)), functools.partial(_refill, mapping, it), _same_items)
    if sequence := next((kind for kind in _SEQUENCES if isinstance(it, kind)), None):
        return Content(lambda: list(sequence.__iter__(it)), functools.partial(_extend, sequence, it), _same_order)
    if isinstance(it, array.array):
        return Content(it.tobytes, functools.partial(_write, it), nbytes=len(it) * it.itemsize)
    if isinstance(it, _OF_C):
        size = ctypes.sizeof(it)
        return Content(lambda: bytes(it), lambda before: ctypes.memmove(ctypes.byref(it), before, size), nbytes=size)
    if isinstance(it, set):
        return Content(lambda: set(set.__iter__(it)), functools.partial(_update, it))
    if isinstance(it, np.ndarray):
        return _of_array(it)
    if isinstance(it, torch.Tensor):
        return _of_tensor(it)
    if is_generator(it):
        return _of_generator(it)
    if isinstance(it, functools._lru_cache_wrapper):
        return Content(lambda: _fills(it), lambda _: _empty(it))
    if isinstance(it, types.CellType):
        name = "cell_contents"
        return _place(lambda: _in_cell(it), functools.partial(setattr, it, name), functools.partial(delattr, it, name))
    return None


def variable_of(space: dict[str, Any], name: str) -> Content:
    """A name of a module's."""
    put, drop = functools.partial(space.__setitem__, name), functools.partial(space.__delitem__, name)
    return _place(lambda: space.get(name, _ABSENT), put, drop)


def attribute_of(owner: Any, name: str) -> Content:
    """An attribute that no dict holds: a slot, or one of a class."""
    look = vars(owner).get if isinstance(owner, type) else functools.partial(getattr, owner)
    of_object = object.__setattr__, object.__delattr__  # it may be frozen
    ways = (setattr, delattr) if isinstance(owner, type) else of_object
    return _place(lambda: look(name, _ABSENT), *(functools.partial(way, owner, name) for way in ways))


def _place(look: Callable[[], Any], put: Callable[[Any], Any], drop: Callable[[], Any]) -> Content:
    return Content(look, lambda item: drop() if item is _ABSENT else put(item), operator.is_)


def _of_array(it: np.ndarray[Any, Any]) -> Content | None:
    if not it.flags.writeable:
        return None
    if it.dtype.hasobject:
        return Content(it.copy, functools.partial(np.copyto, it), lambda a, b: _same_order(a.flat, b.flat), it.nbytes)
    return Content(it.copy, functools.partial(np.copyto, it), lambda a, b: a.tobytes() == b.tobytes(), it.nbytes)


def _of_tensor(it: torch.Tensor) -> Content | None:
    """Numbers, and whether they get a gradient."""
    if type(it) not in (torch.Tensor, nn.Parameter) or it.layout != torch.strided or it.device.type == "meta":
        return None

    def put(before: tuple[torch.Tensor, bool]) -> None:
        numbers, requires_grad = before
        if not _same_numbers(it, numbers):
            it.data.copy_(numbers)
        if it.is_leaf and it.requires_grad != requires_grad:
            it.requires_grad_(requires_grad)

    def is_same(now: tuple[torch.Tensor, bool], before: tuple[torch.Tensor, bool]) -> bool:
        return now[1] == before[1] and _same_numbers(now[0], before[0])

    return Content(lambda: (it.detach().clone(), it.requires_grad), put, is_same, it.nbytes)


def _of_generator(it: Any) -> Content:
    if isinstance(it, random.Random):
        return Content(it.getstate, it.setstate)
    if isinstance(it, np.random.Generator):
        bits = it.bit_generator
        return Content(lambda: bits.state, functools.partial(setattr, bits, "state"), _same_text)
    return Content(it.get_state, it.set_state, torch.equal if isinstance(it, torch.Generator) else _same_text)


_emptied: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of caches, after which they count anew


def _fills(cache: Any) -> tuple[int, int]:
    return _emptied.get(cache, 0), cache.cache_info().misses


def _empty(cache: Any) -> None:
    """What a cache holds cannot be read: one that was filled since, with fakes perhaps, forgets all."""
    if cache.cache_info().currsize:
        cache.cache_clear()
        _emptied[cache] = _emptied.get(cache, 0) + 1


def _in_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return _ABSENT


def _refill(kind: Any, it: Any, items: list[tuple[Any, Any]]) -> None:
    kind.clear(it)
    for key, value in items:
        kind.__setitem__(it, key, value)


def _extend(kind: Any, it: Any, items: list[Any]) -> None:
    kind.clear(it)
    kind.extend(it, items)


def _write(it: array.array[Any], numbers: bytes) -> None:
    if len(numbers) == len(it) * it.itemsize:  # a view of it may be held, which forbids another length
        memoryview(it).cast("B")[:] = numbers
        return
    del it[:]
    it.frombytes(numbers)


def _update(it: set[Any], items: set[Any]) -> None:
    set.clear(it)
    set.update(it, items)


def _same_items(now: list[tuple[Any, Any]], before: list[tuple[Any, Any]]) -> bool:
    return len(now) == len(before) and all(a is b and x is y for (a, x), (b, y) in zip(now, before))


def _same_order(now: Any, before: Any) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _same_text(now: Any, before: Any) -> bool:
    return repr(now) == repr(before)


def _same_numbers(now: torch.Tensor, before: torch.Tensor) -> bool:
    return now.shape == before.shape and torch.equal(flat_bytes(now.detach()), flat_bytes(before))
