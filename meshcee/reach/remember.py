"""What forward and the loss keep in Python between two calls: attributes, closures, globals, and what these hold.

The idea: everything that the model and the loss can reach by name is written down before and after a call, numbers by their
values and tensors by their shapes. What a second call changes again is state, which a graph does not have. A cache that the
first call fills and the second leaves as it is changes nothing. How far an iterator has come is not to be seen, and whoever uses
one moves it.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import enum
import functools
import inspect
import itertools
import math
import operator
import random
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from meshcee.reach.code import is_users, line_of, method_of, names_in, slots_of
from meshcee.reach.content import Backup, Content, attribute_of, content_of, is_generator, variable_of

__all__ = ["Reached", "Remembered"]

_DEPTH = 6
_MOST_IDS = 256  # objects of a container, and numbers of an array, that are looked at
_OWN = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"})
_OF_C = frozenset({*sys.stdlib_module_names, "numpy"})
_SCALARS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_OF_FUNCTIONS = ("forward", "setup_context", "backward", "vjp")  # what `apply` and autograd call
_Look = Callable[[], Any]


class _Unseen:
    """What an iterator holds: never what it was before."""


class Remembered:
    """What the model and the loss reach: values by their place in words, and what puts it all back."""

    most_bytes: float = 1 << 20  # of numbers that are looked at, and put back
    most_values = 50_000
    passed_over = frozenset({"torch", "logging", "builtins", "functools", "meshcee", "_pytest"})  # they have no state

    def __init__(self, model: nn.Module, loss: Callable[..., Any], *, keeps: bool = True) -> None:
        """`keeps`: whether it shall be put back."""
        self._keeps = keeps
        self.values: dict[str, Any] = {}
        self.lines: dict[str, str] = {}
        self.owners: dict[str, tuple[int, str]] = {}  # place -> the module whose attribute is there, and its name
        self._looks: dict[str, _Look] = {}
        self._kept: list[Backup] = []
        self._seen: set[int] = set()
        self._seen_classes: set[int] = set()
        self._alive: list[Any] = []  # so that no two have one id
        self._names: set[str] = set()  # that the code uses which is reached
        self._methods: dict[type, list[Any]] = {}
        self._codes: list[Any] = []  # of the functions that are reached
        self._of_model = set(map(id, model.modules()))
        self._others = collections.Counter[str]()  # modules beside the model's, by what they are called
        for name, module in model.named_modules():
            self._module(name, module)
        of_model = set(self.values)
        self._visit("the loss", lambda: loss, 0, "")
        self._loss = f"the loss {getattr(loss, '__name__', '')}".rstrip(), self.values.keys() - of_model

    def who_changes(self, place: str) -> str:
        """Whose code has this place within reach."""
        words, places = self._loss
        return words if place in places else "forward"

    def line_at(self, place: str) -> str:
        """ " at FILE:LINE" of what changes this place, as far as code tells; "" where nobody knows."""
        if (found := re.match(r"attribute '(\w+)' of class", place)) is None:
            return self.lines.get(place, "")
        return next(filter(None, (line_of(code, found[1], stored_only=True) for code in self._codes)), "")

    def changed(self, other: Remembered) -> list[str]:
        """Places whose value is another there."""
        both = [place for place, value in self.values.items() if place in other.values and other.values[place] != value]
        both = [place for place in both if other.is_seen(place)]
        return both + [place for place in other.values if place not in self.values and self._counts(place, other)]

    @staticmethod
    def _counts(place: str, other: Remembered) -> bool:
        return isinstance(other.values[place], tuple | int | float)

    def is_used(self, place: str) -> bool:
        """Whether code that is reached has the names of the attributes on the way there."""
        return self._names.issuperset(re.findall(r"attribute '(\w+)' of", place))

    def is_seen(self, place: str) -> bool:
        """Whether another value there is a change: what nobody uses holds an iterator as well."""
        return type(self.values[place]) is not _Unseen or self.is_used(place)

    def now(self, place: str) -> Any:
        """The value there at this moment; None where nothing is there any more."""
        try:
            return self._value(self._looks[place]())
        except (LookupError, AttributeError, ValueError):  # of a container, an object, a closure
            return None

    def put_back(self) -> None:
        """What was changed since is as it was."""
        for kept in self._kept:
            kept.put_back()

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _line(self, code: Any, name: str) -> str:
        return line_of(code, name)

    def _of_tensor(self, tensor: torch.Tensor) -> Any:
        return str(tensor.dtype), tuple(tensor.shape)

    def _items(self, container: Any) -> int:
        """How many of them are visited."""
        return min(len(container), 1000)

    def _of_bytes(self, held: memoryview | bytes, nbytes: int) -> int:
        return hash(bytes(held)) if nbytes < self.most_bytes else 0

    def _value(self, item: Any) -> Any:
        """What is compared of an object by itself; None where only what lies inside of it can change."""
        if isinstance(item, _SCALARS):
            return item if item == item else "nan"
        if isinstance(item, torch.Tensor):
            return self._of_tensor(item)
        if isinstance(item, np.ndarray):
            few = item.nbytes < self.most_bytes
            return item.shape, str(item.dtype), self._of_bytes(item.tobytes() if few else b"", item.nbytes)
        if is_generator(item):
            return _state_of(item)
        if isinstance(item, list | tuple | collections.deque | dict):
            return (len(item),)
        if isinstance(item, set | frozenset):
            return len(item), hash(frozenset(item))
        if isinstance(item, Iterator) and not hasattr(item, "__dict__") and not slots_of(type(item)):
            return _Unseen()
        if _root(item) in _OF_C:
            with contextlib.suppress(TypeError):
                held = memoryview(item)
                return held.nbytes, self._of_bytes(held, held.nbytes)
        return None

    def _put(self, place: str, look: _Look) -> bool:
        """Writes down what is there now; False where that is no value."""
        item = look()
        value = self._value(item)
        if value is None and item is not None:
            return False
        self.values[place], self._looks[place] = value, look
        return True

    def _keep(self, content: Content | None) -> None:
        if self._keeps and content is not None and content.nbytes < self.most_bytes:
            self._kept.append(Backup(content))

    def _module(self, name: str, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        hooks = module._forward_hooks, module._forward_pre_hooks  # which a first call may add, and note that it has
        for held in (vars(module), module._parameters, module._buffers, module._modules, *hooks):
            self._keep(content_of(held))
        for buffer in module._buffers.values() if id(module) not in self._of_model else ():
            self._keep(content_of(buffer))
        kind = type(module)
        if not is_users(kind.forward):
            self._names.update(vars(module))
        for method in self._reached(kind, ["forward", *(["__call__"] if is_users(kind.__call__) else [])]):
            self._visit(f"what {kind.__name__} uses", functools.partial(_same, method), 1, "")
        self._class(kind, 1)
        where = f"module {name!r}" if name else "the model"
        for key in sorted(vars(module), key=lambda key: type(vars(module)[key]) in (list, tuple, dict)):  # tables last
            if key not in _OWN and not key.endswith("_hooks") and not key.endswith("_kwargs"):
                place = f"attribute {key!r} of {where}"
                self.owners[place] = id(module), key
                look = functools.partial(operator.getitem, vars(module), key)
                self._visit(place, look, 1, self._line(getattr(kind.forward, "__code__", None), key))
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            self._visit(f"a hook of {where}", functools.partial(_same, hook), 1, "")
        for key, parameter in module._parameters.items():
            if parameter is not None:
                look = functools.partial(getattr, parameter, "requires_grad")
                self._put(f"requires_grad of {f'{name}.{key}'.lstrip('.')!r}", look)

    def _reached(self, kind: type, names: Iterable[str]) -> list[Any]:
        """The functions of a class that these names lead to, one from another."""
        if kind not in self._methods:
            own = {key: held for one in reversed(kind.__mro__) for key, held in vars(one).items()}
            found: dict[str, Any] = {}
            waiting = list(names)
            while waiting:
                name = waiting.pop()
                if name not in found and (method := method_of(own.get(name))) is not None:
                    found[name] = method
                    used = names_in(getattr(inspect.unwrap(method), "__code__", None))
                    self._names.update(used)
                    waiting += used
            self._methods[kind] = list(found.values())
            self._codes += [getattr(inspect.unwrap(method), "__code__", None) for method in found.values()]
        return self._methods[kind]

    def _visit(self, place: str, look: _Look, depth: int, line: str) -> None:
        most = self.most_values if depth > 1 else math.inf  # what a module itself has is seen always
        if len(self.values) > most or depth > _DEPTH:
            return
        item = look()
        if id(item) in self._of_model:  # has a name of its own
            return
        if line:
            self.lines[place] = line
        if not isinstance(item, (*_SCALARS, nn.Module)):
            if id(item) in self._seen:
                return
            self._seen.add(id(item))
            self._alive.append(item)
            self._keep(content_of(item))
        if not self._put(place, look) and not isinstance(item, types.ModuleType):
            self._inside(place, item, depth, line)
        elif isinstance(item, list | dict | tuple) and getattr(item, "__dict__", None):
            self._object(place, item, depth, line)  # of a class of the user's, with attributes besides
        if isinstance(item, list | tuple | collections.deque):
            for i in range(self._items(item)):
                self._visit(f"[{i}] of {place}", functools.partial(operator.getitem, item, i), depth + 1, line)
        elif isinstance(item, dict):
            for i, key in enumerate(list(dict.keys(item))[: self._items(item)]):
                look = functools.partial(dict.__getitem__, item, key)
                said = f"{key!r:.40}" if isinstance(key, _SCALARS) else f"key {i}"  # a tensor's words change with it
                self._visit(f"[{said}] of {place}", look, depth + 1, line)

    def _inside(self, place: str, item: Any, depth: int, line: str) -> None:
        """What an object refers to that has no value by itself."""
        if isinstance(item, types.MethodType):
            self._visit(place, functools.partial(_same, item.__self__), depth, line)
            self._visit(place, functools.partial(_same, item.__func__), depth, line)
        elif isinstance(item, types.FunctionType):
            self._function(item, depth)
        elif isinstance(item, contextvars.ContextVar):
            self._visit(place, functools.partial(item.get, None), depth, line)
        elif isinstance(item, functools._lru_cache_wrapper):
            self._visit(place, functools.partial(_same, item.__wrapped__), depth, line)
        elif isinstance(item, nn.Module):
            for name, module in item.named_modules():
                if id(module) not in self._seen and id(module) not in self._of_model:
                    called = f"{type(item).__name__} {name}".rstrip()
                    self._others[called] += 1
                    self._alive.append(module)
                    self._module(called if self._others[called] == 1 else f"{called} ({self._others[called]})", module)
        elif isinstance(item, type):
            self._class(item, depth)
        else:
            if _root(item) not in self.passed_over:
                self._object(place, item, depth, line)
            if _root(item) in _OF_C:
                self._built(place, item, depth, line)

    def _object(self, place: str, item: Any, depth: int, line: str) -> None:
        """Of a class that may be the user's: what its attributes hold, and its slots."""
        held, slots = _held(item), [name for name in slots_of(type(item)) if hasattr(item, name)]
        for name in slots:
            self._keep(attribute_of(item, name))
        self._keep(content_of(held))
        for method in self._reached(type(item), ["__call__", *self._names]):
            self._visit(place, functools.partial(_same, method), depth + 1, line)
        self._class(type(item), depth)
        looks = {name: functools.partial(operator.getitem, held, name) for name in list(held)}
        looks |= {name: functools.partial(getattr, item, name) for name in slots}
        for name, look in looks.items():
            self._visit(f"attribute {name!r} of {place}", look, depth + 1, line or self._line(_called(item), name))

    def _built(self, place: str, item: Any, depth: int, line: str) -> None:
        """Of an object of C: what it would be built of again, as a date or a range would."""
        with contextlib.suppress(Exception):  # what cannot be built again says so in its own way
            if isinstance(item.__reduce_ex__(2), tuple):
                self._visit(place, lambda: item.__reduce_ex__(2)[1:3], depth, line)

    def _class(self, kind: type, depth: int) -> None:
        """What the classes of the user's hold that this one is made of."""
        for one in kind.__mro__:
            if id(one) in self._seen_classes or issubclass(one, enum.Enum) or not is_users(one):
                continue
            self._seen_classes.add(id(one))
            called = _OF_FUNCTIONS if issubclass(one, torch.autograd.Function) else ()
            for method in self._reached(one, [*self._names, *called]):
                self._visit(f"what {one.__name__} uses", functools.partial(_same, method), depth + 1, "")
            for key, item in list(vars(one).items()):
                if not key.startswith("__") and not hasattr(type(item), "__get__"):
                    self._keep(attribute_of(one, key))
                    look = functools.partial(operator.getitem, vars(one), key)
                    self._visit(f"attribute {key!r} of class {one.__name__}", look, depth + 1, "")

    def _function(self, function: types.FunctionType, depth: int) -> None:
        code, name = function.__code__, function.__name__
        if not is_users(function):
            return
        self._codes.append(code)
        self._keep(content_of(vars(function)))
        for key in list(vars(function)):
            look = functools.partial(operator.getitem, vars(function), key)
            self._visit(f"attribute {key!r} of {name}", look, depth + 1, self._line(code, key))
        for variable, cell in zip(code.co_freevars, function.__closure__ or ()):
            with contextlib.suppress(ValueError):  # not yet assigned
                look = functools.partial(getattr, cell, "cell_contents")
                self._visit(f"{variable!r} in the closure of {name}", look, depth + 1, self._line(code, variable))
            self._keep(content_of(cell))
        self._names.update(names_in(code))
        self._space(code, function.__globals__, "the global ", depth + 1)
        for i, default in enumerate((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())):
            self._visit(f"default {i} of {name}", functools.partial(_same, default), depth + 1, "")

    def _space(self, code: types.CodeType, space: dict[str, Any], words: str, depth: int) -> None:
        """What code uses of a module's names, and of other modules of the user's that are among them."""
        modules: dict[str, types.ModuleType] = {}
        for name in names_in(code) if depth <= _DEPTH else ():
            item = space.get(name, modules)
            if isinstance(item, types.ModuleType) and is_users(item):
                modules[name] = item
            elif item is not modules:
                if isinstance(item, _SCALARS):
                    self._keep(variable_of(space, name))
                look = functools.partial(operator.getitem, space, name)
                self._visit(f"{words}{name!r}", look, depth, self._line(code, name))
        for name, module in modules.items():  # last, as they may lead back to here
            if vars(module) is not space:
                self._space(code, vars(module), f"{words}{name}.", depth + 1)


class Reached(Remembered):
    """What these objects hold and their code names, by place, in a millisecond or two: of many values those that lie nearest."""

    most_bytes = 1 << 12
    most_values = 500
    passed_over = frozenset({"logging", "builtins", "functools", "_pytest"})

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._waiting: collections.deque[tuple[str, _Look, int, str]] = collections.deque()
        super().__init__(nn.Module(), _same, keeps=False)
        self._names |= {"__getitem__", "__getitems__", "__iter__", "__next__", "__len__"}  # which syntax calls
        for name, it in roots.items():
            self._visit(name, functools.partial(_same, it), 0, "")
        while self._waiting:
            with contextlib.suppress(LookupError, AttributeError, ValueError, RuntimeError):  # a thread writes there
                super()._visit(*self._waiting.popleft())

    def changed(self, other: Remembered) -> list[str]:
        return [place for place in super().changed(other) if other.is_seen(place)]

    def is_seen(self, place: str) -> bool:
        return type(self.values[place]) is not _Unseen and self.is_used(place)

    def _visit(self, place: str, look: _Look, depth: int, line: str) -> None:
        self._waiting.append((place, look, depth, line))

    def _items(self, container: Any) -> int:
        return len(container) if len(container) <= 64 else 0  # else it has samples: others may come, and none changes

    def _built(self, place: str, item: Any, depth: int, line: str) -> None:
        pass  # it is another object each time

    def _line(self, code: Any, name: str) -> str:
        return ""

    def _of_tensor(self, tensor: torch.Tensor) -> Any:
        return *super()._of_tensor(tensor), tensor._version, id(tensor)

    def _value(self, item: Any) -> Any:
        found = super()._value(item)
        if isinstance(item, list | dict):
            some = list(itertools.islice(item.values() if isinstance(item, dict) else item, _MOST_IDS))
            return *found, hash(tuple(map(id, some)))
        if isinstance(item, np.ndarray) and item.nbytes >= self.most_bytes and not item.dtype.hasobject:
            return *found, id(item), hash(item.flat[:: -(-item.size // _MOST_IDS)].tobytes())
        return found


def _held(item: Any) -> dict[str, Any]:
    """Its attributes, without a `__getattr__` of the user's, which may raise what it likes."""
    try:
        held = object.__getattribute__(item, "__dict__")
    except AttributeError:
        return {}
    return held if isinstance(held, dict) else {}


def _same(it: Any) -> Any:
    return it


def _root(item: Any) -> str:
    """The package of its class."""
    return type(item).__module__.split(".")[0]


def _called(item: Any) -> Any:
    return getattr(type(item).__call__, "__code__", None) if callable(item) else None


def _state_of(generator: Any) -> int:
    if isinstance(generator, random.Random):
        return hash(generator.getstate())
    if isinstance(generator, torch.Generator):
        return hash(bytes(generator.get_state().tolist()))
    if isinstance(generator, np.random.Generator):
        return hash(repr(generator.bit_generator.state))
    return hash(repr(generator.get_state(legacy=False)))
