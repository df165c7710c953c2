"""What the owner finds out about its job before it asks for a plan: costs of blocks, and how fast each device runs them.

The idea: the owner alone has the graph, so it asks every idle device for a profile of the distinct blocks, all at once.
A device that does not answer in time is planned for by its claimed speed, and the plan says so.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import statistics
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import structlog
import torch

from meshcee.capture import Capture, Program, encode_program
from meshcee.capture.graph import alike, tied
from meshcee.errors import MeshceeError, PlanError, ProtocolError
from meshcee.fields import unpack
from meshcee.figures import MAX_SIZES, BlockTimes, DeviceProfile, JobCosts, as_run
from meshcee.figures.kernels import KernelClass
from meshcee.job import Job
from meshcee.optim import scheduled
from meshcee.sampling import few_of, probes
from meshcee.stage import optimizer_layout, why_one_pipeline
from peers.device import capability, versions
from peers.mesh_view import MeshView
from peers.transport import Frame, StreamClosed
from peers.wire import SLOWEST_BYTES_PER_S, messages

if TYPE_CHECKING:
    from peers.measure import ProfileRequest

__all__ = ["costs_of", "look", "profile"]

log = structlog.get_logger()

FRAME_BYTES = 256  # header and meta of a message between stages, about
PROFILE_BYTES = 8 << 20
AT_ONCE = 16  # devices asked at the same time
ASKED = 32  # devices; of more, one of each kind is asked
SAMPLES = 16  # looked at for the largest integer of each input, and for how long it takes to read one
ALIKE = 1.1  # speeds within this factor are one kind


def costs_of(job: Job, captured: Capture, plans: bool = True) -> JobCosts:
    """Everything about the job that a planner must know, and that the owner can tell without a device.

    plans  whether a plan is made of it: without one nobody asks what operators take for a moment
    """
    program = captured.train
    state = torch.Generator().get_state().nbytes if program.uses_random else 0  # travels with every activation
    like = alike(program)
    return JobCosts(
        blocks=captured.costs,
        batch_size=job.batch_size,
        micro_batch=job.micro_batch_size,
        recompute=job.recompute,
        element_bytes=2 if job.precision == "bf16" else 4,
        message_bytes=(FRAME_BYTES + state, FRAME_BYTES),
        alike=like,
        tied=tied(program),
        codec=job.codec,
        groups=job.groups and not program.samples,
        pipelines=not job.audit and not why_one_pipeline(program),
        statistics=bool(program.slice(0, program.num_blocks).mutated),
        direct_sums=job.direct_sums,
        clips=job.clip_norm is not None,
        mix=job.mix,
        versions=versions(),
        threads=job.threads or 0,
        feeds=_feeds(captured),
        moments=_moments(job, captured),
        audited=job.audit > 0,
        judge=str(KernelClass("cpu", capability(), versions().torch, 0)) if job.audit else "",
        draws=any(one.uses_random for one in captured.programs),
        workspace=_workspaces(job, captured, like) if plans else (),
    )


def _moments(job: Job, captured: Capture) -> tuple[float, ...]:
    """Counts of steps apart."""
    program = captured.train
    masters = {x.name: captured.layout[x.name] for x in program.inputs if x.trainable}
    kept = dict.fromkeys(masters, 0)
    for key, layout in optimizer_layout(scheduled(job.optimizer, job.schedule), masters).items():
        kept[key.rpartition("/")[0]] += _bytes([layout])
    blocks = [program.slice(k, k + 1).trainable for k in range(program.num_blocks)]
    return tuple(sum(kept[n] for n in names) / max(1, _bytes(masters[n] for n in names)) for names in blocks)


def _bytes(layouts: Iterable[tuple[torch.dtype, tuple[int, ...]]]) -> int:
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in layouts if shape)


def _workspaces(job: Job, captured: Capture, like: Sequence[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """For the sizes that micro-batches may have, from the least to the most."""
    from meshcee.stage.workspace import workspaces

    program, own = captured.train, job.micro_batch_size
    sizes = {least_samples(program), job.batch_size} if own is None else {1, own} if job.groups else {own}
    kept = [cost.activation_bytes for cost in captured.costs]
    try:
        return workspaces(program, like, kept, sorted(sizes), job.optimizer)
    except Exception as error:  # whatever torch says of fake tensors: a job is not refused for it
        _refuse_failing(job, captured)
        log.warning("what the operators take for a moment is not counted in the plan", error=str(error))
        return ()


def _refuse_failing(job: Job, captured: Capture) -> None:
    """Some of the model does not run: UsageError where it is the user's own code that does not."""
    if job.verify:
        from meshcee.equality import refuse_failing

        refuse_failing(job, captured)


def _feeds(captured: Capture) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Of each raw input the bytes of a sample, and the blocks that read it."""
    readers: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for block in range(captured.train.num_blocks):
        for value in captured.train.slice(block, block + 1).raw_inputs:
            readers.setdefault(value.name, []).append(block)
            sizes[value.name] = value.nbytes(1) // (captured.train.samples or 1)
    return tuple((sizes[name], tuple(blocks)) for name, blocks in readers.items())


async def profile(
    agent: MeshView,
    job: Job,
    captured: Capture,
    costs: JobCosts,
    most: Mapping[str, int],
    without: Collection[str] = (),
) -> dict[str, BlockTimes]:
    """Times of the job's blocks on the idle devices that answered, of all but these; warns of those that did not.

    most  as `look` found it, before the first step: later ones find data that may count what is read
    """
    devices, _ = costs.fitting(as_run(agent.devices(), costs.threads))
    asked = whom_to_ask({peer: device for peer, device in devices.items() if peer not in without})
    data = await asyncio.to_thread(encode_program, captured.train)
    questions = {peer: _request(job, captured, costs, devices[peer].memory_bytes, most) for peer in asked}
    found: dict[str, BlockTimes] = {}
    refused: dict[str, BaseException] = {}
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(peer: str) -> None:
        from peers.measure import BUDGET_S, LONGEST

        limit_s = 2 * agent.timeouts.join_s + LONGEST * BUDGET_S + len(data) / SLOWEST_BYTES_PER_S
        try:
            async with gate, asyncio.timeout(limit_s):
                found[peer] = await _ask(agent, peer, questions[peer], data)
        except (MeshceeError, StreamClosed, TimeoutError) as error:
            refused[peer] = error

    async with asyncio.TaskGroup() as group:
        for peer in asked:
            group.create_task(one(peer))
    first = most is not None  # nothing is trained yet
    if first and not found and any(isinstance(error, PlanError) for error in refused.values()):
        await asyncio.to_thread(_refuse_failing, job, captured)
    for peer, error in refused.items():
        name, why = agent.names().get(peer, peer), str(error) or type(error).__name__
        log.warning("no profile; its claimed speed stands in", peer=name, error=why)
    return {peer: found[of] for of, peers in asked.items() if of in found for peer in peers}


async def _ask(agent: MeshView, peer: str, request: ProfileRequest, data: bytes) -> BlockTimes:
    stream = await agent.transport.open(peer, "profile", agent.addresses_of([peer]).get(peer, ()))
    stream.max_payload_bytes = PROFILE_BYTES
    try:
        graph = hashlib.sha256(data).hexdigest()
        await stream.send(Frame(messages.PROFILE, {"graph": graph}, [request.pack()]))
        reply = await stream.recv()
        if reply.kind == messages.WANTED:
            await stream.send(Frame(messages.GRAPH, {}, [data]))
            reply = await stream.recv()
    finally:
        await stream.aclose()
    if reply.kind == messages.REFUSED:
        raise messages.error_from(reply.header)
    if reply.kind != messages.PROFILED or len(reply.payloads) != 1:
        raise ProtocolError(f"it answered with a frame of kind {reply.kind!r}")
    times = BlockTimes.from_json(unpack(reply.payloads[0], PROFILE_BYTES, "its profile"))
    if times.blocks != request.blocks or times.sizes != request.sizes:
        raise ProtocolError("its profile is of other blocks or sizes than were asked for")
    return times


def _request(
    job: Job, captured: Capture, costs: JobCosts, memory_bytes: int, most: Mapping[str, int]
) -> ProfileRequest:
    from peers.measure import ProfileRequest

    blocks = tuple(sorted(set(costs.alike)))
    pair = next((a for a, b in zip(costs.alike, costs.alike[1:]) if a == b), None)
    place = next((k for k in range(len(costs.alike) - 1) if costs.alike[k] == costs.alike[k + 1] == k), None)
    return ProfileRequest(
        blocks=blocks,
        pair=pair if pair == place else None,
        sizes=sizes_of(job, costs, memory_bytes, least_samples(captured.train)),
        flops=tuple(captured.costs[k].flops for k in blocks),
        threads=costs.threads,
        precision=job.stage_precision,
        optimizer=job.optimizer,
        most=most,
    )


def least_samples(program: Program) -> int:
    """That a micro-batch must have: two where a batch norm would else see one value for each channel, which torch refuses."""
    for node in program.nodes:
        if node.operator.name == "aten.batch_norm.default" and node.args[5] is True:
            samples, _, *inside = program.value(node.refs[0]).sizes(1, usual=True)
            if samples * math.prod(inside) == 1:
                return 2
    return 1


def sizes_of(job: Job, costs: JobCosts, memory_bytes: int, least: int = 1) -> tuple[int, ...]:
    """Micro-batch sizes worth measuring: the job's own and a group's parts of it, or divisors of the batch from `least` on."""
    if (own := job.micro_batch_size) is not None:
        return tuple(sorted({1, own // 4, own // 2, own} - {0})) if costs.groups else (own,)
    batch = job.batch_size
    each = max((c.activation_bytes for c in costs.blocks), default=0)
    sizes = [m for m in range(min(least, batch), batch + 1) if batch % m == 0]
    fitting = [m for m in sizes if m == sizes[0] or m * each <= memory_bytes]
    if len(fitting) <= MAX_SIZES:
        return tuple(fitting)
    wanted = [(fitting[-1]) ** (k / (MAX_SIZES - 1)) for k in range(MAX_SIZES)]
    return tuple(sorted({min(fitting, key=lambda m: abs(m - x)) for x in wanted}))


def look(job: Job, captured: Capture) -> tuple[dict[str, int], float]:
    """Of a few samples the largest integer of each input, which random ids must stay under, and the seconds that reading one
    usually takes. Once for all devices: the samples are the user's, and may take long.
    """
    found: dict[str, int] = {}
    seconds = []
    for sample, took_s in probes(job, SAMPLES):
        began_s = time.perf_counter()
        batch = few_of(job, sample, 1)
        seconds.append(took_s + time.perf_counter() - began_s)
        for name, tensor in captured.inputs_of(batch).items():
            if tensor.numel() and not tensor.is_floating_point() and not tensor.is_complex():
                found[name] = max(found.get(name, 0), int(tensor.max()))
    return found, statistics.median(seconds)


def whom_to_ask(devices: Mapping[str, DeviceProfile]) -> dict[str, list[str]]:
    """Whom to ask -> for whom it speaks: itself and the CPUs of its host, which are the same; of many devices, one of each kind."""
    found: dict[str, list[str]] = {}
    if len(devices) <= ASKED:
        hosts: dict[str, str] = {}
        for peer, device in sorted(devices.items()):
            of = hosts.setdefault(device.host, peer) if device.host and device.kind == "cpu" else peer
            found.setdefault(of, []).append(peer)
        return found
    for peer, device in sorted(devices.items(), key=lambda x: (x[1].speed_flops_per_s, x[0])):
        for of, peers in found.items():
            first = devices[of]
            same = (device.kind, device.name, device.threads) == (first.kind, first.name, first.threads)
            if same and device.speed_flops_per_s <= ALIKE * first.speed_flops_per_s:
                peers.append(peer)
                break
        else:
            found[peer] = [peer]
    return found
