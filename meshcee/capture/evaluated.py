"""Whether the graph of an evaluation is what the model computes when it is evaluated: in eval mode, under torch.no_grad().

The idea: a model is put into train mode and back between two evaluations, with other weights. What it folds, merges or counts then
is no part of a graph. So the model itself computes a few samples beside its graph, with its weights and with others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from meshcee.capture.graph import Program
from meshcee.errors import CaptureError
from meshcee.reach import Backup, content_of
from meshcee.reach.modules import entries

__all__ = ["Evaluated"]

MOST_BYTES = 1 << 30  # of a model that is looked at: its tensors are copied
OTHER = 1.25  # times the weights
_SEED = 0
NEAR = {"rtol": 1e-3, "atol": 1e-5, "equal_nan": True}  # what is meant is another computation, not another rounding


class Evaluated:
    """A model that goes into eval mode inside of `looked_at`; then its tensors are as they were."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        held = entries(model)
        real = not any(isinstance(tensor, FakeTensor) or tensor.device.type == "meta" for _, tensor in held)
        self._is_looked_at = real and sum(tensor.nbytes for _, tensor in held) <= MOST_BYTES

    @contextlib.contextmanager
    def looked_at(self) -> Iterator[None]:
        contents = [(name, content_of(tensor)) for name, tensor in entries(self._model)] if self._is_looked_at else []
        kept = [(name, Backup(content)) for name, content in contents if content is not None]
        try:
            self._model.eval()
            if written := next((name for name, backup in kept if backup.has_changed), None):
                raise CaptureError(
                    f"model.eval() writes {written!r}, as where adapters are merged: peers switch no modes, so a run would begin "
                    "with that; leave eval_data out, or have eval() leave weights as they are"
                )
            yield
        finally:
            for _, backup in kept:
                backup.put_back()

    def compare(
        self,
        forward: Callable[[], tuple[Any, ...]],
        program: Program,
        inputs: Mapping[str, torch.Tensor],
        names: Mapping[str, str],
    ) -> None:
        """Inside: CaptureError where `forward`, which gives the loss and the outputs, gives other numbers than the program."""
        if not self._is_looked_at:
            return
        stage = program.slice(0, program.num_blocks)
        graph, raw = stage.build(), [inputs[value.name] for value in stage.raw_inputs]
        for times in (1.0, OTHER):
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                for parameter in self._model.parameters():
                    if parameter.is_floating_point():
                        parameter.mul_(times)
                self._model.train()
                self._model.eval()
                torch.manual_seed(_SEED)
                try:
                    expected = forward()
                except Exception:  # the user's own, of these numbers: there is nothing to hold the graph against
                    return
                torch.manual_seed(_SEED)
                state = {names[path]: tensor.detach().clone() for path, tensor in entries(self._model)}
                found = graph(*raw, *(state[name] for name in (*stage.parameters, *stage.buffers)))
            if not all(map(_is_near, expected, found)):
                raise CaptureError(
                    "the model in eval mode under torch.no_grad() gives other numbers than its graph: it asks for gradients, keeps "
                    "something in Python, or folds weights in train(); write it alike for both, or leave eval_data out"
                )


def _is_near(expected: Any, found: Any) -> bool:
    if not isinstance(expected, torch.Tensor) or not expected.is_floating_point():
        return True
    return expected.shape == found.shape and torch.allclose(expected.double(), found.double(), **NEAR)  # type: ignore[arg-type]
