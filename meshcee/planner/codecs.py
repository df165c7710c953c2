"""What a job's own word on codecs makes of a plan.

The idea: a user names one codec for every boundary, or `auto`, the default: 16 bits between regions, everything exact
inside of one (HGTrainer's mixed precision, 10.26599/BDMA.2025.9020031), so that a mesh on one LAN equals the plain loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from meshcee.plan import Pipeline, Plan, Stage

__all__ = ["BETWEEN_REGIONS", "remarks", "with_codec"]

BETWEEN_REGIONS = "bf16"


def with_codec(plan: Plan, codec: str, regions: Mapping[str, str]) -> Plan:
    """The plan with every boundary by this codec; `regions` (peer -> region) is what `auto` goes by."""

    def between(a: Stage, b: Stage) -> str:
        if codec != "auto":
            return codec
        return BETWEEN_REGIONS if len({regions[peer] for peer in (*a.peers, *b.peers)}) > 1 else "none"

    def changed(pipeline: Pipeline) -> Pipeline:
        names = ["none", *(between(a, b) for a, b in pairwise(pipeline.stages)), "none"]
        coded = zip(pipeline.stages, names, names[1:])
        return replace(pipeline, stages=tuple(replace(s, codec_back=back, codec_out=out) for s, back, out in coded))

    return replace(plan, pipelines=tuple(map(changed, plan.pipelines)))


def remarks(plan: Plan) -> tuple[str, ...]:
    """What a user should know of numbers that are not the plain loop's bit for bit, and how they would be."""
    found = []
    if plan.codecs:
        used = " and ".join(sorted(plan.codecs))
        found.append(
            f"some boundaries travel as {used}, which rounds; with --codec none all numbers are the plain loop's"
        )
    if plan.shares_samples:
        found.append("groups share samples, so sums have another order than the plain loop's: losses agree to 1e-5")
    return tuple(found)
