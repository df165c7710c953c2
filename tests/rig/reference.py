"""The eager reference: what one process with plain torch computes; of meshcee only the seeding and drawing.

The idea: this loop is the definition of "exactly"; nothing of the capture or the mesh takes part in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from meshcee.job import Job, seeded
from meshcee.sampling.order import draw, read

__all__ = ["Reference", "call", "reference"]


@dataclass
class Reference:
    """Losses per step and micro-batch, gradients of the last step after clipping, the final state."""

    losses: list[list[torch.Tensor]] = field(default_factory=list)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


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


def mapped(x: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(x, dict):
        return {k: mapped(v, change) for k, v in x.items()}
    if isinstance(x, tuple):
        return tuple(mapped(v, change) for v in x)
    return None if x is None else change(x)


def halved(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16() if x.is_floating_point() else x


def built(job: Job) -> nn.Module:
    """A copy of the job's model, or what its function returns after the job's seed; with the job's weights, if any."""
    if isinstance(job.model, nn.Module):
        model = copy.deepcopy(job.model)
    else:
        torch.manual_seed(job.seed)
        model = job.model()
    if job.weights is not None:
        files = sorted(Path(job.weights).glob("*.safetensors")) if Path(job.weights).is_dir() else [Path(job.weights)]
        loaded = {n: t for file in files for n, t in safetensors.torch.load_file(file).items()}
        absent, unexpected = model.load_state_dict(loaded, strict=False)
        tied = {n for n, p in model.named_parameters(remove_duplicate=False) if n not in dict(model.named_parameters())}
        assert not unexpected
        assert set(absent) <= tied
    return model


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


def reference(job: Job, steps: int | None = None, device: str = "cpu") -> Reference:
    """Train a copy of the job's model eagerly, on one device."""
    model = built(job).to(device)
    if not model.training:
        model.train()
    bf16 = job.precision == "bf16"
    masters = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters() if p.requires_grad}
    if bf16:
        halved_but(model, job.keep_fp32)
    live = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = job.optimizer.build(masters if bf16 else live)
    schedule = job.schedule.build(optimizer) if job.schedule else None
    micro_size = job.micro_batch_size or job.batch_size
    out = Reference()
    for step in range(steps or job.steps):
        drawn = draw(job.seed, len(job.data), job.batch_size, step)
        losses = []
        parts = [drawn[i : i + micro_size] for i in range(0, len(drawn), micro_size)]
        batches = [tuple(map(stacked, zip(*read(job.data, part, job.seed, step)))) for part in parts]
        weights = [float(job.weight(y)) if job.weight else float(len(p)) for p, (_, y) in zip(parts, batches)]
        for micro, (x, y) in enumerate(mapped(pair, lambda t: t.to(device)) for pair in batches):
            with seeded(job.seed, step, micro):
                loss = job.loss(call(model, mapped(x, halved) if bf16 else x), y)
            share = weights[micro] / sum(weights) if job.reduction == "mean" else 1.0
            (loss * share).backward()
            losses.append(loss.detach())
        if bf16:
            for name, master in masters.items():
                grad = live[name].grad
                master.grad = None if grad is None else grad.float()
        trained = masters if bf16 else live
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(trained.values()), job.clip_norm)
        out.grads = {n: p.grad.clone() for n, p in trained.items() if p.grad is not None}
        optimizer.step()
        if schedule is not None:
            schedule.step()
        for group in (masters, live):
            for p in group.values():
                p.grad = None
        if bf16:
            with torch.no_grad():
                for name, master in masters.items():
                    live[name].copy_(master)
        out.losses.append(losses)
    out.state = {n: t.detach() for n, t in model.state_dict().items()}
    if bf16:
        master_of = {id(live[n]): p for n, p in masters.items()}
        for name, tensor in model.state_dict(keep_vars=True).items():  # tied parameters under all their names
            if id(tensor) in master_of:
                out.state[name] = master_of[id(tensor)].detach()
    return out
