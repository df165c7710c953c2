"""What no plan can beat, and what every plan must beat.

The idea: the lower bound is a fractional assignment: every block may be cut anywhere and given to all devices, links are
free. The best single device is simulated like any other plan.
"""

from __future__ import annotations

import numpy as np

from meshcee.profile import Cluster
from meshcee.workload import Workload

__all__ = ["lower_bound_s"]


def lower_bound_s(cluster: Cluster, workload: Workload) -> float:
    """Seconds per step below which no plan on these devices can come.

    The step is at least T when sum over blocks of x[d, k] * seconds[d, k] <= T for every device d and every block is
    done for all samples. By duality, for any weights y >= 0 with sum 1: T >= sum_k min_d(y_d * seconds[d, k]). The
    weights that balance identical blocks are proportional to speed; any weights give a valid bound.
    """
    kinds = [d.kind for d in cluster.devices.values()]
    per_sample = {}
    for kind in dict.fromkeys(kinds):
        times = workload.times[kind]
        rows = []
        for n in times.sizes:
            f, b, w = times.cumulated(n)
            rows.append(np.diff(f + b + w) / n)
        per_sample[kind] = np.min(np.stack(rows), axis=0)
    speed = np.array([1.0 / max(float(per_sample[k].sum()), 1e-12) for k in kinds])
    weights = speed / speed.sum()
    least = {k: float(min(w for w, kind in zip(weights, kinds) if kind == k)) for k in per_sample}
    bound = np.min(np.stack([least[k] * per_sample[k] for k in per_sample]), axis=0).sum()
    return float(workload.global_batch * bound)
