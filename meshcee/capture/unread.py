"""Whether the user's other functions read the weights that are trained: data, collate, weight, sampler, schedule, metrics.

The idea: a plain loop calls them while the model trains, and they see its newest weights. Peers train it elsewhere, and here it
stays as it was. So before the first step they are called under a mode that sees each operator, and whose memory it reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import structlog
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshcee.capture.export import Unchanged, place_of
from meshcee.capture.graph import given_to_write
from meshcee.errors import UsageError
from meshcee.events import Event
from meshcee.job import At, Job
from meshcee.reach.modules import entries
from meshcee.sampling import few_of, indices_of, read
from meshcee.user_code import calling, under_way

__all__ = ["ReadsTold", "WeightWatch", "ask_others", "refuse_told_beside", "unread"]

log = structlog.get_logger()

_PLAIN = (torch.Tensor, nn.Parameter)
_OF_ITS_KIND = re.compile(r"new_|\w+_like\b")  # what takes a type and a shape, and no number


@contextmanager
def unread(model: Any, written: Collection[str] = ()) -> Iterator[None]:
    """UsageError once what is called here reads a weight of this model that is trained, even where the user's code catches it.

    written  names of what forward writes, which nobody may read either
    """
    mode = WeightWatch(model, written) if isinstance(model, nn.Module) else None
    if mode is None:
        yield
        return
    with mode:
        yield
    if mode.error is not None:
        raise mode.error


def ask_others(job: Job, target: Any) -> None:
    """Calls those of the job's functions once that no look at its samples calls. `target`: of a micro-batch."""
    with unread(job.model):
        if job.weight is not None:
            with calling("Job.weight"):
                job.weight(target)
        if job.sampler is not None:  # in the first two data epochs
            indices_of(job, 0)
            indices_of(job, min(job.steps - 1, len(job.data) // job.batch_size + 1))


def refuse_told_beside(job: Job, sample: Any, reads: int, written: Collection[str]) -> None:
    """UsageError where `collate`, or data behind so many reads, tells the model or the loss something beside x and y.

    As a mixup whose factor lies in an attribute: the graph has the number that was there when it was made. Nor may they read
    what forward has `written`, by name.
    """
    before = Unchanged(job)
    never = set(before.changed())  # the same: nobody sees how far an iterator has come
    with unread(job.model, written):
        if not (job.streams or isinstance(job.data, At)):
            read(job.data, [reads % len(job.data)], job.seed)
        few_of(job, sample, 1, step=0, first=1)
    if places := [place for place in before.changed() if place not in never]:
        raise UsageError(
            f"reading data changes {places[0]}, which the model or the loss computes with, and peers have only x and y: let "
            "collate, or data[i], give it with them, as (x, (y, it)), and let the loss take it from there"
        )


class WeightWatch(TorchDispatchMode):
    def __init__(self, model: nn.Module, written: Collection[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        own = {n: t for n, t in entries(model) if (t.requires_grad or n in written) and _is_looked_at(t)}
        self._places = [(name, place_of(tensor)) for name, tensor in own.items()]
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in own.values()}
        self.error: UsageError | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _OF_ITS_KIND.match(func.__name__):
            for name in self.named((args, kwargs)):
                self.refuse(name)
        return func(*args, **(kwargs or {}))

    def named(self, given: Any) -> Iterator[str]:
        """The weights that lie, or of which some lies, in the memory of these tensors."""
        for it in tree_leaves(given):
            if _is_looked_at(it) and it.untyped_storage().data_ptr() in self._storages:
                first, end = place_of(it)
                yield from [name for name, (begin, last) in self._places if first < last and begin < end][:1]

    def refuse(self, name: str) -> None:
        """A weight of this name is read."""
        self.error = UsageError(
            f"{under_way() or 'the schedule'} reads {name!r}, which is trained or written: peers train the model, and here it "
            "stays as it was before the first step; compute this in forward or in the loss, or from a copy.deepcopy that is "
            "made before"
        )
        raise self.error


class ReadsTold(WeightWatch):  # type: ignore[no-untyped-call]
    """Around callbacks: who reads a weight, or writes one in place, is told of once. What the user has loaded, the user may read.

    A view is a read where no write follows, as `weight.data.clamp_(-1, 1)` makes one first.
    """

    def __init__(self, model: nn.Module, written: Callable[[list[str], str], None]) -> None:
        super().__init__(model)
        self._written, self._seen = written, list[tuple[str, str]]()  # weights of which there are views, and by whom
        self._is_done = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_done:
            return func(*args, **(kwargs or {}))
        if writes := [*self.named(given_to_write(func, args, kwargs or {}))]:
            self._is_done = True
            if func is not torch.ops.aten.copy_.default:
                self._written(writes, under_way())
        elif func.is_view:
            self._seen = self._seen or [(name, under_way()) for name in self.named(args)]
        else:
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for name, reader in self._seen:
            self._tell(name, reader)

    def refuse(self, name: str) -> None:
        self._tell(name, under_way())

    def _tell(self, name: str, reader: str) -> None:
        if not self._is_done:
            log.warning(Event.WEIGHTS_READ, parameter=name, reader=reader)
        self._is_done = True


def _is_looked_at(it: Any) -> bool:
    return type(it) in _PLAIN and it.layout == torch.strided and it.device.type == "cpu" and it.numel() > 0
