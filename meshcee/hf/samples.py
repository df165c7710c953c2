"""Datasets and collators as a Job reads them, a sample at a time; and what an evaluation returns, as compute_metrics reads it.

The idea: a Job stacks samples of one shape. So a collator is given one sample at a time, and must pad to a length that it knows.
A target holds the sample's place too, so that outputs are put in order whoever computed them, and when.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from meshcee.errors import UsageError
from meshcee.hf.loss import Counting

__all__ = ["Outputs", "Samples"]


class Samples:
    """`data` for a Job: x is what the model is called with, y its place, how many items it has, and its labels."""

    def __init__(
        self,
        data: Any,
        collate: Callable[[list[Any]], Mapping[str, Any]],
        columns: Collection[str] | None,
        label_names: Sequence[str],
        counting: Counting,
        *,
        name: str,
        stacked: bool,
        labels: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__") or isinstance(data, Mapping):
            raise UsageError(
                f"{name} is one dataset that has a length and samples by number: a list of dicts or a datasets.Dataset"
            )
        self._data, self._collate, self._columns, self._name = data, collate, columns, name
        self._label_names, self._counting, self._labels = label_names, counting, labels or {}
        self._stacked, self._shapes = stacked, dict[str, torch.Size]()

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, i: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        row = self._data[i]
        if self._columns is not None and isinstance(row, Mapping):
            row = {key: value for key, value in row.items() if key in self._columns}
        batch = dict(self._collate([row]))
        for key, value in batch.items():
            if not isinstance(value, torch.Tensor) or value.shape[:1] != (1,):
                raise UsageError(f"data_collator makes of {self._name}[{i}] no tensor {key!r} with one row")
        x = {key: value[0] for key, value in batch.items()} | {
            key: value for key, value in self._labels.items() if key not in batch
        }
        if self._stacked:
            self._check_shapes(i, x)
        y: dict[str, Any] = {"place": i, "items": 0}
        if "labels" in x:
            y["items"] = int(self._counting.items(x))
        if labels := {key: x[key] for key in self._label_names if key in x}:
            y["labels"] = labels
        return x, y

    def _check_shapes(self, i: int, x: Mapping[str, torch.Tensor]) -> None:
        for key, value in x.items():
            first = self._shapes.setdefault(key, value.shape)
            if first != value.shape:
                raise UsageError(
                    f"{self._name}[{i}] has {key} of {tuple(value.shape)}, another sample {tuple(first)}: pad all to one length, "
                    "with padding='max_length' and max_length=... in the collator or the tokenizer (pad_to_multiple_of alone "
                    "leaves several), or write per_device_train_batch_size=1"
                )


class Outputs:
    """A metric of a Job that keeps what the model returned for each micro-batch of an evaluation."""

    def __init__(self, ignored: Collection[str], preprocess: Callable[[Any, Any], Any] | None = None) -> None:
        self._ignored, self._preprocess = {*ignored, "loss"}, preprocess
        self._found: dict[int, tuple[Any, Any]] = {}  # by the place of the first sample

    def __call__(self, output: Any, target: Mapping[str, Any]) -> float:
        logits = (
            tuple(value for key, value in output.items() if key not in self._ignored)
            if isinstance(output, Mapping)
            else tuple(output[1:])
        )
        labels = tuple(target.get("labels", {}).values()) or None
        logits, labels = _alone(logits), _alone(labels)
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
