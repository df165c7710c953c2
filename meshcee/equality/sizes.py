"""What a plan computes at once, where it cuts, and how fast this machine is: what a look runs, and may."""

from __future__ import annotations

import time

import torch

from meshcee.capture import Capture
from meshcee.plan import Plan
from meshcee.role import rows_of

__all__ = ["Cut", "cuts_of", "forward_s", "sizes_of"]

Cut = tuple[tuple[int, int], ...]
UTILISATION = 0.5  # of the speed of a matrix product, by a whole model


def sizes_of(plan: Plan) -> list[int]:
    """The numbers of samples that a device computes at once, the whole micro-batch first."""
    parts = {
        end - first
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for first, end in rows_of(stage, plan.micro_batch)
    }
    return [plan.micro_batch, *sorted(parts - {plan.micro_batch, 0})]


def cuts_of(plan: Plan) -> list[Cut]:
    """The stages of each pipeline."""
    return list(dict.fromkeys(tuple((s.first, s.end) for s in p.stages) for p in plan.pipelines))


def forward_s(captured: Capture) -> float:
    """A sample's forward pass here, by the speed of this machine's matrix products, which is measured in some 10 ms."""
    x = torch.ones(384, 384)
    x @ x
    start_s = time.perf_counter()
    for _ in range(3):
        x @ x
    flops_per_s = 3 * 2 * 384**3 / max(time.perf_counter() - start_s, 1e-6)
    return sum(cost.flops for cost in captured.costs) / (UTILISATION * flops_per_s)
