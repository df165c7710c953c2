"""What a stage keeps between steps: parameters, buffers, the optimizer and, in bf16, full-precision masters.

The idea: names are the model's own, so state can move between stages of any shape; nothing here knows of micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from meshcee.capture.graph import Input
from meshcee.files.layout import copied
from meshcee.files.tensor_files import Layout
from meshcee.optim import Optimizer

__all__ = ["AVERAGE", "Weights", "first_moments", "optimizer_layout"]

AVERAGE = "ema"  # the key of a parameter's average beside its moments
COUNTS = frozenset({"step", "mu_product", "mu", "eta"})  # keys of what torch makes in its process's default type


class Weights:
    """`parameters` compute; `masters` are what the optimizer changes: the same, unless the graph computes with rounded ones.

    Where the graph computes with rounded ones, in bf16, activations and gradients are bf16, too. At the end of a step the
    gradients are widened, clipped and applied to the fp32 masters. The masters are then rounded into the parameters.
    """

    def __init__(
        self,
        parameters: Sequence[str],
        trainable: Sequence[str],
        buffers: Sequence[str],
        state: Mapping[str, torch.Tensor],
        optimizer: Optimizer,
        device: torch.device,
        entries: Mapping[str, Input],
    ) -> None:
        """`entries` say of each tensor in which type the graph computes with it, and how it lies in the memory of eager code."""

        def full_of(name: str) -> torch.Tensor:
            return entries[name].laid_out(state[name].detach()).to(device)

        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.masters: dict[str, torch.nn.Parameter] = {}
        self.buffers = {n: entries[n].placed(full_of(n).to(entries[n].value.dtype), copy=True) for n in buffers}
        chosen = frozenset(trainable)
        for name in parameters:
            full = full_of(name)
            compute = full.to(entries[name].value.dtype)
            self.parameters[name] = torch.nn.Parameter(
                entries[name].placed(compute, copy=True), requires_grad=name in chosen
            )
            if name in chosen:
                same = compute.dtype == full.dtype
                self.masters[name] = self.parameters[name] if same else torch.nn.Parameter(copied(full))
        self.trainable = {n: self.parameters[n] for n in trainable}
        self.optimizer = optimizer.build(self.masters)
        self.ema, self.eval_ema = optimizer.ema or 0.0, optimizer.eval_ema
        self.averages: dict[str, torch.Tensor] = {}  # of the masters, from the end of the first step on

    def evaluated(self, name: str) -> torch.Tensor:
        """What evaluations compute with: the parameter, or its average where the job wants that and there is one.

        That is a parameter too, as in torch's AveragedModel: products of what needs no gradient are folded otherwise.
        """
        own = self.parameters[name]
        average = self.averages.get(name) if self.eval_ema else None
        return own if average is None else average.to(own.dtype).detach().requires_grad_(own.requires_grad)

    def drop_grads(self) -> None:
        for parameter in (*self.trainable.values(), *self.masters.values()):
            parameter.grad = None

    def norms(self, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        """The 2-norm of each gradient there is, as the optimizer will see it.

        Of one type at a time, as torch takes them: on a GPU it has another kernel for gradients of several types.
        """
        found = {n: g.to(self.masters[n].dtype) for n in names if (g := self.trainable[n].grad) is not None}
        norms: dict[str, torch.Tensor] = {}
        for dtype in {grad.dtype for grad in found.values()}:
            alike = {n: grad for n, grad in found.items() if grad.dtype == dtype}
            norms |= zip(alike, torch._foreach_norm(list(alike.values()), 2.0))
        return [(n, norms[n]) for n in found]

    def not_finite(self) -> str | None:
        """The first parameter whose gradient has a number that is NaN or infinite.

        Then its sum is, too: that takes about a tenth of the optimizer's time. As large numbers may overflow a sum, each number is
        looked at then.
        """
        grads = [(n, p.grad) for n, p in self.trainable.items() if p.grad is not None]
        if not grads or torch.stack([grad.sum().abs().double() for _, grad in grads]).isfinite().all():
            return None
        return next((name for name, grad in grads if not grad.isfinite().all()), None)

    def commit(self, clip: torch.Tensor | None, hyper: Sequence[Mapping[str, Any]] | None) -> None:
        """Clip, one optimizer step with these options per group, round the masters, drop the gradients."""
        for name, parameter in self.trainable.items():
            master = self.masters[name]
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.to(master.dtype)
        if clip is not None:
            for master in self.masters.values():
                if master.grad is not None:
                    master.grad.mul_(clip.to(master.device))
        if hyper is not None:
            for group, options in zip(self.optimizer.param_groups, hyper, strict=True):
                group.update(options)
        self.optimizer.step()
        with torch.no_grad():
            for name, master in self.masters.items():
                if master is not self.trainable[name]:
                    self.trainable[name].copy_(master)
            self._average()
        self.drop_grads()

    def _average(self) -> None:
        """As torch's AveragedModel: the weights after the first step, then a part of the way to those after each."""
        for name, master in self.masters.items() if self.ema else ():
            if name in self.averages:
                self.averages[name].lerp_(master, 1 - self.ema)
            else:
                self.averages[name] = master.detach().clone()

    def close(self) -> None:
        """Nothing is kept any more."""
        for held in (self.parameters, self.masters, self.trainable, self.buffers, self.averages, self.optimizer.state):
            held.clear()
        self.optimizer.param_groups.clear()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters (masters where there are any) and buffers by original name; not copies."""
        return {**{n: self.masters.get(n, p).detach() for n, p in self.parameters.items()}, **self.buffers}

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Moments, step counts, the average and the like by parameter name; not copies."""
        found = {
            n: {k: _counted(k, v) for k, v in self.optimizer.state.get(p, {}).items()} for n, p in self.masters.items()
        }
        for name, average in self.averages.items():
            found[name][AVERAGE] = average
        return found

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """As `optimizer_state` returned it, from any device; moments get the strides with which the optimizer makes them.

        Step counts stay on the CPU, where torch keeps them, but for options whose kernels read them on the device, and of ASGD.
        """
        groups = [group for group in self.optimizer.param_groups if group.get("fused") or group.get("capturable")]
        on_device = {id(parameter) for group in groups for parameter in group["params"]}
        for name, parameter in self.masters.items():
            if state.get(name):
                there = id(parameter) in on_device or "eta" in state[name]
                counts_at = parameter.device if there else torch.device("cpu")
                kept = partial(_kept, parameter=parameter, counts_at=counts_at)
                found = {k: kept(k, v) if isinstance(v, torch.Tensor) else v for k, v in state[name].items()}
                if AVERAGE in found:
                    self.averages[name] = found.pop(AVERAGE)
                if found:
                    self.optimizer.state[parameter] = found


def _counted(key: str, value: Any) -> Any:
    """As every peer has it, in float32: the default type may be a script's own in the process of an owner."""
    return value.float() if key in COUNTS and isinstance(value, torch.Tensor) else value


def _kept(key: str, tensor: torch.Tensor, parameter: torch.Tensor, counts_at: torch.device) -> torch.Tensor:
    """A copy of what an optimizer keeps of a parameter. A count is a number too, and so may be the parameter and its moments."""
    if tensor.shape != parameter.shape or not tensor.dim():
        counts = not tensor.dim() and (parameter.dim() > 0 or key in ("step", "mu_product"))
        return tensor.to(counts_at if counts else parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def optimizer_layout(optimizer: Optimizer, masters: Layout) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """All that the optimizer may keep for these parameters, found by stepping it once on tiny ones.

    A class of ours says so itself.
    """
    found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    if optimizer.ema is not None:
        found |= {f"{name}/{AVERAGE}": known for name, known in masters.items()}
    tiny: dict[str, torch.nn.Parameter] = {}
    for name, (dtype, shape) in masters.items():
        state = optimizer.first_state(name, torch.empty(shape, dtype=dtype, device="meta"))
        if state is None:
            tiny[name] = torch.nn.Parameter(torch.zeros([2] * len(shape), dtype=dtype))
        else:
            found |= {f"{name}/{key}": (value.dtype, tuple(value.shape)) for key, value in state.items()}
    built = optimizer.build(tiny)
    for parameter in tiny.values():
        parameter.grad = torch.zeros_like(parameter)
    for group in built.param_groups:
        group["capturable"] = False  # kernels for GPUs alone, which keep the same
    built.step()
    for name, parameter in tiny.items():
        for key, value in built.state.get(parameter, {}).items():
            if isinstance(value := _counted(key, value), torch.Tensor):
                whole = masters[name][1] if value.dim() == parameter.dim() else ()  # of a factor a dimension is 1
                found[f"{name}/{key}"] = (value.dtype, tuple(n if own > 1 else 1 for n, own in zip(whole, value.shape)))
    return found


def first_moments(optimizer: Optimizer, masters: Layout) -> dict[str, torch.Tensor]:
    """What the optimizer keeps for these parameters before its first step, as "<parameter>/<key>": Adagrad begins with sums."""
    fresh = {name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, (dtype, shape) in masters.items()}
    state = optimizer.build(fresh).state
    kept = {f"{n}/{k}": _counted(k, v) for n, parameter in fresh.items() for k, v in state.get(parameter, {}).items()}
    return {name: value for name, value in kept.items() if isinstance(value, torch.Tensor)}
