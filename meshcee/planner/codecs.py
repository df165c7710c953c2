"""What a job's own word on codecs makes of a plan.

The idea: a user names one codec for every boundary, or `auto`, the default: 16 bits between regions, everything exact
inside of one (HGTrainer's mixed precision, 10.26599/BDMA.2025.9020031), so that a mesh on one LAN equals the plain loop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from meshcee.plan import Plan

__all__ = ["BETWEEN_REGIONS", "auto", "remarks"]

BETWEEN_REGIONS = "bf16"


def auto(
    a: Collection[str], b: Collection[str], *, regions: Mapping[str, str], known: Collection[frozenset[str]]
) -> str:
    """The codec of a boundary between these groups.

    regions  peer -> region
    known    pairs of regions between which a link was measured; others are guesses, which round nothing
    """
    pairs = {frozenset((regions[p], regions[q])) for p in a for q in b}
    return BETWEEN_REGIONS if any(len(pair) > 1 and pair in known for pair in pairs) else "none"


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
