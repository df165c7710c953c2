"""Where peers stand on the map: regions apart by latency, the peers of a region around its middle.

The idea: classical scaling of the latencies between regions, on a logarithmic scale, which two dimensions hold well enough for a
person. The same mesh gives the same map: no randomness, and signs and corners are fixed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from meshcee.figures import LinkProfile
from meshcee.planner.regions import find_regions

__all__ = ["places"]

USUAL_S = 0.05  # between regions whose links nobody has measured
SHORTEST_S = 1e-4
TENSOR_BYTES = 1e6  # by which regions are told apart, as for an ordinary boundary


def places(
    peers: Sequence[str],
    links: Mapping[tuple[str, str], LinkProfile],
    hints: Mapping[str, str] | None = None,
    *,
    regions: Sequence[Sequence[str]] | None = None,
) -> dict[str, tuple[float, float, int]]:
    """Of each peer its place, from 0 to 1 both ways, and the number of its region, or -1 where there is no telling.

    What people say joins what nobody measured. Who has neither link nor region stands in a row of its own below the others.
    `regions`: they are known, and not looked for.
    """
    linked = {peer for pair in links for peer in pair} | (hints or {}).keys()
    apart = [peer for peer in sorted(peers) if peer not in linked] if linked else []
    if regions is None:
        regions = _joined(find_regions(sorted({*peers} - {*apart}), links, TENSOR_BYTES), hints or {}, links)
    centres = _centres(regions, links)
    found = {peer: (round((k + 0.5) / len(apart), 4), 1.0, -1) for k, peer in enumerate(apart)}
    height = 0.86 if apart else 1.0
    for number, (region, (x, y)) in enumerate(zip(regions, centres)):
        room = (
            0.33 if len(regions) == 1 else min(0.19, 0.1 + 0.01 * len(region)) * min(1.0, 2.2 / math.sqrt(len(regions)))
        )
        radius = room if len(region) > 1 else 0.0
        for k, peer in enumerate(region):
            angle = 2 * math.pi * k / len(region) - (math.pi / 2 if len(region) > 2 else math.pi)
            found[peer] = (
                round(x + radius * math.cos(angle), 4),
                round(height * (y + 1.3 * radius * math.sin(angle)), 4),
                number,
            )
    return found


def _joined(
    regions: Sequence[Sequence[str]], hints: Mapping[str, str], links: Mapping[tuple[str, str], LinkProfile]
) -> list[list[str]]:
    """Those without any link of their own stand with the region that their user names."""
    linked = {peer for pair in links for peer in pair}
    named: dict[str, list[str]] = {}
    found: list[list[str]] = []
    for region in regions:
        hint = next((hints[peer] for peer in region if peer in hints), None)
        is_known = any(peer in linked for peer in region)
        if hint is not None and hint in named and not is_known:
            named[hint] += region
        else:
            found.append(list(region))
            if hint is not None:
                named.setdefault(hint, found[-1])
    return found


def _centres(
    regions: Sequence[Sequence[str]], links: Mapping[tuple[str, str], LinkProfile]
) -> list[tuple[float, float]]:
    """From 0.2 to 0.8: their peers stand around them."""
    count = len(regions)
    if count < 2:
        return [(0.5, 0.5)] * count
    of = {peer: k for k, region in enumerate(regions) for peer in region}
    between: dict[tuple[int, int], list[float]] = {}
    for (a, b), link in links.items():
        if a in of and b in of and of[a] != of[b]:
            between.setdefault((min(of[a], of[b]), max(of[a], of[b])), []).append(link.latency_s)
    distance = np.zeros((count, count))
    for i in range(count):
        for j in range(i + 1, count):
            latency_s = median(between.get((i, j), [USUAL_S]))
            distance[i, j] = distance[j, i] = 1 + math.log10(max(latency_s, SHORTEST_S) / SHORTEST_S)
    centred = np.eye(count) - 1 / count
    values, vectors = np.linalg.eigh(-0.5 * centred @ distance**2 @ centred)
    axes = []
    for k in (-1, -2):
        axis = vectors[:, k] * math.sqrt(max(values[k], 0.0))
        first = next((v for v in axis if abs(v) > 1e-9), 1.0)
        axes.append(axis * (-1 if first > 0 else 1))  # the first region stands left and above
    extent = max(float(np.ptp(axes[0])), 1e-9)
    middle = [(float(a.max()) + float(a.min())) / 2 for a in axes]
    return [
        (0.5 + 0.6 * (float(x) - middle[0]) / extent, 0.5 + 0.6 * (float(y) - middle[1]) / extent)
        for x, y in zip(*axes)
    ]
