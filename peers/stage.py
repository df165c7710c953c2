"""A stage at work: F, B and W of its blocks, bit for bit what the eager loop would compute.

The idea: autograd sums the gradients of a value in one order, last use first. Every place where the pipeline cuts that
sum is put together again in the same order: a received gradient enters as the root of a backward pass and is therefore
the first summand; the partial gradient of a parameter that later stages use too enters in the same way at the parameter
itself; and micro-batches accumulate into `.grad` in ascending order, which `backward_weight` checks.

Everything here is synchronous and runs in the compute thread of one device. A step is a transaction: gradients and the
buffers that F writes are the step's own until `apply`, and `rollback` forgets them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshcee.capture.program import Value
from meshcee.capture.slicing import StageSpec
from meshcee.errors import ProtocolError
from meshcee.job import Optimizer

__all__ = ["Rng", "StageRunner", "clip_coefficient"]

Boundary = torch.Tensor | int
Rng = int | torch.Tensor | None  # a seed not yet used, the generator's state, or no randomness at all

# Seeded forwards of several peers in one process must not interleave: the default generator is one per process.
_generator_lock = threading.Lock()


def clip_coefficient(norms: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """As torch.nn.utils.clip_grad_norm_: `norms` of all parameters that have a gradient, in named_parameters order."""
    total = torch.linalg.vector_norm(torch.stack(list(norms)), 2.0)
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


@dataclass
class _Micro:
    """What F leaves behind for B and W."""

    leaves: list[Boundary]  # received, as leaves of this stage's graph
    sent: list[Any]  # with their graph
    loss: torch.Tensor | None
    roots: list[torch.Tensor] | None = None  # set by B for W
    root_grads: list[torch.Tensor] | None = None


class StageRunner:
    """One stage of one job on one device.

    `state` holds full-precision tensors by original name: what `spec.state_names()` lists (and the evaluation's).
    `stages` are the block ranges of all stages and `index` our own; they say which parameters live elsewhere too.
    In precision "bf16" parameters, activations and gradients are bf16, and the optimizer works on fp32 masters.
    """

    def __init__(
        self,
        train: StageSpec,
        state: Mapping[str, torch.Tensor],
        optimizer: Optimizer,
        *,
        evaluate: StageSpec | None = None,
        stages: Sequence[tuple[int, int]] | None = None,
        index: int = 0,
        precision: str = "fp32",
        device: torch.device | str = "cpu",
    ) -> None:
        self.spec = train
        self.eval_spec = evaluate
        self.device = torch.device(device)
        self.precision = precision
        self.index = index
        shared = train.shared(stages) if stages is not None else {}
        self.to_earlier = tuple(n for n, at in shared.items() if at[0] < index)  # W sends their partials up the chain
        self.from_later = tuple(n for n, at in shared.items() if at[-1] > index)  # W needs their partials first
        self.owned = tuple(n for n in train.trainable if n not in self.to_earlier)
        self.shared_owned = tuple(n for n in self.owned if n in shared)
        names = dict.fromkeys([*train.state_names(), *(evaluate.state_names() if evaluate else ())])
        frozen_buffers = {*train.buffers, *(evaluate.buffers if evaluate else ())}
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self._masters: dict[str, torch.nn.Parameter] = {}
        for name in names:
            tensor = state[name].detach().to(self.device)
            compute = tensor.to(torch.bfloat16) if precision == "bf16" and tensor.is_floating_point() else tensor
            if name in frozen_buffers:
                self.buffers[name] = compute.clone()
                continue
            trainable = name in train.trainable
            self.parameters[name] = torch.nn.Parameter(_copy(compute), requires_grad=trainable)
            if trainable:
                same = compute.dtype == tensor.dtype
                self._masters[name] = self.parameters[name] if same else torch.nn.Parameter(_copy(tensor))
        self.trainable = {n: self.parameters[n] for n in train.trainable}
        self.optimizer = optimizer.build(self._masters)
        self._run = train.build(self.device)
        self._run_eval = evaluate.build(self.device) if evaluate else None
        self._working: dict[str, torch.Tensor] = {}
        self._micros: dict[int, _Micro] = {}
        self._totals: set[str] = set()
        self._next = {"F": 0, "B": 0, "W": 0}
        self.step = -1
        self.begin(0)

    # -- the step ----------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Open the transaction of a step; whatever an earlier one left uncommitted is dropped."""
        self.rollback()
        self.step = step

    def rollback(self) -> None:
        """Forget the step: gradients, activations, written buffers."""
        for parameter in (*self.trainable.values(), *self._masters.values()):
            parameter.grad = None
        self._working = {name: self.buffers[name] for name in self.spec.mutated}
        self._micros.clear()
        self._totals.clear()
        self._next = {"F": 0, "B": 0, "W": 0}

    @property
    def live(self) -> int:
        """Micro-batches between F and W."""
        return len(self._micros)

    def forward(
        self, micro: int, raw: Mapping[str, torch.Tensor], received: Sequence[Boundary], rng: Rng = None
    ) -> tuple[list[Boundary], Rng, torch.Tensor | None]:
        """F: what goes to the next stage (contiguous, in wire order), the generator's state after, the loss.

        `rng` is the micro-batch's seed (an int) as long as no stage has drawn from it, then the state that the stage
        before returned; a stage that draws nothing hands it on untouched.
        """
        self._in_order("F", micro)
        leaves = [self._leaf(v, t) for v, t in zip(self.spec.received, received, strict=True)]
        written = {name: t.clone() for name, t in self._working.items()}  # a later F must not disturb this one's graph
        arguments = [
            *(raw[v.name].to(self.device) for v in self.spec.raw_inputs),
            *leaves,
            *(self.parameters[n] for n in self.spec.parameters),
            *(written.get(n, self.buffers[n]) for n in self.spec.buffers),
        ]
        with torch.enable_grad(), self._generator(rng) as after:
            results = self._run(*arguments)
        self._working = written
        count = len(self.spec.sent)
        loss = results[count] if self.spec.is_last else None
        self._micros[micro] = _Micro(leaves, list(results[:count]), loss)
        return _to_wire(self.spec.sent, results[:count]), after[0], None if loss is None else loss.detach()

    def backward(
        self,
        micro: int,
        grads: Sequence[torch.Tensor | None] = (),
        weight: float = 1.0,
        partials: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[list[torch.Tensor | None], dict[str, torch.Tensor]]:
        """B and W in one: gradients for `received`, and partial gradients for the earlier holders."""
        self._in_order("B", micro)
        self._in_order("W", micro)
        state = self._micros.pop(micro)
        roots, root_grads = self._roots(state, grads, weight)
        inputs = _differentiable(state.leaves)
        wanted = [*inputs, *self.trainable.values()]
        self._accumulate(roots, root_grads, wanted, partials)
        return self._received_grads(state, [leaf.grad for leaf in inputs]), self._take_partials()

    def backward_input(
        self, micro: int, grads: Sequence[torch.Tensor | None] = (), weight: float = 1.0
    ) -> list[torch.Tensor | None]:
        """B: gradients for `received`. `weight` is the micro-batch's share of the step's loss (last stage)."""
        self._in_order("B", micro)
        state = self._micros[micro]
        state.roots, state.root_grads = self._roots(state, grads, weight)
        inputs = _differentiable(state.leaves)
        found: Sequence[torch.Tensor | None] = ()
        if inputs and state.roots:
            found = torch.autograd.grad(
                state.roots, inputs, state.root_grads, retain_graph=bool(self.trainable), allow_unused=True
            )
        return self._received_grads(state, found)

    def backward_weight(
        self, micro: int, partials: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """W: adds to the parameters' gradients; returns partial gradients for the earlier holders.

        `partials` come from the next later holder of each parameter in `from_later`, for this micro-batch.
        """
        self._in_order("W", micro)
        state = self._micros.pop(micro)
        if state.roots is None or state.root_grads is None:
            raise ProtocolError(f"W of micro-batch {micro} was asked for before its B")
        self._accumulate(state.roots, state.root_grads, list(self.trainable.values()), partials)
        return self._take_partials()

    # -- the end of a step -------------------------------------------------------------------------------------------

    def shared_totals(self) -> dict[str, torch.Tensor]:
        """The step's gradients of parameters that later stages hold too, for them; after the last W."""
        return {n: g for n in self.shared_owned if (g := self.trainable[n].grad) is not None}

    def set_shared_totals(self, totals: Mapping[str, torch.Tensor]) -> None:
        """Gradients of `to_earlier` parameters, from the first stage that holds them."""
        for name, total in totals.items():
            if name not in self.to_earlier:
                raise ProtocolError(f"{name!r} is not a parameter whose gradient comes from an earlier stage")
            parameter = self.trainable[name]
            self._check(name, total, parameter.shape, parameter.dtype)
            parameter.grad = total.to(self.device).clone()
            self._totals.add(name)

    def grad_norms(self) -> list[tuple[str, torch.Tensor]]:
        """The norm of each gradient that this stage owns; a shared parameter is counted by its first holder."""
        found = [
            (n, g.float() if self.precision == "bf16" else g)
            for n in self.owned
            if (g := self.trainable[n].grad) is not None
        ]
        norms = torch._foreach_norm([g for _, g in found], 2.0) if found else []
        return [(n, norm) for (n, _), norm in zip(found, norms)]

    def apply(self, clip: torch.Tensor | None = None, hyper: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Commit: clip, one optimizer step with these options per group (lr and the like), keep the written buffers."""
        if self._micros:
            raise ProtocolError(f"a step was committed with {len(self._micros)} micro-batches unfinished")
        for name, parameter in self.trainable.items():
            master = self._masters[name]
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.to(master.dtype)
        if clip is not None:
            clip = clip.to(self.device)
            for master in self._masters.values():
                if master.grad is not None:
                    master.grad.mul_(clip)
        if hyper is not None:
            for group, options in zip(self.optimizer.param_groups, hyper, strict=True):
                group.update(options)
        self.optimizer.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                if master is not self.trainable[name]:
                    self.trainable[name].copy_(master)
        self.buffers.update(self._working)
        self.rollback()

    # -- evaluation and state ----------------------------------------------------------------------------------------

    def evaluate(
        self, raw: Mapping[str, torch.Tensor], received: Sequence[Boundary]
    ) -> tuple[list[Boundary], list[torch.Tensor]]:
        """The evaluation program with the committed state: what goes on, and, in the last stage, (loss, *outputs)."""
        spec, run = self.eval_spec, self._run_eval
        if spec is None or run is None:
            raise ProtocolError("this stage was built without an evaluation program")
        with torch.no_grad():
            leaves = [self._leaf(v, t) for v, t in zip(spec.received, received, strict=True)]
            results = run(
                *(raw[v.name].to(self.device) for v in spec.raw_inputs),
                *leaves,
                *(self.parameters[n] for n in spec.parameters),
                *(self.buffers[n] for n in spec.buffers),
            )
        count = len(spec.sent)
        return _to_wire(spec.sent, results[:count]), list(results[count:])

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Committed parameters (masters where there are any) and buffers by original name; not copies."""
        parameters = {n: self._masters.get(n, p).detach() for n, p in self.parameters.items()}
        return {**parameters, **self.buffers}

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state by parameter name (moments, step counts); not copies."""
        return {n: dict(self.optimizer.state.get(p, {})) for n, p in self._masters.items()}

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        for name, parameter in self._masters.items():
            if state.get(name):
                self.optimizer.state[parameter] = {
                    k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state[name].items()
                }

    # -- parts -------------------------------------------------------------------------------------------------------

    def _in_order(self, kind: str, micro: int) -> None:
        """Sums have one order because each kind runs in micro order."""
        if micro != self._next[kind]:
            raise ProtocolError(f"{kind} of micro-batch {micro} came out of order; {self._next[kind]} is next")
        self._next[kind] += 1

    def _leaf(self, value: Value, given: Boundary) -> Boundary:
        if not isinstance(given, torch.Tensor):
            return given
        if given.dtype != value.dtype or given.dim() != len(value.shape):
            raise ProtocolError(f"activation {value.name} arrived as {given.dtype} with {given.dim()} dimensions")
        tensor = value.from_wire(given.to(self.device)).detach()
        return tensor.requires_grad_() if value.requires_grad else tensor

    def _roots(
        self, state: _Micro, grads: Sequence[torch.Tensor | None], weight: float
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Where the backward pass starts, and with what."""
        if self.spec.is_last:
            loss = state.loss
            assert loss is not None
            return [loss], [torch.ones_like(loss) * weight]
        roots: list[torch.Tensor] = []
        found: list[torch.Tensor] = []
        for value, sent, grad in zip(self.spec.sent, state.sent, grads, strict=True):
            if grad is None or not isinstance(sent, torch.Tensor) or not sent.requires_grad:
                continue
            given = value.from_wire(grad.to(self.device))
            self._check(value.name, given, sent.shape, sent.dtype)
            roots.append(sent)
            found.append(given)
        return roots, found

    def _accumulate(
        self,
        roots: Sequence[torch.Tensor],
        root_grads: Sequence[torch.Tensor],
        wanted: Sequence[torch.Tensor],
        partials: Mapping[str, torch.Tensor] | None,
    ) -> None:
        """autograd adds to `.grad` of what is wanted, exactly as loss.backward() does."""
        starts, values = list(roots), list(root_grads)
        for name, partial in (partials or {}).items():
            if name not in self.from_later:
                raise ProtocolError(f"no later stage holds {name!r}")
            parameter = self.trainable[name]
            self._check(name, partial, parameter.shape, parameter.dtype)
            starts.append(parameter)
            values.append(partial.to(self.device))
        if starts and wanted:
            torch.autograd.backward(starts, values, inputs=list(wanted))

    def _take_partials(self) -> dict[str, torch.Tensor]:
        taken = {}
        for name in self.to_earlier:
            grad, self.trainable[name].grad = self.trainable[name].grad, None
            if grad is not None:
                taken[name] = grad
        return taken

    def _received_grads(self, state: _Micro, found: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """One entry per received value; None for integers and where no gradient flows."""
        ready = iter(found)
        out: list[torch.Tensor | None] = []
        for value, leaf in zip(self.spec.received, state.leaves):
            grad = next(ready, None) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else None
            out.append(None if grad is None else value.to_wire(grad))
        return out

    @staticmethod
    def _check(name: str, given: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
        if tuple(given.shape) != tuple(shape) or given.dtype != dtype:
            raise ProtocolError(f"a gradient for {name!r} arrived as {given.dtype}{tuple(given.shape)}")

    @contextlib.contextmanager
    def _generator(self, rng: Rng) -> Iterator[list[Rng]]:
        """The micro-batch's generator around a forward that draws; the state after it is left in the yielded list."""
        after: list[Rng] = [rng]
        if not self.spec.uses_random or rng is None:
            yield after
            return
        cuda = self.device.type == "cuda"
        with _generator_lock:
            if isinstance(rng, int):
                torch.manual_seed(rng)
            elif cuda:
                torch.cuda.set_rng_state(rng.cpu(), self.device)
            else:
                torch.set_rng_state(rng.cpu())
            yield after
            after[0] = torch.cuda.get_rng_state(self.device) if cuda else torch.get_rng_state()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.preserve_format)


def _differentiable(leaves: Sequence[Boundary]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _to_wire(values: Sequence[Value], results: Sequence[Any]) -> list[Boundary]:
    return [v.to_wire(t) if isinstance(t, torch.Tensor) else int(t) for v, t in zip(values, results)]
