"""What a stage's operators need for a moment beside what is counted: unfolded weights, gradients on their way, copies.

The idea: the stage itself runs, a block at a time, on fake tensors, which have sizes and no memory. So all memory that
F, B and W of a block allocate is seen when the memory comes and when the memory goes. That includes the memory that torch
allocates inside an operator or in a backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshcee.capture.graph import Program, Value, quiet
from meshcee.capture.graph.sizes import integer
from meshcee.optim import Optimizer
from meshcee.stage.runner import StageRunner

__all__ = ["workspaces"]

_MICROS = 2  # a second gradient is there before it is added to the first


def workspaces(
    program: Program, alike: Sequence[int], activations: Sequence[int], sizes: Sequence[int], optimizer: Optimizer
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Of micro-batches of these sizes, each with a figure for every block: the most bytes from F to W, less what is counted anyway.

    alike        per block the first block that is the same work
    activations  per block what a sample keeps from F to W
    """
    peaks = {block: _peaks(program, block, sizes, optimizer) for block in sorted(set(alike))}
    return tuple(
        (size, tuple(max(0, peaks[like][k] - size * each) for like, each in zip(alike, activations, strict=True)))
        for k, size in enumerate(sizes)
    )


def _peaks(program: Program, block: int, sizes: Sequence[int], optimizer: Optimizer) -> list[int]:
    """What a micro-batch of so many samples takes at most, weights and their gradients apart."""
    spec = program.slice(block, block + 1)
    with FakeTensorMode(allow_non_fake_inputs=True), quiet():
        state = {e.name: torch.empty(e.value.sizes(1), dtype=e.value.dtype) for _, e in spec.inputs if e.kind != "raw"}
        runner = StageRunner(spec, state, optimizer, split=block > 0)
        return [_peak(program, runner, samples) for samples in sizes]


def _peak(program: Program, runner: StageRunner, samples: int) -> int:
    spec = runner.spec
    runner.begin(0)
    held = 0
    with _Live() as live:
        raw = {v.name: _empty(v, samples) for v in spec.raw_inputs}
        given = [
            v.to_wire(_empty(v, samples)) if v.is_tensor else integer(program, number, samples)
            for v, number in zip(spec.received, spec.received_numbers)
        ]
        for micro in range(_MICROS):
            held = sum(p.grad.nbytes for p in runner.trainable.values() if p.grad is not None)
            live.most = live.now
            sent, _, _ = runner.forward(micro, raw, given)
            grads = [
                torch.empty_like(t) if v.requires_grad and isinstance(t, torch.Tensor) else None
                for v, t in zip(spec.sent, sent)
            ]
            if runner.split:
                runner.backward_input(micro, grads)
                runner.backward_weight(micro)
            else:
                runner.backward(micro, grads)
    runner.rollback()
    return int(live.most - held)


def _empty(value: Value, samples: int) -> torch.Tensor:
    return torch.empty(value.sizes(samples, usual=True), dtype=value.dtype)


class _Live(TorchDispatchMode):
    """Bytes of what has been made since it was entered and is still there, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_memory(t) for t in _tensors((*args, *(kwargs or {}).values()))}
        # No number is drawn, and some of torch's rules for fake tensors take no generator.
        drawn = {name: v for name, v in (kwargs or {}).items() if not isinstance(v, torch.Generator)}
        wanted = {a.name: None for a in func._schema.arguments if a.name == "generator" and not a.has_default_value()}
        out = func(*args, **wanted, **drawn)
        for tensor in _tensors([out]):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in given or key in self._seen:
                continue
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            self._seen[key] = weakref.finalize(storage, self._gone, key, storage.nbytes())
        return out

    def _gone(self, key: int, size: int) -> None:
        del self._seen[key]
        self.now -= size


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found
