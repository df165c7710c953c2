"""A model that does not fit: the user's module beside the program, forward only, each weight made when it is used.

The idea: the module's large tensors are stand-ins, which have types and shapes and no numbers. A mode around forward gives every
torch function the tensor itself in place of its stand-in. The mode makes the tensor from a recipe, or reads the tensor from the
state. The mode forgets the tensor when others need the room. The program follows block by block, each before its weights are
forgotten, so that they are made once. Autograd is on, since kernels look at it, and keeps nothing: no backward pass comes. What
is held is about the largest block, and the activations of a micro-batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from meshcee.capture import Capture
from meshcee.capture.graph import Program, StageSpec, resolve
from meshcee.equality.recorder import memory_of, tensors_in
from meshcee.equality.watch import digest
from meshcee.files.layout import copied, offset_of, placed
from meshcee.reach.modules import compute_in_full, entries, original_of, outermost, put_others

__all__ = ["Blocks", "Weights", "entries", "stand_in", "without_saving"]

SMALL_BYTES = 64 << 10  # tensors below this are kept as they are
# What asks for no numbers, and is answered by the stand-in.
_ABOUT = frozenset(
    {
        *(
            "size",
            "dim",
            "ndimension",
            "numel",
            "nelement",
            "stride",
            "element_size",
            "storage_offset",
            "__len__",
            "__hash__",
        ),
        *("is_contiguous", "is_floating_point", "is_complex", "__set__", "requires_grad_", "register_hook"),
    }
)


def stand_in(model: nn.Module, halves: bool, keep_fp32: Sequence[str], real: Mapping[str, torch.Tensor]) -> None:
    """Put stand-ins into the places of all that is large but what is in `real`; it computes in bf16 then, or not."""
    kept = outermost(model, keep_fp32)
    full = {id(tensor) for module in kept for _, tensor in entries(module)}
    first = {id(tensor): name for name, tensor in reversed(entries(model))}
    fakes: Any = FakeTensorMode(allow_non_fake_inputs=True)

    def other(tensor: torch.Tensor) -> torch.Tensor:
        rounds = halves and tensor.is_floating_point() and id(tensor) not in full
        wanted = torch.bfloat16 if rounds else tensor.dtype
        if (name := first[id(tensor)]) in real:
            return placed(real[name].to(wanted), tensor.stride(), offset_of(tensor))
        if isinstance(tensor, FakeTensor) or tensor.nbytes >= SMALL_BYTES:
            with fakes:
                return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=wanted)
        return copied(tensor.detach()) if tensor.dtype == wanted else tensor.detach().to(wanted)

    put_others(model, other)
    compute_in_full(kept)


class _Tracked(torch.autograd.Function):
    """A tensor that needs a gradient and is no leaf: autograd's graph holds its leaves, and no tensor between."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty(0, dtype=tensor.dtype)
        return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


class Weights(TorchFunctionMode):
    """Around forward: every stand-in of the model that a torch function is given is replaced by its tensor.

    `limit_bytes` of them stay at hand, or the largest alone.
    """

    def __init__(self, model: nn.Module, captured: Capture, limit_bytes: int) -> None:
        super().__init__()
        self._captured, self._limit_bytes = captured, limit_bytes
        named = {id(t): (captured.aliases.get(n, n), t) for n, t in entries(model)}
        self._names = {key: name for key, (name, t) in named.items() if isinstance(t, FakeTensor)}
        self._own = dict(named.values())
        self._stead = {id(own): t for _, t in named.values() if (own := original_of(t)) is not t}
        self._offsets = {entry.name: entry.offset for entry in captured.train.inputs}
        self._held: OrderedDict[str, tuple[torch.Tensor, int]] = OrderedDict()  # and its version when it was made
        self._bytes = 0
        self._anchor = torch.zeros((), requires_grad=True)
        self.before: Callable[[], None] = lambda: None  # called before a tensor is made, and others may be forgotten
        self.written: set[str] = set()  # of the stand-ins: they stay at hand

    @property
    def stand_in(self) -> bool:
        """Whether there are stand-ins at all."""
        return bool(self._names)

    def take(self, name: str) -> torch.Tensor:
        """A tensor of the model by its first name, with what eager code sees of it: type, strides, whether it needs a gradient."""
        own = self._own[name]
        if not isinstance(own, FakeTensor):
            return self._tracked(own.detach()) if own.requires_grad else own.detach()
        if name not in self._held:
            self.before()
            self._make_room(own.nbytes)
            with torch.inference_mode(mode=False):
                with torch.no_grad():
                    value = placed(self._captured.state[name].detach().to(own.dtype), own.stride(), self._offsets[name])
                with torch.enable_grad():
                    value = self._tracked(value) if own.requires_grad else value
            self._held[name] = value, value._version
            self._bytes += own.nbytes
        self._held.move_to_end(name)
        return self._held[name][0]

    def _tracked(self, tensor: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Tracked.apply(self._anchor, tensor)  # type: ignore[no-untyped-call]
        return found

    def at_hand(self, names: Iterable[str]) -> bool:
        return all(name in self._held or not isinstance(self._own[name], FakeTensor) for name in names)

    def _make_room(self, nbytes: int) -> None:
        for name in list(self._held):
            if self._bytes + nbytes <= self._limit_bytes:
                break
            tensor, version = self._held[name]
            if tensor._version != version:
                self.written.add(name)
            else:
                del self._held[name]
                self._bytes -= tensor.nbytes

    def forget(self) -> None:
        """All of them; what forward wrote is in `written`."""
        self.written |= {name for name, (tensor, version) in self._held.items() if tensor._version != version}
        self._held.clear()
        self._bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(id(t) in self._stead for t in tree_leaves((args, kwargs))):  # of a list or a closure
            args, kwargs = tree_map(lambda t: self._stead.get(id(t), t), (args, kwargs))
        given = [t for t in tree_leaves((args, kwargs)) if id(t) in self._names]
        if not given or getattr(func, "__name__", "") in _ABOUT:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__":  # of its type, or its transpose
            found = func(*args, **kwargs)
            if not any(isinstance(t, FakeTensor) for t in tree_leaves(found)):
                return found
        real_args, real_kwargs = tree_map(
            lambda t: self.take(self._names[id(t)]) if id(t) in self._names else t, (args, kwargs)
        )
        return func(*real_args, **real_kwargs)


@contextmanager
def without_saving() -> Iterator[None]:
    """Autograd records, and keeps no tensor for a backward pass."""

    def never(_: Any) -> Any:
        raise AssertionError("there is no backward pass")

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, never):
        yield


class Blocks:
    """The program, every block as a stage of its own, one after the other; `follow` runs what has its weights at hand.

    Of `state`, what the program writes, all blocks work on one copy. It has its own turn of torch's generator.
    """

    def __init__(
        self, program: Program, raw: Mapping[str, torch.Tensor], weights: Weights, state: Mapping[str, torch.Tensor]
    ) -> None:
        self._program, self._raw, self._weights = program, raw, weights
        self._written = {name: copied(tensor) for name, tensor in state.items()}
        self._arrived: dict[int, Any] = {}
        self._spec: StageSpec | None = program.slice(0, 1)
        self.rng = torch.get_rng_state()
        self.numbers: set[Any] = {digest(t) for t in raw.values()}  # fingerprints of all that was computed
        self.ends: list[tuple[int, int, Any]] = []  # (block, value, fingerprint) of all that a block sends
        self.outputs: list[torch.Tensor] = []  # the loss, and its terms

    def follow(self) -> None:
        while self._spec is not None and self._weights.at_hand(self._spec.state_names()):
            self._step(self._spec)

    def finish(self) -> None:
        while self._spec is not None:
            self._step(self._spec)

    def written(self) -> dict[str, Any]:
        """Fingerprints of what the program left in the buffers that it writes."""
        return {name: digest(tensor) for name, tensor in self._written.items()}

    def _step(self, spec: StageSpec) -> None:
        theirs = torch.get_rng_state()
        torch.set_rng_state(self.rng)
        try:
            with torch.inference_mode(mode=False), torch.enable_grad():
                values = self._values(spec)
                _run(spec.nodes, values, self.numbers, {*spec.sent_numbers, *spec.output_numbers})
                self._send(spec, values)
            self.rng = torch.get_rng_state()
        finally:
            torch.set_rng_state(theirs)
        self._spec = None if spec.is_last else self._program.slice(spec.end, spec.end + 1)

    def _values(self, spec: StageSpec) -> dict[int, Any]:
        values = dict(self._arrived)
        for number, entry in spec.inputs:
            if entry.kind == "raw":
                values[number] = self._raw[entry.name]
            elif entry.data is not None:
                values[number] = entry.placed(entry.data)
            elif entry.name in self._written:
                values[number] = self._written[entry.name]
            else:
                values[number] = entry.placed(self._weights.take(entry.name))
        return values

    def _send(self, spec: StageSpec, values: Mapping[int, Any]) -> None:
        self._arrived = {}
        for number, value in zip(spec.sent_numbers, spec.sent):
            held = values[number]
            if isinstance(held, torch.Tensor):
                self.ends.append((spec.first, number, digest(held)))
                held = copied(held.detach()).requires_grad_(value.requires_grad)
            self._arrived[number] = held
        if spec.is_last:
            self.outputs = [values[number].detach() for number in spec.output_numbers]


def _run(nodes: Sequence[tuple[int, Any]], values: dict[int, Any], numbers: set[Any], wanted: Set[int]) -> None:
    """A block's nodes; each value is dropped after its last use."""
    last = {ref: number for number, node in nodes for ref in node.refs}
    for number, node in nodes:
        with torch.set_grad_enabled(not node.no_grad):
            args, kwargs = resolve(node.args, values), {k: resolve(v, values) for k, v in node.kwargs.items()}
            values[number] = node.operator.call(*args, **kwargs)
        numbers.update(digest(t) for t in tensors_in(values[number]))
        for place in node.writes:
            if place < len(args):
                touched = {memory_of(t) for t in tensors_in(args[place])}
                numbers.update(digest(t) for v in values.values() for t in tensors_in(v) if memory_of(t) in touched)
        del args, kwargs
        for ref in (*node.refs, number):
            if last.get(ref, number) == number and ref not in wanted:
                values.pop(ref, None)
