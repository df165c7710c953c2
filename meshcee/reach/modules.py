"""A model's tensors and modes: what the plain loop and a look at the model both do to it before it computes.

The idea: bits depend on how a tensor lies in memory, on modes, and on which object stands in which place. So there is one
function for each of these, and a look at a model takes it `on_loan`.
"""

from __future__ import annotations

import copy
import fnmatch
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from meshcee.errors import UsageError
from meshcee.files.layout import GRAIN_BYTES, memory_at

__all__ = [
    "HALVES",
    "compute_in_full",
    "entries",
    "give_memory",
    "halve",
    "in_full",
    "into_training",
    "on_loan",
    "original_of",
    "outermost",
    "put_others",
    "tensors_of",
    "widen",
    "with_a_train",
]

_BOXES = (dict, OrderedDict, defaultdict, list, deque, set)
HALVES = (torch.bfloat16, torch.float16)


def entries(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, under every name."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def into_training(model: nn.Module) -> None:
    """As a loop begins. What is in eval mode inside of a model in train mode stays so; a `train` of the user's is called."""
    if not model.training:
        model.train()
        return
    modes = {module: module.training for module in model.modules()}
    for module in with_a_train(model):
        module.train()
        woken = [name for name, one in module.named_modules() if one.training and not modes.get(one, True)]
        if woken:
            raise UsageError(
                f"{type(module).__name__}.train() puts {woken[0]!r} into train mode, and it is in eval mode now: call "
                "model.train() before the job if your loop does, or have train() keep it in eval mode"
            )


def with_a_train(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules in train mode with a `train` of their own, which may freeze parts of them."""
    if module.training and getattr(module.train, "__func__", None) is not nn.Module.train:
        yield module
        return
    for child in module.children():
        yield from with_a_train(child)


@contextmanager
def on_loan(model: nn.Module) -> Iterator[None]:
    """Meanwhile the model has no gradients and may be changed; then it is as it was.

    Of a copy the loss, hooks and closures would know nothing.
    """
    kept = [
        (box, copy.copy(box)) for m in model.modules() for box in (*vars(m).values(), vars(m)) if type(box) in _BOXES
    ]
    tensors = [(t, t.data, t.grad, t.requires_grad) for t in tensors_of(model)]
    for tensor, *_ in tensors:
        tensor.grad = None  # of an earlier pass, into which the next would add
    try:
        yield
    finally:
        for box, content in kept:
            box.clear()
            box.extend(content) if isinstance(box, list | deque) else box.update(content)
        for tensor, data, grad, requires_grad in tensors:
            tensor.data, tensor.grad = data, grad
            tensor.requires_grad_(requires_grad)


def put_others(model: nn.Module, other: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """In the places of its parameters and buffers, each once; what was tied is tied."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for box in (module._parameters, module._buffers):
            for key, tensor in box.items():
                if tensor is not None and id(tensor) not in made:
                    value = other(tensor)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = new = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
                    if is_parameter or new.dtype == tensor.dtype:  # torch's own conversion would keep the object
                        new.original = original_of(tensor)  # type: ignore[attr-defined]
                box[key] = None if tensor is None else made[id(tensor)]  # type: ignore[assignment]


def original_of(tensor: torch.Tensor) -> torch.Tensor:
    """The model's own tensor, which lists and closures hold, where `put_others` has put this one into its place."""
    return getattr(tensor, "original", tensor)


def give_memory(model: nn.Module) -> None:
    """To its parameters and buffers, with the same numbers; what has shared memory shares it."""
    given: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors_of(model):
        if tensor.layout != torch.strided:
            tensor.data = tensor.data.clone()
            continue
        own = tensor.untyped_storage()
        if own._cdata not in given:
            given[own._cdata] = _cloned(own)
        made: Any = torch.empty(0, dtype=tensor.dtype)
        tensor.data = made.set_(given[own._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())


def _cloned(own: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy of this memory that begins as it does: a mapped file's weights lie where kernels round in another way."""
    if own.device.type != "cpu" or not own.data_ptr() % GRAIN_BYTES:
        return own.clone()  # type: ignore[no-untyped-call,no-any-return]
    made = memory_at(own.nbytes(), own.data_ptr() % GRAIN_BYTES).untyped_storage()
    made.copy_(own)
    return made


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if not is_lazy(tensor)]


def widen(model: nn.Module) -> None:
    """Its half-precision tensors in fp32: what a job in bf16 has as masters, whatever its checkpoint was saved in."""
    if any(t.dtype in HALVES for t in (*model.parameters(), *model.buffers())):
        model._apply(in_full)  # type: ignore[no-untyped-call]


def in_full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALVES else tensor


def halve(model: nn.Module, keep_fp32: Sequence[str] = ()) -> None:
    """Round the model to bf16, as `model.bfloat16()` does, but for what is kept in full."""
    kept = outermost(model, keep_fp32)
    if not kept:
        model.bfloat16()  # also where a module of the user's has an `_apply` of its own
        return
    inside = {module for one in kept for module in one.modules()}
    for one in kept:
        widen(one)
    for module in model.modules():
        if module not in inside:
            module._apply(  # type: ignore[no-untyped-call]
                lambda t: t.bfloat16() if t.is_floating_point() else t, recurse=False
            )
    compute_in_full(kept)


def compute_in_full(modules: Iterable[nn.Module]) -> None:
    """Each gets its bf16 inputs in fp32, and gives its fp32 outputs in bf16."""
    for module in modules:
        module.register_forward_pre_hook(lambda _, args, kwargs: _as(torch.float32, (args, kwargs)), with_kwargs=True)
        module.register_forward_hook(lambda _, args, output: _as(torch.bfloat16, output))


def outermost(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """The modules inside of the model that Job.keep_fp32 names and that have a forward pass, without what is inside of them."""
    found: list[nn.Module] = []
    unmet = set(patterns)

    def look(module: nn.Module, path: str, named: set[str]) -> None:
        for name, child in module.named_children():
            own = f"{path}.{name}".lstrip(".")
            met = named | {p for p in patterns if _is_named(child, own, p)}
            if met and type(child).forward is not nn.Module.forward:
                found.append(child)
                unmet.difference_update(met)
                unmet.difference_update(
                    {p for p in unmet for n, m in child.named_modules(prefix=own) if _is_named(m, n, p)}
                )
            else:
                look(child, own, met)

    look(model, "", set())
    if "frozen" in unmet:
        raise UsageError("keep_fp32: all modules of the model are trained, so leave 'frozen' out, or freeze some")
    if unmet:
        raise UsageError(
            f"keep_fp32: no module of the model that has a forward pass has a name or a class like {min(unmet)!r}"
        )
    inside = {module for one in found for module in one.modules()}
    own = {id(t) for module in inside for t in _own(module)}
    for name, module in model.named_modules():
        if module not in inside and any(id(t) in own for t in _own(module)):
            raise UsageError(
                f"keep_fp32: a tensor of {name!r} is also one of a module that stays in fp32; name both, or neither"
            )
    return found


def _is_named(module: nn.Module, name: str, pattern: str) -> bool:
    if pattern == "frozen" and not any(p.requires_grad for p in module.parameters()):
        return any(True for _ in (*module.parameters(), *module.buffers()))
    return any(fnmatch.fnmatchcase(word, pattern) for word in (name, type(module).__name__))


def _own(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _as(dtype: torch.dtype, tree: Any) -> Any:
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.dtype == other else t, tree)
