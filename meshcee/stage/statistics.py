"""The running statistics of a stage that computes some of a step's micro-batches, and not the first: noted, and folded later.

The idea: in training, a batch norm writes its running statistics and does not read them. So F goes on without those of earlier
micro-batches. It notes the statistics of each batch, and `folded` applies the notes in their order to what earlier members had.
Each operation rounds as the operator's own kernel does on a CPU (found by trial, and tried again before use). Where no such
rounding is known, the job keeps to one pipeline. Where that shows only while it runs, as with gaps between an input's rows, the
input is kept, and the operator itself is called again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from meshcee.capture.graph import Node, Ref, StageSpec, Value, is_random
from meshcee.files.layout import copied

__all__ = ["BatchStatistics", "why_not_folded"]

NORM = "aten.batch_norm.default"
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
PROBED = ((7, 3), (4, 5, 6), (2, 3, 4, 5), (3, 8, 7, 7), (2, 3, 2, 3, 4))  # shapes
MOMENTA = (0.1, 0.3, 0.01)


class _Noted(NamedTuple):
    """The mean and the unbiased variance of one batch. `wide`: its variance is mixed in double precision."""

    mean: torch.Tensor
    variance: torch.Tensor
    momentum: float
    wide: bool


Note = _Noted | list[Any]  # the arguments of a call that is made again


def why_not_folded(spec: StageSpec) -> str:
    """The first buffer that F writes in a way that cannot be folded, or only with all inputs kept; "" where there is none."""
    writes, other = _writes(spec)
    value_of = {n: given.value for n, given in spec.inputs} | {n: node.value for n, node in spec.nodes}
    norms = [(node, names[0]) for _, node, names in writes if len(names) == 2]
    return other or next((name for node, name in norms if not _needs_no_input(node, value_of)), "")


def _needs_no_input(node: Node, value_of: Mapping[int, Value]) -> bool:
    """Whether this norm's statistics can be folded without what they are of; gaps between rows show only when it runs."""
    if node.operator.name != NORM:
        return False
    x, mean = (value_of[arg.index] for arg in (node.args[0], node.args[3]) if isinstance(arg, Ref))
    assert x.dtype is not None
    assert mean.dtype is not None
    ascending = tuple(range(len(x.shape)))
    last = (0, *ascending[2:], 1) if len(x.shape) in CHANNELS_LAST else ascending
    return x.order in (ascending, last) and _folds(x.dtype, mean.dtype)


def _writes(spec: StageSpec) -> tuple[list[tuple[int, Node, tuple[str, ...]]], str]:
    """The calls that write buffers, with those; and the first buffer that is written, or read, in another way."""
    name_of = {n: e.name for n, e in spec.inputs if e.kind == "buffer" and e.name in spec.mutated}
    found = []
    for number, node in spec.nodes:
        if not (own := [r for r in node.refs if r in name_of]):
            continue
        if _counts(node):
            name_of[number] = name_of[own[0]]  # the same memory
        elif not _is_norm(node, own):
            return [], name_of[own[0]]
        found.append((number, node, tuple(name_of[r] for r in own)))
    left = (name_of[n] for n in (*spec.sent_numbers, *spec.output_numbers) if n in name_of)
    return found, next(left, "")


def _is_norm(node: Node, own: Sequence[int]) -> bool:
    """Whether it has these for its statistics alone, and surely writes them."""
    names = node.operator.argument_names
    if "running_var" not in names or not isinstance(node.argument("momentum"), float):
        return False
    told = [a.index for name in ("running_mean", "running_var") if isinstance(a := node.argument(name), Ref)]
    return node.argument(names[names.index("running_var") + 1]) is True and list(own) == told


def _counts(node: Node) -> bool:
    """Whether it changes a buffer by constants alone, as a batch norm counts its batches."""
    return node.writes == (0,) and len(node.refs) == 1 and isinstance(node.args[0], Ref) and not is_random(node)


class BatchStatistics:
    """Of one stage. `calls` replaces operators, by value number, by functions of the same arguments. Until `keeps` is true
    these do what the operators do."""

    def __init__(self, spec: StageSpec) -> None:
        self.keeps = False
        self.calls: dict[int, Callable[..., Any]] = {}
        self.written: dict[str, torch.Tensor] = {}  # the buffers that F writes, as the step has them so far
        self._now: dict[int, Note] = {}
        self._notes: list[dict[int, Note]] = []  # of each micro-batch
        self._writes, other = _writes(spec)
        if not other:
            norms = [(number, node) for number, node, names in self._writes if len(names) == 2]
            self.calls = {number: functools.partial(self._norm, number, node) for number, node in norms}

    def begin(self) -> None:
        """Before an F."""
        self._now = {}

    def note(self) -> None:
        """After the F of a micro-batch, the first time that it is computed."""
        if self.keeps:
            self._notes.append(self._now)

    def forget(self) -> None:
        """The step is over."""
        self._now, self._notes = {}, []

    def folded(self, before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Some of the stage's written buffers after our micro-batches, from what they were before these."""
        found = {name: tensor.clone() for name, tensor in before.items()}
        for noted in self._notes:
            for number, node, names in self._writes:
                if names[0] not in found:
                    continue
                note = noted.get(number)
                if isinstance(note, _Noted):
                    mean, variance = names
                    found[mean] = _mixed(found[mean], note.mean, note.momentum, wide=False)
                    found[variance] = _mixed(found[variance], note.variance, note.momentum, wide=note.wide)
                elif note is not None:
                    with torch.no_grad():
                        node.call(*_placed(node, note, found[names[0]], found[names[1]]))
                else:
                    node.call(found[names[0]], *node.args[1:], **node.kwargs)
        return found

    def _norm(self, number: int, node: Node, *args: Any, **kwargs: Any) -> Any:
        if not self.keeps:
            return node.call(*args, **kwargs)
        given = {**dict(zip(node.operator.argument_names, args)), **kwargs}
        values: list[Any] = [given.get(name) for name in node.operator.argument_names]
        x, momentum = values[0], given["momentum"]
        mean, variance = torch.zeros_like(given["running_mean"]), torch.zeros_like(given["running_var"])
        if node.operator.name == NORM and _is_dense(x) and _folds(x.dtype, mean.dtype):
            self._now[number] = _Noted(mean, variance, momentum, x.dtype == mean.dtype)
            values[node.operator.argument_names.index("momentum")] = 1.0
        else:
            kept = [v.detach() if isinstance(v, torch.Tensor) else v for v in values]
            self._now[number] = [copied(kept[0]), *kept[1:]]  # what reads it may write over it
        return node.call(*_placed(node, values, mean, variance))


def _placed(node: Node, values: Sequence[Any], mean: torch.Tensor, variance: torch.Tensor) -> list[Any]:
    own = {"running_mean": mean, "running_var": variance}
    return [own.get(name, value) for name, value in zip(node.operator.argument_names, values)]


def _is_dense(x: torch.Tensor) -> bool:
    """The kernels of a CPU that reduce such inputs round alike."""
    last = CHANNELS_LAST.get(x.dim())
    return x.device.type == "cpu" and (x.is_contiguous() or (last is not None and x.is_contiguous(memory_format=last)))


def _mixed(running: torch.Tensor, own: torch.Tensor, momentum: float, *, wide: bool) -> torch.Tensor:
    share = torch.tensor(momentum, dtype=running.dtype)
    rest = (1 - share) * running
    if wide:
        return (share.double() * own.double() + rest.double()).to(running.dtype)
    return share * own + rest


@functools.lru_cache(maxsize=64)
def _folds(of_input: torch.dtype, of_statistics: torch.dtype) -> bool:
    """Whether `_mixed` rounds as this torch does on this machine."""
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for shape in PROBED:
            x = (3 * torch.randn(shape, generator=drawn) + 1).to(of_input)
            last = CHANNELS_LAST.get(x.dim())
            mean, variance = (torch.rand(shape[1], generator=drawn).to(of_statistics) for _ in range(2))
            for laid in (x, *([x.contiguous(memory_format=last)] if last is not None else [])):
                for momentum in MOMENTA:
                    then, own = (mean.clone(), variance.clone()), (torch.zeros_like(mean), torch.zeros_like(mean))
                    for (of_mean, of_variance), share in ((then, momentum), (own, 1.0)):
                        torch.ops.aten.batch_norm(laid, None, None, of_mean, of_variance, True, share, 1e-5, False)
                    of_variance = _mixed(variance, own[1], momentum, wide=of_input == of_statistics)
                    if not torch.equal(_mixed(mean, own[0], momentum, wide=False), then[0]):
                        return False
                    if not torch.equal(of_variance, then[1]):
                        return False
    return True
