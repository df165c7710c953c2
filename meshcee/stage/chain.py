"""A pipeline of StageRunners in one thread: what the executor does, without peers, links or time.

The idea: what is to be equal is what stages compute, not how they hear of each other; so whatever checks a cut runs it here.
The order in which F, B and W run is a parameter, so that W can be delayed, or the pipeline filled, and still the same bits be
demanded. What crosses a boundary goes through one method, where a codec may stand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from meshcee.capture import Capture, Value
from meshcee.codec import Coder, accepted, noise_seed
from meshcee.errors import UsageError
from meshcee.job import Job, seed_of, shares_of
from meshcee.optim import HyperSchedule, Optimizer
from meshcee.sampling import NO_STEP, source_of
from meshcee.stage.runner import Rng, StageRunner, clip_coefficient
from meshcee.stage.tensors import pack, unpack

__all__ = ["Chain", "split_blocks"]

Ranges = Sequence[tuple[int, int]]


def split_blocks(num_blocks: int, stages: int) -> list[tuple[int, int]]:
    """Block ranges of so many stages, of about as many blocks each."""
    edges = [round(i * num_blocks / stages) for i in range(stages + 1)]
    return list(itertools.pairwise(edges))


def _owned(runner: StageRunner) -> Iterator[tuple[str, torch.Tensor]]:
    for name in runner.owned:
        if (grad := runner.trainable[name].grad) is not None:
            yield name, grad


class Chain:
    """`order` is "fused", "split" (W right after B), or "late" (all F, all B, then all W).

    `stages` is their number, or their ranges of blocks. `state` takes the place of the captured one, `optimizer` of the
    job's. `codec` rounds (or packs) what crosses as between peers.
    """

    def __init__(
        self,
        job: Job,
        captured: Capture,
        stages: int | Ranges,
        order: str = "late",
        *,
        state: Mapping[str, torch.Tensor] | None = None,
        optimizer: Optimizer | None = None,
        codec: str = "none",
        **options: Any,
    ) -> None:
        self.job, self.captured, self.order, self.codec = job, captured, order, codec
        self.initial = captured.state if state is None else state
        self.ranges = split_blocks(captured.train.num_blocks, stages) if isinstance(stages, int) else list(stages)
        self.runners = [
            StageRunner(
                captured.train.slice(*r),
                self.initial,
                optimizer or job.optimizer,
                evaluate=captured.evaluate.slice(*r) if captured.evaluate else None,
                stages=self.ranges,
                index=i,
                **options,
            )
            for i, r in enumerate(self.ranges)
        ]
        for i, runner in enumerate(self.runners if order == "fused" else ()):
            runner.split &= i > 0 and not runner.to_earlier  # as in a mesh, where a stage before waits for W as well
        coded = [] if codec == "none" else range(len(self.ranges))
        self._coders = {(kind, i): Coder(codec) for kind in "FB" for i in coded}
        self._hyper = HyperSchedule(job.optimizer, job.schedule)
        self._source = source_of(job)
        self.step = 0
        self.hear: Callable[[Mapping[str, torch.Tensor]], None] | None = None  # gradients, as they are applied
        self.rng: Rng = None  # of the newest micro-batch, after its forward pass

    def run(self, steps: int) -> list[list[torch.Tensor]]:
        """The loss of every micro-batch of every step."""
        return [self.run_step(step) for step in range(steps)]

    def run_step(self, step: int) -> list[torch.Tensor]:
        job = self.job
        size = job.micro_batch_size or job.batch_size
        batches = [self._source.batch(step, k, k + size) for k in range(0, job.batch_size, size)]
        weights = [float(job.weight(b[1])) if job.weight else float(size) for b in batches]
        shares = shares_of(weights) if job.reduction == "mean" else [1.0] * len(weights)
        self.begin(step)
        losses = []
        if self.order == "late":
            for m, batch in enumerate(batches):
                losses.append(self.forward(step, m, batch))
            for m in range(len(batches)):
                self.backward_input(m, shares[m])
            for m in range(len(batches)):
                self.backward_weight(step, m)
        else:
            for m, batch in enumerate(batches):
                losses.append(self.forward(step, m, batch))
                if self.order == "fused":
                    self.fused(step, m, shares[m])
                else:
                    self.backward_input(m, shares[m])
                    self.backward_weight(step, m)
        self.finish()
        return losses

    def begin(self, step: int) -> None:
        self.step = step
        for runner in self.runners:
            runner.begin(step)

    def forward(self, step: int, micro: int, batch: tuple[Any, Any]) -> torch.Tensor:
        raw = self.captured.inputs_of(batch)
        if said := self.captured.misfit(raw):
            raise UsageError(f"step {step + 1}, micro-batch {micro + 1}: {said}")
        received: Sequence[Any] = []
        self.rng = seed_of(self.job.seed, step, micro)
        told: Sequence[torch.Tensor] = ()
        for i, runner in enumerate(self.runners):
            own = {v.name: raw[v.name] for v in runner.spec.raw_inputs}
            sent, self.rng, told = runner.forward(micro, own, received, self.rng)
            received = self.arrived("F", i, runner.spec.sent, sent, micro)
        self.terms = dict(zip(self.captured.terms, told[1:], strict=True))
        return told[0]

    def backward_input(self, micro: int, share: float) -> None:
        grads: Sequence[Any] = []
        for i, runner in reversed(list(enumerate(self.runners))):
            grads = self._back(i, micro, runner.backward_input(micro, grads, share))

    def backward_weight(self, step: int, micro: int) -> None:
        travelling: dict[str, torch.Tensor] = {}
        for runner in reversed(self.runners):
            mine = {n: travelling.pop(n) for n in list(travelling) if n in runner.from_later}
            travelling.update(runner.backward_weight(micro, mine))
        assert not travelling

    def fused(self, step: int, micro: int, share: float) -> None:
        grads: Sequence[Any] = []
        travelling: dict[str, torch.Tensor] = {}
        for i, runner in reversed(list(enumerate(self.runners))):
            mine = {n: travelling.pop(n) for n in list(travelling) if n in runner.from_later}
            found, partials = runner.backward(micro, grads, share, mine)
            grads = self._back(i, micro, found)
            travelling.update(partials)
        assert not travelling

    def _back(self, stage: int, micro: int, grads: Sequence[Any]) -> list[Any]:
        return self.arrived("B", stage, self.runners[stage].spec.received, grads, micro)

    def arrived(self, kind: str, stage: int, values: Sequence[Value], items: Sequence[Any], micro: int) -> list[Any]:
        """What arrives of the values (F), or of their gradients (B), that leave this stage: through bytes, as between peers."""
        coder = self._coders.get((kind, stage))
        if coder is None:
            return unpack(*pack(items))

        def encode(place: int, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
            seed = noise_seed(self.job.seed, self.step, micro, stage, place) if kind == "B" else None
            return coder.encode(tensor, seed) if values[place].requires_grad else None

        return unpack(*pack(items, encode), codecs=accepted(self.codec), limit_bytes=1 << 50)

    def evaluate(self, batch: tuple[Any, Any]) -> tuple[torch.Tensor, Any]:
        """The loss and the output of the evaluation program over all stages, as the mesh evaluates its first micro-batch."""
        raw = self.captured.inputs_of(batch)
        received: Sequence[Any] = []
        outputs: list[torch.Tensor] = []
        rng: Rng = seed_of(self.job.seed, NO_STEP, 0)
        for runner in self.runners:
            received, rng, outputs = runner.evaluate(raw, received, rng)
        return outputs[0], self.captured.output_of(outputs[1:])

    def grads(self) -> dict[str, torch.Tensor]:
        """The gradients there are, each from the first stage that holds the parameter."""
        return {n: g for runner in self.runners for n, g in _owned(runner)}

    def finish(self) -> None:
        """Gradients of shared parameters to all their holders, clipping, the optimizer's step."""
        totals: dict[str, torch.Tensor] = {}
        for runner in self.runners:
            totals.update(runner.shared_totals())
        for runner in self.runners:
            runner.set_shared_totals({n: t for n, t in totals.items() if n in runner.to_earlier})
        clip = None
        if self.job.clip_norm is not None:
            norms = dict(n for runner in self.runners for n in runner.grad_norms())
            clip = clip_coefficient([norms[n] for n in self.captured.param_order if n in norms], self.job.clip_norm)
        hyper = self._hyper.at(self.step)
        if self.hear is not None:
            full = {n: g.to(r.weights.masters[n].dtype) for r in self.runners for n, g in _owned(r)}
            self.hear(full if clip is None else {n: g * clip for n, g in full.items()})
        for runner in self.runners:
            runner.apply(clip, hyper)

    def state(self) -> Mapping[str, torch.Tensor]:
        """As the model's state_dict names it."""
        merged: dict[str, torch.Tensor] = {}
        for runner in self.runners:
            for name, tensor in runner.state_dict().items():
                if name in merged:
                    assert torch.equal(merged[name], tensor), f"copies of {name} differ"
                merged[name] = tensor
        return self.captured.state_dict({**self.initial, **merged})
