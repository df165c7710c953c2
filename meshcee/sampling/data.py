"""How a list of samples becomes the named raw inputs of a program.

The idea: x and y are small trees of tuples, lists and dicts. Their leaves become tensors, or are None. A leaf's name is its path
("x", "x.0", "x.attention_mask", "y"). So inputs are told apart on the wire by name and never by position. Rows that are dicts
become a pair here, and `call_model` alone looks at what a model takes of them: so whoever reads samples needs no model.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any

import torch

from meshcee.errors import UsageError
from meshcee.sampling.order import NO_STEP, collated, read

__all__ = ["batch_of", "batched", "call_model", "inputs_of", "leaves", "rebuild", "stack", "varying"]

Collate = Callable[[list[Any]], Any]
LABELS = ("labels", "label")  # columns that are the target of a row: the first that is there


class Row(dict[str, Any]):
    """x of rows that are dicts: all of their columns."""


def batch_of(
    data: Any,
    indices: Sequence[int],
    seed: int,
    step: int,
    first: int = 0,
    *,
    name: str = "data",
    collate: Collate | None = None,
) -> tuple[Any, Any]:
    """Those samples as that step reads them, as one (x, y). `first` is their place in the step. UsageError names them."""
    found = read(data, indices, seed, step, name=name)
    try:
        return batched(found, seed, step, first, name=name, collate=collate)
    except UsageError as error:
        when = "" if step == NO_STEP else f" of step {step + 1}"
        raise UsageError(f"{name}[i]{when} for i in {list(indices)}: {error}") from error


def batched(
    samples: Sequence[Any],
    seed: int,
    step: int = NO_STEP,
    first: int = 0,
    *,
    name: str = "data",
    collate: Collate | None = None,
) -> tuple[Any, Any]:
    """These samples as one (x, y): stacked, or as the job's `collate` has it."""
    if collate is None:
        return stack(samples)
    found = collated(collate, samples, seed, step, first, name=name)
    x, y = _tensors(found[0], "x"), _tensors(found[1], "y")
    for path, tensor in inputs_of((x, y)).items():
        if tensor.shape[:1] != (len(samples),):
            raise UsageError(
                f"Job.collate makes of {len(samples)} sample{'s' * (len(samples) > 1)} {path} of shape {tuple(tensor.shape)}; its "
                "first dimension must have one row for each sample"
            )
    return x, y


def _tensors(tree: Any, path: str) -> Any:
    """The same tree of plain dicts and tuples, with tensors at its leaves."""
    if isinstance(tree, Mapping):
        return {key: _tensors(value, f"{path}.{key}") for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return _like(tree, (_tensors(value, f"{path}.{i}") for i, value in enumerate(tree)))
    try:
        return None if tree is None else torch.as_tensor(tree)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"Job.collate gives {path} as a {type(tree).__name__}, which is no tensor: {error}") from error


def stack(samples: Sequence[Any]) -> tuple[Any, Any]:
    """Samples (x, y), or rows that are dicts -> one (x, y) whose tensors have a new first dimension."""
    if not samples:
        raise UsageError("a micro-batch needs at least one sample")
    if all(isinstance(sample, Mapping) for sample in samples):
        return _columns(samples)
    for sample in samples:
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise UsageError(
                f"data[i] must be a pair (x, y) or a dict of columns, and is a {type(sample).__name__}; Job(collate=FUNCTION) "
                "makes (x, y) of a list of such samples"
            )
    return _stack([s[0] for s in samples], "x"), _stack([s[1] for s in samples], "y")


def _columns(rows: Sequence[Mapping[str, Any]]) -> tuple[Row, Any]:
    """x is all columns, each one tensor. y is the label, or all columns where there is none. They share no memory."""
    first = rows[0]
    if other := {key for row in rows for key in row.keys() ^ first.keys()}:
        raise UsageError(f"rows differ in their columns: not all have {', '.join(sorted(map(str, other))):.200}")
    label = next((name for name in LABELS if name in first), None)

    def column(name: str, path: str) -> torch.Tensor | None:
        return _tensor([row[name] for row in rows], path, ", or take this column out of the rows")

    x = Row({name: column(name, f"x.{name}") for name in first})
    return x, {name: column(name, f"y.{name}") for name in first} if label is None else column(label, "y")


def _stack(items: Sequence[Any], path: str) -> Any:
    first = items[0]
    if isinstance(first, Mapping | tuple | list):
        _check_parts(items, path)
    if isinstance(first, Mapping):
        return {k: _stack([item[k] for item in items], f"{path}.{k}") for k in first}
    if isinstance(first, tuple | list):
        return _like(first, (_stack([item[i] for item in items], f"{path}.{i}") for i in range(len(first))))
    return _tensor(items, path, of_floats=torch.float64)  # as torch's default_collate has it; Hugging Face's does not


def _check_parts(items: Sequence[Any], path: str) -> None:
    """UsageError where samples have other parts here than the first, which is a dict, a tuple or a list."""
    first, advice = items[0], "give all samples the same structure"
    kind: Any = Mapping if isinstance(first, Mapping) else tuple | list
    for item in items:
        if not isinstance(item, kind):
            said = f"a {type(first).__name__} and a {type(item).__name__}"
        elif kind is Mapping and (other := item.keys() ^ first.keys()):
            said = f"not all have {', '.join(sorted(map(str, other))):.200}"
        elif len(item) != len(first):
            said, advice = f"{len(first)} and {len(item)} elements", "pad them, or say collate"
        else:
            continue
        raise UsageError(f"samples cannot be stacked at {path}: {said}; {advice}")


def _like(given: Sequence[Any], parts: Iterable[Any]) -> Any:
    """The parts as a tuple, or as the named tuple that was given."""
    make: Callable[[Iterable[Any]], Any] = getattr(given, "_make", tuple)
    return make(parts)


def _tensor(
    items: Sequence[Any], path: str, advice: str = "", *, of_floats: torch.dtype | None = None
) -> torch.Tensor | None:
    if all(item is None for item in items):
        return None
    try:
        return torch.stack([torch.as_tensor(item, dtype=of_floats if type(item) is float else None) for item in items])
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"samples cannot be stacked at {path}: {_mend(items, error)} in data[i]{advice}") from error


def _mend(items: Sequence[Any], error: Exception) -> str:
    """Why these are no tensors of one shape, and what to do."""
    parts = [part for item in items for part in (item if isinstance(item, list | tuple) else [item])]
    kinds = {type(part) for part in parts}
    if any(issubclass(kind, str | bytes) for kind in kinds):
        return "a text is no tensor; tokenize it"
    if any(base.__module__.split(".")[0] == "PIL" for kind in kinds for base in kind.__mro__):
        return "an image is no tensor; use torchvision.transforms.ToTensor(), or dataset.with_transform(...),"
    if odd := next((kind for kind in kinds if not (issubclass(kind, _STACKED) or hasattr(kind, "__array__"))), None):
        return f"a {odd.__name__} is no tensor; make a tensor of it"
    return f"{error}; pad them to one shape" if re.search(r"equal size|of length", str(error)) else f"{error}; mend it"


_STACKED = (torch.Tensor, Number, list, tuple)  # what a tensor can be made of


def leaves(tree: Any, path: str) -> dict[str, torch.Tensor]:
    """The tensors of a stacked tree by path."""
    if tree is None:
        return {}
    if isinstance(tree, torch.Tensor):
        return {path: tree}
    if isinstance(tree, Mapping):
        return {n: t for k, v in tree.items() for n, t in leaves(v, f"{path}.{k}").items()}
    if isinstance(tree, tuple | list):
        return {n: t for i, v in enumerate(tree) for n, t in leaves(v, f"{path}.{i}").items()}
    raise UsageError(
        f"{path} is a {type(tree).__name__}; data[i] must hold tensors, numbers, None, and tuples or dicts of them"
    )


def inputs_of(batch: tuple[Any, Any]) -> dict[str, torch.Tensor]:
    """A stacked (x, y) as the program's raw inputs."""
    return {**leaves(batch[0], "x"), **leaves(batch[1], "y")}


def varying(rows: Sequence[Mapping[str, torch.Tensor]]) -> frozenset[tuple[str, int]]:
    """Sizes that differ between batches of one sample: (input, dimension)."""
    found = set()
    for name, tensor in rows[0].items():
        if any(row.keys() != rows[0].keys() or row[name].dim() != tensor.dim() for row in rows):
            raise UsageError(f"samples differ in structure at {name}; give all data[i] the same inputs and dimensions")
        found |= {(name, d) for d in range(1, tensor.dim()) if len({row[name].shape[d] for row in rows}) > 1}
    return frozenset(found)


def rebuild(tree: Any, path: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    """A tree like `tree` with other tensors at its leaves."""
    if isinstance(tree, Mapping):
        found = {k: rebuild(v, f"{path}.{k}", tensors) for k, v in tree.items()}
        return Row(found) if isinstance(tree, Row) else found
    if isinstance(tree, tuple | list):
        return _like(tree, (rebuild(v, f"{path}.{i}", tensors) for i, v in enumerate(tree)))
    return None if tree is None else tensors[path]


def call_model(model: Any, x: Any) -> Any:
    """`model(x)`, `model(*x)` or `model(**x)`; of rows without the label, if forward has no parameter for it."""
    if isinstance(x, Mapping):
        _refuse_whole(model, x)
        return model(**(_taken(model, x) if isinstance(x, Row) else x))
    if isinstance(x, tuple | list):
        _refuse_parts(model, x)
        return model(*x)
    return model(x)


def _refuse_whole(model: Any, x: Mapping[str, Any]) -> None:
    """UsageError where forward has one argument, for all of the dict."""
    (first, *others) = inspect.signature(model.forward).parameters.values() or [None]
    if others or first is None or first.kind is not first.POSITIONAL_OR_KEYWORD or first.default is not first.empty:
        return
    if first.name not in x:
        raise UsageError(
            f"what a dict holds goes to the model by name, and forward of {type(model).__name__} has one argument, {first.name!r}: "
            f"give the whole dict in a tuple, data[i] = (({{{next(iter(x), '')!r}: ...}},), y), or have Job(collate=FUNCTION) do so"
        )


def _refuse_parts(model: Any, x: Sequence[Any]) -> None:
    """UsageError where forward has fewer arguments."""
    parameters = inspect.signature(model.forward).parameters.values()
    takes = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if takes < len(x) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise UsageError(
            f"what a tuple or list holds goes to the model one by one, {len(x)} here, and forward of {type(model).__name__} takes "
            f"{takes}: give the whole as one in a tuple, data[i] = ((x,), y), numbers as torch.tensor([...])"
        )


def _taken(model: Any, row: Row) -> dict[str, Any]:
    """What forward takes of these columns. UsageError where one that is no label has no parameter."""
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return row
    unknown = [name for name in row if name not in parameters]
    label = next((name for name in LABELS if name in row), None)
    if unknown and unknown != [label]:
        names = ", ".join(str(name) for name in unknown if name != label)
        raise UsageError(
            f"data[i] is a dict, so its columns go to the model by name, and forward of {type(model).__name__} has no parameter "
            f"{names:.200}: take that out of the rows, or Job(collate=FUNCTION) makes (x, y) of a list of them"
        )
    return {name: value for name, value in row.items() if name in parameters}
