"""What of the user's a forward pass may change: taken once, compared later, and put back.

The idea: one walk over everything that the user's code can reach and write. The walk visits modules with their parameters,
buffers and plain attributes, the variables that functions close over, the globals that functions name, and the process's
generators. Each place has a name, a fingerprint, and a way to look again; each container that was met is remembered with its
content, so all can be put back.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

from meshcee.files.tensor_files import byte_view

__all__ = ["Slot", "Watch", "digest"]

MAX_SLOTS = 50_000  # a vocabulary in an attribute is no state of a forward pass
MAX_DEPTH = 8
_SIMPLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType, logging.Logger)
_MAPPINGS = (
    dict,
    OrderedDict,
    defaultdict,
    Counter,
)  # these very types: what is derived from them may do what it likes
_SEQUENCES = (list, deque, tuple)
_INTERNAL = frozenset({"_parameters", "_buffers", "_modules", "__dict__"})


def digest(tensor: torch.Tensor) -> Any:
    """A fingerprint of a tensor's numbers in logical order, whatever its shape and strides; its type and size where there are
    no numbers to read."""
    plain = tensor.detach()
    if plain.layout != torch.strided or plain.device.type == "meta" or type(plain) not in (torch.Tensor, nn.Parameter):
        return (str(plain.dtype), tuple(plain.shape))
    return xxhash.xxh3_128_digest(byte_view(plain.cpu())) if plain.numel() else b""


@dataclass(frozen=True)
class Slot:
    """One place: its fingerprint when it was looked at, and how to look again."""

    kind: str  # "tensor" of the model, "flag", "value" of Python, "generator"
    seen: Any
    look: Callable[[], Any]


class Watch:
    """The state before a pass. `look()` gives everything as it is now, `restore()` puts everything back."""

    def __init__(self, model: nn.Module, functions: Sequence[Any], *, spared: Set[int] = frozenset()) -> None:
        """`spared` are ids of tensors too large to copy: whether they are written is seen, and not put back."""
        self._model, self._functions, self._spared = model, functions, spared
        self._undo: list[Callable[[], Any]] = []
        self.slots = self._walk(self._undo)

    def look(self) -> dict[str, Slot]:
        """Everything as it is now."""
        return self._walk(None)

    def restore(self) -> None:
        for undo in self._undo:
            undo()

    def _walk(self, undo: list[Callable[[], Any]] | None) -> dict[str, Slot]:
        walk = _Walk(undo, self._spared)
        walk.generators()
        walk.module("", self._model)
        for function in self._functions:
            walk.function("the loss", function, 0)
        return walk.slots


class _Walk:
    def __init__(self, undo: list[Callable[[], Any]] | None, spared: Set[int]) -> None:
        self.slots: dict[str, Slot] = {}
        self.undo, self.spared = undo, spared
        self.seen: set[int] = set()
        self.alive: list[Any] = []  # alive while ids are compared

    def generators(self) -> None:
        process: tuple[tuple[str, Callable[[], Any], Callable[[Any], Any]], ...] = (
            ("torch's generator", torch.get_rng_state, torch.set_rng_state),
            ("Python's random", random.getstate, random.setstate),
            ("numpy.random", np.random.get_state, np.random.set_state),
        )
        for name, look, put in process:
            if name != "torch's generator":  # every pass is seeded, and the one of its end is compared by itself
                self.slots[name] = Slot("generator", repr(look()), functools.partial(_repr, look))
            if self.undo is not None:
                self.undo.append(functools.partial(put, look()))
        for name, number in _process_flags().items():
            self.slots[name] = Slot("flag", number, functools.partial(_flag, name))

    def module(self, path: str, root: nn.Module) -> None:
        for name, module in root.named_modules():
            own = ".".join(part for part in (path, name) if part)
            if self._met(module):
                continue
            self._remember(module.__dict__)
            for place in ("_parameters", "_buffers"):
                held = module.__dict__[place]
                self._remember(held)
                for key in list(held):
                    self._tensor(f"{own}.{key}".lstrip("."), held, key)
            self._remember(module.__dict__["_modules"])
            for key in list(module.__dict__):
                if key not in _INTERNAL and not key.endswith("_hooks") and not key.startswith("_non_persistent"):
                    self.value(f"{own}.{key}".lstrip("."), module.__dict__, key, 0)
            self._class(type(module))

    def _tensor(self, name: str, held: dict[str, Any], key: str) -> None:
        """A parameter or buffer."""
        tensor = held[key]
        if tensor is None or self._met(tensor):
            return
        look = _version if id(tensor) in self.spared else digest
        self.slots[name] = Slot("tensor", look(tensor), lambda: look(held[key]))
        self.slots[f"{name}.requires_grad"] = Slot("flag", tensor.requires_grad, lambda: held[key].requires_grad)
        if self.undo is not None:
            if id(tensor) not in self.spared:
                self.undo.append(functools.partial(_put_tensor, tensor, tensor.detach().clone(), tensor.requires_grad))
            self.undo.append(functools.partial(setattr, tensor, "grad", tensor.grad))

    def value(self, name: str, container: Any, key: Any, depth: int) -> None:
        """What a container of Python's holds at a key."""
        try:
            item = container[key]
        except (KeyError, IndexError):
            return
        if len(self.slots) < MAX_SLOTS:
            fingerprint = _fingerprint(item)
            if fingerprint is not None:
                self.slots[name] = Slot("value", fingerprint, functools.partial(_look, container, key))
            self._inside(name, item, depth + 1)

    def _inside(self, name: str, item: Any, depth: int) -> None:
        if depth > MAX_DEPTH or isinstance(item, (*_SIMPLE, *_OPAQUE)) or self._met(item):
            return
        if isinstance(item, nn.Module):
            self.module(name, item)
        elif isinstance(item, torch.Tensor):
            if self.undo is not None and item.layout == torch.strided:
                self.undo.append(functools.partial(_put_tensor, item, item.detach().clone(), item.requires_grad))
        elif isinstance(item, np.ndarray):
            if self.undo is not None and item.flags.writeable:
                self.undo.append(functools.partial(np.copyto, item, item.copy()))
        elif isinstance(item, random.Random):
            self._undo(functools.partial(item.setstate, item.getstate()))
        elif isinstance(item, np.random.Generator):
            self._undo(functools.partial(setattr, item.bit_generator, "state", item.bit_generator.state))
        elif isinstance(item, torch.Generator):
            self._undo(functools.partial(item.set_state, item.get_state()))
        elif type(item) in _MAPPINGS:
            self._remember(item)
            for key in list(item):
                self.value(f"{name}[{key!r}]", item, key, depth)
        elif type(item) in _SEQUENCES:
            self._remember(item)
            for i in range(len(item)):
                self.value(f"{name}[{i}]", item, i, depth)
        elif type(item) is set:
            self._undo(functools.partial(_put_set, item, set(item)))
        elif isinstance(item, types.FunctionType | types.MethodType | functools.partial):
            self.function(name, item, depth)
        elif isinstance(getattr(item, "__dict__", None), dict):
            self._remember(item.__dict__)
            for key in list(item.__dict__):
                self.value(f"{name}.{key}", item.__dict__, key, depth)

    def function(self, name: str, function: Any, depth: int) -> None:
        """What a function closes over, is bound to, and names of its module's globals."""
        if isinstance(function, functools.partial):
            self._inside(name, function.args, depth + 1)
            self._inside(name, function.keywords, depth + 1)
            self.function(name, function.func, depth + 1)
        elif isinstance(function, types.MethodType):
            self._inside(name, function.__self__, depth + 1)
            self.function(name, function.__func__, depth + 1)
        elif isinstance(function, types.FunctionType):
            if _library(function.__module__) or depth > MAX_DEPTH:
                return
            for cell, variable in zip(function.__closure__ or (), function.__code__.co_freevars):
                self.value(f"{name}'s variable {variable}", _Cell(cell), 0, depth)
                with contextlib.suppress(KeyError):
                    self._undo(functools.partial(setattr, cell, "cell_contents", _Cell(cell)[0]))
            self._inside(name, function.__defaults__, depth + 1)
            self._globals(function, depth)
        elif isinstance(function, nn.Module):
            self.module(name, function)
        elif not isinstance(function, _OPAQUE) and callable(function):
            self._inside(name, function, depth + 1)
            self._class(type(function))

    def _class(self, cls: type) -> None:
        """Numbers that a class of the user's holds, and what its methods name."""
        for each in cls.__mro__:
            if _library(each.__module__) or self._met(each):
                continue
            for key, item in list(vars(each).items()):
                if isinstance(item, types.FunctionType):
                    self._globals(item, 0)
                elif not key.startswith("__") and isinstance(item, (int, float, str, list, dict)):
                    self.value(f"{each.__name__}.{key}", vars(each), key, 0)
                    self._undo(functools.partial(setattr, each, key, item))

    def _globals(self, function: types.FunctionType, depth: int) -> None:
        if "-packages/" in function.__code__.co_filename:  # a library's are many, and no state
            return
        for name in _names(function.__code__):
            item = function.__globals__.get(name)
            if isinstance(item, types.FunctionType):
                if item.__module__ == function.__module__ and not self._met(item):
                    self.function(name, item, depth + 1)
            elif isinstance(item, (*_SIMPLE[1:], torch.Tensor, np.random.Generator, random.Random)) or (
                type(item) in (*_MAPPINGS, *_SEQUENCES, set)
            ):
                slot = f"the global {name}"
                if slot not in self.slots:
                    self.value(slot, function.__globals__, name, depth)
                    self._undo(functools.partial(function.__globals__.__setitem__, name, item))

    def _met(self, item: Any) -> bool:
        met = id(item) in self.seen
        self.seen.add(id(item))
        self.alive.append(item)
        return met

    def _undo(self, how: Callable[[], Any]) -> None:
        if self.undo is not None:
            self.undo.append(how)

    def _remember(self, container: Any) -> None:
        if isinstance(container, dict):
            self._undo(functools.partial(_put_dict, container, dict(container)))
        elif isinstance(container, list | deque):
            self._undo(functools.partial(_put_list, container, list(container)))


class _Cell:
    """A variable of a closure as a container of one item."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell

    def __getitem__(self, _: Any) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # not yet assigned
            raise KeyError from None


def _library(module: str | None) -> bool:
    return (module or "").split(".")[0] in ("torch", "builtins", "typing", "abc", "collections", "functools", "meshcee")


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _fingerprint(item: Any) -> Any:
    """Of what the item holds itself; None where only what lies inside of it can change."""
    if isinstance(item, _SIMPLE):
        return repr(item)
    if isinstance(item, torch.Tensor):
        return ("tensor", digest(item))
    if isinstance(item, np.ndarray):
        return ("array", item.shape, xxhash.xxh3_128_digest(np.ascontiguousarray(item).tobytes()))
    if isinstance(item, random.Random):
        return repr(item.getstate())
    if isinstance(item, np.random.Generator):
        return repr(item.bit_generator.state)
    if isinstance(item, torch.Generator):
        return digest(item.get_state())
    if type(item) in (set, frozenset):
        return (type(item).__name__, frozenset(map(repr, item)) if len(item) < 1000 else len(item))
    if type(item) in _MAPPINGS:
        return ("dict", tuple(map(repr, item)) if len(item) < 1000 else len(item))
    if type(item) in _SEQUENCES:
        return (type(item).__name__, len(item))
    if type(item).__module__ == "itertools":
        return repr(item)
    return None


def _repr(look: Callable[[], Any]) -> str:
    return repr(look())


def _version(tensor: torch.Tensor) -> int:
    return tensor._version


def _look(container: Any, key: Any) -> Any:
    try:
        return _fingerprint(container[key])
    except (KeyError, IndexError):
        return "absent"


def _put_tensor(tensor: torch.Tensor, value: torch.Tensor, requires_grad: bool) -> None:
    with torch.no_grad():
        if not torch.equal(tensor.detach(), value):
            tensor.data.copy_(value)
    if tensor.is_leaf and tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)


def _put_dict(container: dict[Any, Any], content: dict[Any, Any]) -> None:
    if len(container) != len(content) or any(k not in content or content[k] is not v for k, v in container.items()):
        container.clear()
        container.update(content)


def _put_list(container: Any, content: list[Any]) -> None:
    container.clear()
    container.extend(content)


def _put_set(container: set[Any], content: set[Any]) -> None:
    container.clear()
    container.update(content)


def _process_flags() -> dict[str, Any]:
    kernels: Any = torch.backends.cuda  # what the CPU obeys too
    return {
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.get_default_dtype()": str(torch.get_default_dtype()),
        "torch.get_num_threads()": torch.get_num_threads(),
        "the kernels of scaled_dot_product_attention": (
            kernels.flash_sdp_enabled(),
            kernels.math_sdp_enabled(),
            kernels.mem_efficient_sdp_enabled(),
        ),
    }


def _flag(name: str) -> Any:
    return _process_flags()[name]
