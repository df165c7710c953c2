"""What eager code says of sizes in words that hold for one size only, said so that a graph holds for all.

The idea: while a model is traced, sizes that vary are symbols. Python's `len` would make a number of them. A slice up to a constant
would be one graph for what is longer and another for what is shorter. Said by x.shape and by torch.sym_min both are one graph. And
`generator=None`, as torch takes it, has torch look for sizes that are numbers.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshcee.capture.export.refusals import Watched, replaced

__all__ = ["sizes_that_vary"]


@contextlib.contextmanager
def sizes_that_vary() -> Iterator[None]:
    """Around the forward pass that is traced."""
    with replaced(builtins, "len", _length), _Saying():
        yield


_INDEXING = torch.Tensor.__getitem__, torch.Tensor.__setitem__
_LEN = len
_LEAST: Any = torch.sym_min
_MOST: Any = torch.sym_max


def _length(of: Any) -> Any:
    if isinstance(of, torch.Tensor) and of.dim() and isinstance(of.shape[0], torch.SymInt):
        return of.shape[0]
    return _LEN(of)


class _Saying(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and kwargs.get("generator", self) is None:
            kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        if func in _INDEXING:
            args = args[0], _clamped(args[0], args[1]), *args[2:]
        return func(*args, **(kwargs or {}))


def _clamped(tensor: torch.Tensor, index: Any) -> Any:
    """The index with ends of slices within the tensor, where its size varies and is not the number of samples."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, _PLAIN) and not isinstance(part, bool) for part in parts):
        return index  # tensors and truths count dimensions otherwise
    taken = sum(isinstance(part, _TAKING) for part in parts)
    found, dim = [], 0
    for part in parts:
        if part is Ellipsis:
            dim += tensor.dim() - taken
        elif part is not None:
            if isinstance(part, slice) and dim < tensor.dim() and _varies(size := tensor.shape[dim]):
                part = slice(_start(part.start, size), _stop(part.stop, size), part.step)
            dim += 1
        found.append(part)
    return tuple(found) if isinstance(index, tuple) else found[0]


_TAKING = int | torch.SymInt | slice  # a dimension
_PLAIN = _TAKING | type(None) | type(Ellipsis)


def _varies(size: Any) -> bool:
    """Of samples a part is refused: a plain loop would compute with those of its micro-batch."""
    if not isinstance(size, torch.SymInt):
        return False
    samples = Watched.now.samples if Watched.now is not None else frozenset()
    return not {str(symbol) for symbol in size.node.expr.free_symbols} <= samples


def _start(start: Any, size: Any) -> Any:
    return _MOST(size + start, 0) if isinstance(start, int) and start < 0 else start


def _stop(stop: Any, size: Any) -> Any:
    return _LEAST(stop, size) if isinstance(stop, int) and stop > 0 else stop
