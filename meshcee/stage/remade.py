"""Frozen weights that F unfolds are made again where a gradient asks for them, not kept from F to W.

The idea: autograd saves through a hook. Of a tensor that was made of frozen weights alone, the hook saves a note of how the
tensor lay in memory. When a gradient asks for the tensor, the same operators make the tensor again. So the bits are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from meshcee.capture.graph import StageSpec, unfolded
from meshcee.stage.weights import Weights

__all__ = ["Remade"]


@dataclass(frozen=True)
class _Note:
    """A view of an unfolded weight."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Watched:
    """One operator, whose bound method the stage's graph calls. A graph refers to itself, and must not keep weights alive."""

    of: weakref.ref[Remade]
    number: int

    def run(self, *values: Any) -> Any:
        of = self.of()
        assert of is not None
        return of.made(self.number, values)


class Remade:
    """Of a stage. `calls` replaces the operators whose results are watched, when the stage is built."""

    def __init__(self, spec: StageSpec, weights: Weights, device: torch.device) -> None:
        self._weights = weights
        self._device = device
        self._nodes = dict(spec.nodes)
        self._inputs = {number: entry for number, entry in spec.inputs if entry.kind != "raw"}
        self._ways = unfolded(spec.inputs, spec.nodes)
        read = {r for number, node in spec.nodes if number not in self._ways for r in node.refs}
        self._alive: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}  # by storage: number, and version
        self.calls: dict[int, Callable[..., Any]] = {}
        for number in self._ways.keys() & read:
            self.calls[number] = _Watched(weakref.ref(self), number).run

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The stage's forward pass, whose graph notes what it would keep."""

        def watched(*values: Any) -> Any:
            self._alive.clear()
            with saved_tensors_hooks(self._note, self._again):
                return run(*values)

        return watched

    def made(self, number: int, values: tuple[Any, ...]) -> Any:
        """The value, from those that its node reads; its memory is known from now on."""
        node = self._nodes[number]
        out = node.run(dict(zip(dict.fromkeys(node.refs), values)), self._device)
        self._alive[out.untyped_storage()._cdata] = (weakref.ref(out), number, out._version)
        return out

    def _note(self, tensor: torch.Tensor) -> torch.Tensor | _Note:
        """Nothing is noted of what has been written since: a later view of it may have been."""
        made, number, version = self._alive.get(tensor.untyped_storage()._cdata, (None, 0, 0))
        if made is None or (whole := made()) is None or whole.dtype != tensor.dtype or tensor._version != version:
            return tensor.detach()  # the tensor itself would refer to its graph, and so to itself, for ever
        return _Note(number, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _again(self, kept: torch.Tensor | _Note) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        values: dict[int, Any] = {}
        ways = self._ways[kept.number]
        last = {read: number for number in ways for read in self._nodes[number].refs}
        with torch.no_grad():
            for number in ways:
                node = self._nodes[number]
                values |= {r: self._held(r) for r in node.refs if r in self._inputs}
                values[number] = node.run(values, self._device)
                for read in set(node.refs):
                    if last[read] == number:
                        del values[read]
        made: torch.Tensor = values[kept.number]
        return made.as_strided(kept.size, kept.stride, kept.offset)

    def _held(self, number: int) -> torch.Tensor:
        entry = self._inputs[number]
        if entry.kind == "constant":
            assert entry.data is not None
            return entry.placed(entry.data.to(self._device))
        held = self._weights.parameters if entry.kind == "parameter" else self._weights.buffers
        return held[entry.name].detach()
