"""What eager code says of sizes in words that hold for one size only, said so that a graph holds for all.

The idea: while a model is traced, sizes that vary are symbols. Python's `len` would make a number of them. A slice up to a constant
would be one graph for what is longer and another for what is shorter. Said by x.shape and by torch.sym_min both are one graph. And
`generator=None`, as torch takes it, has torch look for sizes that are numbers.

Where opt_einsum is installed, torch asks it by sizes in which order einsum multiplies three tensors or more. A graph has one order
for micro-batches of every size. What an order costs grows with the size, so between two sizes with the same best order there is no
other. Where that order changes, the job is refused.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshcee.capture.export.refusals import Watched, instead
from meshcee.capture.export.settings import replaced
from meshcee.errors import CaptureError
from meshcee.user_code import Place

__all__ = ["Branch", "branches_of", "one_order", "sizes_that_vary"]


@contextlib.contextmanager
def sizes_that_vary() -> Iterator[None]:
    """Around the forward pass that is traced."""
    with replaced(builtins, "len", _length), _Saying():
        yield


_CHUNKS = torch.chunk, torch.Tensor.chunk
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
        if func in _CHUNKS and (args[1:2] == (1,) or (kwargs or {}).get("chunks") == 1):
            return (args[0].view_as(args[0]),)
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


@dataclass(frozen=True)
class Branch:
    """A condition of sizes that code has asked for while it was traced. Where it does not hold, the graph is not what forward
    does."""

    condition: Any  # of torch's symbols
    places: Mapping[Any, tuple[str, int]]  # symbol -> the raw input that has this size, and where
    pieces: bool  # whether it decides how many pieces a tensor is split into
    at: Place

    def allows(self, sizes: Mapping[Any, int]) -> bool:
        return str(self.condition.subs(sizes)) != "False"

    def misfit(self, inputs: Mapping[str, torch.Tensor]) -> str:
        """What to say of these raw inputs; "" where the graph holds for them."""
        shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
        own = {s: shapes[name][dim] for s, (name, dim) in self.places.items() if dim < len(shapes.get(name, ()))}
        if self.allows(own):
            return ""
        said = " and ".join(dict.fromkeys(f"{name} is {shapes[name]}" for name, _ in self.places.values()))
        one = "or pad all samples to one length"
        if self.pieces:
            advice = instead(self.at, "pad to a multiple of a length k and write h.unflatten(1, (-1, k))")
            return f"{said}, of which the model makes another number of pieces{self.at}: {advice}, {one}"
        advice = instead(self.at, "write it alike for all lengths")
        return f"{said}, for which the model takes another way{self.at}: {advice}, {one}"


def branches_of(
    shapes: Any, asked: Mapping[str, Place], places: Mapping[Any, tuple[str, int]], pads: Collection[Any]
) -> tuple[Branch, ...]:
    """Of the conditions that torch has noted, those that Python code asked for, of other sizes than the number of samples.

    Those that a range of a size says are in its range, and not here. Nor is `if pad > 0:` around a padding by so many: by
    none it is the same. Where nothing was padded, what stands there is not in the graph.

    places  symbol -> the raw input that has this size, and where: samples are its first
    pads    by how many something is padded
    """
    found: dict[Any, Branch] = {}
    for guard in shapes.guards:
        condition = guard.expr.subs(shapes.replacements)
        symbols = condition.free_symbols
        lengths = [s for s in symbols if s in places and places[s][1] > 0]
        if str(guard.expr) in asked and lengths and symbols <= places.keys() and not _is_idle(condition, pads):
            pieces = guard.sloc.framework_loc.name == "split"
            own = {s: places[s] for s in sorted(symbols, key=str)}
            found.setdefault(condition, Branch(condition, own, pieces, asked[str(guard.expr)]))
    return tuple(found.values())


def _is_idle(condition: Any, pads: Collection[Any]) -> bool:
    if 0 in condition.args and any(pad in condition.args and condition.subs(pad, 0) == False for pad in pads):  # noqa: E712
        return True
    compares = condition.is_Relational and not (condition.is_Equality or condition.rel_op == "!=")
    sides = (condition.lhs, condition.rhs) if compares else ()
    return {(side.is_Symbol, side.is_number) for side in sides} == {(True, False), (False, True)}


LONGEST = 1024  # of dimensions that vary beside the first


@contextlib.contextmanager
def one_order(most: int) -> Iterator[None]:
    """While a model is exported, for micro-batches of up to `most` samples. Raises CaptureError where the order would change."""
    library = torch.backends.opt_einsum.get_opt_einsum()
    if library is None:
        yield
        return
    asked = SimpleNamespace(contract_path=_Asked(library, most).contract_path)
    with replaced(torch.backends.opt_einsum, "get_opt_einsum", lambda: asked):
        yield


@dataclass(frozen=True)
class _Asked:
    library: Any
    most: int

    def contract_path(self, equation: str, *operands: torch.Tensor, optimize: str) -> tuple[Any, ...]:
        """As opt_einsum's, whose first item torch takes."""
        shapes = [tuple(operand.shape) for operand in operands]
        found = [
            self.library.contract_path(equation, *sizes, shapes=True, optimize=optimize)[0]
            for sizes in self._sizes(shapes)
        ]
        if any(path != found[0] for path in found):
            raise CaptureError(
                f"einsum({equation!r}) multiplies in another order for micro-batches of 1 and of {self.most} samples, as "
                "opt_einsum is installed here; write torch.backends.opt_einsum.enabled = False at the top of the job's file"
            )
        return (found[0],)

    def _sizes(self, shapes: Sequence[tuple[Any, ...]]) -> Iterator[list[tuple[int, ...]]]:
        """The shapes, with every free dimension at both of its ends."""
        expressions = [[getattr(size, "node", None) and size.node.expr for size in shape] for shape in shapes]
        symbols = sorted({s for shape in expressions for e in shape if e is not None for s in e.free_symbols}, key=str)
        ends = (1, self.most) if len(symbols) < 2 else (1, self.most, LONGEST)
        for values in itertools.product(ends, repeat=len(symbols)):
            chosen = dict(zip(symbols, values))
            yield [
                tuple(size if e is None else int(e.subs(chosen)) for size, e in zip(shape, exprs))
                for shape, exprs in zip(shapes, expressions)
            ]
