"""A model's output taken apart into tensors, and put together again around others: what a metric and `predict` get.

The idea: tensors alone come back from an evaluation. What else the output holds is kept here as its form: which tuple, which
keys, which constants. A tensor that is in neither tuple, list, mapping nor dataclass, as those of a cache, is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from meshcee.errors import CaptureError

__all__ = ["check_terms", "no_loss", "put_together", "taken_apart"]

MOST_TERMS, MOST_NAME_CHARACTERS = 64, 64  # of one loss
_TENSOR = object()
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))


class _Output(dict[Any, Any]):
    """A mapping whose keys are attributes too: `out.logits` and `out["logits"]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class _LeftOut:
    """In the place of an object of another class."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        kind = vars(self).get("_kind")  # a copy in the making has none
        raise AttributeError(
            f"forward returns a {kind}, and what comes back are tensors in tuples, lists, dicts, named tuples or dataclasses: "
            f"return {name!r} in one of these"
        )


def taken_apart(output: Any, tensors: list[torch.Tensor]) -> Any:
    """The form of an output. Its tensors are put behind `tensors`."""
    if isinstance(output, torch.Tensor):
        tensors.append(output)
        return _TENSOR
    if isinstance(output, tuple | list):
        return _like(output, [taken_apart(part, tensors) for part in output])
    if isinstance(output, Mapping):
        entries = dict(output)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        entries = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    else:
        return output if type(output) in _CONSTANTS else _LeftOut(type(output).__name__)
    found = {key: taken_apart(value, tensors) for key, value in entries.items()}
    return _Output((key, value) for key, value in found.items() if not isinstance(value, _LeftOut))


def put_together(form: Any, tensors: Iterator[torch.Tensor | None]) -> Any:
    """An output of this form with the next of these tensors. None is one that is left out."""
    if form is _TENSOR:
        return next(tensors)
    if isinstance(form, tuple | list):
        return _like(form, [put_together(part, tensors) for part in form])
    if isinstance(form, _Output):
        return _Output((key, put_together(value, tensors)) for key, value in form.items())
    return form


def _like(given: Sequence[Any], parts: list[Any]) -> Any:
    """The parts as a named tuple, a tuple or a list."""
    kind: Any = type(given)
    if hasattr(kind, "_make"):
        return kind._make(parts)
    return parts if isinstance(given, list) else kind(parts) if hasattr(kind, "n_sequence_fields") else tuple(parts)


def no_loss(loss: Any, output: Any, x: Any) -> str:
    """What a loss that is no scalar tensor is, and what to write."""
    has_none = getattr(output, "loss", 0) is None or (isinstance(output, Mapping) and output.get("loss", 0) is None)
    if loss is None and has_none and not (isinstance(x, Mapping) and "labels" in x):
        return (
            "returns None, as the model got no `labels` and computed no loss: rename that column of data[i] to `labels`, or "
            "return a loss of output and target"
        )
    if loss is None:
        return "returns None: end it with `return` and a loss of output and target"
    if isinstance(loss, Mapping | list | tuple):
        names = f" of {', '.join(map(repr, loss))}" if isinstance(loss, Mapping) else ""
        return (
            f"returns a {type(loss).__name__}{names:.200}: return one of its numbers, or their sum; "
            '{"loss": loss, "kl": kl} trains the loss and tells of kl in every step'
        )
    if isinstance(loss, torch.Tensor):
        shape = ", ".join(str(size) if type(size) is int else "samples" for size in loss.shape)
        return f"returns a tensor of shape ({shape}): use .mean() or .sum() for one number"
    return f"returns a {type(loss).__name__}, and no scalar tensor: use .mean() or .sum(), not .item() or float()"


def check_terms(terms: Mapping[Any, Any]) -> tuple[str, ...]:
    """The names of what a step tells of beside its loss. CaptureError for what is no number of a tensor, or too much."""
    if len(terms) > MOST_TERMS:
        raise CaptureError(
            f"loss(output, target) returns {len(terms)} terms beside the loss; the most are {MOST_TERMS}"
        )
    for name, term in terms.items():
        if not (isinstance(name, str) and name.isprintable() and 0 < len(name) <= MOST_NAME_CHARACTERS):
            raise CaptureError(
                f"loss(output, target) returns a term named {name!r:.80}: give it a short name of letters"
            )
        if not isinstance(term, torch.Tensor) or term.dim() != 0 or term.is_complex():
            what = f"a {type(term).__name__}"
            if isinstance(term, torch.Tensor):
                what = "a complex number" if term.dim() == 0 else f"a tensor of shape {tuple(term.shape)}"
            raise CaptureError(
                f"loss(output, target) returns {what} as {name!r}, and a step tells of scalar tensors: use .mean() or .sum(), not "
                ".item() or float(), or leave it out"
            )
    return tuple(terms)
