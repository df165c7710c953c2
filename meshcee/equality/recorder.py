"""Where an eager pass and a program part: the first operation whose result the program does not have.

The idea: record what every torch function of an eager pass returned, and which line called the function. Then run the program
node by node. An operation that is the same on both sides leaves the same numbers on both. The operation's name does not matter,
nor how the exporter took the operation apart. Of the operations that the loss depends on, the first whose numbers are nowhere in
the program is where they part.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, resolve_name

from meshcee.capture.graph import Program, resolve
from meshcee.equality.lines import at, users
from meshcee.equality.watch import digest

__all__ = ["Call", "Recorder", "memory_of", "tensors_in", "unlike", "unlike_backwards", "values_of"]


@dataclass(frozen=True)
class Call:
    """One call: what it is named, the user's line, the numbers that it left, the memory that it read and wrote."""

    name: str
    where: str
    shape: tuple[int, ...]
    left: tuple[Any, ...]
    reads: frozenset[int]
    writes: frozenset[int]


class Recorder(TorchFunctionMode):
    """Around an eager pass. With `forget`, tensors may go when the pass is done with them, and `numbers` has what they were."""

    def __init__(self, *, forget: bool = False) -> None:
        super().__init__()
        self.forget = forget
        self.calls: list[Call] = []
        self.tensors: list[tuple[list[Any], list[Any]]] = []  # given and left: alive, so that no memory is used twice
        self._numbered: dict[int, int] = {}  # address -> what its memory is called now
        self._count = itertools.count(1)
        self.numbers: set[Any] = set()  # fingerprints of all that was given or left
        self.output: Any = None  # of the model, which the loss was given

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = str(getattr(func, "__name__", func))
        given = list(tensors_in([args, kwargs]))
        left = [t for t in tensors_in(out) if not isinstance(t, FakeTensor)]  # a stand-in has no numbers
        if given and (name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))):
            left.append(given[0])
        if isinstance(kwargs.get("out"), torch.Tensor):
            left.append(kwargs["out"])
        if left:
            reads, writes = self._places(given, left)
            full = resolve_name(func) or name
            fingerprints = tuple(digest(t) for t in left)
            if self.forget:
                self.numbers.update(fingerprints, map(digest, given))
            self.calls.append(
                Call(
                    full.removeprefix("torch.nn.functional.").removeprefix("torch.Tensor.").removeprefix("torch."),
                    _users_line(),
                    tuple(left[-1].shape),
                    fingerprints,
                    reads,
                    writes,
                )
            )
        return out

    def memory(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's memory; memory that is used again counts as other memory."""
        address = memory_of(tensor)
        return self._numbered.setdefault(address, address) if self.forget else address

    def _places(self, given: list[Any], left: list[Any]) -> tuple[frozenset[int], frozenset[int]]:
        """The memory that a call read and wrote."""
        reads = frozenset(map(self.memory, given))
        if self.forget:  # no reference keeps an address: not even a weak one, which would keep the bytes
            before = set(map(memory_of, given))
            self._numbered |= {m: -next(self._count) for m in map(memory_of, left) if m not in before}
        else:
            self.tensors.append((given, left))
        return reads, frozenset(map(self.memory, left))


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_in(item)
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from tensors_in(item)


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def _users_line() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None and not users(frame.f_code.co_filename):
        frame = frame.f_back
    return at(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""


def values_of(program: Program, inputs: Sequence[torch.Tensor]) -> tuple[list[Any], set[Any]]:
    """All that a program holds and computes, node by node, as its stages would, and its numbers. `inputs` by their place."""
    found = {digest(t) for t in inputs}
    values: list[Any] = list(inputs)
    of_memory: dict[int, list[torch.Tensor]] = {}

    def note(tensors: Sequence[torch.Tensor]) -> None:
        for t in tensors:
            of_memory.setdefault(memory_of(t), []).append(t)
            found.add(digest(t))

    note(list(inputs))
    with torch.enable_grad():
        for node in program.nodes:
            with torch.set_grad_enabled(not node.no_grad):
                out = node.operator.call(
                    *(resolve(a, values) for a in node.args), **{k: resolve(v, values) for k, v in node.kwargs.items()}
                )
            values.append(out)
            note(list(tensors_in(out)))
            for place in node.writes:
                if place < len(node.args):
                    for written in tensors_in(resolve(node.args[place], values)):
                        found.update(digest(t) for t in of_memory.get(memory_of(written), ()))
    return values, found


def unlike(recorder: Recorder, loss: torch.Tensor, known: set[Any]) -> Call | None:
    """The first call that the loss depends on and whose numbers the program does not have."""
    needed = {recorder.memory(loss)}
    behind: list[Call] = []
    for call in reversed(recorder.calls):
        if call.writes & needed:
            needed |= call.reads
            behind.append(call)
    return next((call for call in reversed(behind) if any(d not in known for d in call.left)), None)


def unlike_backwards(recorder: Recorder, loss: torch.Tensor, values: Sequence[Any], ours: torch.Tensor) -> Call | None:
    """The call whose backward parts: of what it was given the gradient is nowhere in the program, of what it left it is.

    `loss` is that of the recorded pass, `ours` the program's among its `values`.
    """
    known = set(_gradients(ours, [t for value in values for t in tensors_in(value)]))
    left = [t for _, out in recorder.tensors for t in out]
    found = dict(zip(map(id, left), _gradients(loss, left)))
    for _, out in reversed(recorder.tensors):
        for tensor in out:
            seen = found.get(id(tensor))
            if seen is not None and seen not in known:
                readers = [
                    call
                    for call, (read, made) in zip(recorder.calls, recorder.tensors)
                    if any(t is tensor for t in read) and not any(t is tensor for t in made)
                ]
                # One without a gradient of its own is where the program has one too many.
                blind = [
                    c
                    for c in readers
                    if all(found.get(id(t)) is None for t in recorder.tensors[recorder.calls.index(c)][1])
                ]
                return next(iter(blind or reversed(readers)), None)
    return None


def _gradients(loss: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[Any]:
    """A fingerprint of the gradient of each, None where there is none."""
    wanted = [i for i, t in enumerate(tensors) if t.requires_grad]
    grads = (
        torch.autograd.grad(loss, [tensors[i] for i in wanted], retain_graph=True, allow_unused=True) if wanted else ()
    )
    found: list[Any] = [None] * len(tensors)
    for i, grad in zip(wanted, grads):
        found[i] = None if grad is None else digest(grad)
    return found
