"""What forward keeps in Python between two calls: attributes, closures, globals, and what these hold.

The idea: everything that the model and the loss can reach by name is written down before and after a call, numbers by their
values and tensors by their shapes. What a second call changes again is state, which a graph does not have. A cache that the
first call fills and the second leaves as it is changes nothing. How far an iterator has come is not to be seen, and whoever uses
one moves it.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dis
import enum
import functools
import inspect
import random
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from meshcee.user_code import is_ours

__all__ = ["Remembered"]

_DEPTH, _MOST = 6, 50_000
_OWN = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"})
_NOT_STATE = frozenset({"torch", "logging", "builtins", "functools", "meshcee", "_pytest"})
_OF_C = frozenset({*sys.stdlib_module_names, "numpy"})
_SCALARS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class _Unseen:
    """What an iterator holds: never what it was before."""


class Remembered:
    """What `roots` reach: values by their place in words, and copies of what holds them, to put it back."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        self.values: dict[str, Any] = {}
        self.lines: dict[str, str] = {}
        self.owners: dict[str, tuple[int, str]] = {}  # place -> the module whose attribute is there, and its name
        self._holders: list[tuple[Any, Any]] = []
        self._drawers: list[Callable[[], Any]] = []
        self._seen: set[int] = set()
        self._seen_classes: set[int] = set()
        self._alive: list[Any] = []  # so that no two have one id
        self._names: set[str] = set()  # that the code uses which is reached
        self._methods: dict[type, list[Any]] = {}
        for name, module in model.named_modules():
            self._module(name, module)
        of_model = set(self.values)
        self._visit("the loss", loss, 0, "")
        self._of_loss, self._loss = self.values.keys() - of_model, f"the loss {getattr(loss, '__name__', '')}".rstrip()

    def who_changes(self, place: str) -> str:
        """Whose code has this place within reach."""
        return self._loss if place in self._of_loss else "forward"

    def changed(self, other: Remembered) -> list[str]:
        """Places whose value is another there."""
        both = [place for place, value in self.values.items() if place in other.values and other.values[place] != value]
        both = [place for place in both if type(self.values[place]) is not _Unseen or other.is_used(place)]
        return both + [place for place in other.values if place not in self.values and self._counts(place, other)]

    @staticmethod
    def _counts(place: str, other: Remembered) -> bool:
        return isinstance(other.values[place], tuple | int | float)

    def is_used(self, place: str) -> bool:
        """Whether code that is reached has the names of the attributes on the way there."""
        return self._names.issuperset(re.findall(r"attribute '(\w+)' of", place))

    def put_back(self) -> None:
        """What was changed since is as it was."""
        for put_back in self._drawers:
            put_back()
        for holder, copy in self._holders:
            if isinstance(holder, types.CellType):
                holder.cell_contents = copy
            elif isinstance(holder, tuple):
                holder[0][holder[1]] = copy
            elif isinstance(holder, list | collections.deque | bytearray):
                if len(holder) != len(copy) or any(a is not b for a, b in zip(holder, copy)):
                    holder.clear()
                    holder.extend(copy)
            elif isinstance(holder, set):
                if holder != copy:
                    holder.clear()
                    holder.update(copy)
            elif isinstance(holder, torch.Tensor):
                if not torch.equal(holder, copy):
                    holder.detach().copy_(copy)
            elif len(holder) != len(copy) or any(k not in holder or holder[k] is not v for k, v in copy.items()):
                holder.clear()
                holder.update(copy)

    def _line(self, code: Any, name: str) -> str:
        return _line(code, name)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _module(self, name: str, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        self._holders += [(held, dict(held)) for held in (vars(module), module._buffers)]
        code = getattr(type(module).forward, "__code__", None)
        if _is_foreign(code):
            self._names.update(vars(module))
        for method in self._reached(type(module), ["forward"]):
            self._visit(f"what {type(module).__name__} uses", method, 1, "")
        self._class(type(module), 1)
        for key, value in list(vars(module).items()):
            if key not in _OWN and not key.endswith("_hooks") and not key.endswith("_kwargs"):
                place = f"attribute {key!r} of {f'module {name!r}' if name else 'the model'}"
                self.owners[place] = id(module), key
                self._visit(place, value, 1, self._line(code, key))
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            self._visit(f"a hook of {f'module {name!r}' if name else 'the model'}", hook, 1, "")
        for key, parameter in module._parameters.items():
            if parameter is not None:
                self.values[f"requires_grad of {f'{name}.{key}'.lstrip('.')!r}"] = parameter.requires_grad

    def _reached(self, kind: type, names: Iterable[str]) -> list[Any]:
        """The functions of a class that these names lead to, one from another."""
        if kind not in self._methods:
            own = {key: held for one in reversed(kind.__mro__) for key, held in vars(one).items()}
            found: dict[str, Any] = {}
            waiting = list(names)
            while waiting:
                name = waiting.pop()
                if name not in found and (method := _function_of(own.get(name))) is not None:
                    found[name] = method
                    used = _globals(getattr(inspect.unwrap(method), "__code__", None))
                    self._names.update(used)
                    waiting += used
            self._methods[kind] = list(found.values())
        return self._methods[kind]

    def _visit(self, place: str, value: Any, depth: int, line: str) -> None:
        if len(self.values) > _MOST or depth > _DEPTH:
            return
        if line:
            self.lines[place] = line
        if isinstance(value, _SCALARS):
            self.values[place] = value if value == value else "nan"
            return
        if id(value) in self._seen:
            return
        if isinstance(value, torch.Tensor):
            self._tensor(place, value)
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if isinstance(value, np.ndarray):
            self.values[place] = (value.shape, str(value.dtype), hash(value.tobytes()) if value.nbytes < 1 << 20 else 0)
        elif isinstance(value, random.Random):
            self.values[place] = (hash(value.getstate()),)
            self._drawers.append(functools.partial(value.setstate, value.getstate()))
        elif isinstance(value, np.random.Generator):
            self.values[place] = (repr(value.bit_generator.state),)
            self._drawers.append(functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif isinstance(value, np.random.RandomState):
            self.values[place] = (repr(value.get_state(legacy=False)),)
            self._drawers.append(functools.partial(value.set_state, value.get_state(legacy=False)))
        elif isinstance(value, torch.Generator):
            self.values[place] = (hash(bytes(value.get_state().tolist())),)
            self._drawers.append(functools.partial(value.set_state, value.get_state()))
        elif isinstance(value, list | tuple | collections.deque):
            self.values[place] = (len(value),)
            if not isinstance(value, tuple):
                self._holders.append((value, list(value)))
            for i, item in enumerate(list(value)[:1000]):
                self._visit(f"[{i}] of {place}", item, depth + 1, line)
        elif isinstance(value, dict):
            self.values[place] = (len(value),)
            self._holders.append((value, dict(value)))
            for key, item in list(value.items())[:1000]:
                self._visit(f"[{key!r:.40}] of {place}", item, depth + 1, line)
        elif isinstance(value, set | frozenset):
            self.values[place] = (len(value), hash(frozenset(value)))
            if isinstance(value, set):
                self._holders.append((value, set(value)))
        elif isinstance(value, types.MethodType):
            self._visit(place, value.__self__, depth, line)
            self._visit(place, value.__func__, depth, line)
        elif isinstance(value, types.FunctionType):
            self._function(value, depth)
        elif isinstance(value, contextvars.ContextVar):
            self._visit(place, value.get(None), depth, line)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._drawers.append(functools.partial(_emptied, value, _fills(value)))
            self._visit(place, value.__wrapped__, depth, line)
        elif isinstance(value, nn.Module):
            for name, module in value.named_modules():
                self._module(name or type(value).__name__, module)
        elif isinstance(value, type):
            self._class(value, depth)
        elif isinstance(value, Iterator) and not hasattr(value, "__dict__") and not _slots(type(value)):
            self.values[place] = _Unseen()
        elif not isinstance(value, types.ModuleType):
            if _root(value) not in _NOT_STATE:
                self._object(place, value, depth, line)
            if _root(value) in _OF_C:
                self._built(place, value, depth, line)

    def _object(self, place: str, value: Any, depth: int, line: str) -> None:
        """Of a class that may be the user's: what its attributes hold, and its slots."""
        slots = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
        self._drawers += [functools.partial(_put, value, name, item) for name, item in slots.items()]
        held = getattr(value, "__dict__", {})
        if held:
            self._holders.append((held, dict(held)))
        for method in self._reached(type(value), ["__call__", *self._names]):
            self._visit(place, method, depth + 1, line)
        self._class(type(value), depth)
        for key, item in [*held.items(), *slots.items()]:
            self._visit(f"attribute {key!r} of {place}", item, depth + 1, line or self._line(_called(value), key))

    def _built(self, place: str, value: Any, depth: int, line: str) -> None:
        """Of an object of C: its bytes; else what it would be built of again, as a date or a range would."""
        try:
            held = memoryview(value)
        except TypeError:
            with contextlib.suppress(Exception):  # what cannot be built again says so in its own way
                built = value.__reduce_ex__(2)
                if isinstance(built, tuple):
                    self._visit(place, built[1:3], depth, line)
        else:
            self.values[place] = (held.nbytes, hash(bytes(held)) if held.nbytes < 1 << 20 else 0)

    def _class(self, kind: type, depth: int) -> None:
        """What the classes of the user's hold that this one is made of."""
        for one in kind.__mro__:
            module = sys.modules.get(one.__module__)
            if (
                id(one) in self._seen_classes
                or issubclass(one, enum.Enum)
                or _is_foreign(getattr(module, "__file__", None))
            ):
                continue
            self._seen_classes.add(id(one))
            for method in self._reached(one, self._names):
                self._visit(f"what {one.__name__} uses", method, depth + 1, "")
            for key, item in list(vars(one).items()):
                if not key.startswith("__") and not callable(item) and not hasattr(type(item), "__get__"):
                    self._drawers.append(functools.partial(_put, one, key, item))
                    self._visit(f"attribute {key!r} of class {one.__name__}", item, depth + 1, "")

    def _tensor(self, place: str, value: torch.Tensor) -> None:
        self.values[place] = (str(value.dtype), tuple(value.shape))
        if type(value) is torch.Tensor and value.is_leaf and not value.requires_grad and value.nbytes < 1 << 20:
            self._holders.append((value, value.detach().clone()))

    def _function(self, function: types.FunctionType, depth: int) -> None:
        code = function.__code__
        if _is_foreign(code):
            return
        self._holders.append((vars(function), dict(vars(function))))
        for key, item in list(vars(function).items()):
            self._visit(f"attribute {key!r} of {function.__name__}", item, depth + 1, self._line(code, key))
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            self._holders.append((cell, value))
            self._visit(f"{name!r} in the closure of {function.__name__}", value, depth + 1, self._line(code, name))
        self._names.update(_globals(code))
        self._space(code, function.__globals__, "the global ", depth + 1)
        for i, value in enumerate((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())):
            self._visit(f"default {i} of {function.__name__}", value, depth + 1, "")

    def _space(self, code: types.CodeType, space: dict[str, Any], words: str, depth: int) -> None:
        """What code uses of a module's names, and of other modules of the user's that are among them."""
        modules: dict[str, types.ModuleType] = {}
        for name in _globals(code) if depth <= _DEPTH else ():
            value = space.get(name, modules)
            if isinstance(value, types.ModuleType) and not _is_foreign(getattr(value, "__file__", None)):
                modules[name] = value
            elif value is not modules:
                if isinstance(value, _SCALARS):
                    self._holders.append(((space, name), value))
                self._visit(f"{words}{name!r}", value, depth, self._line(code, name))
        for name, module in modules.items():  # last, as they may lead back to here
            if vars(module) is not space:
                self._space(code, vars(module), f"{words}{name}.", depth + 1)


def _root(value: Any) -> str:
    """The package of its class."""
    return type(value).__module__.split(".")[0]


def _is_foreign(code: types.CodeType | str | None) -> bool:
    """Whether it is of no file of the user's."""
    file = code.co_filename if isinstance(code, types.CodeType) else code
    return file is None or is_ours(file) or "/site-packages/" in file


def _function_of(found: Any) -> Any:
    """A method as it stands in a class, without what is around it; None where it is none of Python's. A cache stays around it."""
    found = found.fget if isinstance(found, property) else found
    found = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    return found if isinstance(found, types.FunctionType | functools._lru_cache_wrapper) else None


def _slots(kind: type) -> list[str]:
    """By the names that they have outside of the class."""
    found: list[str] = []
    for one in kind.__mro__:
        named = vars(one).get("__slots__", ())
        for name in (named,) if isinstance(named, str) else tuple(named):
            is_private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{one.__name__.lstrip('_')}{name}" if is_private else name)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _put(holder: Any, name: str, item: Any) -> None:
    """In the place of another one; a frozen dataclass is never another one."""
    if getattr(holder, name, _Unseen) is not item:
        setattr(holder, name, item)


_emptyings: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of caches, after which they count anew


def _fills(cache: Any) -> tuple[int, int]:
    return _emptyings.get(cache, 0), cache.cache_info().misses


def _emptied(cache: Any, fills: tuple[int, int]) -> None:
    """A cache that was filled since, with fakes perhaps."""
    if _fills(cache) != fills and cache.cache_info().currsize:
        cache.cache_clear()
        _emptyings[cache] = _emptyings.get(cache, 0) + 1


def _globals(code: types.CodeType | None) -> list[str]:
    if code is None:
        return []
    inner = [name for c in code.co_consts if isinstance(c, types.CodeType) for name in _globals(c)]
    return [*dict.fromkeys([*code.co_names, *inner])]


def _called(value: Any) -> Any:
    return getattr(type(value).__call__, "__code__", None) if callable(value) else None


def _line(code: Any, name: str) -> str:
    """ " at FILE:LINE" where the code stores this name; else where it uses it; else where it begins."""
    if not inspect.iscode(code) or is_ours(code.co_filename):
        return ""
    stored, used, line = 0, 0, code.co_firstlineno
    for step in dis.get_instructions(code):
        line = step.starts_line or line
        if step.argval == name:
            used = used or line
            stored = stored or (line if step.opname.startswith("STORE") else 0)
    return f" at {code.co_filename}:{stored or used or code.co_firstlineno}"
