"""The plain loop of a job: what one machine without meshcee would run, for everybody to compare with.

The idea: this page is the definition of "exactly". It is written against torch, `meshcee.seeded`, `meshcee.sampling` and
`meshcee.reach.modules` alone; nothing of the capture or of the mesh takes part in it. `python -m meshcee.eager JOB.py STEPS
MICRO_BATCH FOLDER` runs it in a process of its own, writes FOLDER/eager.safetensors and prints {"losses": [...], "seconds": s}.
"""

from __future__ import annotations

import copy
import inspect
import json
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_leaves

from meshcee.errors import UsageError
from meshcee.files.tensor_files import Checkpoint
from meshcee.job import WEIGHS_NOTHING, At, Job, check_is_job, parts_of, seeded, shares_of
from meshcee.reach.modules import give_memory, halve, into_training, on_loan, widen
from meshcee.sampling import collated, look_anew, source_of

__all__ = ["Plain", "PlainStep", "plain", "plain_steps"]


class _Plain(NamedTuple):
    losses: list[float]  # one a step: the weighted sum over its micro-batches
    norms: list[float]  # one a step: of all gradients, before clipping
    module: nn.Module  # a copy of the trained model; the job's own is as it was
    state_dict: dict[str, torch.Tensor]  # in bf16 with the fp32 masters of what was trained


class Plain(_Plain):
    """What the plain loop leaves, under the names of what `meshcee.train` returns."""

    ema: dict[str, torch.Tensor]  # as state_dict, with the average of what was trained, if the job wants one
    terms: dict[str, list[float]]  # one a step, of each term that the job's loss tells of


@dataclass(frozen=True)
class PlainStep:
    """One step, told before the next one begins. The tensors are the loop's own: look at them now, or copy them."""

    step: int
    loss: float
    losses: list[torch.Tensor]  # of each micro-batch, unweighted
    norm: float
    grads: Mapping[str, torch.Tensor]  # by the name of the parameter, after clipping
    module: nn.Module  # the job's own, until the next step; after the last step it is as it was
    state_dict: dict[str, torch.Tensor]
    ema: dict[str, torch.Tensor]
    terms: dict[str, float]  # weighted and added as the loss is


def plain(job: Job, steps: int | None = None, micro_batch: int | None = None) -> Plain:
    """Train the job's model in one plain PyTorch loop, on this process's CPU; then the model is as it was.

    `steps` are the job's unless given. `micro_batch` is the job's micro_batch_size, else its batch_size; where a plan
    chose the size, it is `result.micro_batch_size`. Bits depend on torch's number of threads.

    >>> result = meshcee.train(job, local=3)
    >>> expected = meshcee.plain(job, micro_batch=result.micro_batch_size)
    >>> assert result.losses == expected.losses
    """
    check_is_job(job)
    look_anew(job)
    if isinstance(job.data, At):
        raise UsageError(
            f"the data is at {job.data.where!r}, and the plain loop reads it here: replace(job, data=...) first"
        )
    losses, norms, terms = [], [], dict[str, list[float]]()
    steps = job.steps if steps is None else steps
    for done in plain_steps(job, steps, micro_batch):
        losses.append(done.loss)
        norms.append(done.norm)
        for name, value in done.terms.items():
            terms.setdefault(name, []).append(value)
        if done.step == steps - 1:
            found = Plain(losses, norms, _copied(done.module), done.state_dict)
            found.ema, found.terms = done.ema, terms
    return found


def plain_steps(job: Job, steps: int | None = None, micro_batch: int | None = None) -> Iterator[PlainStep]:
    """The same, step by step."""
    steps = job.steps if steps is None else steps
    micro_batch = micro_batch or job.micro_batch_size or job.batch_size
    if steps < 1 or job.batch_size % micro_batch:
        raise UsageError(f"take at least one step, and a micro_batch that divides batch_size={job.batch_size}")
    if not isinstance(job.model, nn.Module):
        torch.manual_seed(job.seed)
        yield from _trained(job, job.model(), steps, micro_batch)
        return
    with on_loan(job.model):
        give_memory(job.model)
        yield from _trained(job, job.model, steps, micro_batch)


def _trained(job: Job, model: nn.Module, steps: int, micro_batch: int) -> Iterator[PlainStep]:
    if job.precision == "bf16":
        widen(model)
    if job.weights is not None:
        # Not strict: of tied weights a checkpoint holds one name. Whether it fits is for capture to say.
        model.load_state_dict(dict(Checkpoint.at(job.weights)), strict=False)
    into_training(model)
    model.zero_grad()  # a function that makes the model may try it
    # In bf16 weights, activations and gradients are bf16; the optimizer sees the gradients and weights in full.
    full = {name: p.detach().clone() for name, p in model.named_parameters()} if job.precision == "bf16" else {}
    if full:
        halve(model, job.keep_fp32)
    live = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: nn.Parameter(full[name]) if full else p for name, p in live.items()}
    for kind in {p.device.type for p in masters.values()}:
        job.optimizer.check_device(kind)
    optimizer = job.optimizer.build(masters)
    schedule = job.schedule.build(optimizer) if job.schedule else None
    source = source_of(job)
    average = None
    if job.ema is not None:
        towards = get_ema_multi_avg_fn(job.ema)  # type: ignore[no-untyped-call]
        average = AveragedModel(nn.ParameterList(masters.values()), multi_avg_fn=towards)
    for step in range(steps):
        batches = []
        for start in range(0, job.batch_size, micro_batch):
            samples = source.samples(step, start, start + micro_batch)
            if job.collate is not None:
                batches.append(_tensors(collated(job.collate, samples, job.seed, step, start)))
            else:
                batches.append(_pair(model, samples))
        total, losses, terms = 0.0, [], dict[str, float]()
        for micro, ((x, y), weight) in enumerate(zip(batches, _weights(job, [y for _, y in batches]))):
            with seeded(job.seed, step, micro), job.autocast():
                loss, told = parts_of(job.loss(_call(model, _halved(x) if full else x), y))
            if weight == 0 and not loss.isfinite():
                of = f"the loss of step {step + 1}, micro-batch {micro + 1}"
                warnings.warn(f"{of} is {loss.item()}. {WEIGHS_NOTHING}", stacklevel=2)
            (loss * weight).backward()
            total += loss.item() * weight
            for name, term in told.items():
                terms[name] = terms.get(name, 0.0) + term.item() * weight
            losses.append(loss.detach())
        if full:
            for name, master in masters.items():
                grad = live[name].grad
                master.grad = None if grad is None else grad.float()
        grads = {name: p.grad for name, p in masters.items() if p.grad is not None}
        if job.clip_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(masters.values(), job.clip_norm)
        else:
            norm = torch.nn.utils.get_total_norm(grads.values())
        optimizer.step()
        if schedule is not None:
            schedule.step()
        if full:
            with torch.no_grad():
                for name, master in masters.items():
                    live[name].copy_(master)
        ema = {}
        if average is not None:
            average.update_parameters(nn.ParameterList(masters.values()))
            averages = {name: p.detach() for name, p in zip(masters, average.module.parameters(), strict=True)}
            ema = _state_dict(model, full | averages)
        yield PlainStep(step, total, losses, norm.item(), grads, model, _state_dict(model, full), ema, terms)
        optimizer.zero_grad()
        model.zero_grad()


def _copied(model: nn.Module) -> nn.Module:
    """A copy; what forward has left in attributes comes without its graph, and what has no copy, as a lock, is shared."""
    left = (t for m in model.modules() for t in tree_leaves(vars(m)) if isinstance(t, torch.Tensor) and t.grad_fn)
    memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in left}
    with suppress(Exception):  # classes raise what they like
        return copy.deepcopy(model, dict(memo))
    attributes = [vars(m).items() for m in model.modules()]
    own = [value for items in attributes for name, value in items if name not in vars(nn.Module())]
    return copy.deepcopy(model, memo | {id(value): value for value in own if not _has_copy(value, memo)})


def _has_copy(value: Any, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:  # classes raise what they like
        return False
    return True


def _pair(model: nn.Module, samples: list[Any]) -> tuple[Any, Any]:
    """Of rows that are dicts x is their columns, each one tensor, and y the label, else all columns again."""
    if not isinstance(samples[0], Mapping):
        return _collate([s[0] for s in samples]), _collate([s[1] for s in samples])
    _check_parts(samples)
    x, y = (
        {k: None if v is None else torch.stack([torch.as_tensor(s[k]) for s in samples]) for k, v in samples[0].items()}
        for _ in range(2)
    )
    label = next((name for name in ("labels", "label") if name in x), None)
    if label is None:
        return x, y
    parameters = inspect.signature(model.forward).parameters
    if label not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        del x[label]
    return x, y[label]


def _collate(items: list[Any]) -> Any:
    """As a DataLoader does, which takes no None."""
    from torch.utils.data import default_collate

    first = items[0]
    if isinstance(first, dict | tuple | list):
        _check_parts(items)
    if isinstance(first, dict):
        return {key: _collate([item[key] for item in items]) for key in first}
    if isinstance(first, tuple | list):
        return _like(first, (_collate(list(column)) for column in zip(*items)))
    return None if first is None else default_collate(items)


def _check_parts(items: list[Any]) -> None:
    """UsageError where not all of these have the names, or the number of elements, that the first has."""
    first = items[0]
    kind, parts = (Mapping, set) if isinstance(first, Mapping) else (tuple | list, len)
    if any(not isinstance(item, kind) or parts(item) != parts(first) for item in items):
        raise UsageError("samples differ in their names or numbers of elements: pad them, or say collate")


def _tensors(tree: Any) -> Any:
    """What a collate function returned, as plain dicts and tuples of tensors."""
    if isinstance(tree, Mapping):
        return {key: _tensors(value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return _like(tree, map(_tensors, tree))
    return None if tree is None else torch.as_tensor(tree)


def _like(given: Any, parts: Iterable[Any]) -> Any:
    """A tuple of the parts, or the named tuple that was given."""
    return getattr(given, "_make", tuple)(parts)


def _halved(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _halved(value) for key, value in x.items()}
    if isinstance(x, tuple):
        return _like(x, map(_halved, x))
    return x.bfloat16() if x is not None and x.is_floating_point() else x


def _call(model: nn.Module, x: Any) -> Any:
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def _weights(job: Job, targets: list[Any]) -> list[float]:
    """What the loss of each micro-batch is multiplied by."""
    if job.reduction == "sum":
        return [1.0] * len(targets)
    if job.weight is None:
        return [job.batch_size // len(targets) / job.batch_size] * len(targets)
    return shares_of([float(job.weight(y)) for y in targets])


def _state_dict(model: nn.Module, full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's state, with the full-precision tensors where there are any, under all names of a tied one.

    A frozen parameter that forward has changed has none any more: it is kept like a buffer.
    """
    kept = model.state_dict(keep_vars=True)
    of = {
        id(p): full[name]
        for name, p in model.named_parameters()
        if name in full and (p.requires_grad or torch.equal(p, full[name].to(p.dtype)))
    }
    return {name: of.get(id(found), found).detach() for name, found in kept.items() if isinstance(found, torch.Tensor)}


def _main(arguments: list[str]) -> None:
    import importlib.util

    import safetensors.torch

    path, steps, micro_batch, folder = Path(arguments[0]), int(arguments[1]), int(arguments[2]), Path(arguments[3])
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("job_file", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["job_file"] = module
    spec.loader.exec_module(module)
    start_s = time.perf_counter()
    done = plain(module.job, steps, micro_batch)
    seconds = time.perf_counter() - start_s
    state = {name: tensor.clone().contiguous() for name, tensor in done.state_dict.items()}
    safetensors.torch.save_file(state, folder / "eager.safetensors")
    print(json.dumps({"losses": done.losses, "seconds": seconds}))


if __name__ == "__main__":
    _main(sys.argv[1:])
