"""A pipeline of StageRunners in one thread: what the executor does, without peers, links or time.

The idea: the order in which F, B and W run is a parameter, so that a test can delay W or fill the pipeline and still
demand the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshcee.capture import Capture, Free, stack
from meshcee.job import Job, seed_of
from meshcee.sampling import draw, read
from peers.stage import StageRunner, clip_coefficient
from peers.tensors import pack, unpack

__all__ = ["Chain", "split_blocks"]


def _sent(values: Sequence[Any]) -> list[Any]:
    """As they arrive at another peer."""
    return unpack(*pack(values))


def split_blocks(num_blocks: int, stages: int) -> list[tuple[int, int]]:
    edges = [round(i * num_blocks / stages) for i in range(stages + 1)]
    return list(itertools.pairwise(edges))


class Chain:
    """`order` is "fused", "split" (W right after B), or "late" (all F, all B, then all W)."""

    def __init__(self, job: Job, captured: Capture, stages: int, order: str = "late", **options: Any) -> None:
        self.job, self.captured, self.order = job, captured, order
        self.ranges = split_blocks(captured.train.num_blocks, stages)
        self.runners = [
            StageRunner(
                captured.train.slice(*r),
                captured.state,
                job.optimizer,
                evaluate=captured.evaluate.slice(*r) if captured.evaluate else None,
                stages=self.ranges,
                index=i,
                precision=job.precision,
                **options,
            )
            for i, r in enumerate(self.ranges)
        ]
        self.tamper: Callable[[int, int], None] = lambda step, micro: None  # after a W of the first stage
        self._schedule: Any = None
        if job.schedule:
            dummy = {n: torch.nn.Parameter(torch.zeros(1)) for n in captured.param_order}
            self._optimizer = job.optimizer.build(dummy)
            self._schedule = job.schedule.build(self._optimizer)

    def run(self, steps: int) -> list[list[torch.Tensor]]:
        return [self.run_step(step) for step in range(steps)]

    def run_step(self, step: int) -> list[torch.Tensor]:
        job = self.job
        size = job.micro_batch_size or job.batch_size
        drawn = draw(job.seed, len(job.data), job.batch_size, step)
        batches = [stack(read(job.data, drawn[k : k + size], job.seed, step)) for k in range(0, len(drawn), size)]
        weights = [float(job.weight(b[1])) if job.weight else float(size) for b in batches]
        shares = [w / sum(weights) if job.reduction == "mean" else 1.0 for w in weights]
        for runner in self.runners:
            runner.begin(step)
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

    def forward(self, step: int, micro: int, batch: tuple[Any, Any]) -> torch.Tensor:
        raw = self.captured.inputs_of(batch)
        received: Sequence[Any] = []
        rng: Any = seed_of(self.job.seed, step, micro)
        loss = None
        for runner in self.runners:
            own = {v.name: raw[v.name] for v in runner.spec.raw_inputs}
            received, rng, loss = runner.forward(micro, own, _sent(received), rng)
            for value, item in zip(runner.spec.sent, received):
                if isinstance(item, torch.Tensor):
                    n = next(iter(raw.values())).shape[0]
                    assert value.admits(item, on_wire=True)
                    assert item.nbytes <= value.nbytes(n)
                    if not any(isinstance(d, Free) for d in value.shape):
                        assert tuple(item.shape) == value.wire_shape(n)
                        assert item.nbytes == value.nbytes(n)
        assert loss is not None
        return loss

    def backward_input(self, micro: int, share: float) -> None:
        grads: Sequence[Any] = []
        for runner in reversed(self.runners):
            grads = runner.backward_input(micro, _sent(grads), share)

    def backward_weight(self, step: int, micro: int) -> None:
        travelling: dict[str, torch.Tensor] = {}
        for runner in reversed(self.runners):
            mine = {n: travelling.pop(n) for n in list(travelling) if n in runner.from_later}
            travelling.update(runner.backward_weight(micro, mine))
        assert not travelling
        self.tamper(step, micro)

    def fused(self, step: int, micro: int, share: float) -> None:
        grads: Sequence[Any] = []
        travelling: dict[str, torch.Tensor] = {}
        for runner in reversed(self.runners):
            mine = {n: travelling.pop(n) for n in list(travelling) if n in runner.from_later}
            grads, partials = runner.backward(micro, _sent(grads), share, mine)
            travelling.update(partials)
        assert not travelling
        self.tamper(step, micro)

    def evaluate(self, batch: tuple[Any, Any]) -> tuple[torch.Tensor, Any]:
        """The loss and the output of the evaluation program over all stages."""
        raw = self.captured.inputs_of(batch)
        received: Sequence[Any] = []
        outputs: list[torch.Tensor] = []
        for runner in self.runners:
            received, outputs = runner.evaluate(raw, received)
        return outputs[0], self.captured.output_of(outputs[1:])

    def fused_with(self, partials: dict[str, torch.Tensor]) -> None:
        """One fused backward that is handed these partial gradients."""
        self.forward(0, 0, stack([self.job.data[0]]))
        self.runners[-1].backward(0, [], 1.0, partials)

    def finish(self) -> None:
        totals: dict[str, torch.Tensor] = {}
        for runner in self.runners:
            totals.update(runner.shared_totals())
        for runner in self.runners:
            runner.set_shared_totals({n: t for n, t in totals.items() if n in runner.to_earlier})
        clip = None
        if self.job.clip_norm is not None:
            norms = dict(n for runner in self.runners for n in runner.grad_norms())
            clip = clip_coefficient([norms[n] for n in self.captured.param_order if n in norms], self.job.clip_norm)
        hyper = None
        if self._schedule is not None:
            hyper = [{"lr": g["lr"]} for g in self._optimizer.param_groups]
            self._optimizer.step()
            self._schedule.step()
        for runner in self.runners:
            runner.apply(clip, hyper)

    def state(self) -> dict[str, torch.Tensor]:
        merged: dict[str, torch.Tensor] = {}
        for runner in self.runners:
            for name, tensor in runner.state_dict().items():
                if name in merged:
                    assert torch.equal(merged[name], tensor), f"copies of {name} differ"
                merged[name] = tensor
        return self.captured.state_dict({**self.captured.state, **merged})
