"""The coordinator's work: answer owners who ask for a plan.

The idea: whoever holds the lease plans, from the records that every peer publishes and what the owner found out about its
job; nobody else does. A plan carries the term under which it was made, and members refuse terms older than the newest
that they have accepted. An owner holds a plan against what it asked for: one that rounds, or is of other work, is made here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple

import msgpack
import structlog
from msgspec import Meta

from meshcee.errors import JoinError, MeshceeError, NotPermittedError, PlanError, ProtocolError
from meshcee.events import Event
from meshcee.fields import plain, read, unpack
from meshcee.figures import MOST_MICROS, BlockTimes, DeviceProfile, JobCosts, LinkProfile, Measured, without_links
from meshcee.job import CODEC_CHOICES
from meshcee.plan import LeftOut, Plan, Term
from peers.mesh_view import MeshView
from peers.transport import Frame, Stream, StreamClosed
from peers.wire import messages

__all__ = ["PlanRequest", "PlanService", "Planned", "check_memory", "plan_here", "request_plan"]

log = structlog.get_logger()

MAX_WANTED = 16
MAX_NAMED = 512
MOST_BLOCKS = 512  # as many as automatic cuts make; a search takes longer by the square of them
MOST_SHARED = 4096  # samples of a micro-batch that groups may share
MAX_PROFILES = 1024
MAX_NOTES = 64
REQUEST_BYTES = 8 << 20  # thousands of blocks with room to spare; msgpack may unfold to 64 times as much
ASKED_AT_ONCE = 4  # by one owner
PLAN_BYTES = 4 << 20  # a thousand peers that are left out take 140 kB
_Profiles = Meta(max_length=MAX_PROFILES)
PLANNING_S = 90.0  # that an owner waits for the coordinator's answer
# What a planner may choose for a boundary where a job's codec leaves it that (meshcee.planner.rules.between).
LEFT_TO_PLANNER = {"lossless": {"none", "lossless"}, "auto": {"none", "bf16", "bf16-lossless"}}


class Planned(NamedTuple):
    """A plan, the term under which it was made, and what people should know of the figures behind it."""

    plan: Plan
    term: Term
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Answer:
    plan: Mapping[str, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class PlanRequest:
    """What an owner asks: its job's costs, what devices measured of it, and how it wants it."""

    job: JobCosts
    times: Annotated[Mapping[str, BlockTimes], _Profiles] = field(default_factory=dict)  # peer -> seconds of its blocks
    stages: Annotated[int, Meta(ge=1)] | None = None  # exactly so many; None leaves it to the planner
    wanted: tuple[str, ...] = ()  # peers that have just joined for this job: the coordinator waits until it sees them
    free: tuple[str, ...] = ()  # the owner's own members, to be used whatever their records still say
    without: tuple[str, ...] = ()  # peers that the owner has just missed
    parted: tuple[tuple[str, str], ...] = ()  # links that its members say nothing crosses any more
    feeds: Annotated[Mapping[str, LinkProfile], _Profiles] = field(default_factory=dict)  # the owner's, as measured
    hurried: bool = False  # a member was lost and the run stands still
    largest: Mapping[str, int] = field(
        default_factory=dict
    )  # integers of its inputs, which random ids stay under; not sent

    def frame(self) -> Frame:
        blocks = [replace(cost, parameters=()) for cost in self.job.blocks]
        body = plain(replace(self, job=replace(self.job, blocks=blocks), largest={}))
        return Frame(messages.PLAN_REQUEST, {}, [msgpack.packb(body)])

    @classmethod
    def from_frame(cls, frame: Frame) -> PlanRequest:
        if frame.kind != messages.PLAN_REQUEST or len(frame.payloads) != 1:
            raise ProtocolError(f"expected a request for a plan, got a frame of kind {frame.kind!r}")
        what = "a request for a plan"
        found = read(unpack(frame.payloads[0], REQUEST_BYTES, what), cls, what)
        found.job.check()
        if found.job.codec not in CODEC_CHOICES:
            raise ProtocolError(f"codec {found.job.codec[:40]!r} is unknown to this coordinator; upgrade it")
        _check_effort(found.job)
        named = {name: getattr(found, name)[:MAX_NAMED] for name in ("free", "without", "parted")}
        return replace(found, wanted=found.wanted[:MAX_WANTED], **named)

    def plan(self, measured: Measured, busy: tuple[str, ...] = ()) -> tuple[Plan, tuple[str, ...]]:
        """The best plan and notes on its figures. Raises PlanError in a sentence."""
        from meshcee.planner import HURRIED, plan_job

        known = [pair for pair in self.parted if measured.devices.keys() >= {*pair}]
        times = {p: t for p, t in self.times.items() if p in measured.devices}
        measured = replace(measured, times=times, links=without_links(measured.links, known), feeds=self.feeds)
        plan, notes = plan_job(measured, self.job, self.stages, HURRIED if self.hurried else None)
        left_out = (*plan.left_out, *(LeftOut(p, "it runs another job") for p in busy))
        return replace(plan, left_out=left_out), tuple(notes)

    def check(self, plan: Plan, devices: Mapping[str, DeviceProfile]) -> None:
        """Raises PlanError where a coordinator's plan is not what was asked for. `devices` are those that its members lend.

        One that is unknown here yet is not looked at.
        """
        job, members = self.job, {peer: devices[peer] for peer in plan.peers if peer in devices}
        stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
        codecs = {codec for stage in stages for codec in (stage.codec_out, stage.codec_back)}
        counts = {len(pipeline.stages) for pipeline in plan.pipelines}
        _, unfit = job.fitting(members)
        kinds = {device.kind for device in members.values()}
        found = (
            (plan.num_blocks != len(job.blocks), f"it has {plan.num_blocks} blocks, not {len(job.blocks)}"),
            (plan.global_batch != job.batch_size, f"it takes {plan.global_batch} samples a step, not {job.batch_size}"),
            (job.micro_batch not in (None, plan.micro_batch), f"its micro-batches are of {plan.micro_batch} samples"),
            (len(plan.pipelines) > 1 and not job.pipelines, "it has several pipelines, and the job's model is for one"),
            (self.stages is not None and counts != {self.stages}, f"it has not {self.stages} stages in each pipeline"),
            (plan.shares_samples and not job.groups, "it has groups, which the job does not allow"),
            (
                not codecs <= LEFT_TO_PLANNER.get(job.codec, {"none", job.codec}),
                f"it has {', '.join(sorted(codecs))} for {job.codec}",
            ),
            (job.draws and len(kinds) > 1, "it draws random numbers on unlike devices"),
            (plan.threads != job.threads, f"it computes with {plan.threads} threads, not {job.threads}"),
            (not {*plan.peers}.isdisjoint(self.without), "it has peers that were just missed"),
            *((True, f"it has peer {one.peer}, and {one.why}") for one in unfit),
        )
        if why := next((why for wrong, why in found if wrong), None):
            raise PlanError(f"the coordinator's plan is not what was asked for: {why}")
        check_memory(plan, devices, job)


def _check_effort(job: JobCosts) -> None:
    """Raises ProtocolError where a plan would keep a coordinator busy for hours. The owner of such a job plans by itself.

    A group's shares are dealt out sample by sample, and the seconds of every count of samples are kept. So a micro-batch that
    groups may share counts; where none is fixed, that is the whole batch.
    """
    micros = job.batch_size // job.micro_batch if job.micro_batch is not None else 1
    shared = (job.micro_batch or job.batch_size) if job.groups else 0
    for what, count, most in (
        ("blocks", len(job.blocks), MOST_BLOCKS),
        ("micro-batches a step", micros, MOST_MICROS),
        ("samples a micro-batch for groups", shared, MOST_SHARED),
    ):
        if count > most:
            raise ProtocolError(f"a coordinator plans {most} {what} at most, and the job has {count}")


def check_memory(
    plan: Plan, devices: Mapping[str, DeviceProfile], job: JobCosts, names: Mapping[str, str] | None = None
) -> None:
    """Raises PlanError where a member's device has not the memory that its stage needs. Who is not in `devices` is passed over.

    Of a host the plan's members alone share the memory: others there may be idle, and hold nothing.
    """
    from meshcee.planner import shortages, situation

    members = {peer: devices[peer] for peer in plan.peers if peer in devices}
    if members and (short := shortages(plan, *situation(Measured(members, {}, {}, {}), job))):
        raise PlanError(short[0].text(names or {}))


class PlanService:
    """Serves the stream `plan` on every peer; only the coordinator answers with a plan."""

    def __init__(self, agent: MeshView) -> None:
        self._agent = agent
        self._asking: Counter[str] = Counter()  # requests under way, by owner
        self._reading = asyncio.Semaphore(1)  # what a request unfolds to is in memory once
        agent.transport.serve("plan", self.serve)

    async def serve(self, stream: Stream) -> None:
        self._asking[stream.peer_id] += 1
        try:
            await self._serve(stream)
        finally:
            self._asking[stream.peer_id] -= 1
            self._asking += Counter()  # without those at zero

    async def _serve(self, stream: Stream) -> None:
        try:
            lease = self._agent.lease
            if lease is None or lease.peer_id != self._agent.peer_id:
                holder = lease.peer_id if lease else "nobody yet"
                raise JoinError(f"this peer is not the coordinator ({holder} is); ask again")
            if self._asking[stream.peer_id] > ASKED_AT_ONCE:
                raise JoinError(f"{ASKED_AT_ONCE} requests for plans are under way already: ask again")
            stream.max_payload_bytes = REQUEST_BYTES
            async with asyncio.timeout(self._agent.timeouts.join_s):
                frame = await stream.recv()
            async with self._reading:
                request = await asyncio.to_thread(PlanRequest.from_frame, frame)
            plan, notes = await answer(self._agent, request)
            stages = [len(p.stages) for p in plan.pipelines]
            log.info(Event.PLANNED, stages=stages, owner=stream.peer_id, term=lease.term)
            # Every peer that is left out is named with the reason: too much for a header in a mesh of hundreds.
            body = msgpack.packb({"plan": plan.to_json(), "notes": list(notes[:MAX_NOTES])})
            await stream.send(Frame(messages.PLAN, {"term": list(lease.term)}, [body]))
        except (StreamClosed, TimeoutError):
            raise
        except Exception as error:
            tell = log.warning if isinstance(error, MeshceeError) else log.exception
            tell("no plan", owner=stream.peer_id, error=str(error))
            await stream.send(Frame(messages.REFUSED, messages.error_header(error)))


async def answer(agent: MeshView, request: PlanRequest) -> tuple[Plan, tuple[str, ...]]:
    """Plan with what this peer knows of the mesh, once it knows enough; at once for who has just asked who is there."""
    chosen = (request.free, request.without)
    if chosen == ((), ()):
        await agent.wait_for_peers(request.wanted)
        await agent.wait_for_idle()
        await agent.wait_for_links()
    return await asyncio.to_thread(request.plan, agent.measured(*chosen), agent.busy(*chosen))


async def plan_here(agent: MeshView, request: PlanRequest, term: Term) -> Planned:
    """As the coordinator of this term would, by this peer's own records. Raises PlanError, or JoinError when they stay unknown."""
    plan, notes = await answer(agent, request)
    return Planned(plan, term, notes)


async def request_plan(agent: MeshView, request: PlanRequest) -> Planned:
    """Ask whoever holds the lease, waiting for an election if need be. Where that peer sees no way, fails or hangs, plan here.

    Raises PlanError or JoinError; NotPermittedError where this peer's own certificate says that it may ask nobody.
    """
    failed: MeshceeError
    last, lease = "nobody holds the coordinator's lease", None
    try:
        async with asyncio.timeout(agent.timeouts.join_s + PLANNING_S):
            while True:
                async with asyncio.timeout(agent.timeouts.join_s):
                    lease = await agent.coordinator()
                if lease.peer_id == agent.peer_id:
                    return await plan_here(agent, request, lease.term)
                try:
                    return await _ask(agent, lease.peer_id, request)
                except (JoinError, StreamClosed) as error:
                    last = str(error)
                    await asyncio.sleep(agent.timeouts.directory_poll_s)
    except TimeoutError:
        failed = JoinError(f"no coordinator answered in time: {last}; try again, or look at `meshcee status`")
    except MeshceeError as error:  # of the mesh as that peer sees it, whose clock or links may be bad, or of its own
        failed = error
    if lease is None or lease.peer_id == agent.peer_id:
        raise failed
    if isinstance(failed, NotPermittedError):  # that peer's word, which may be false
        agent.members.vouch(agent.peer_id, agent.members.shown, "own", agent.clock(), "asks for no plan")
    try:
        planned = await plan_here(agent, request, lease.term)
    except (PlanError, JoinError) as error:
        raise (failed if isinstance(failed, PlanError | JoinError) else error) from error
    log.warning(Event.PLANNED_HERE, coordinator=lease.peer_id, error=str(failed))
    return planned


async def _ask(agent: MeshView, peer_id: str, request: PlanRequest) -> Planned:
    stream = await agent.transport.open(peer_id, "plan", agent.addresses_of([peer_id]).get(peer_id, ()))
    stream.max_payload_bytes = PLAN_BYTES
    try:
        await stream.send(request.frame())
        reply = await stream.recv()
    finally:
        await stream.aclose()
    if reply.kind == messages.REFUSED:
        raise messages.error_from(reply.header)
    planned = _planned(reply)
    await asyncio.to_thread(request.check, planned.plan, agent.lent())
    return planned


def _planned(frame: Frame) -> Planned:
    """The coordinator's answer. Raises ProtocolError or PlanError when it is none."""
    term = messages.term_of(frame.header)
    if len(frame.payloads) != 1:
        raise ProtocolError("a plan comes with its notes as one payload")
    what = "a plan with its notes"
    told = read(unpack(frame.payloads[0], PLAN_BYTES, what), _Answer, what)
    return Planned(Plan.from_json(told.plan), term, tuple(note[:500] for note in told.notes[:MAX_NOTES]))
