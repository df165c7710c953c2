"""A stage at work: F, B and W of its blocks, bit for bit what the eager loop would compute.

The idea: autograd sums the gradients of a value in one order, last use first. Every place where the pipeline cuts that
sum is put together again in the same order. A received gradient enters as the root of a backward pass and is therefore
the first summand. The partial gradient of a parameter that later stages use too enters in the same way at the parameter
itself. Micro-batches accumulate into `.grad` in ascending order. Each call checks that order.

Everything here is synchronous and runs in the compute thread of one device. A step is a transaction: gradients and the
buffers that F writes are the step's own until `apply`, and `rollback` forgets them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshcee.capture.graph import StageSpec, Value, moved, unfolded
from meshcee.errors import ProtocolError
from meshcee.files.layout import copied
from meshcee.optim import Optimizer
from meshcee.stage.deferred import Deferral, Tape, Template
from meshcee.stage.draws import Draws, Rng
from meshcee.stage.statistics import BatchStatistics
from meshcee.stage.weights import Weights

__all__ = ["Rng", "StageRunner", "clip_coefficient", "global_norm"]

Boundary = torch.Tensor | int


def global_norm(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """As torch.nn.utils.get_total_norm: `norms` of all gradients there are, in named_parameters order; none give 0."""
    return torch.linalg.vector_norm(torch.stack(list(norms)), 2.0) if norms else torch.tensor(0.0)


def clip_coefficient(norms: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """What torch.nn.utils.clip_grad_norm_ multiplies gradients of these norms by."""
    return torch.clamp(max_norm / (global_norm(norms) + 1e-6), max=1.0)


@dataclass
class _Micro:
    """What F leaves behind for B, and B for W."""

    leaves: list[Boundary]  # received, as leaves of this stage's graph
    results: list[Any]  # sent, or the loss, with their graph
    tape: Tape | None  # None: one plain graph, which B and W both walk
    redo: Callable[[], _Micro] | None = None  # recomputation: makes the three above
    roots: list[torch.Tensor] = field(default_factory=list)  # of W, set by B
    grads: list[torch.Tensor] = field(default_factory=list)


class StageRunner:
    """One stage of one job on one device.

    `state` holds full-precision tensors by original name: what `state_names` of both specs lists. `stages` are the
    block ranges of all stages and `index` our own; they say which parameters live elsewhere too.
    `recompute` keeps only what F received, and runs F again before B. `split` (which may be changed between
    micro-batches) prepares F for a B without W; a fused `backward` is somewhat faster without it. `draws` replaces the
    random operators of a member that has only some rows of a micro-batch (`whole_draws`).
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
        device: torch.device | str = "cpu",
        recompute: bool = False,
        split: bool = True,
        draws: Mapping[int, Callable[..., Any]] | None = None,
    ) -> None:
        self.spec = train
        self.eval_spec = evaluate
        self.device = torch.device(device)
        self.index = index
        self.recompute = recompute
        self.split = split
        shared = train.shared(stages) if stages is not None else {}
        self.to_earlier = tuple(n for n, at in shared.items() if at[0] < index)  # W sends their partials up the chain
        self.from_later = tuple(n for n, at in shared.items() if at[-1] > index)  # W needs their partials first
        self.owned = tuple(n for n in train.trainable if n not in self.to_earlier)
        self.shared_owned = tuple(n for n in self.owned if n in shared)
        both = [train, *([evaluate] if evaluate else [])]
        self.weights = Weights(
            tuple(dict.fromkeys(n for spec in both for n in spec.parameters)),
            train.trainable,
            tuple(dict.fromkeys(n for spec in both for n in spec.buffers)),
            state,
            optimizer,
            self.device,
            {entry.name: entry for spec in both for _, entry in spec.inputs if entry.kind != "raw"},
        )
        self.trainable = self.weights.trainable
        self._partial = draws is not None
        draws = dict(draws or {})
        remade = None
        if unfolded(train.inputs, train.nodes):
            from meshcee.stage.remade import Remade

            remade = Remade(train, self.weights, self.device)
            draws |= remade.calls
        self.statistics = BatchStatistics(train)
        instead = self.statistics.calls
        self._deferral = Deferral(train, self.device, frozenset(draws), instead)
        draws |= {number: Template(node, instead[number]).run for number, node in train.nodes if number in instead}
        self._draws = Draws(self.device)
        draws |= self._draws.calls(train.nodes, draws)
        self._run = train.build(self.device, draws)
        self._run_split = train.build(self.device, draws | self._deferral.calls) if self._deferral.calls else self._run
        if remade is not None:
            self._run, self._run_split = remade.around(self._run), remade.around(self._run_split)
        self._run_eval = evaluate.build(self.device, self._draws.calls(evaluate.nodes, {})) if evaluate else None
        self._micros: dict[int, _Micro] = {}
        self._next = {"F": 0, "B": 0, "W": 0}
        self.terms: dict[str, list[torch.Tensor]] = {}  # gradients of earlier micro-batches, by name: see `keep_terms`
        self.step = -1
        self.rollback()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.weights.optimizer

    # -- the step ----------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Open the transaction of a step; whatever an earlier one left uncommitted is dropped."""
        self.rollback()
        self.step = step

    def rollback(self) -> None:
        """Forget the step: gradients, activations, written buffers."""
        self.weights.drop_grads()
        self.statistics.written = {name: self.weights.buffers[name] for name in self.spec.mutated}
        self._micros.clear()
        self._next = {"F": 0, "B": 0, "W": 0}
        for earlier in self.terms.values():
            earlier.clear()
        self.statistics.forget()

    def close(self) -> None:
        """Free all memory, whoever still refers to this stage."""
        self.rollback()
        self.statistics.written.clear()
        self.weights.close()

    def keep_terms(self, names: Iterable[str]) -> None:
        """Keep the gradients of each micro-batch apart: in `.grad` is the newest alone, in `terms` those before, in order.

        For who adds them to a sum that others have begun, in the plain loop's order.
        """
        self.terms |= {name: [] for name in names}

    def take_written(self, written: Mapping[str, torch.Tensor]) -> None:
        """What the step makes of these buffers, with the micro-batches of others."""
        self.statistics.written |= written

    @property
    def written(self) -> dict[str, torch.Tensor]:
        """The buffers that F writes, as the step has them so far."""
        return self.statistics.written

    @property
    def live(self) -> int:
        """Micro-batches between F and W."""
        return len(self._micros)

    def forward(
        self, micro: int, raw: Mapping[str, torch.Tensor], received: Sequence[Boundary], rng: Rng = None
    ) -> tuple[list[Boundary], Rng, list[torch.Tensor]]:
        """F: what goes to the next stage (dimensions in wire order), the generator's state after, and, in the last stage, (loss,
        *terms).

        `rng` is the micro-batch's seed (an int) as long as no stage has drawn from the seed. After that, `rng` is the
        state that the stage before returned. A stage that draws nothing hands `rng` on untouched.
        """
        self._in_order("F", micro)
        own = self._fed(self.spec, raw)
        given = [self._arrived(v, t) for v, t in zip(self.spec.received, received, strict=True)]
        buffers, split = self.statistics.written, self.split and self._deferral.possible
        state, self.statistics.written, after = self._compute(own, given, buffers, rng, split)
        self.statistics.note()
        results = state.results
        if self.recompute:
            # F ran with autograd on, because kernels may be chosen by it; only what it needs to run again is kept.
            state = _Micro([], [], None, redo=lambda: self._compute(own, given, buffers, rng, split)[0])
        self._micros[micro] = state
        if self.spec.is_last:
            return [], after, [result.detach() for result in results]
        return _to_wire(self.spec.sent, results), after, []

    def sent(self, micro: int) -> list[Any]:
        """What F of this micro-batch gave: tensors with their dimensions in eager order, and sizes; before its B."""
        return self._redone(micro).results

    def backward(
        self,
        micro: int,
        grads: Sequence[torch.Tensor | None] = (),
        weight: float = 1.0,
        partials: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[list[torch.Tensor | None], dict[str, torch.Tensor]]:
        """B and W in one: gradients for `received`, and partial gradients for the earlier holders."""
        if self._redone(micro).tape is not None:
            return self.backward_input(micro, grads, weight), self.backward_weight(micro, partials)
        self._in_order("B", micro)
        self._in_order("W", micro)
        state = self._micros.pop(micro)
        roots, values, _ = self._roots(state, grads, weight)
        inputs = _differentiable(state.leaves)
        otherwise = [_laid_otherwise(leaf) for leaf in inputs]
        self._accumulate(roots, values, [*inputs, *self.trainable.values()], partials)
        found = [own[0] if own else leaf.grad for leaf, own in zip(inputs, otherwise)]
        return self._received_grads(state, found), self._take_partials()

    def backward_input(
        self, micro: int, grads: Sequence[torch.Tensor | None] = (), weight: float = 1.0
    ) -> list[torch.Tensor | None]:
        """B: gradients for `received`. `weight` is the micro-batch's share of the step's loss (last stage)."""
        self._in_order("B", micro)
        state = self._redone(micro)
        roots, values, of_weights = self._roots(state, grads, weight)
        inputs = _differentiable(state.leaves)
        found: Sequence[torch.Tensor | None] = ()
        if state.tape is None:
            if inputs and roots:
                keep = bool(self.trainable)
                found = torch.autograd.grad(roots, inputs, values, retain_graph=keep, allow_unused=True)
            state.roots, state.grads = roots, values
        else:
            data = [i for i, own in enumerate(of_weights) if not own]
            if inputs and data:
                found = torch.autograd.grad(
                    [roots[i] for i in data], inputs, [values[i] for i in data], allow_unused=True
                )
            for i, own in enumerate(of_weights):
                if own:
                    state.tape.outputs.append(roots[i])
                    state.tape.grads.append(values[i])
            state.roots, state.grads = state.tape.outputs, state.tape.grads
        arrived = self._received_grads(state, found)
        state.leaves, state.results = [], []
        return arrived

    def backward_weight(
        self, micro: int, partials: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """W: adds to the parameters' gradients; returns partial gradients for the earlier holders.

        `partials` come from the next later holder of each parameter in `from_later`, for this micro-batch.
        """
        if micro >= self._next["B"]:
            raise ProtocolError(f"W of micro-batch {micro} was asked for before its B")
        self._in_order("W", micro)
        state = self._micros.pop(micro)
        self._accumulate(state.roots, state.grads, list(self.trainable.values()), partials)
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
            _check(name, total, parameter)
            parameter.grad = total.to(self.device).clone()

    def grad_norms(self) -> list[tuple[str, torch.Tensor]]:
        """The norm of each gradient that this stage owns; a shared parameter is counted by its first holder."""
        return self.weights.norms(self.owned)

    def norm_values(self) -> list[tuple[str, float]]:
        """`grad_norms` as numbers, read off the device in one go."""
        found = self.grad_norms()
        values = torch.stack([norm.double() for _, norm in found]).tolist() if found else []
        return [(name, value) for (name, _), value in zip(found, values)]

    def clip(self, norms: Sequence[float], dtype: torch.dtype, max_norm: float) -> tuple[float, float]:
        """The global norm of all parameters' norms, and what gradients are multiplied by.

        On the device: a GPU adds in another order than a CPU, and the plain loop has its norms beside its gradients.
        """
        given = torch.tensor(norms, dtype=dtype, device=self.device).unbind()
        return float(global_norm(given)), float(clip_coefficient(given, max_norm))

    def not_finite(self) -> str | None:
        """The first parameter whose gradient is NaN or infinite somewhere."""
        return self.weights.not_finite()

    def apply(self, clip: torch.Tensor | None = None, hyper: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Commit: clip, one optimizer step with these options per group (lr and the like), keep the written buffers."""
        if self._micros:
            raise ProtocolError(f"a step was committed with {len(self._micros)} micro-batches unfinished")
        self.weights.commit(None if clip is None else clip.to(self.device), hyper)
        self.weights.buffers.update(self.statistics.written)
        self.rollback()

    # -- evaluation and state ----------------------------------------------------------------------------------------

    def evaluate(
        self, raw: Mapping[str, torch.Tensor], received: Sequence[Boundary], rng: Rng = None
    ) -> tuple[list[Boundary], Rng, list[torch.Tensor]]:
        """The evaluation program with the committed state: what goes on, the generator's state after, as in F, and, in the last
        stage, (loss, *outputs)."""
        spec, run = self.eval_spec, self._run_eval
        if spec is None or run is None:
            raise ProtocolError("this stage was built without an evaluation program")
        own = self._fed(spec, raw)
        given = [self._arrived(v, t) for v, t in zip(spec.received, received, strict=True)]
        with torch.no_grad(), self._draws.seeded(rng, spec) as after:
            results = run(
                *own,
                *given,
                *(self.weights.evaluated(n) for n in spec.parameters),
                *(self.weights.buffers[n] for n in spec.buffers),
            )
        count = len(spec.sent)
        return _to_wire(spec.sent, results[:count]), after[0], list(results[count:])

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Committed parameters (masters where there are any) and buffers by original name; not copies."""
        return self.weights.state_dict()

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state by parameter name (moments, step counts); not copies."""
        return self.weights.optimizer_state()

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self.weights.load_optimizer_state(state)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _in_order(self, kind: str, micro: int) -> None:
        """Sums have one order because each kind runs in micro order."""
        if micro != self._next[kind]:
            raise ProtocolError(f"{kind} of micro-batch {micro} came out of order; {self._next[kind]} is next")
        self._next[kind] += 1

    def _redone(self, micro: int) -> _Micro:
        """What F left, computed again where it was not kept."""
        state = self._micros[micro]
        if state.redo is not None:
            state = self._micros[micro] = state.redo()
        return state

    def _fed(self, spec: StageSpec, raw: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The raw inputs on our device; ProtocolError where one is missing, or of another type or shape than declared."""
        for value in spec.raw_inputs:
            if (given := raw.get(value.name)) is None:
                raise ProtocolError(f"input {value.name} did not arrive")
            if not value.admits(given):
                raise ProtocolError(f"input {value.name} arrived as {given.dtype}{tuple(given.shape)}")
        return [raw[value.name].to(self.device) for value in spec.raw_inputs]

    def _arrived(self, value: Value, given: Boundary) -> Boundary:
        """A received value on our device, with the strides it had where it was made."""
        if not isinstance(given, torch.Tensor):
            if value.is_tensor or not isinstance(given, int):
                raise ProtocolError(f"activation {value.name} arrived as a {type(given).__name__}")
            return given
        if not value.admits(given, on_wire=True):
            raise ProtocolError(f"activation {value.name} arrived as {given.dtype}{tuple(given.shape)}")
        return value.from_wire(moved(given, self.device))

    def _compute(
        self,
        raw: Sequence[torch.Tensor],
        given: Sequence[Boundary],
        buffers: Mapping[str, torch.Tensor],
        rng: Rng,
        split: bool,
    ) -> tuple[_Micro, dict[str, torch.Tensor], Rng]:
        """One forward pass with its graph; the buffers and the generator's state after it."""
        leaves = [
            t.detach().requires_grad_(v.requires_grad) if isinstance(t, torch.Tensor) else t
            for v, t in zip(self.spec.received, given)
        ]
        written = {name: copied(t) for name, t in buffers.items()}  # a later F must not disturb this one's graph
        self.statistics.begin()
        tape = self._deferral.tape = Tape() if split else None
        with torch.enable_grad(), self._draws.seeded(rng, self.spec) as after:
            results = (self._run_split if split else self._run)(
                *raw,
                *leaves,
                *(self.weights.parameters[n] for n in self.spec.parameters),
                *(written[n] if n in written else self.weights.buffers[n] for n in self.spec.buffers),
            )
        self._deferral.tape = None  # the last micro-batch's would be kept until the next step
        return _Micro(leaves, list(results), tape), written, after[0]

    def _roots(
        self, state: _Micro, grads: Sequence[torch.Tensor | None], weight: float
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[bool]]:
        """Where the backward pass starts, with what, and whether that depends on parameters alone."""
        weights = self._deferral.weights
        if self.spec.is_last:
            loss = state.results[0]
            if self._partial and weight == 0 and not loss.isfinite():
                return [], [], []  # our rows hold no target that counts; 0 times the gradient of 0 / 0 is no number
            return [loss], [torch.ones_like(loss) * weight], [self.spec.output_numbers[0] in weights]
        roots: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        of_weights: list[bool] = []
        rows = zip(self.spec.sent, self.spec.sent_numbers, state.results, grads, strict=True)
        for value, number, sent, grad in rows:
            if grad is None or not isinstance(sent, torch.Tensor) or not sent.requires_grad:
                continue
            given = value.from_wire(moved(grad, self.device)) if grad.dim() == sent.dim() else grad
            _check(value.name, given, sent)
            roots.append(sent)
            values.append(given)
            of_weights.append(number in weights)
        return roots, values, of_weights

    def _accumulate(
        self,
        roots: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        wanted: Sequence[torch.Tensor],
        partials: Mapping[str, torch.Tensor] | None,
    ) -> None:
        """autograd adds to `.grad` of what is wanted, exactly as loss.backward() does."""
        starts, given = list(roots), list(values)
        for name, partial in (partials or {}).items():
            if name not in self.from_later:
                raise ProtocolError(f"no later stage holds {name!r}")
            _check(name, partial, self.trainable[name])
            starts.append(self.trainable[name])
            given.append(moved(partial, self.device))
        for name, earlier in self.terms.items():
            if (grad := self.trainable[name].grad) is not None:
                earlier.append(grad)
                self.trainable[name].grad = None
        if starts and wanted:
            torch.autograd.backward(starts, given, inputs=list(wanted))

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


def _check(name: str, given: torch.Tensor, like: torch.Tensor) -> None:
    if given.shape != like.shape or given.dtype != like.dtype:
        raise ProtocolError(f"a gradient for {name!r} arrived as {given.dtype}{tuple(given.shape)}")


def _differentiable(leaves: Sequence[Boundary]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _laid_otherwise(leaf: torch.Tensor) -> list[torch.Tensor]:
    """Will hold the leaf's gradient where that lies in memory otherwise: autograd adds it to `.grad` as the leaf lies.

    The stage before would then add up the same numbers in another order than the plain loop.
    """
    found: list[torch.Tensor] = []
    strides = leaf.stride()  # a hook that refers to its leaf would keep it until the garbage is collected

    def keep(grad: torch.Tensor) -> None:
        if grad.stride() != strides or 0 in strides:
            found.append(grad)

    leaf.register_hook(keep)  # type: ignore[no-untyped-call]
    return found


def _to_wire(values: Sequence[Value], results: Sequence[Any]) -> list[Boundary]:
    return [v.to_wire(t) if isinstance(t, torch.Tensor) else int(t) for v, t in zip(values, results)]
