"""Several pipelines side by side, from rows that were judged for one.

The idea: among the rows that the search for one pipeline has judged there are good ones for many sets of devices. Sets
that do not overlap are put together: each takes micro-batches in proportion to its pace, and what the reduction of all
gradients between them costs is added. Devices of a class are alike, so a set is a number of each class.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshcee.planner.chain import Chain, Layout
from meshcee.planner.rows import Row, Rows

__all__ = ["side_by_side"]

TEAMS = 200  # sets of devices that are combined


def side_by_side(
    judged: Sequence[tuple[float, Chain]], rows: Rows, micro_batch: int, codec: str, most: int | None, keep: int
) -> list[tuple[float, Layout]]:
    """Layouts of two pipelines or more with estimates of a step, best first.

    judged  rows with estimates, best first; the best of each set of devices is used
    most    pipelines
    """
    total = rows.workload.global_batch // micro_batch
    limit = min(most or total, total)
    if limit < 2:
        return []
    teams: dict[tuple[int, ...], tuple[float, Row]] = {}
    for estimate, chain in judged:
        teams.setdefault(rows.counts(chain.peers), (total / estimate, tuple(s.peers for s in chain.stages)))
    sizes = np.array([len(c.peers) for c in rows.classes])
    # a set that leaves room for another one; the best of them, and among equals the smaller
    apart = [(rate, counts, row) for counts, (rate, row) in teams.items() if np.any(sizes - counts > 0)]
    apart = sorted(apart, key=lambda x: (-x[0] / sum(x[1]), x[1]))[:TEAMS]
    if not apart:
        return []
    counts_of, rates = np.array([c for _, c, _ in apart]), np.array([r for r, _, _ in apart])
    found: dict[tuple[int, ...], float] = {}
    for first in range(len(apart)):
        chosen, left = [first], sizes - counts_of[first]
        while len(chosen) < limit:
            fitting = np.flatnonzero((counts_of <= left).all(axis=1))
            if not len(fitting):
                break
            best = int(fitting[rates[fitting].argmax()])
            chosen.append(best)
            left = left - counts_of[best]
            found[tuple(sorted(chosen))] = total / float(rates[chosen].sum())
    layouts = []
    for teams_of, _ in sorted(found.items(), key=lambda x: (x[1], x[0]))[: 2 * keep]:
        layout = _placed([apart[t][2] for t in teams_of], [apart[t][0] for t in teams_of], rows, micro_batch, codec)
        if layout is not None:
            layouts.append(layout)
    return sorted(layouts, key=lambda x: x[0])[:keep]


def _placed(
    team_rows: Sequence[Row], rates: Sequence[float], rows: Rows, micro_batch: int, codec: str
) -> tuple[float, Layout] | None:
    """The rows on devices of their own, with their micro-batches and best cuts."""
    total = rows.workload.global_batch // micro_batch
    taken = [1] * len(rates)
    for _ in range(total - len(rates)):
        taken[min(range(len(rates)), key=lambda i: ((taken[i] + 1) / rates[i], i))] += 1
    free = {k: list(c.peers) for k, c in enumerate(rows.classes)}
    chains, slowest = [], 0.0
    for row, num_micro in zip(team_rows, taken):
        placed = tuple(tuple(free[k].pop(0) for k in group) for group in rows.shape(row))
        found = rows.best(placed, micro_batch, codec, num_micro)
        if found is None:
            return None
        slowest = max(slowest, found[0])
        chains.append(found[1])
    return slowest + _reduction_s(chains, rows), tuple(chains)


def _reduction_s(chains: Sequence[Chain], rows: Rows) -> float:
    """Of all gradients between the first devices of the pipelines, once a step."""
    heads = [chain.peers[0] for chain in chains]
    paths = [path for a, b in zip(heads, heads[1:] + heads[:1]) if (path := rows.cluster.path(a, b)) is not None]
    share = 2 * (len(heads) - 1) / len(heads)
    size = share * sum(rows.workload.gradient_bytes)
    return max((size / path.bandwidth_bytes_per_s + path.latency_s for path in paths), default=0.0)
