"""What a job's own word on codecs makes of a plan.

The idea: a user names one codec for every boundary, or `auto`, the default: 16 bits between regions, everything exact
inside of one (HGTrainer's mixed precision, 10.26599/BDMA.2025.9020031), so that a mesh on one LAN equals the plain loop.
`lossless` leaves everything exact. With both, what crosses a thin link is packed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from meshcee.plan import Plan

__all__ = ["between", "remarks"]

THIN_BYTES_PER_S = 25e6  # packing takes about as long as the bytes that it saves on a link of 24 (fp32) to 49e6 (bf16)


def between(
    choice: str,
    a: Collection[str],
    b: Collection[str],
    *,
    regions: Mapping[str, str],
    links: Mapping[frozenset[str], float],
) -> str:
    """The codec of a boundary between these groups, as "auto" or "lossless" chooses it.

    regions  peer -> region
    links    pair of regions -> bytes per second of the link, where one was measured; others are guesses, which change nothing
    """
    pairs = {frozenset((regions[p], regions[q])) for p in a for q in b}
    met = [links[pair] for pair in pairs if len(pair) > 1 and pair in links]
    if not met:
        return "none"
    thin = min(met) < THIN_BYTES_PER_S
    if choice == "lossless":
        return "lossless" if thin else "none"
    return "bf16-lossless" if thin else "bf16"


def remarks(plan: Plan) -> tuple[str, ...]:
    """What a user should know of numbers that are not the plain loop's bit for bit, and how they would be."""
    found = []
    if plan.codecs:
        used = " and ".join(sorted(plan.codecs))
        found.append(
            f"some boundaries travel as {used}, which rounds; with --codec lossless all numbers are the plain loop's"
        )
    if plan.sums_gradients:
        who = "pipelines add up their gradients" if len(plan.pipelines) > 1 else "groups share samples"
        found.append(f"{who}, so sums have another order than the plain loop's: losses agree to 1e-5")
    return tuple(found)
