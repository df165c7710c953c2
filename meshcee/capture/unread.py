"""Whether the user's other functions read the weights that are trained: data, collate, weight, sampler, schedule, metrics.

The idea: a plain loop calls them while the model trains, and they see its newest weights. Peers train it elsewhere, and here it
stays as it was. So before the first step they are called under a mode that sees each operator, and whose memory it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshcee.capture.export import Unchanged
from meshcee.errors import UsageError
from meshcee.job import At, Job
from meshcee.sampling import HyperSchedule, batched, indices_of, read
from meshcee.user_code import calling, under_way

__all__ = ["WeightWatch", "ask_others", "refuse_told_beside", "unread"]

_PLAIN = (torch.Tensor, nn.Parameter)


@contextmanager
def unread(model: Any) -> Iterator[None]:
    """UsageError once what is called here reads a weight of this model that is trained, even where the user's code catches it."""
    mode = WeightWatch(model) if isinstance(model, nn.Module) else None
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
        if job.sampler is not None:
            indices_of(job, 0)
        if job.schedule is not None:
            HyperSchedule(job.optimizer, job.schedule).at(min(1, job.steps - 1))


def refuse_told_beside(job: Job, sample: Any, reads: int) -> None:
    """UsageError where `collate`, or data behind so many reads, tells the model or the loss something beside x and y.

    As a mixup whose factor lies in an attribute: the graph has the number that was there when it was made.
    """
    before = Unchanged(job)
    with unread(job.model):
        if not (job.streams or isinstance(job.data, At)):
            read(job.data, [reads % len(job.data)], job.seed)
        batched([sample], job.seed, 0, 1, collate=job.collate)
    if places := before.changed():
        raise UsageError(
            f"reading data changes {places[0]}, which the model or the loss computes with, and peers have only x and y: let "
            "collate, or data[i], give it with them, as (x, (y, it)), and let the loss take it from there"
        )


class WeightWatch(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        own = ((n, p) for n, p in model.named_parameters() if p.requires_grad and type(p) in _PLAIN)
        self._names = {p.untyped_storage().data_ptr(): name for name, p in own if p.device.type == "cpu" and p.numel()}
        self.error: UsageError | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_leaves((args, kwargs)):
            if type(given) in _PLAIN and given.layout == torch.strided and given.device.type == "cpu":
                self.refuse(self._names.get(given.untyped_storage().data_ptr()))
        return func(*args, **(kwargs or {}))

    def refuse(self, name: str | None) -> None:
        """A weight of this name is read."""
        if name is not None:
            self.error = UsageError(
                f"{under_way()} reads {name!r}, which is trained: peers train the model, and here it stays as it was before the "
                "first step; compute this in forward or in the loss, or from a copy.deepcopy of the model, which stays as it is "
                "in a plain loop too"
            )
            raise self.error
