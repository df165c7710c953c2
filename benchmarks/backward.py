"""A stage in the middle, three ways: B and W in one, split, and with F run again; what each costs in time and keeps in memory.

The idea: the middle third of a model's blocks is one stage, fed what the third before it sends and a gradient of ones. All
three compute the same gradients, which is checked. Bytes are those of the tensors that autograd keeps for the backward
pass, parameters left out, and what F received.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from measure import Turns

from meshcee.capture import capture, stack
from meshcee.job import Job
from meshcee.stage.runner import StageRunner

__all__ = ["three_ways"]

WAYS = {"fused": {"split": False}, "split": {"split": True}, "recompute": {"split": True, "recompute": True}}
MICROS = 4  # in a turn


class _Saved:
    """What autograd keeps of one tensor, for as long as it keeps it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Middle:
    """One way to run the middle stage."""

    def __init__(self, job: Job, captured: Any, stages: Sequence[tuple[int, int]], device: str, way: str) -> None:
        spec = captured.train.slice(*stages[1])
        self.way = way
        self.runner = StageRunner(
            spec, captured.state, job.optimizer, stages=stages, index=1, device=device, **WAYS[way]
        )
        self.parameters = {p.untyped_storage().data_ptr() for p in self.runner.weights.parameters.values()}

    def forward(self, micro: int, raw: Any, received: Sequence[Any]) -> list[Any]:
        return self.runner.forward(micro, raw, received, 1)[0]

    def back(self, micro: int, grads: Sequence[Any]) -> None:
        if self.way == "fused":
            self.runner.backward(micro, grads)
        else:
            self.runner.backward_input(micro, grads)
            self.runner.backward_weight(micro)

    def turn(self, step: int, raw: Any, received: Sequence[Any], grads: Sequence[Any]) -> float:
        """Seconds a micro-batch."""
        self.runner.begin(step)
        start_s = time.perf_counter()
        for micro in range(MICROS):
            self.forward(micro, raw, received)
            self.back(micro, grads)
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)
        return (time.perf_counter() - start_s) / MICROS

    def kept(self, raw: Any, received: Sequence[Any], grads: Sequence[Any]) -> tuple[int, int]:
        """Bytes between F and B, and between B and W (0 where they are one)."""
        alive: weakref.WeakSet[_Saved] = weakref.WeakSet()

        def pack(tensor: torch.Tensor) -> _Saved:
            alive.add(saved := _Saved(tensor.detach()))  # with its graph it would keep itself
            return saved

        given = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in received if torch.is_tensor(t)}

        def held(known: dict[int, int]) -> int:
            gc.collect()
            storages = [saved.tensor.untyped_storage() for saved in alive]
            found = known | {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in self.parameters}
            return sum(found.values())

        self.runner.begin(0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            self.forward(0, raw, received)
            after_f = held(given)
            if self.way == "fused":
                self.back(0, grads)
                return after_f, 0
            self.runner.backward_input(0, grads)
        after_b = held({})
        self.runner.backward_weight(0)
        return after_f, after_b

    def gradients(self) -> dict[str, torch.Tensor]:
        return {n: p.grad.clone() for n, p in self.runner.trainable.items() if p.grad is not None}


def three_ways(job: Job, turns: int, device: str) -> dict[str, Any]:
    """Median seconds of F and backward of a micro-batch each way, their ratios within a turn, and bytes kept."""
    captured = capture(job)
    blocks = captured.train.num_blocks
    cuts = [round(i * blocks / 3) for i in range(4)]
    stages = list(itertools.pairwise(cuts))
    before = StageRunner(captured.train.slice(*stages[0]), captured.state, job.optimizer, stages=stages, device=device)
    batch = stack([job.data[i] for i in range(job.micro_batch_size or job.batch_size)])
    raw = captured.inputs_of(batch)
    received, _, _ = before.forward(0, raw, (), 1)
    ways = {way: _Middle(job, captured, stages, device, way) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    sent = ways["fused"].forward(0, raw, received)
    wanted = [v.requires_grad and torch.is_tensor(t) for v, t in zip(ways["fused"].runner.spec.sent, sent)]
    grads = [torch.ones_like(t) if grad else None for t, grad in zip(sent, wanted)]
    for turn in range(turns + 1):
        for way, middle in ways.items():
            took_s = middle.turn(turn, raw, received, grads)
            if turn:  # the first turn warms caches and allocators up
                seconds[way].append(took_s)
    found = [middle.gradients() for middle in ways.values()]
    if any(g.keys() != found[0].keys() or not all(torch.equal(g[n], found[0][n]) for n in g) for g in found[1:]):
        raise SystemExit(f"{job.name}: the ways differ in their gradients")
    kept = {way: middle.kept(raw, received, grads) for way, middle in ways.items()}
    return {
        "job": job.name,
        "blocks": stages[1][1] - stages[1][0],
        "seconds": {way: statistics.median(s) for way, s in seconds.items()},
        "fused_over_split": Turns(seconds["fused"], seconds["split"]).to_json()["ratio"],
        "split_over_recompute": Turns(seconds["split"], seconds["recompute"]).to_json()["ratio"],
        "kept_f_to_b_bytes": {way: f for way, (f, _) in kept.items()},
        "kept_b_to_w_bytes": {way: b for way, (_, b) in kept.items()},
    }
