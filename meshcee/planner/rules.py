"""What a plan may be: what executors can run, what devices can hold, what a job says of codecs, and why a device is left out.

The idea: the planner can think of more than an executor does today, and of more than memory holds. One file says what may be
proposed and why something was not; everything that proposes asks it. With AdamW memory is 16 bytes a trainable parameter, whatever
the precision. In fp32 these are weight, gradient and two moments; in bf16 weight and gradient at two bytes, master and moments at
four. What `keep_fp32` leaves in fp32 is its own master. To this comes what every live micro-batch keeps from F to W.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np

from meshcee.config import AUDIT_COPIES, FAR_COPIES, OTHERS_COPIES, OWN_COPIES
from meshcee.errors import PlanError
from meshcee.figures import Cluster
from meshcee.figures.amounts import size, times_as_long
from meshcee.figures.workload import Workload
from meshcee.plan import Plan
from meshcee.planner.chain import Codecs, Layout, peers_of
from meshcee.planner.cut import DeviceClass

__all__ = [
    "OF_ADAMW",
    "Runs",
    "Shortage",
    "between",
    "copies_factor",
    "lower_bound_s",
    "missing",
    "needs",
    "remarks",
    "shortage",
    "shortages",
    "why_left_out",
]


@dataclass(frozen=True)
class Runs:
    """None: no bound."""

    group: int | None = None  # members of a stage
    alike: Mapping[str, str] | None = None  # peer -> what the members of a stage must have in common
    stages: int | None = None  # of a pipeline, exactly so many
    pipelines: int | None = None  # side by side
    classes: Mapping[str, str] | None = (
        None  # peer -> its kernel class, which those have in common that hold a block side by side
    )
    recompute_last: bool = True  # whether the last stage may recompute
    recompute: bool = False  # whether all others must
    codec: Callable[[Sequence[str], Sequence[str]], str] | None = None  # of the boundary between two groups

    def may_share(self, peers: Sequence[str]) -> bool:
        """Whether these may hold a stage together."""
        if self.group is not None and len(peers) > self.group:
            return False
        return self.alike is None or len({self.alike.get(p, "") for p in peers}) == 1

    def permits(self, layout: Layout) -> bool:
        """Whether a plan of this form may be proposed."""
        return (
            (self.pipelines is None or len(layout) <= self.pipelines)
            and all(
                (self.stages is None or len(chain.stages) == self.stages)
                and all(self.may_share(s.peers) for s in chain.stages)
                for chain in layout
            )
            and (self.classes is None or self._are_alike(layout, self.classes))
        )

    @staticmethod
    def _are_alike(layout: Layout, classes: Mapping[str, str]) -> bool:
        """Whether all that hold a block in several pipelines compute the same bits."""
        stages = [stage for chain in layout for stage in chain.stages]
        return len(layout) == 1 or all(
            len({classes[p] for p in (*a.peers, *b.peers)}) == 1
            for a, b in combinations(stages, 2)
            if a.first < b.end and b.first < a.end
        )

    def coded(self, layout: Layout) -> Layout:
        """The layout with the codecs that it would run with."""
        if (codec := self.codec) is None:
            return layout

        def of(a: Sequence[str], b: Sequence[str]) -> Codecs:
            return Codecs(codec(a, b), codec(b, a))

        return tuple(
            replace(chain, codecs=tuple(of(a.peers, b.peers) for a, b in pairwise(chain.stages))) for chain in layout
        )


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
    if plan.shares_samples:
        found.append("groups share samples, so sums have another order than the plain loop's: losses agree to 1e-5")
    return tuple(found)


OF_ADAMW = 2.0  # bytes of moments for each byte of a weight in full


def copies_factor(tiers: int, *, audited: bool = False, moments: float = OF_ADAMW) -> float:
    """What copies take at a member, times its own state, where stages are about equal: 1 tier for keepers, 2 for far ones too."""
    copies = OWN_COPIES + OTHERS_COPIES + 2 * FAR_COPIES * (tiers - 1) if tiers else 0
    return (1 + moments) / (2 + moments) * (copies + AUDIT_COPIES * audited)  # a copy has no gradients


@dataclass(frozen=True)
class Shortage:
    """A member that needs more than it has."""

    peer: str  # "": all devices together
    needed_bytes: int
    memory_bytes: int

    def text(self, names: Mapping[str, str]) -> str:
        """In a sentence, with the peer's name where there is one."""
        who = names.get(self.peer, self.peer)
        return f"{who} needs {size(self.needed_bytes)} for this plan and has {size(self.memory_bytes)}"


def needs(plan: Plan, cluster: Cluster, workload: Workload) -> dict[str, int]:
    """Peer -> bytes when its live cap is reached. Raises PlanError for a plan of another number of blocks."""
    workload.check_blocks(plan.num_blocks)
    return {
        m.peer: workload.stage_bytes(s.first, s.end, m.samples, min(s.live_cap, p.num_micro), s.recompute)
        + workload.sum_bytes(s.first, s.end, len(s.members) * len(plan.pipelines))
        + workload.term_bytes(s.first, s.end, p.num_micro if k and not plan.shares_samples else 0)
        for k, p in enumerate(plan.pipelines)
        for s in p.stages
        for m in s.members
    }


def shortages(plan: Plan, cluster: Cluster, workload: Workload) -> list[Shortage]:
    """Members whose memory the plan exceeds. Raises PlanError for a plan of another number of blocks."""
    found = []
    for peer, needed in needs(plan, cluster, workload).items():
        device = cluster.devices.get(peer)
        if device is not None and needed > device.memory_bytes:
            found.append(Shortage(peer, needed, device.memory_bytes))
    return found


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


def why_left_out(
    of: DeviceClass,
    with_one: tuple[float, Layout] | None,
    period_s: float,
    best: Layout,
    cluster: Cluster,
    workload: Workload,
) -> str:
    """`with_one`: the best plan found that does use a device of this class."""
    peer = of.peers[0]
    samples = workload.times[of.kind].sizes[0]
    least = min(workload.stage_bytes(k, k + 1, samples, 1) for k in range(workload.num_blocks))
    if least > of.memory_bytes:
        return f"its {size(of.memory_bytes)} hold no block: the smallest needs {size(least)}"
    near = [p for p in peers_of(best) if p != peer]
    joined = [path for p in near if (path := cluster.path(peer, p)) is not None]
    if near and not joined:
        return "no link joins it to the devices of the plan"
    if near and with_one is None:
        codec = next((c.out for chain in best for c in chain.codecs), "none")
        crossing = workload.wire_bytes(max(workload.boundary_bytes) * best[0].micro_batch, codec)
        fastest = min(crossing / p.bandwidth_bytes_per_s for p in joined)
        pace = period_s / sum(chain.num_micro for chain in best)
        if fastest > pace:
            return (
                f"a boundary of one micro-batch takes {fastest:.3g} s on its fastest link, "
                f"longer than the {pace:.3g} s that the plan takes for a micro-batch"
            )
        held = f"{sum(len(chain.stages) for chain in best)} stages already hold the {workload.num_blocks} blocks"
        return f"no place for it made a plan that fits and is faster; {held}"
    if with_one is None:
        return "no plan with it was faster than the best device alone"
    longer = times_as_long(with_one[0] / period_s)
    return f"the best plan found with one of its kind takes {with_one[0]:.4g} s a step, {longer}"


def missing(cluster: Cluster, workload: Workload, pipelines: int = 1) -> Shortage | None:
    """Memory that every plan of so many pipelines needs: the largest block on the largest device, or all blocks on all devices."""
    largest = max(cluster.devices.values(), key=lambda d: d.memory_bytes)
    one = max(workload.stage_bytes(k, k + 1, 1, 1) for k in range(workload.num_blocks))
    if one > largest.memory_bytes:
        return Shortage(largest.name, one, largest.memory_bytes)
    needed = pipelines * (workload.state_sum_bytes(0, workload.num_blocks) + sum(workload.activation_bytes))
    offered = sum(d.memory_bytes for d in cluster.devices.values())
    return Shortage("", needed, offered) if needed > offered else None


def shortage(cluster: Cluster, workload: Workload, classes: Sequence[DeviceClass]) -> PlanError:
    """How many bytes are missing, and where."""
    if (short := missing(cluster, workload)) is not None:
        gap = short.needed_bytes - short.memory_bytes
        if short.peer:
            worst = max(range(workload.num_blocks), key=lambda k: workload.stage_bytes(k, k + 1, 1, 1))
            return PlanError(
                f"block {workload.names[worst]!r} needs {size(short.needed_bytes)} and the largest device, {short.peer}, has "
                f"{size(short.memory_bytes)}: {size(gap)} are missing there; add a larger device"
            )
        return PlanError(
            f"the job needs {size(short.needed_bytes)} at one sample a micro-batch and the {len(cluster.devices)} devices have "
            f"{size(short.memory_bytes)}: {size(gap)} are missing; add devices"
        )
    low = min(min(workload.times[c.kind].sizes) for c in classes)
    high = max(workload.times[c.kind].largest for c in classes)
    if workload.micro_batch is not None and not low <= workload.micro_batch <= high:
        return PlanError(f"micro-batches of {workload.micro_batch} samples were not profiled; take {low} to {high}")
    smallest = min(cluster.devices.values(), key=lambda d: d.memory_bytes)
    gap = min(workload.stage_bytes(k, k + 1, 1, 1) for k in range(workload.num_blocks)) - smallest.memory_bytes
    where = (
        f"{size(gap)} are missing on {smallest.name}" if gap > 0 else "no cut between blocks suits the memory and links"
    )
    return PlanError(f"the blocks cannot be spread over these devices: {where}; add memory, devices or links")
