"""Whether what the model and the loss compute with is what it was when the graph was made.

The idea: peers run a graph, and what a callback writes into the owner's objects between two steps reaches nobody. A plain loop
would go on with it, so a run ends there and says what was changed.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any

import numpy as np
import structlog
import torch
from torch import nn

from meshcee.errors import UsageError
from meshcee.events import Event
from meshcee.files.tensor_files import byte_view
from meshcee.job import Job
from meshcee.reach import Remembered

__all__ = ["Unchanged"]

log = structlog.get_logger()

_MODE = "attribute 'training' of the model"
_MOST_BYTES = 1 << 20  # of a tensor whose numbers are all looked at
_SOME = 256  # numbers of a larger one, and of a weight


class Unchanged:
    """Called again and again: UsageError once something is other than at first. `written` are buffers that forward writes."""

    def __init__(self, job: Job, written: Collection[str] = ()) -> None:
        self._model = job.model if isinstance(job.model, nn.Module) else nn.Module()
        self._loss, self._written = job.loss, frozenset(written)
        self._before, self._parts = self._seen(), _parts(self._model)
        self._trains = self._model.training  # until it is told that it does not any more
        self._first = {name: numbers for name, (*_, numbers) in self._weights().items()}
        # As the first look finds them: who looks at the graph gives them back.
        self._versions: dict[str, Any] | None = {}

    def __call__(self) -> None:
        """What is in eval mode as a whole, a loop puts back into train mode. Weights that are written are told of once: who has
        loaded those of a checkpoint, to look at them, changes nothing."""
        if places := self.changed():
            raise UsageError(
                f"{places[0]} is not what it was before the first step, and peers go on with the "
                "graph that was made of it then: count steps in a registered buffer that forward adds to, thaw weights in a "
                "second run, and change learning rates by run.set_lr"
            )
        if self._trains and not self._model.training:
            log.warning(Event.LEFT_IN_EVAL)
            self._trains = False
        if self._versions is not None and (written := self._written_weights()):
            self.tell_written(written)

    def tell_written(self, names: list[str], writer: str | None = None) -> None:
        """Weights of these names were. It is said once, by whoever sees it first."""
        if self._versions is not None:
            more = {} if writer is None else {"writer": writer}
            log.warning(Event.WEIGHTS_WRITTEN, parameters=names[:3], **more)
            self._versions = None

    def changed(self) -> list[str]:
        """The places of what is other than at first."""
        now, parts = self._seen(), _parts(self._model)
        moved = [place for place, part in self._parts.items() if parts.get(place) != part]
        places = [place for place in self._before.changed(now) if self._before.is_used(place) or now.is_used(place)]
        if not all(seen.values.get(_MODE) for seen in (self._before, now)):
            places = [place for place in places if not place.startswith(_MODE.partition(" of ")[0])]
        return places + moved

    def _written_weights(self) -> list[str]:
        assert self._versions is not None
        now = self._weights()
        before = self._versions or {
            name: (*now[name][:-1], numbers) for name, numbers in self._first.items() if name in now
        }
        self._versions = self._versions or now
        return [name for name, version in now.items() if version != before.get(name)]

    def _weights(self) -> dict[str, Any]:
        own = self._model.named_parameters()
        return {name: (p._version, p.data_ptr(), _some(p)) for name, p in own if p.device.type != "meta"}

    def _seen(self) -> Remembered:
        seen = _WithNumbers(self._model, self._loss, keeps=False)
        for name, buffer in self._model.named_buffers():
            if name not in self._written:
                seen.values[f"the buffer {name!r}"] = _numbers(buffer)
        return seen


class _WithNumbers(Remembered):
    def _module(self, name: str, module: nn.Module) -> None:
        """With the tensors of modules that the loss holds."""
        if id(module) not in self._seen and id(module) not in self._of_model:
            held = {**module._parameters, **module._buffers}
            self.values |= {
                f"{key!r} of module {name!r}": _numbers(t.detach()) for key, t in held.items() if t is not None
            }
        super()._module(name, module)

    def _line(self, code: Any, name: str) -> str:
        return ""  # to look for lines takes longer than all else

    def _of_tensor(self, tensor: torch.Tensor) -> Any:
        return _numbers(tensor)

    def _value(self, item: Any) -> Any:
        if isinstance(item, np.ndarray) and item.nbytes >= self.most_bytes and not item.dtype.hasobject:
            return item.shape, str(item.dtype), hash(item.take(_places(item.size).numpy()).tobytes())
        return super()._value(item)


class _Same:
    """An object that equals itself alone, and is kept: no other has its address meanwhile."""

    def __init__(self, it: Any) -> None:
        self.it = getattr(it, "__func__", it)  # a method is another object each time

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.it is other.it

    __hash__ = None  # type: ignore[assignment]


def _parts(model: nn.Module) -> dict[str, Any]:
    """What a model consists of beside numbers: its modules with their classes, functions and hooks."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        where = f"module {path!r}" if path else "the model"
        found[f"the class of {where}"] = _Same(type(module))
        found[f"the list of modules in {where}"] = [(name, _Same(part)) for name, part in module._modules.items()]
        held = vars(module)
        hooks = [held[name] for name in sorted(held) if name.endswith("_hooks") and isinstance(held[name], dict)]
        hooks += [h for p in module._parameters.values() for h in _hooks_of(p)]
        found[f"the list of hooks of {where}"] = [_Same(hook) for of_kind in hooks for hook in of_kind.values()]
        for name in {"forward", *held}:
            function = held.get(name)
            if (callable(function) and not isinstance(function, nn.Module | torch.Tensor)) or name == "forward":
                found[f"the function {name!r} of {where}"] = _Same(function)
    return found


def _hooks_of(tensor: torch.Tensor | None) -> list[dict[Any, Any]]:
    return [getattr(tensor, name, None) or {} for name in ("_backward_hooks", "_post_accumulate_grad_hooks")]


def _numbers(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A tensor's type and shape, and what is in it; of a large one some of it, and how often torch has written it."""
    looks = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not looks:
        held: Any = 0
    elif tensor.nbytes <= _MOST_BYTES:
        held = hash(bytes(byte_view(tensor)))
    else:
        held = tensor._version, _some(tensor)
    return str(tensor.dtype), tuple(tensor.shape), held


def _some(tensor: torch.Tensor) -> int:
    """Of numbers all over it; 0 of a kind that cannot be taken apart."""
    with suppress(RuntimeError):
        return hash(bytes(byte_view(tensor.detach().take(_places(tensor.numel())))))
    return 0


def _places(count: int) -> torch.Tensor:
    most = min(_SOME, count)
    return torch.arange(most) * count // max(most, 1)
