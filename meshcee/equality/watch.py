"""What of the user's a forward pass may change: taken once, compared later, and put back.

The idea: the walk of `Remembered`, with the numbers of all tensors, and beside it the process's generators and its flags.
Each place has a name, a fingerprint, and a way to look again.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

from meshcee.files.tensor_files import byte_view
from meshcee.reach import Remembered, content_of

__all__ = ["Slot", "Watch", "digest", "same"]

MOVES = 0.02  # at most, of a weight: what such a model computes stays close to what it computed

Look = Callable[[], Any]


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
    look: Look


class Watch:
    """The state before a pass. `look()` gives everything as it is now, `restore()` puts everything back."""

    def __init__(self, model: nn.Module, loss: Any, *, spared: Set[int] = frozenset()) -> None:
        """`spared` are ids of tensors too large to copy: whether they are written is seen, and not put back."""
        self._model, self._loss, self._spared = model, loss, spared
        self.moved = False  # whether `move` was called, and what is put back is to be moved again
        self._before = _Reached(model, loss, spared)
        self._grads = [(tensor, tensor.grad) for tensor in self._before.of_modules.values() if tensor.is_leaf]
        self._generators = [(put, look()) for look, put in _GENERATORS.values()]
        self._weights = [(weight, digest(weight)) for weight in model.parameters() if id(weight) not in spared]

    def look(self) -> dict[str, Slot]:
        """Everything as it is now."""
        slots = {
            name: Slot("generator", repr(look()), functools.partial(_repr, look))
            for name, (look, _) in _GENERATORS.items()
            if name != _OF_TORCH  # every pass is seeded, and the one of its end is compared by itself
        }
        slots |= {name: Slot("flag", seen, functools.partial(_flag, name)) for name, seen in _process_flags().items()}
        return slots | _Reached(self._model, self._loss, self._spared, keeps=False).slots()

    def move(self) -> None:
        """Other weights than the first ones."""
        self.moved, drawn = True, torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self._model.parameters():
                if parameter.requires_grad and parameter.is_floating_point():
                    parameter.add_((torch.rand(parameter.shape, generator=drawn) * MOVES).to(parameter.dtype))

    def restore(self) -> None:
        """The first weights, and all else as it was. RuntimeError, a bug of ours, where a weight is another one."""
        self._before.put_back()
        if any(digest(weight) != first for weight, first in self._weights):
            raise RuntimeError("the look before the first step has not put back a weight of the model")
        for tensor, grad in self._grads:
            tensor.grad = grad
        for put, state in self._generators:
            put(state)


class _Reached(Remembered):
    most_bytes = math.inf

    def __init__(self, model: nn.Module, loss: Any, spared: Set[int], *, keeps: bool = True) -> None:
        self.of_modules: dict[str, torch.Tensor] = {}
        self._spared = spared
        super().__init__(model, loss, keeps=keeps)

    def slots(self) -> dict[str, Slot]:
        found = {}
        for place, seen in self.values.items():
            kind = "tensor" if place in self.of_modules else "flag" if place.startswith("requires_grad") else "value"
            if self.is_seen(place):
                found[place] = Slot(kind, seen, functools.partial(self.now, place))
        return found

    def _line(self, code: Any, name: str) -> str:
        return ""  # to look for lines takes longer than all else

    def _of_tensor(self, tensor: torch.Tensor) -> Any:
        return tensor._version if id(tensor) in self._spared else digest(tensor)

    def _module(self, name: str, module: nn.Module) -> None:
        """With the numbers of its parameters and buffers."""
        if id(module) in self._seen:
            return
        super()._module(name, module)
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is None:
                    continue
                place = f"{name}.{key}".lstrip(".")
                self.of_modules[place] = tensor
                self._put(place, functools.partial(held.__getitem__, key))
                if id(tensor) not in self._spared:
                    self._keep(content_of(tensor))


_OF_TORCH = "torch's generator"
_GENERATORS: dict[str, tuple[Look, Callable[[Any], Any]]] = {
    _OF_TORCH: (torch.get_rng_state, torch.set_rng_state),
    "Python's random": (random.getstate, random.setstate),
    "numpy.random": (np.random.get_state, np.random.set_state),
}


def _repr(look: Look) -> str:
    return repr(look())


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


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, NaN like NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and (torch.equal(a, b) or digest(a) == digest(b))
