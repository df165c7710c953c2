"""`capture` for tests of what comes after it: a job that reads like one which was captured before is not captured again.

The idea: a capture takes a good part of a second, and tests make the same small job again and again. Jobs read alike where all
that capture reads of them is alike bit for bit: the module with its tensors and attributes, loss, data and sizes. The state's
tensors are the job's own. What cannot be compared (a closure, a stream, a function that builds the model) is captured each time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import pickle
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import torch
from torch import nn

from meshcee.capture import Capture
from meshcee.capture import capture as product
from meshcee.files.tensor_files import byte_view
from meshcee.job import Job

__all__ = ["capture", "remembered"]

# What no graph depends on.
OTHERS = frozenset(
    "optimizer steps schedule clip_norm eval_every metrics name direct_sums checkpoint_every codec groups adapt verify "  # noqa: SIM905
    "threads mix workers sampler ema audit eval_ema".split()
)


class _Told(pickle.Pickler):
    """Tensors by their bits: two pickles are alike where what they are of is."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        bits = hashlib.sha256(byte_view(value.detach().contiguous())).hexdigest()
        return str, (f"{type(value)} {value.dtype} {value.shape} {value.stride()} {value.requires_grad} {bits}",)


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Runs that capture their jobs themselves do so too."""
    with contextlib.ExitStack() as stack:
        for place in ("meshcee.capture", "peers.owner.job_run", "peers.node.mesh"):
            stack.enter_context(mock.patch(f"{place}.capture", capture))
        yield


def _told(job: Job, evaluate: bool | None) -> bytes | None:
    if not isinstance(job.model, nn.Module) or job.weights is not None or job.streams:
        return None
    read = {field.name: getattr(job, field.name) for field in fields(job) if field.name not in OTHERS}
    out = io.BytesIO()
    try:
        _Told(out).dump((evaluate, read))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    return out.getvalue()


@functools.cache
def _known() -> dict[bytes, Capture]:
    return {}


def capture(job: Job, *, evaluate: bool | None = None) -> Capture:
    """What `meshcee.capture` finds."""
    told = _told(job, evaluate)
    if told is None:
        return product(job, evaluate=evaluate)
    known = _known()
    if told not in known:
        known[told] = product(job, evaluate=evaluate)
    assert isinstance(job.model, nn.Module)
    job.optimizer.check({name: p.dtype for name, p in job.model.named_parameters() if p.requires_grad})
    own = {
        **dict(job.model.named_parameters(remove_duplicate=False)),
        **dict(job.model.named_buffers(remove_duplicate=False)),
    }
    return replace(known[told], state={name: own[name].detach() for name in known[told].state})
