"""A module from a callable, built in order but never held whole: large tensors are forgotten and made again on demand.

The idea: virtual memory for tensors. The constructor runs as it would in a plain loop, every operator for real and in
order, so generators advance as they should and code may look at values. But whatever is large is shown to it as a fake
tensor; the real one lies in a small cache, and is dropped when the cache is full. A tape holds the operators that
wrote large storages, and makes any such storage again, alone. Only the calls that lead to the storage run again, each random
call with the generator's state of its turn. What nobody can make again (a draw without a generator argument) is kept.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshcee.capture.recipes.recipe import Call, Const, Recipe, View, covers, fresh
from meshcee.errors import CaptureError, MeshceeError, UsageError
from meshcee.files import large_apart
from meshcee.reach.modules import entries
from meshcee.user_code import place_of

__all__ = ["construct"]

SMALL_BYTES = 64 << 10  # storages below this are kept as they are
CACHE_BYTES = 64 << 20  # of large storages that stay real while the constructor runs, or twice the largest
# Operators that write every element of the tensor they are called on, without reading it.
_OVERWRITING = frozenset({"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_", "bernoulli_"})
_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
# What these return is an empty tensor after one draw over all of it.
_DRAWN: dict[str, Any] = {
    "rand": torch.ops.aten.uniform_.default,
    "rand_like": torch.ops.aten.uniform_.default,
    "randn": torch.ops.aten.normal_.default,
    "randn_like": torch.ops.aten.normal_.default,
}


@dataclass
class _Storage:
    """A large storage: how large, its stand-in, and its bytes while they are in the cache."""

    nbytes: int
    fake: torch.Tensor
    real: torch.UntypedStorage | None
    writes: list[int]  # calls that wrote it, ascending
    pinned: bool = False  # it cannot be made again


class _Fakes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """One for a whole construction: modules that copy themselves copy tensors and all that these refer to."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Fakes:
        return self


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operator, shows large results as fake tensors, writes the tape."""

    def __init__(self, small_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._small_bytes = small_bytes
        self._fakes = _Fakes(allow_non_fake_inputs=True)
        self._storages: list[_Storage] = []
        self._slots: dict[int, int] = {}  # address of the stand-in's storage -> index in `_storages`
        self._calls: list[Call] = []
        self._cached: OrderedDict[int, None] = OrderedDict()  # slots, the least recently used first
        self._cached_bytes = 0
        self._limit_bytes = CACHE_BYTES
        self.views: list[tuple[str, torch.Tensor]] = []  # of a parameter or buffer, outside of the module's own lists

    def slot_of(self, tensor: Any) -> int | None:
        """The large storage that this tensor stands for a view of."""
        if not isinstance(tensor, FakeTensor) or tensor.fake_mode is not self._fakes:
            return None
        return self._slots[tensor.untyped_storage()._cdata]

    # -- while the constructor runs ------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, spec = tree_flatten((args, kwargs or {}))
        writes = _written(func, args, kwargs or {})
        random = torch.Tag.nondeterministic_seeded in func.tags
        state = _generator(given).get_state() if random else None
        name = func._schema.name.removeprefix("aten::")
        real = []
        for tensor in given:
            slot = self.slot_of(tensor)
            if slot is None:
                real.append(tensor)
                continue
            replaced = name in _OVERWRITING and tensor is args[0] and self._covers(self._view(slot, tensor))
            self._bring(slot, blank=replaced)
            real.append(_view_of(self._storages[slot].real, tensor))
        real_args, real_kwargs = tree_unflatten(real, spec)
        recorded = [self._recordable(tensor) for tensor in given]  # before the call, which may write what it is given
        out = func(*real_args, **real_kwargs)
        pairs = [(r, g) for r, g in zip(real, given) if isinstance(r, torch.Tensor)]
        same = {id(r): g for r, g in pairs}
        owner = {r.untyped_storage()._cdata: self.slot_of(g) for r, g in pairs}
        results, out_spec = tree_flatten(out)
        made: list[View | None] = []  # of each tensor that is returned: the whole of a storage that is new
        shown = [self._shown(r, same, owner, made) if isinstance(r, torch.Tensor) else r for r in results]
        touched = {slot for tensor in writes if (slot := self.slot_of(tensor)) is not None}
        if (touched or any(made)) and name not in _EMPTY:  # a storage that no call makes is blank anyway
            taken = tree_unflatten(recorded, spec)
            self._record(func, name, taken[0], taken[1], made, touched, state)
        self._evict()
        return tree_unflatten(shown, out_spec)

    def _shown(
        self, result: torch.Tensor, same: Mapping[int, Any], owner: Mapping[int, int | None], made: list[View | None]
    ) -> Any:
        """What the constructor sees of a result: itself, or a stand-in for a view of a large storage."""
        made.append(None)
        if id(result) in same:  # what was written in place is the very object that was given
            return same[id(result)]
        storage = result.untyped_storage()
        slot = owner.get(storage._cdata, -1)
        if slot is None or (slot == -1 and storage.nbytes() < self._small_bytes):
            return result
        if slot == -1:
            slot = len(self._storages)
            with self._fakes:
                base = torch.empty(storage.nbytes() // result.itemsize, dtype=result.dtype)
            self._storages.append(_Storage(storage.nbytes(), base, storage, []))
            self._slots[base.untyped_storage()._cdata] = slot
            self._keep(slot)
            made[-1] = self._view(slot, result)
        base = self._storages[slot].fake
        if base.dtype != result.dtype:
            base = base.view(result.dtype)
        return base.as_strided(result.shape, result.stride(), result.storage_offset())

    def _recordable(self, tensor: Any) -> Any:
        """An argument as the tape keeps it."""
        if not isinstance(tensor, torch.Tensor):
            return None if isinstance(tensor, torch.Generator) else tensor
        slot = self.slot_of(tensor)
        if slot is not None:
            return self._view(slot, tensor)
        small = tensor.untyped_storage().nbytes() < self._small_bytes
        return Const(tensor.detach().clone() if small else tensor.detach(), -1 if small else tensor._version)

    @staticmethod
    def _view(slot: int, tensor: torch.Tensor) -> View:
        return View(slot, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def _record(
        self,
        func: Any,
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        made: Sequence[View | None],
        touched: set[int],
        state: torch.Tensor | None,
    ) -> None:
        makes: tuple[int | None, ...] = tuple(None if view is None else view.slot for view in made)
        slots = {*touched, *(slot for slot in makes if slot is not None)}
        views = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, View)]
        if name in _DRAWN:
            func, args, kwargs, name = _DRAWN[name], (made[0], 0.0, 1.0), {}, "uniform_"
            makes, views = (None,), [v for v in made if v is not None]
        names = [argument.name for argument in func._schema.arguments]
        if any(self._storages[v.slot].pinned for v in views) or (state is not None and "generator" not in names):
            for slot in slots:
                self._storages[slot].pinned = True
            return
        replaces = {slot for slot in makes if slot is not None}
        reads = {v.slot for v in views}
        if name in _OVERWRITING and isinstance(args[0], View) and self._covers(args[0]):
            replaces.add(args[0].slot)
            reads = {v.slot for v in views[1:]}
        for slot in slots:
            self._storages[slot].writes.append(len(self._calls))
        self._calls.append(Call(func, tuple(args), kwargs, makes, state, frozenset(reads), frozenset(replaces)))

    def _covers(self, view: View) -> bool:
        return covers(view, self._storages[view.slot].nbytes)

    # -- the cache -----------------------------------------------------------------------------------------------------

    def _bring(self, slot: int, *, blank: bool) -> None:
        """Have a storage's bytes at hand; `blank` if they are about to be written anyway."""
        storage = self._storages[slot]
        if storage.real is None:
            storage.real = fresh(storage.nbytes, zeros=False) if blank else self.recipe(slot).run_storage()
        self._keep(slot)

    def _keep(self, slot: int) -> None:
        if slot not in self._cached:
            self._cached_bytes += self._storages[slot].nbytes
            self._limit_bytes = max(self._limit_bytes, 2 * self._storages[slot].nbytes)
        self._cached[slot] = None
        self._cached.move_to_end(slot)

    def _evict(self) -> None:
        for slot in list(self._cached):
            if self._cached_bytes <= self._limit_bytes:
                break
            if not self._storages[slot].pinned:
                self._drop(slot)

    def _drop(self, slot: int) -> None:
        self._storages[slot].real = None
        del self._cached[slot]
        self._cached_bytes -= self._storages[slot].nbytes

    def finish(self) -> None:
        """The constructor is done: forget what can be made again."""
        for slot in list(self._cached):
            if not self._storages[slot].pinned:
                self._drop(slot)

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def recipe(self, slot: int) -> Recipe:
        """The calls that lead to a storage as it is now."""
        wanted, seen = [(slot, len(self._calls))], set()
        needed: set[int] = set()
        while wanted:
            current, before = wanted.pop()
            for i in reversed(self._storages[current].writes):
                if i >= before:
                    continue
                if (current, i) in seen:
                    break
                seen.add((current, i))
                needed.add(i)
                wanted += [(read, i) for read in self._calls[i].reads if read != current]
                if current in self._calls[i].replaces and current not in self._calls[i].reads:
                    break
        calls = tuple(self._calls[i] for i in sorted(needed))
        slots = {slot, *(s for c in calls for s in c.slots)}
        return Recipe({s: self._storages[s].nbytes for s in sorted(slots)}, calls, slot)

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The real tensor behind a stand-in, made anew."""
        slot = self.slot_of(tensor)
        if slot is None:
            return tensor.detach()
        held = self._storages[slot].real
        return _view_of(held if held is not None else self.recipe(slot).run_storage(), tensor)

    def recipe_of(self, tensor: torch.Tensor) -> tuple[Recipe, View] | None:
        """How to make a stand-in's value, or None where it is at hand."""
        slot = self.slot_of(tensor)
        if slot is None or self._storages[slot].real is not None:
            return None
        return self.recipe(slot), self._view(slot, tensor)


def _view_of(storage: Any, like: torch.Tensor) -> torch.Tensor:
    view: torch.Tensor = torch.empty(0, dtype=like.dtype).set_(
        storage, int(like.storage_offset()), tuple(like.shape), tuple(like.stride())
    )
    return view


def _generator(given: Sequence[Any]) -> torch.Generator:
    """The one that a random call draws from."""
    return next((g for g in given if isinstance(g, torch.Generator)), torch.default_generator)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that the call writes in place."""
    found: list[torch.Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            tensor = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [t for t in (tensor if isinstance(tensor, list) else [tensor]) if isinstance(t, torch.Tensor)]
    return found


def construct(factory: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Recorder]:
    """`torch.manual_seed(seed)`, then `factory()`: the same values as in a plain loop, at no time all of them.

    Returns the module, whose large tensors are fake, and what makes them: see `InitialState`. The process's generator
    is left as it was.
    """
    recorder = Recorder(SMALL_BYTES)
    with torch.random.fork_rng(devices=[]), large_apart(), warnings.catch_warnings():
        # Modules that copy themselves ask fake tensors for their address, which torch thinks nobody should.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        torch.manual_seed(seed)
        try:
            with recorder:
                module = factory()
        except MeshceeError:
            raise
        except Exception as error:
            if isinstance(factory, type) and isinstance(error, TypeError):
                what = f"Job.model is the class {factory.__name__}, and to make one failed"
                raise CaptureError(f"{what}: {error}; give a module") from error
            raise CaptureError(
                f"Job.model() failed{place_of(error)}: {type(error).__name__}: {error}; if it runs by itself, it needs its large "
                "tensors as they are: give the built module instead of the function"
            ) from error
    recorder.finish()
    if not isinstance(module, nn.Module):
        raise UsageError("Job.model must be an nn.Module, or a function that returns one")
    own = {slot: n for n, tensor in reversed(entries(module)) if (slot := recorder.slot_of(tensor)) is not None}
    for part in module.modules():  # tensors that are neither parameter nor buffer become constants of the graph
        for name, value in list(vars(part).items()):
            if (slot := recorder.slot_of(value)) is not None:
                made = recorder.value(value)
                setattr(part, name, made)
                if slot in own:
                    recorder.views.append((own[slot], made))
    return module, recorder
