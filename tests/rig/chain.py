"""The product's chain of stages, with the wire looked at: what crosses is what the graph declares, for some number of samples.

The idea: every test that runs a chain also holds this, and can tamper with a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshcee.capture import Free, Value, stack
from meshcee.stage.chain import Chain as Stages
from meshcee.stage.chain import split_blocks

__all__ = ["Chain", "split_blocks"]


class Chain(Stages):
    """`tamper` is called after a W of the first stage."""

    tamper: Callable[[int, int], None] = staticmethod(lambda step, micro: None)
    samples = 0

    def forward(self, step: int, micro: int, batch: tuple[Any, Any]) -> torch.Tensor:
        self.samples = next(iter(self.captured.inputs_of(batch).values())).shape[0]
        return super().forward(step, micro, batch)

    def arrived(self, kind: str, stage: int, values: Sequence[Value], items: Sequence[Any], micro: int) -> list[Any]:
        for value, item in zip(values, items) if kind == "F" else ():
            if isinstance(item, torch.Tensor):
                assert value.admits(item, on_wire=True)
                assert item.nbytes <= value.nbytes(self.samples)
                if not any(isinstance(d, Free) for d in value.shape):
                    assert tuple(item.shape) == value.wire_shape(self.samples)
                    assert item.nbytes == value.nbytes(self.samples)
        if any(isinstance(item, torch.Tensor) and item.is_meta for item in items):
            return list(items)  # on the meta device there is no number that could travel
        return super().arrived(kind, stage, values, items, micro)

    def backward_weight(self, step: int, micro: int) -> None:
        super().backward_weight(step, micro)
        self.tamper(step, micro)

    def fused(self, step: int, micro: int, share: float) -> None:
        super().fused(step, micro, share)
        self.tamper(step, micro)

    def fused_with(self, partials: dict[str, torch.Tensor]) -> None:
        """One fused backward that is handed these partial gradients."""
        self.forward(0, 0, stack([self.job.data[0]]))
        self.runners[-1].backward(0, [], 1.0, partials)
