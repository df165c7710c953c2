"""The model and the loss as the one module that torch.export traces."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from meshcee.capture.asserts import Asserts
from meshcee.capture.export import Owned, causal_masks, faithful, keeping, one_by_one, sizes_that_vary
from meshcee.capture.outputs import check_terms, no_loss, taken_apart
from meshcee.errors import CaptureError
from meshcee.job import Job, parts_of
from meshcee.reach.modules import entries, original_of
from meshcee.sampling import data as data_rules

__all__ = ["WithLoss"]


class WithLoss(nn.Module):
    """The model and the loss as one module over flat inputs; bf16 models get their floating inputs in bf16. `predicts`: the outputs
    are wanted, and no loss.
    """

    def __init__(
        self, model: nn.Module, job: Job, example: tuple[Any, Any], evaluate: bool, predicts: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self._job = job
        self._example = example
        self.evaluates, self._predicts = evaluate, predicts
        self._places = {id(own := original_of(tensor)): (own, name) for name, tensor in entries(model)}
        self._real = {} if job.weights else dict(model.named_buffers())
        self.rebound: tuple[str, ...] = ()  # buffers that forward assigns
        # An object: torch.export puts attributes back as they were.
        self.seen = types.SimpleNamespace(form=None, terms=())

    def forward(self, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, y = self._example
        tensors = dict(zip(data_rules.inputs_of(self._example), flat, strict=True))
        if self._job.precision == "bf16":
            tensors = {
                n: t.to(torch.bfloat16) if n.split(".")[0] == "x" and t.is_floating_point() else t
                for n, t in tensors.items()
            }
        told = faithful(self.model, self._replaced(), evaluate=self.evaluates)
        masks, asserts = causal_masks(self.model, self._real), Asserts()
        asked, lists = asserts.answered(), one_by_one()
        with (
            keeping(self, self.rebound),
            sizes_that_vary(),
            asked,
            lists,
            Owned(),
            told,  # the first to hear of a call, as it looks who calls
            masks,
            _as_in_eager(),
            self._job.autocast(),
        ):
            output = data_rules.call_model(self.model, data_rules.rebuild(x, "x", tensors))
            if self._predicts:  # in the loss's place is a number that nobody reads
                outputs: list[torch.Tensor] = []
                self.seen.form = taken_apart(output, outputs)
                if outputs:
                    return (asserts.upon(outputs[0].sum().float()), *outputs)
            loss, terms = parts_of(self._job.loss(output, data_rules.rebuild(y, "y", tensors)))
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            raise CaptureError(f"loss(output, target) {no_loss(loss, output, x)}")
        if not self.evaluates:
            self.seen.terms = check_terms(terms)
            return (asserts.upon(loss), *terms.values())
        found: list[torch.Tensor] = []
        self.seen.form = taken_apart(output, found)
        return (asserts.upon(loss), *found)

    def _replaced(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """The model's own tensors by id, which lists and closures hold, with what stands in their places while it is traced.

        Where forward assigns, such a list goes on to hold the first tensor.
        """
        now = {name: tensor for name, tensor in entries(self.model) if f"model.{name}" not in self.rebound}
        for tensor, name in self._places.values():
            for key, value in vars(tensor).items() if name in now else ():  # marks of the user's, as p.decays
                vars(now[name]).setdefault(key, value)
        held = ((key, tensor, name) for key, (tensor, name) in self._places.items() if name in now)
        return {key: (tensor, now[name]) for key, tensor, name in held if now[name] is not tensor}


@contextlib.contextmanager
def _as_in_eager() -> Iterator[None]:
    """Models must not see that they are exported: some then take another path (an explicit mask for a causal flag).

    Nor that they are evaluated: torch's encoder has fused kernels for that, where no gradient is wanted.
    """
    flags = {
        f: getattr(torch.compiler, f)
        for f in ("_is_exporting_flag", "_is_compiling_flag")
        if hasattr(torch.compiler, f)
    }
    for flag in flags:
        setattr(torch.compiler, flag, False)
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for flag, value in flags.items():
            setattr(torch.compiler, flag, value)
