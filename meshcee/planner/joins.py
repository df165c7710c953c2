"""The boundary between two groups as the dynamic programs see it.

The idea: seconds there and back delay a micro-batch; seconds that a line is held bound the period, and add up over all
boundaries that cross it. Latency is only in the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshcee.planner.partition import Join
from meshcee.profile import Cluster
from meshcee.workload import Workload

__all__ = ["GroupJoin", "join", "join_groups", "overlaps"]


@dataclass(frozen=True)
class GroupJoin:
    """A boundary for every place where it could be cut, the same for all devices of these classes.

    held_s   line between regions or two devices -> seconds at the largest boundary
    ports_s  (0 for the first group or 1 for the second, member, 0 for out or 1 for in) -> the same of its port
    """

    join: Join
    held_s: dict[tuple[str, str], float]
    ports_s: dict[tuple[int, int, int], float]


def overlaps(a: Sequence[int], b: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Who has samples for whom: (member of a, member of b, samples), members taking samples in listed order."""
    i = j = 0
    left_a, left_b = a[0], b[0]
    while True:
        both = min(left_a, left_b)
        yield i, j, both
        left_a, left_b = left_a - both, left_b - both
        if not left_a:
            i += 1
            if i == len(a):
                return
            left_a = a[i]
        if not left_b:
            j += 1
            if j == len(b):
                return
            left_b = b[j]


def join_groups(
    cluster: Cluster,
    workload: Workload,
    a: Sequence[tuple[str, int]],
    b: Sequence[tuple[str, int]],
    codec: str,
) -> GroupJoin | None:
    """Between members (peer, samples) of two groups; None when a pair that must exchange samples is not joined."""
    out, back = workload.cuts
    most_out, most_back = out.item(out.argmax()), back.item(back.argmax())
    share, each_s = workload.wire_bytes(1.0, codec), workload.codec_s(0.0, codec)
    coding = workload.codec_s(1.0, codec) - each_s
    delays: tuple[set[tuple[float, float]], ...] = (
        set(),
        set(),
    )  # there and back: latency, seconds per byte of a sample
    held: dict[tuple[str, str], float] = {}
    ports: dict[tuple[int, int, int], float] = {}
    for i, j, samples in overlaps([n for _, n in a], [n for _, n in b]):
        go, come = cluster.path(a[i][0], b[j][0]), cluster.path(b[j][0], a[i][0])
        if go is None or come is None:
            return None
        ends = ((0, i), (1, j))
        for way, (path, size) in enumerate(((go, samples * most_out), (come, samples * most_back))):
            delays[way].add((path.latency_s, samples * (share / path.bandwidth_bytes_per_s + coding)))
            for line in path.lines:
                seconds = size * share / cluster.bandwidth(line)
                if not _is_port(line):
                    held[line] = held.get(line, 0.0) + seconds
                else:
                    into = int(line[0][0] == "@")
                    port = (*ends[way ^ into], into)
                    ports[port] = ports.get(port, 0.0) + seconds
    there, again = (
        np.maximum.reduce([each_s + latency_s + slope * size for latency_s, slope in sorted(found)])
        for found, size in zip(delays, (out, back))
    )
    most = max(held.values(), default=0.0)
    return GroupJoin(Join(there + again, out * (most / max(most_out, 1e-12))), held, ports)


def _is_port(line: tuple[str, str]) -> bool:
    return (line[0][0] == "@") != (line[1][0] == "@")


def join(cluster: Cluster, workload: Workload, a: str, b: str, micro_batch: int, codec: str) -> Join | None:
    """Between two single devices."""
    found = join_groups(cluster, workload, [(a, micro_batch)], [(b, micro_batch)], codec)
    return None if found is None else found.join
