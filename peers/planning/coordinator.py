"""The coordinator's work: answer owners who ask for a plan.

The idea: whoever holds the lease plans, from the records that every peer publishes and what the owner found out about its
job; nobody else does. A plan carries the term under which it was made, and members refuse terms older than the newest
that they have accepted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import msgpack
import structlog

from meshcee.errors import JoinError, MeshceeError, ProtocolError
from meshcee.figures import MIXES, BlockCost, BlockTimes, JobCosts, LinkProfile, Measured, Versions, without_links
from meshcee.job import CODEC_CHOICES
from meshcee.plan import MOST_THREADS, LeftOut, Plan
from meshcee.planner import plan_job
from peers.mesh_view import MeshView
from peers.transport import Frame, Stream, StreamClosed
from peers.wire import messages, need

__all__ = ["PlanRequest", "PlanService", "Planned", "answer", "request_plan"]

log = structlog.get_logger()

MAX_BLOCKS = 4096
MAX_WANTED = 16
MAX_NAMED = 512
MAX_BATCH = 1 << 24
MAX_PROFILES = 1024
MAX_NOTES = 64
REQUEST_BYTES = 8 << 20  # MAX_BLOCKS costs with room to spare; msgpack may unfold to 64 times as much
PLAN_BYTES = 4 << 20  # a thousand peers that are left out take 140 kB
FLAGS = ("groups", "direct_sums", "clips")
PLANNING_S = 90.0  # that an owner waits for the coordinator's answer


class Planned(NamedTuple):
    """A plan, the term under which it was made, and what people should know of the figures behind it."""

    plan: Plan
    term: tuple[int, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanRequest:
    """What an owner asks: its job's costs, what devices measured of it, and how it wants it."""

    job: JobCosts
    times: Mapping[str, BlockTimes] = field(default_factory=dict)  # peer -> seconds of the job's blocks
    stages: int | None = None  # exactly so many; None leaves it to the planner
    wanted: tuple[str, ...] = ()  # peers that have just joined for this job: the coordinator waits until it sees them
    free: tuple[str, ...] = ()  # the owner's own members, to be used whatever their records still say
    without: tuple[str, ...] = ()  # peers that the owner has just missed
    parted: tuple[tuple[str, str], ...] = ()  # links that its members say nothing crosses any more
    feeds: Mapping[str, LinkProfile] = field(
        default_factory=dict
    )  # peer -> the owner's link to it, as the owner measured it

    def frame(self) -> Frame:
        job = self.job
        body = {
            "costs": [{**asdict(cost), "parameters": []} for cost in job.blocks],
            "alike": list(job.alike),
            "tied": [list(t) for t in job.tied],
            "inputs": [[size, list(blocks)] for size, blocks in job.feeds],
            "data_s": job.data_s,
            "feeds": {peer: [link.latency_s, link.bandwidth_bytes_per_s] for peer, link in self.feeds.items()},
            "times": {peer: times.to_json() for peer, times in self.times.items()},
        }
        header = {
            "batch_size": job.batch_size,
            "micro_batch": job.micro_batch,
            "recompute": job.recompute,
            "codec": job.codec,
            **{name: getattr(job, name) for name in FLAGS},
            "mix": job.mix,
            "threads": job.threads,
            "versions": None if job.versions is None else [*vars(job.versions).values()],
            "element_bytes": job.element_bytes,
            "message_bytes": list(job.message_bytes),
            "stages": self.stages,
            "wanted": list(self.wanted),
            "free": list(self.free),
            "without": list(self.without),
            "parted": [list(pair) for pair in self.parted],
        }
        return Frame(messages.PLAN_REQUEST, header, [msgpack.packb(body)])

    @classmethod
    def from_frame(cls, frame: Frame) -> PlanRequest:
        if frame.kind != messages.PLAN_REQUEST or len(frame.payloads) != 1:
            raise ProtocolError(f"expected a request for a plan, got a frame of kind {frame.kind!r}")
        body = messages.body_of(frame.payloads[0], "a request for a plan")
        try:
            raw, times = need(body, "costs", list), need(body, "times", dict)
            if not 1 <= len(raw) <= MAX_BLOCKS or len(times) > MAX_PROFILES:
                raise ProtocolError(f"a job has 1 to {MAX_BLOCKS} blocks and at most {MAX_PROFILES} profiles")
            if not all(_sensible(n, value) for cost in raw for n, value in cost.items()):
                raise ProtocolError("a block's costs are its name and finite numbers")
            costs = [BlockCost(**{**cost, "parameters": ()}) for cost in raw]
            alike, tied = need(body, "alike", list), need(body, "tied", list)
            if len(alike) not in (0, len(costs)) or not all(
                type(k) is int and 0 <= k <= i for i, k in enumerate(alike)
            ):
                raise ProtocolError("each block is like itself or an earlier one")
            if len(tied) > MAX_BLOCKS or not all(_is_tie(t, len(costs)) for t in tied):
                raise ProtocolError("a shared parameter lies on two blocks of the job and has a size")
            inputs, data_s, feeds = need(body, "inputs", list), need(body, "data_s", float), need(body, "feeds", dict)
            if len(inputs) > MAX_BLOCKS or not all(_is_input(one, len(costs)) for one in inputs):
                raise ProtocolError("a raw input has a size, and blocks of the job read it")
            if not 0 <= data_s < math.inf or len(feeds) > MAX_PROFILES or not all(map(_is_link, feeds.values())):
                raise ProtocolError("an owner's links have a latency and a bandwidth, and its data some time")
            found = {str(peer): BlockTimes.from_json(data) for peer, data in times.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise ProtocolError(f"this is not a request for a plan: {error}") from error
        header = frame.header
        optional = {n: None if header.get(n) is None else need(header, n, int) for n in ("micro_batch", "stages")}
        batch_size = need(header, "batch_size", int)
        micro, stages = optional["micro_batch"], optional["stages"]
        if not 1 <= batch_size <= MAX_BATCH or (micro is not None and (micro < 1 or batch_size % micro)):
            raise ProtocolError(f"a batch has 1 to {MAX_BATCH} samples in equal micro-batches")
        if stages is not None and stages < 1:
            raise ProtocolError("a plan has at least one stage")
        extra = need(header, "message_bytes", list)
        if len(extra) != 2 or not all(type(x) is int and 0 <= x < 1 << 30 for x in extra):
            raise ProtocolError("a message has bytes beside its samples, out and back")
        if (element_bytes := need(header, "element_bytes", int)) not in (2, 4):
            raise ProtocolError("an element has 2 or 4 bytes")
        if (codec := need(header, "codec", str)) not in CODEC_CHOICES:
            raise ProtocolError(f"codec {codec[:40]!r} is unknown to this coordinator; upgrade it")
        if (mix := need(header, "mix", str)) not in MIXES:
            raise ProtocolError(f"mix {mix[:40]!r} is unknown to this coordinator; upgrade it")
        if not 0 <= (threads := need(header, "threads", int)) <= MOST_THREADS:
            raise ProtocolError(f"a run has 0 to {MOST_THREADS} threads, got {threads}")
        versions = None if header.get("versions") is None else need(header, "versions", list)
        if versions is not None and (len(versions) != 3 or not all(type(v) is str and len(v) <= 32 for v in versions)):
            raise ProtocolError("an owner runs a meshcee, a torch and a Python, each with a short version")
        job = JobCosts(
            costs,
            batch_size,
            micro,
            need(header, "recompute", bool),
            element_bytes,
            (extra[0], extra[1]),
            tuple(alike),
            tuple((first, last, size) for first, last, size in tied),
            codec,
            **{name: need(header, name, bool) for name in FLAGS},
            mix=mix,
            versions=None if versions is None else Versions(*versions),
            threads=threads,
            feeds=tuple((size, tuple(blocks)) for size, blocks in inputs),
            data_s=data_s,
        )
        wanted = tuple(map(str, need(header, "wanted", list)[:MAX_WANTED]))
        free, without = (tuple(map(str, need(header, name, list)[:MAX_NAMED])) for name in ("free", "without"))
        parted = need(header, "parted", list)[:MAX_NAMED]
        if not all(type(pair) is list and len(pair) == 2 for pair in parted):
            raise ProtocolError("a link has two ends")
        cut = tuple((str(a), str(b)) for a, b in parted)
        own = {str(peer): LinkProfile(float(latency), float(rate)) for peer, (latency, rate) in feeds.items()}
        return cls(job, found, stages, wanted, free, without, cut, own)

    def plan(self, measured: Measured, busy: tuple[str, ...] = ()) -> tuple[Plan, tuple[str, ...]]:
        """The best plan and notes on its figures. Raises PlanError in a sentence."""
        known = [pair for pair in self.parted if measured.devices.keys() >= {*pair}]
        times = {p: t for p, t in self.times.items() if p in measured.devices}
        measured = replace(measured, times=times, links=without_links(measured.links, known), feeds=self.feeds)
        plan, notes = plan_job(measured, self.job, self.stages)
        left_out = (*plan.left_out, *(LeftOut(p, "it runs another job") for p in busy))
        return replace(plan, left_out=left_out), tuple(notes)


def _sensible(name: str, value: Any) -> bool:
    if name in ("name", "parameters"):
        return True
    return type(value) in (int, float) and 0 <= value < math.inf


def _is_tie(value: Any, blocks: int) -> bool:
    if not isinstance(value, list) or len(value) != 3 or not all(type(x) is int for x in value):
        return False
    return bool(0 <= value[0] < value[1] < blocks and 0 <= value[2] < 1 << 50)


def _is_input(value: Any, blocks: int) -> bool:
    if not isinstance(value, list) or len(value) != 2 or type(value[0]) is not int or type(value[1]) is not list:
        return False
    return 0 <= value[0] < 1 << 40 and all(type(block) is int and 0 <= block < blocks for block in value[1])


def _is_link(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2 or not all(type(x) in (int, float) for x in value):
        return False
    return bool(0 <= value[0] < math.inf and 0 < value[1] < math.inf)


class PlanService:
    """Serves the stream `plan` on every peer; only the coordinator answers with a plan."""

    def __init__(self, agent: MeshView) -> None:
        self._agent = agent
        agent.transport.serve("plan", self.serve)

    async def serve(self, stream: Stream) -> None:
        stream.max_payload_bytes = REQUEST_BYTES
        try:
            async with asyncio.timeout(self._agent.timeouts.join_s):
                frame = await stream.recv()
            request = await asyncio.to_thread(PlanRequest.from_frame, frame)
            lease = self._agent.lease
            if lease is None or lease.peer_id != self._agent.peer_id:
                holder = lease.peer_id if lease else "nobody yet"
                raise JoinError(f"this peer is not the coordinator ({holder} is); ask again")
            plan, notes = await answer(self._agent, request)
            log.info("planned", stages=[len(p.stages) for p in plan.pipelines], owner=stream.peer_id, term=lease.term)
            # Every peer that is left out is named with the reason: too much for a header in a mesh of hundreds.
            body = msgpack.packb({"plan": plan.to_json(), "notes": list(notes[:MAX_NOTES])})
            await stream.send(Frame(messages.PLAN, {"term": list(lease.term)}, [body]))
        except MeshceeError as error:
            log.warning("no plan", owner=stream.peer_id, error=str(error))
            await stream.send(Frame(messages.REFUSED, messages.error_header(error)))


async def answer(agent: MeshView, request: PlanRequest) -> tuple[Plan, tuple[str, ...]]:
    """Plan with what this peer knows of the mesh, once it knows enough; at once for who has just asked who is there."""
    chosen = (request.free, request.without)
    if chosen == ((), ()):
        await agent.wait_for_peers(request.wanted)
        await agent.wait_for_idle()
        await agent.wait_for_links()
    return await asyncio.to_thread(request.plan, agent.measured(*chosen), agent.busy(*chosen))


async def request_plan(agent: MeshView, request: PlanRequest) -> Planned:
    """Ask whoever holds the lease, waiting for an election if need be. Raises PlanError or JoinError."""
    last = "nobody holds the coordinator's lease"
    try:
        async with asyncio.timeout(agent.timeouts.join_s + PLANNING_S):
            while True:
                async with asyncio.timeout(agent.timeouts.join_s):
                    lease = await agent.coordinator()
                if lease.peer_id == agent.peer_id:
                    plan, notes = await answer(agent, request)
                    return Planned(plan, lease.term, notes)
                try:
                    return await _ask(agent, lease.peer_id, request)
                except (JoinError, StreamClosed) as error:
                    last = str(error)
                    await asyncio.sleep(agent.timeouts.directory_poll_s)
    except TimeoutError as error:
        raise JoinError(f"no coordinator answered in time: {last}; try again, or look at `meshcee status`") from error


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
    return _planned(reply)


def _planned(frame: Frame) -> Planned:
    """The coordinator's answer. Raises ProtocolError or PlanError when it is none."""
    term = messages.term_of(frame.header)
    if len(frame.payloads) != 1:
        raise ProtocolError("a plan comes with its notes as one payload")
    body = messages.body_of(frame.payloads[0], "a plan with its notes")
    notes = tuple(str(note)[:500] for note in need(body, "notes", list)[:MAX_NOTES])
    return Planned(Plan.from_json(need(body, "plan", dict)), term, notes)
