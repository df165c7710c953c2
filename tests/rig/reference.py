"""The eager reference: what one process with plain torch computes; of meshcee only the seeding and drawing.

The idea: this loop is the definition of "exactly"; nothing of the capture or the mesh takes part in it.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from meshcee.job import Job, seeded
from meshcee.sampling.order import draw, generators_put_back, read, seed_generators

__all__ = ["Reference", "call", "reference"]


@dataclass
class Reference:
    """Losses per step and micro-batch, gradients of the last step after clipping, the final state."""

    losses: list[list[torch.Tensor]] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)  # of each step, weighted
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # of evaluations, by step
    ema: dict[str, torch.Tensor] = field(default_factory=dict)  # as the state, where the job has one
    moments: dict[str, torch.Tensor] = field(default_factory=dict)  # of what had a gradient, by parameter/key


def call(model: nn.Module, x: Any) -> Any:
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def stacked(items: list[Any]) -> Any:
    if isinstance(items[0], dict):
        return {k: stacked([i[k] for i in items]) for k in items[0]}
    if isinstance(items[0], tuple):
        return tuple(stacked([i[k] for i in items]) for k in range(len(items[0])))
    return None if items[0] is None else torch.stack([torch.as_tensor(i) for i in items])


def paired(model: nn.Module, samples: list[Any]) -> tuple[Any, Any]:
    """(x, y) of pairs; or of dicts their columns, without a label that forward does not take, and that label, else all of them."""
    if not isinstance(samples[0], dict):
        x, y = map(stacked, zip(*samples))
        return x, y
    columns = {key: torch.stack([torch.as_tensor(row[key]) for row in samples]) for key in samples[0]}
    takes = inspect.getfullargspec(model.forward)
    for label in ("labels", "label"):
        if label in columns:
            x = {k: v for k, v in columns.items() if k != label or takes.varkw or k in takes.args + takes.kwonlyargs}
            return x, columns[label].clone()
    return columns, mapped(columns, torch.clone)


def mapped(x: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(x, dict):
        return {k: mapped(v, change) for k, v in x.items()}
    if isinstance(x, tuple):
        return tuple(mapped(v, change) for v in x)
    return None if x is None else change(x)


def halved(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16() if x.is_floating_point() else x


def built(job: Job, in_place: bool) -> nn.Module:
    """The job's model or a copy, or what its function returns after the job's seed; with the job's weights, if any."""
    if isinstance(job.model, nn.Module):
        model = job.model if in_place else copy.deepcopy(job.model)
    else:
        torch.manual_seed(job.seed)
        model = job.model()
    if job.precision == "bf16" and any(t.dtype in (torch.bfloat16, torch.float16) for t in model.state_dict().values()):
        model.float()  # what a checkpoint saved in 16 bits has for masters
    if job.weights is not None:
        files = sorted(Path(job.weights).glob("*.safetensors")) if Path(job.weights).is_dir() else [Path(job.weights)]
        loaded = {n: t for file in files for n, t in safetensors.torch.load_file(file).items()}
        absent, unexpected = model.load_state_dict(loaded, strict=False)
        state = model.state_dict(keep_vars=True)
        assert not unexpected
        assert all(any(state[name] is state[other] for other in loaded) for name in absent), (
            "but for other names of one tensor"
        )
    return model


def mixed(job: Job) -> AbstractContextManager[Any]:
    """Nothing where autocast is off: around regions of the model's own, torch would keep converted weights from one to the next."""
    return torch.autocast("cpu", dtype=torch.bfloat16) if job.precision == "bf16-mixed" else nullcontext()


def halved_but(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """In bf16, but for modules of these names or classes, whose forward is wrapped: written another way than meshcee's."""
    found = {n: module for n, module in model.named_modules() if n and any(is_kept(n, module, p) for p in patterns)}
    kept = [module for name, module in found.items() if not any(name.startswith(f"{other}.") for other in found)]
    before = [[t.detach().clone() for t in (*module.parameters(), *module.buffers())] for module in kept]
    model.bfloat16()
    for module, tensors in zip(kept, before):
        for tensor, value in zip((*module.float().parameters(), *module.buffers()), tensors):
            tensor.data.copy_(value)

        def forward(*args: Any, inner: Any = module.forward, **kwargs: Any) -> Any:
            given, named = mapped((args, kwargs), lambda t: t.float() if t.dtype == torch.bfloat16 else t)
            return mapped(inner(*given, **named), lambda t: t.bfloat16() if t.dtype == torch.float32 else t)

        module.forward = forward  # type: ignore[method-assign]


def is_kept(name: str, module: nn.Module, pattern: str) -> bool:
    if pattern == "frozen":
        trained = [p.requires_grad for p in module.parameters()]
        return bool(trained) and not any(trained)
    return fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern)


def evaluate(job: Job, model: nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The loss and the metrics over eval_data, in eval mode, with these weights in the places of the model's own."""
    modes = [(module, module.training) for module in model.modules()]
    live = {n: p for n, p in model.named_parameters() if n in weights}
    before = {n: p.data for n, p in live.items()}
    sums: dict[str, float] = {}
    shares: dict[str, float] = {}
    count, size = len(job.eval_data), job.micro_batch_size or job.batch_size
    model.eval()
    with torch.no_grad():
        for name, p in live.items():
            p.data = weights[name].to(p.dtype)  # as AveragedModel's, which do not lie as strided parameters do
        for first in range(0, count, size):
            samples = read(job.eval_data, range(first, min(first + size, count)), job.seed)
            x, y = paired(model, samples)
            with mixed(job):
                output = call(model, mapped(x, halved) if job.precision == "bf16" else x)
                loss = job.loss(output, y)
            found = {"loss": loss.item()} | {n: metric(output, y) for n, metric in job.metrics.items()}
            found["loss"] /= len(samples) if job.reduction == "sum" else 1
            share = dict.fromkeys(found, float(len(samples)))
            share["loss"] = float(job.weight(y)) if job.weight else share["loss"]
            sums = {n: sums.get(n, 0.0) + value * share[n] for n, value in found.items()}
            shares = {n: shares.get(n, 0.0) + share[n] for n in found}
        for name, p in live.items():
            p.data = before[name]
    for module, mode in modes:
        module.training = mode
    return {name: value / shares[name] for name, value in sums.items()}


def samples_of(job: Job, steps: int) -> Iterator[list[Any]]:
    """Of each step, in the order of the data, of a sampler, or shuffled; read under the seeds that docs/models.md tells."""
    if job.streams:
        yield from streamed(job, steps)
    elif job.sampler is None:
        for step in range(steps):
            yield read(job.data, draw(job.seed, len(job.data), job.batch_size, step), job.seed, step)
    else:
        data_epoch, left = -1, []
        for step in range(steps):
            if len(left) < job.batch_size:
                data_epoch += 1
                left = ordered(job, data_epoch)
            yield read(job.data, left[: job.batch_size], job.seed, step)
            left = left[job.batch_size :]


def ordered(job: Job, data_epoch: int) -> list[int]:
    with generators_put_back():
        seed_generators(job.seed, data_epoch, 0, "order")
        if not isinstance(job.sampler, torch.utils.data.Sampler):
            return [*job.sampler(data_epoch, job.seed)]  # type: ignore[misc]
        if hasattr(job.sampler, "set_epoch"):
            job.sampler.set_epoch(data_epoch)
        return [int(i) for i in job.sampler]


def streamed(job: Job, steps: int) -> Iterator[list[Any]]:
    """A data epoch reads the set once; the samples of a batch that is not complete at its end are dropped."""
    found: list[list[Any]] = []
    with generators_put_back():
        data, data_epoch = copy.deepcopy(job.data), 0
        while len(found) < steps:
            if hasattr(data, "set_epoch"):
                data.set_epoch(data_epoch)
            seed_generators(job.seed, data_epoch, 0, "set")
            samples, batch = iter(data), []
            for k in itertools.count():
                seed_generators(job.seed, data_epoch, k)
                sample = next(samples, None)
                if sample is None or len(found) == steps:
                    break
                batch.append(sample)
                if len(batch) == job.batch_size:
                    found.append(batch)
                    batch = []
            data_epoch += 1
    yield from found


def reference(
    job: Job,
    steps: int | None = None,
    device: str = "cpu",
    *,
    rates: Mapping[int, tuple[str, float]] | None = None,
    in_place: bool = False,
) -> Reference:
    """Train a copy of the job's model eagerly, on one device.

    `rates`: after a step, "set" or "scale" the learning rate. `in_place`: no copy, in which strided parameters lie otherwise.
    """
    model = built(job, in_place).to(device)
    asleep = [m for m in model.modules() if not m.training] if model.training else []
    model.train()
    for module in asleep:  # as a loop that does not wake what its user has put into eval mode
        module.training = False
    bf16 = job.precision == "bf16"
    given = {n: p.detach().clone() for n, p in model.named_parameters()}
    masters = {n: nn.Parameter(given[n].clone()) for n, p in model.named_parameters() if p.requires_grad}
    if bf16:
        halved_but(model, job.keep_fp32)
    live = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = job.optimizer.build(masters if bf16 else live)
    schedule = job.schedule.build(optimizer) if job.schedule else None
    micro_size = job.micro_batch_size or job.batch_size
    steps = steps or job.steps
    trained = masters if bf16 else live
    average = None
    if job.ema is not None:
        average = AveragedModel(nn.ParameterList(trained.values()), multi_avg_fn=get_ema_multi_avg_fn(job.ema))  # type: ignore[no-untyped-call]
    asked: list[tuple[str, float]] = []  # of the learning rate
    out = Reference()
    for step, samples in enumerate(samples_of(job, steps)):
        losses, total = [], 0.0
        parts = [samples[i : i + micro_size] for i in range(0, len(samples), micro_size)]
        batches = [paired(model, part) for part in parts]
        weights = [float(job.weight(y)) if job.weight else float(len(p)) for p, (_, y) in zip(parts, batches)]
        for micro, (x, y) in enumerate(mapped(pair, lambda t: t.to(device)) for pair in batches):
            with seeded(job.seed, step, micro), mixed(job):
                loss = job.loss(call(model, mapped(x, halved) if bf16 else x), y)
            share = weights[micro] / sum(weights) if job.reduction == "mean" else 1.0
            (loss * share).backward()
            losses.append(loss.detach())
            total += loss.item() * share
        if bf16:
            for name, master in masters.items():
                grad = live[name].grad
                master.grad = None if grad is None else grad.float()
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(trained.values()), job.clip_norm)
        out.grads = {n: p.grad.clone() for n, p in trained.items() if p.grad is not None}
        scheduled = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            for how, value in asked:
                group["lr"] = value if how == "set" else group["lr"] * value
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, scheduled):
            group["lr"] = rate
        if schedule is not None:
            schedule.step()
        for group in (masters, live):
            for p in group.values():
                p.grad = None
        if bf16:
            with torch.no_grad():
                for name, master in masters.items():
                    live[name].copy_(master)
        averages: dict[str, torch.Tensor] = {}
        if average is not None:
            average.update_parameters(nn.ParameterList(trained.values()))
            averages = {n: p.detach() for n, p in zip(trained, average.module.parameters())}
        out.losses.append(losses)
        out.totals.append(total)
        if rates and step in rates:
            asked.append(rates[step])
        if job.eval_every and ((step + 1) % job.eval_every == 0 or step == steps - 1):
            out.metrics.append((step, evaluate(job, model, averages if job.eval_ema else {})))
    full: dict[str, torch.Tensor] = {}
    if bf16:  # what is frozen is handed back as it was given, unless forward has written there
        frozen = {n: p for n, p in model.named_parameters() if n not in live}
        full = {n: given[n] for n, p in frozen.items() if torch.equal(p, given[n].to(p.dtype))}
        full |= {n: p.detach() for n, p in masters.items()}
    out.state = state_of(model, full)
    out.ema = state_of(model, full | averages) if averages else {}
    kept = {n: optimizer.state[p] for n, p in trained.items() if n in out.grads}
    out.moments = {f"{n}/{key}": torch.as_tensor(value) for n, state in kept.items() for key, value in state.items()}
    return out


def state_of(model: nn.Module, instead: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state, with these parameters under all their names."""
    value_of = {id(p): instead[n] for n, p in model.named_parameters() if n in instead}
    state = model.state_dict(keep_vars=True)
    return {name: value_of.get(id(tensor), tensor).detach() for name, tensor in state.items()}
