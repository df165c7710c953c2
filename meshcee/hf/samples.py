"""Datasets and collators as a Job reads them; and what an evaluation returns, as compute_metrics reads it.

The idea: a collator is given the samples of one micro-batch, as in the library, and may pad to the longest of these. A target
holds each sample's place too, so that outputs are put in order whoever computed them, and when.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from meshcee.errors import UsageError
from meshcee.hf.loss import Counting
from meshcee.reach.modules import in_full
from meshcee.sampling.data import varying
from meshcee.user_code import calling

__all__ = ["LOOKED_AT", "Batches", "Outputs", "Samples", "lengths_of"]


LOOKED_AT = 16  # samples, as many as a capture looks at


class Samples:
    """`data` for a Job: each row with its place, and without what the model does not take."""

    def __init__(self, data: Any, columns: Collection[str] | None, *, name: str) -> None:
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__") or isinstance(data, Mapping):
            raise UsageError(
                f"{name} is one dataset that has a length and samples by number: a list of dicts or a datasets.Dataset, and of a "
                "DataLoader its .dataset"
            )
        self._data, self._columns, self.name = data, columns, name
        self._multiple = 1

    def drop_last(self, size: int) -> None:
        """Have as many as fill micro-batches of this size. UsageError where these are none."""
        if size > len(self._data) > 0:
            raise UsageError(
                f"{self.name} has {len(self._data)} samples, and dataloader_drop_last=True leaves out what fills no micro-batch of "
                f"{size}: give more samples, or leave dataloader_drop_last out"
            )
        self._multiple = size

    def __len__(self) -> int:
        return len(self._data) // self._multiple * self._multiple

    def __getitem__(self, i: int) -> tuple[int, Any]:
        row = self._data[i]
        if self._columns is not None and isinstance(row, Mapping):
            row = {key: value for key, value in row.items() if key in self._columns}
        return i, row


class Batches:
    """`collate` for a Job: x is what the model is called with, y the samples' places, how many items each has, and labels.

    `like` is a sample of another dataset, for samples without labels: the graph has a loss, and nothing is made of it.
    `lengths` are what every micro-batch must have, as the graph has them for good: (key, dimension) -> size.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Mapping[str, Any]],
        label_names: Sequence[str],
        counting: Counting,
        like: Mapping[str, torch.Tensor] | None = None,
        lengths: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        self._collate, self._label_names, self._counting = collate, label_names, counting
        self._like, self._lengths = like or {}, lengths or {}

    def __call__(self, samples: Sequence[tuple[int, Any]]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        places, rows = [place for place, _ in samples], [row for _, row in samples]

        def asked() -> str:
            bare = ", of which the model takes no column (tokenize them first)" if rows[0] == {} else ""
            is_usual = getattr(self._collate, "__name__", "") == "default_data_collator"
            pads = ", which pads nothing (DataCollatorForSeq2Seq(tokenizer) does)" if is_usual else ""
            return f"data_collator{pads}, given samples {places}{bare},"

        with calling(asked):
            x = {key: value for key, value in self._collate(rows).items() if value is not None}
        for key, value in x.items():
            if not isinstance(value, torch.Tensor) or value.shape[:1] != (len(rows),):
                raise UsageError(
                    f"data_collator makes of {len(rows)} samples no tensor {key!r} with a row for each: collate with padding, and "
                    "return tensors alone"
                )
        for (key, dimension), size in self._lengths.items():
            if key in x and x[key].shape[dimension] != size:
                raise UsageError(
                    f"samples {places} have {key} of {tuple(x[key].shape)}, and the {LOOKED_AT} looked at before the start have "
                    f"{size} in dimension {dimension}: pad each to one length, with padding='max_length' and max_length=..."
                )
        x |= {key: self._blind(key, x) for key in self._label_names if key in self._like and key not in x}
        x = {key: value.clone() for key, value in x.items()}  # inputs of a graph share no memory
        y: dict[str, Any] = {"place": torch.tensor(places), "items": torch.zeros(len(rows), dtype=torch.int64)}
        if "labels" in x:
            y["items"] = self._counting.items_of_each(x)
        if labels := {key: x[key].clone() for key in self._label_names if key in x}:
            y["labels"] = labels
        return x, y

    def _blind(self, key: str, x: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Labels for these samples: those of `like`; or zeros as many as the tokens, where it has one for each token."""
        known = self._like[key]
        for name, tokens in x.items():
            if known.dim() > 1 and name in self._like and self._like[name].shape == known.shape:
                return torch.zeros_like(tokens, dtype=known.dtype)
        return known.expand(len(next(iter(x.values()))), *known.shape[1:])


def lengths_of(rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[tuple[str, int], int]:
    """Sizes that all of these micro-batches of one sample have: (key, dimension) -> size."""
    differ = varying(rows)
    places = [(key, d) for key, value in rows[0].items() for d in range(1, value.dim())]
    return {(key, d): rows[0][key].shape[d] for key, d in places if (key, d) not in differ}


class Outputs:
    """A metric of a Job that keeps what the model returned for each micro-batch of an evaluation."""

    def __init__(
        self, ignored: Collection[str], preprocess: Callable[[Any, Any], Any] | None = None, *, widens: bool = False
    ) -> None:
        """`widens`: autocast has computed, and everybody else gets fp32."""
        self._ignored, self._preprocess = {*ignored, "loss"}, preprocess
        self._widens = widens
        self._found: dict[int, tuple[Any, Any]] = {}  # by the place of the first sample

    def __call__(self, output: Any, target: Mapping[str, Any]) -> float:
        given = (
            [value for key, value in output.items() if key not in self._ignored]
            if isinstance(output, Mapping)
            else output[1:]
        )
        logits = tuple(value for value in given if isinstance(value, torch.Tensor | tuple | list | Mapping))
        labels = tuple(target.get("labels", {}).values()) or None
        logits, labels = (
            _alone(tree_map_only(torch.Tensor, in_full, logits) if self._widens else logits),
            _alone(labels),
        )
        if self._preprocess is not None:
            logits = self._preprocess(logits, labels)
        self._found[int(target["place"][0])] = logits, labels
        return 0.0

    def collect(self) -> tuple[Any, Any]:
        """Predictions and labels of all samples in their order, as arrays; nothing is left here."""
        from transformers.trainer_pt_utils import EvalLoopContainer

        columns = EvalLoopContainer(True, padding_index=-100), EvalLoopContainer(True, padding_index=-100)
        found, self._found = self._found, {}
        for _, pair in sorted(found.items()):
            for column, tensors in zip(columns, pair):
                if tensors is not None:
                    column.add(tensors)
        predictions, labels = (column.get_arrays() for column in columns)
        return predictions, labels


def _alone(values: Any) -> Any:
    return values[0] if values is not None and len(values) == 1 else values
