"""Plans for a live mesh: from what its peers measured of devices, links and blocks.

The idea: the search plans clusters and workloads; here a mesh becomes one. Measured figures count for more than claimed
ones, figures that contradict each other are set aside. What nobody has measured yet is filled in with a stated
default, never silently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations

from meshcee.errors import PlanError
from meshcee.figures import (
    AT_HAND,
    DEFAULT_LINK,
    BlockCost,
    BlockTimes,
    Cluster,
    DeviceProfile,
    JobCosts,
    LinkProfile,
    Measured,
    as_run,
    class_of,
    with_classes,
)
from meshcee.figures.workload import KindTimes, Workload
from meshcee.plan import LeftOut, Plan
from meshcee.planner.regions import cluster_of
from meshcee.planner.rules import OF_ADAMW, between, copies_factor, shortages
from meshcee.planner.search import Choice, Effort, Question, Runs, plans
from meshcee.planner.trust import believed_devices, believed_links, believed_speeds
from meshcee.simulator import period_s

__all__ = [
    "EFFORT",
    "HURRIED",
    "NO_FAR_ROOM",
    "NO_ROOM",
    "RUNS",
    "choose",
    "has_room_for_copies",
    "most_micros",
    "plan_job",
    "question_of",
    "regions_of",
    "situation",
    "workload_of",
]

# What every member of a mesh can run. Peers of another protocol version cannot even join, so this is a matter of the
# version alone: whoever teaches the executor more, widens it here. Groups it runs too, but only for jobs that ask for
# them: sample shares give sums another order. Pipelines side by side are exact among devices of one kernel class.
RUNS = Runs(group=1, pipelines=1, recompute_last=False)

EFFORT = Effort(events=600_000, rows=18_000_000)  # half a second for four devices
# While a run stands still: a quarter of the time for six devices. The testbeds lose 2.5 % at most, and adaptation looks further.
HURRIED = EFFORT.times(1 / 15)
ROOM_IS_WORTH = 1.25  # times the seconds of a step
NO_ROOM = "the peers' memory has no room for copies of the state beside the stages: after a loss the job goes back to a checkpoint"
NO_FAR_ROOM = (
    "the peers' memory has no room for copies of the state in another region: if a whole region is lost, the job goes back to a "
    "checkpoint"
)
STEPS_SHARE = 0.9  # of a link's bandwidth is for steps: copies take 5 %, far ones and probes 2 %, headers the rest
BACKWARD = 1.0  # B and W each cost as many operations as F
UPDATE_FLOPS_PER_BYTE = 4.0  # of trainable parameters: about 16 operations a parameter


def situation(mesh: Measured, job: JobCosts, *, tiers: int = 0) -> tuple[Cluster, Workload]:
    """The cluster and the workload; `cluster.notes` says what was set aside or filled in.

    With `tiers` of copies, what members keep of one another's stages counts as state. It lies where the stage lies unless that is a
    GPU, and how much the machine around a GPU has nobody knows: so only where all devices are processors.
    """
    if not job.blocks:
        raise PlanError("the job has no blocks; capture it first")
    if not mesh.devices:
        raise PlanError(
            "no peer of the mesh has a free device: start one with `meshcee peer --join TOKEN`, or wait until the "
            "running job is over (`meshcee status`)"
        )
    notes: list[str] = []
    devices = as_run(believed_devices(mesh.devices, notes), job.threads)
    if not devices:
        raise PlanError(f"no device of the mesh can be planned with: {'; '.join(notes)}")
    times: dict[str, BlockTimes] = {}
    if job.alike:
        sent = {p: t for p, t in mesh.times.items() if p in devices and set(job.alike) <= set(t.blocks)}
        devices, times = believed_speeds(devices, sent, job.alike, [c.flops for c in job.blocks], notes)
    links = _all_joined(list(devices), believed_links(list(devices), mesh.links, notes), notes)
    links = {pair: link.with_share(STEPS_SHARE) for pair, link in links.items()}
    tensor = max((c.boundary_bytes for c in job.blocks[:-1]), default=0) * (job.micro_batch or 1)
    cluster = cluster_of(devices, links, max(tensor, 1), mesh.hints)
    cluster.notes[:0] = notes
    cluster.feeds |= _fed_over(mesh.feeds, cluster.devices)
    kinds = {p: d.kind for p, d in cluster.devices.items()}
    known: dict[str, KindTimes] = {}
    for peer, kind in kinds.items():  # a kind is as fast as its slowest member
        if peer in times:
            found = times[peer].kind_times(job.alike)
            if kind not in known or _whole_s(found) > _whole_s(known[kind]):
                known[kind] = found
    moments = job.moments or [OF_ADAMW] * len(job.blocks)
    work = workload_of(
        devices,
        kinds,
        job.blocks,
        job.batch_size,
        job.micro_batch,
        times=known,
        element_bytes=job.element_bytes,
        moments=moments,
    )
    if (tiers or job.audited) and all(device.kind == "cpu" for device in mesh.devices.values()):
        factors = [copies_factor(tiers, audited=job.audited, moments=each) for each in moments]
        frozen = [c.parameter_bytes - c.trainable_bytes for c in job.blocks]  # of which nobody makes copies
        more = [round(factor * (size - own)) for factor, size, own in zip(factors, work.state_bytes, frozen)]
        work = replace(work, state_bytes=tuple(map(sum, zip(work.state_bytes, more))))
    return cluster, replace(
        work,
        message_bytes=job.message_bytes,
        fused_first=True,
        tied=job.tied,
        group_sum="process group" if job.direct_sums else "streams",
        clips=job.clips,
        feeds=job.feeds,
        data_s=job.data_s,
        workspace=job.workspace,
    )


def _fed_over(known: Mapping[str, LinkProfile], devices: Collection[str]) -> dict[str, LinkProfile]:
    """The links that feed these, where any is known: one that nobody has measured is as slow as the slowest."""
    crossed = {peer: link for peer, link in known.items() if link.bandwidth_bytes_per_s < AT_HAND.bandwidth_bytes_per_s}
    if not crossed:
        return {}
    slowest = min(crossed.values(), key=lambda link: link.bandwidth_bytes_per_s)
    return {peer: crossed.get(peer, slowest) for peer in devices if peer in crossed or peer not in known}


def choose(
    mesh: Measured, job: JobCosts, stages: int | None = None, effort: Effort | None = None
) -> tuple[Choice, Cluster, Workload]:
    """The best plans that the members can run, and what they were made from; of devices that may be put together."""
    devices, left_out = job.fitting(mesh.devices)
    if mesh.devices and not devices:
        raise PlanError(
            f"no device of the mesh can take part in this job: {left_out[0].peer} cannot, as {left_out[0].why}"
        )
    found, refused = [], []
    parts = _by_kind(devices) if job.draws and devices else {"": devices}
    for kind, own in parts.items():
        try:
            found.append((kind, *_with_room(replace(mesh, devices=own), job, stages, effort)))
        except PlanError as error:
            refused.append(error)
    if not found:
        why = "; ".join([str(refused[0]), *(f"{left.peer} is left out: {left.why}" for left in left_out)])
        raise PlanError(why) from refused[0]
    kind, choice, cluster, workload = min(found, key=lambda x: period_s(x[1].best, x[2], x[3]))
    if kind:
        why = f"the job draws random numbers (dropout), and its plan has devices of one kind: {kind}"
        left_out += [LeftOut(peer, why) for peer, device in devices.items() if device.kind != kind]
    best, *others = (with_classes(plan, devices, job.threads) for plan in (choice.best, *choice.runners_up))
    best = replace(best, left_out=(*best.left_out, *left_out))
    return Choice(best, others, choice.single), cluster, workload


def _by_kind(devices: Mapping[str, DeviceProfile]) -> dict[str, dict[str, DeviceProfile]]:
    kinds: dict[str, dict[str, DeviceProfile]] = {}
    for peer, device in devices.items():
        kinds.setdefault(device.kind, {})[peer] = device
    return kinds


def _with_room(
    mesh: Measured, job: JobCosts, stages: int | None, effort: Effort | None
) -> tuple[Choice, Cluster, Workload]:
    """Where the best plan leaves no room for copies of the state, one that does may take ROOM_IS_WORTH times as long.
    It may take no more, as copies only shorten the way back after a loss. Where none has room for those in other
    regions too, they are left out first.
    """
    choice, cluster, workload = _choose(mesh, job, stages, effort)
    cpus = {p: device for p, device in mesh.devices.items() if device.kind == "cpu"}  # the room of others is not known
    notes: list[str] = []
    for tiers in range(_tiers(choice.best, cluster), 0, -1):
        if has_room_for_copies(choice.best, mesh.devices, job, tiers):
            break
        with contextlib.suppress(PlanError):  # no plan has room
            roomy, _, _ = _choose(replace(mesh, devices=cpus), job, stages, effort, tiers)
            step_s, roomy_s = (period_s(c.best, cluster, workload) for c in (choice, roomy))
            if roomy_s <= ROOM_IS_WORTH * step_s and has_room_for_copies(roomy.best, cpus, job, tiers):
                left = [left for left in choice.best.left_out if left.peer not in cpus]
                best = replace(roomy.best, left_out=(*roomy.best.left_out, *left))
                choice = Choice(best, roomy.runners_up, roomy.single)
                break
        notes = [NO_ROOM if tiers == 1 else NO_FAR_ROOM]
    cluster.notes.extend(notes)
    return choice, cluster, workload


def _tiers(plan: Plan, cluster: Cluster) -> int:
    """Of copies: with keepers, and with far ones where a stage's keeper is in its own region and there are others."""
    regions = {cluster.devices[peer].region for peer in plan.peers}
    return (len(plan.peers) > 1) + (len(plan.peers) > len(regions) > 1)


def regions_of(mesh: Measured, job: JobCosts) -> dict[str, str]:
    """Of every device that a plan may have."""
    cluster, _ = situation(mesh, job)
    return {peer: device.region for peer, device in cluster.devices.items()}


def has_room_for_copies(plan: Plan, devices: Mapping[str, DeviceProfile], job: JobCosts, tiers: int = 1) -> bool:
    """Whether the members of this plan can keep copies of their own and of others' stages beside what they compute with."""
    members = {peer: devices[peer] for peer in plan.peers}
    cluster, workload = situation(Measured(members, {}, {}, {}), job, tiers=tiers)
    return not shortages(plan, cluster, workload)


def most_micros(plan: Plan, devices: Mapping[str, DeviceProfile], job: JobCosts) -> tuple[int, ...]:
    """Of each pipeline the micro-batches of a step that its members have memory for, if it had more than the plan says.

    Pipelines that are not the first keep the gradient of each micro-batch apart.
    """
    mesh = Measured({peer: devices[peer] for peer in plan.peers}, {}, {}, {})
    cluster, workload = situation(mesh, job)
    for tiers in range(_tiers(plan, cluster), 0, -1):
        if has_room_for_copies(plan, devices, job, tiers):  # then they have them
            cluster, workload = situation(mesh, job, tiers=tiers)
            break
    total, found = sum(p.num_micro for p in plan.pipelines), []
    for i, pipeline in enumerate(plan.pipelines):
        fits = pipeline.num_micro
        while fits < total:
            more = (*plan.pipelines[:i], replace(pipeline, num_micro=fits + 1), *plan.pipelines[i + 1 :])
            if any(
                short.peer in {p for s in pipeline.stages for p in s.peers}
                for short in shortages(replace(plan, pipelines=more), cluster, workload)
            ):
                break
            fits += 1
        found.append(fits)
    return tuple(found)


def _choose(
    mesh: Measured, job: JobCosts, stages: int | None, effort: Effort | None, tiers: int = 0
) -> tuple[Choice, Cluster, Workload]:
    asked = _question(mesh, job, stages, tiers)
    found = plans(
        asked.cluster, asked.workload, codecs=asked.codecs, effort=effort or EFFORT, runs=asked.runs, steady=True
    )
    return found, asked.cluster, asked.workload


def _question(mesh: Measured, job: JobCosts, stages: int | None, tiers: int) -> Question:
    cluster, workload = situation(mesh, job, tiers=tiers)
    runs = replace(RUNS, stages=stages, recompute=job.recompute)
    if job.pipelines and stages is None:
        kernels = {p: class_of(mesh.devices[p], job.threads) for p in cluster.devices}
        # how a GPU rounds the statistics of batches is not known: it is like no other
        classes = {p: f"{k} {p}" if job.statistics and k.kind != "cpu" else str(k) for p, k in kernels.items()}
        runs = replace(runs, pipelines=None, classes=classes)
    if job.groups:  # each member applies the sum by itself, and must end with the same bits: so they are of one kind
        alike = {p: f"{d.region}, {mesh.devices[p].kind}" for p, d in cluster.devices.items()}
        runs = replace(runs, group=None, alike=alike)
    regions = {peer: device.region for peer, device in cluster.devices.items()}
    codec = job.codec
    if codec in ("auto", "lossless"):
        links: dict[frozenset[str], float] = {}
        for (a, b), link in mesh.links.items():
            if a in regions and b in regions:
                pair = frozenset((regions[a], regions[b]))
                links[pair] = max(links.get(pair, 0.0), link.bandwidth_bytes_per_s)
        of = partial(between, codec, regions=regions, links=links)
        runs = replace(runs, codec=of)
        # The search looks for rows with one codec everywhere, and prices them with those that they would run with.
        one_each = {region: [peer] for peer, region in regions.items()}.values()
        codes = any(of(a, b) != "none" for a, b in combinations(one_each, 2))
        codec = "none" if not codes else "lossless" if codec == "lossless" else "bf16"
    return Question(cluster, workload, (codec,), runs, STEPS_SHARE)


def question_of(plan: Plan, mesh: Measured, job: JobCosts, stages: int | None = None) -> Question:
    """The question that such a plan answers, with as much room for copies of the state as the plan leaves."""
    devices, _ = job.fitting(mesh.devices)
    if job.draws:
        kinds = {devices[peer].kind for peer in plan.peers if peer in devices}
        devices = {peer: device for peer, device in devices.items() if device.kind in kinds}
    mesh = replace(mesh, devices=devices)
    bare = _question(mesh, job, stages, 0)
    for tiers in range(_tiers(plan, bare.cluster), 0, -1):
        if has_room_for_copies(plan, mesh.devices, job, tiers):
            return _question(mesh, job, stages, tiers)
    return bare


def plan_job(
    mesh: Measured, job: JobCosts, stages: int | None = None, effort: Effort | None = None
) -> tuple[Plan, list[str]]:
    """The best plan for a live mesh, of exactly so many stages if asked, and notes on the figures behind it.

    Raises PlanError in a sentence when nothing fits.
    """
    choice, cluster, _ = choose(mesh, job, stages, effort)
    return choice.best, list(cluster.notes)


def _whole_s(times: KindTimes) -> float:
    size = times.largest
    return times.stage(0, len(times.optimizer) - 1, size).total_s / size


def _all_joined(
    peers: Sequence[str], links: Mapping[tuple[str, str], LinkProfile], notes: list[str]
) -> dict[tuple[str, str], LinkProfile]:
    """Every measured link, and a default one between those that no measured link joins."""
    found = dict(links)
    root = {p: p for p in peers}

    def top(peer: str) -> str:
        while root[peer] != peer:
            root[peer] = root[root[peer]]
            peer = root[peer]
        return peer

    for a, b in found:
        root[top(a)] = top(b)
    alone = [p for p in peers if top(p) == p]
    if len(alone) > 1:
        notes.append(
            f"nobody has measured the links between {len(alone)} parts of the mesh yet: "
            f"{DEFAULT_LINK.bandwidth_bytes_per_s * 8 / 1e6:.0f} Mbit/s and {2e3 * DEFAULT_LINK.latency_s:.0f} ms there "
            "and back stand in"
        )
        for a in alone:
            for b in alone:
                if a != b:
                    found[a, b] = DEFAULT_LINK
    return found


def workload_of(
    devices: Mapping[str, DeviceProfile],
    kinds: Mapping[str, str],
    costs: Sequence[BlockCost],
    batch_size: int,
    micro_batch: int | None = None,
    *,
    times: Mapping[str, KindTimes] | None = None,
    element_bytes: int = 4,
    moments: Sequence[float] | None = None,
) -> Workload:
    """A job on a live mesh: seconds from measured speeds, or `times` where blocks themselves were timed.

    devices  peer -> profile; kinds: peer -> kind, as in the cluster; times: kind -> measured
    """
    found: dict[str, KindTimes] = {}
    for peer, kind in kinds.items():
        if times and kind in times:
            found[kind] = times[kind]
            continue
        speed = devices[peer].speed_flops_per_s
        # a kind is as fast as its slowest member
        if kind in found and found[kind].optimizer[-1] >= _update_s(costs, speed):
            continue
        flops = [max(c.flops, 1.0) for c in costs]
        rows = [[n * x / speed for x in flops] for n in (1, max(2, batch_size))]
        back = [[BACKWARD * x for x in row] for row in rows]
        update = [UPDATE_FLOPS_PER_BYTE * c.trainable_bytes / speed for c in costs]
        found[kind] = KindTimes((1, max(2, batch_size)), rows, back, back, update)
    return Workload(
        names=tuple(c.name for c in costs),
        global_batch=batch_size,
        times=found,
        # 8 bytes a trainable parameter, whatever it computes in, and what is kept of it. What a bf16 job keeps in fp32 has no
        # master of its own, so 8 bytes are twice its weight, and not four times.
        state_bytes=tuple(
            round((2 + each) * (c.trainable_bytes + (4 // element_bytes - 1) * (c.trainable_bytes - c.full_bytes)))
            + (c.parameter_bytes - c.trainable_bytes)
            for c, each in zip(costs, moments or [OF_ADAMW] * len(costs), strict=True)
        ),
        gradient_bytes=tuple(c.trainable_bytes for c in costs),
        activation_bytes=tuple(c.activation_bytes for c in costs),
        boundary_bytes=(*(c.boundary_bytes for c in costs[:-1]), 0),
        boundary_back_bytes=(*(c.boundary_grad_bytes for c in costs[:-1]), 0),
        element_bytes=element_bytes,
        micro_batch=micro_batch,
        default_codec="none",
    )


def _update_s(costs: Sequence[BlockCost], speed: float) -> float:
    return sum(UPDATE_FLOPS_PER_BYTE * c.trainable_bytes / speed for c in costs)
