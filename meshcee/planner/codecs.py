"""What a job's own word on codecs makes of a plan.

The idea: a user names one codec for every boundary, or `auto`, the default: 16 bits between regions, everything exact
inside of one (HGTrainer's mixed precision, 10.26599/BDMA.2025.9020031), so that a mesh on one LAN equals the plain loop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import pairwise

from meshcee.plan import Pipeline, Plan, Stage

__all__ = ["BETWEEN_REGIONS", "remarks", "with_codec"]

BETWEEN_REGIONS = "bf16"


def with_codec(
    plan: Plan, codec: str, regions: Mapping[str, str], known: Collection[frozenset[str]] | None = None
) -> Plan:
    """The plan with every boundary by this codec; `regions` (peer -> region) is what `auto` goes by.

    known   pairs of regions between which a link was measured; others are guesses, which round nothing. None: all
    """

    def between(a: Stage, b: Stage) -> str:
        if codec != "auto":
            return codec
        pairs = {frozenset((regions[p], regions[q])) for p in a.peers for q in b.peers}
        far = [pair for pair in pairs if len(pair) > 1 and (known is None or pair in known)]
        return BETWEEN_REGIONS if far else "none"

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
    if plan.sums_gradients:
        who = "pipelines add up their gradients" if len(plan.pipelines) > 1 else "groups share samples"
        found.append(f"{who}, so sums have another order than the plain loop's: losses agree to 1e-5")
    return tuple(found)
