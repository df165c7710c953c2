"""The boundary between two devices as the dynamic programs see it.

The idea: seconds there and back delay a micro-batch; seconds that a line is held bound the period. Latency is only in
the first.
"""

from __future__ import annotations

import numpy as np

from meshcee.planner.partition import Join
from meshcee.profile import Cluster
from meshcee.workload import Workload

__all__ = ["join"]


def join(cluster: Cluster, workload: Workload, a: str, b: str, micro_batch: int, codec: str) -> Join | None:
    """The boundary between two devices, for every place where it could be cut."""
    go, come = cluster.path(a, b), cluster.path(b, a)
    if go is None or come is None:
        return None
    out = np.concatenate([[0.0], np.asarray(workload.boundary_bytes, dtype=np.float64)]) * micro_batch
    back = np.concatenate([[0.0], np.asarray(workload.boundary_back_bytes, dtype=np.float64)]) * micro_batch
    share = workload.wire_bytes(1.0, codec)
    trip = go.latency_s + come.latency_s + (out + back) * workload.codec_s(1.0, codec)
    trip = trip + out * share / go.bandwidth_bytes_per_s + back * share / come.bandwidth_bytes_per_s
    held = np.zeros_like(out)
    for path, size in ((go, out), (come, back)):
        for line in path.lines:
            if (line[0][0] == "@") == (line[1][0] == "@"):  # ports are in the tables
                held = np.maximum(held, size * share / cluster.bandwidth(line))
    return Join(trip, held)
