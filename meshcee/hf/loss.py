"""The loss as transformers sums it over an accumulated batch, in the words of a Job: a weight for each micro-batch.

The idea: transformers has a model divide its sum of losses by the number of items in the whole batch. Here each micro-batch
divides by its own number, and weighs that number's share of the batch: the same sum. Labels of -100 count nowhere.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from meshcee.errors import UsageError
from meshcee.hf.library import transformers
from meshcee.reach import Remembered
from meshcee.reach.modules import in_full, on_loan
from meshcee.user_code import calling

__all__ = [
    "Counting",
    "base_of",
    "counted",
    "divides",
    "eval_loss",
    "full_loss_of",
    "loss_of",
    "losses_of",
    "weight_of",
]

IGNORED = -100
KEPT_LOSS, KEPT = "kept_loss", "kept"  # metrics of a Job


def base_of(model: Any) -> Any:
    """Of an adapter the model that it changes; else the model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class Counting:
    """Of one model: whether it takes the number of items, and which labels are items."""

    def __init__(self, model: nn.Module) -> None:
        transformers()
        from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

        base = base_of(model)
        kinds = [parameter.kind for parameter in inspect.signature(base.forward).parameters.values()]
        accepts = getattr(base, "accepts_loss_kwargs", None)
        self.accepts = inspect.Parameter.VAR_KEYWORD in kinds if accepts is None else bool(accepts)
        shifts = LOSS_MAPPING.get(getattr(base, "loss_type", None)) is ForCausalLMLoss
        self._shifts = shifts and not getattr(getattr(base, "config", None), "is_encoder_decoder", False)

    def items(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """How many labels of these samples are predicted. A causal model predicts none at a sample's first place."""
        return self._predicted(inputs).sum()

    def items_of_each(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """The same for each sample."""
        predicted = self._predicted(inputs)
        return predicted.sum(tuple(range(1, predicted.dim()))) if predicted.dim() > 1 else predicted.long()

    def _predicted(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        if "shift_labels" in inputs:
            labels = inputs["shift_labels"]
        else:
            labels = inputs["labels"][..., 1:] if self._shifts else inputs["labels"]
        return labels.ne(IGNORED)  # type: ignore[no-any-return]


def counted(model: nn.Module, counting: Counting) -> nn.Module:
    """The same modules and weights; called with labels, it divides its loss by their number. The model stays as it is."""
    kind, found = type(model), copy.copy(model)
    own = vars(found).pop("forward", None)  # of a library that has patched this one object

    def forward(self: nn.Module, *args: Any, **inputs: Any) -> Any:
        if inputs.get("labels") is not None:
            items = counting.items(inputs)
            # Of none: a step's loss of 0, and in an evaluation 0 / 0, as the library has it.
            inputs["num_items_in_batch"] = items.clamp(min=1) if self.training else items
        if own is None:
            return kind.forward(self, *args, **inputs)
        if isinstance(own, MethodType) and own.__self__ is model:
            return own.__func__(self, *args, **inputs)
        return own(*args, **inputs)

    found.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return found


def loss_of(output: Any, target: Any) -> torch.Tensor:
    """What the model itself says: of a mapping `loss`, of a tuple the first."""
    found = output.get("loss") if isinstance(output, Mapping) else output[0]
    if not isinstance(found, torch.Tensor):
        raise UsageError(
            "the model returns no loss: take one with a head for the task, and give every sample `labels` (or name them "
            "in TrainingArguments(label_names=...))"
        )
    return found


def full_loss_of(output: Any, target: Any) -> torch.Tensor:
    """The same in fp32, as accelerate gives all outputs of what autocast has computed."""
    return in_full(loss_of(output, target))


def losses_of(filters: bool) -> dict[str, Callable[[Any, Any], float]]:
    """Metrics of a Job, from which `eval_loss` follows. `filters`: micro-batches count nothing whose loss is no finite number."""

    def keeps(output: Any, target: Any) -> bool:
        return not filters or bool(loss_of(output, target).isfinite())

    return {
        KEPT_LOSS: lambda output, target: float(loss_of(output, target)) if keeps(output, target) else 0.0,
        KEPT: lambda output, target: float(keeps(output, target)),
    }


def eval_loss(metrics: Mapping[str, Any]) -> Any:
    """The mean loss over the samples that count, from what an evaluation has found. None where a report has no number."""
    loss, share = metrics.get(KEPT_LOSS), metrics.get(KEPT)
    return loss / share if share and loss is not None else metrics["loss"]


def weight_of(target: Mapping[str, Any]) -> float:
    """A micro-batch weighs as many items as it has."""
    return float(target["items"].sum())


def divides(model: nn.Module, samples: Iterable[Mapping[str, torch.Tensor]]) -> bool:
    """Whether the model, as it trains, divides its loss by the number of items that it is given; else it passes that number over.

    UsageError where it divides one part of its loss and not another. `samples` are micro-batches of one; one is computed twice.
    The model is left as it was, in train mode.
    """
    counting = Counting(model)
    model.train()
    with on_loan(model), torch.random.fork_rng(devices=[]), torch.no_grad():
        for buffer in model.buffers():
            buffer.data = buffer.clone()  # into which a layer in train mode writes
        before = Remembered(model, loss_of)
        try:
            for inputs in samples:
                if counting.items(inputs) and (found := _divides(model, inputs)) is not None:
                    return found
        finally:
            before.put_back()
    return True


def _divides(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> bool | None:
    """None of a loss of 0, which tells nothing."""
    losses = []
    for n in (1.0, 2.0):
        torch.manual_seed(0)  # the same masks of dropout
        with calling("the model"):
            losses.append(loss_of(model(**inputs, num_items_in_batch=torch.tensor(n)), None))
    by_one, by_two = losses
    if not by_one.any() and not by_two.any():
        return None
    if torch.equal(by_one, by_two * 2):
        return True
    if torch.equal(by_one, by_two):
        return False
    raise UsageError(
        "this model adds to its loss something that it does not divide by the number of tokens, so transformers' sum over "
        "micro-batches has no equal here: write gradient_accumulation_steps=1"
    )
