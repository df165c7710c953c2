"""The coordinator's work: answer owners who ask for a plan.

The idea: whoever holds the lease plans, from the records that every peer publishes; nobody else does. A plan carries
the term under which it was made, and members refuse terms older than the newest that they have accepted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import structlog

from meshcee.errors import JoinError, MeshceeError, PlanError, ProtocolError
from meshcee.job import Job
from meshcee.plan import Plan
from meshcee.planner.proportional import proportional
from meshcee.profile import BlockCost, DeviceProfile
from peers import messages
from peers.messages import need
from peers.transport.base import Frame, Stream, StreamClosed

if TYPE_CHECKING:
    from peers.agent import Agent

__all__ = ["PlanRequest", "PlanService", "request_plan"]

log = structlog.get_logger()

MAX_BLOCKS = 4096
MAX_WANTED = 16
MAX_BATCH = 1 << 24
REQUEST_BYTES = 4 << 20  # MAX_BLOCKS costs with room to spare; msgpack may unfold to 64 times as much


@dataclass(frozen=True)
class PlanRequest:
    """What a planner must know of a job: no tensor, no code."""

    costs: Sequence[BlockCost]
    batch_size: int
    micro_batch: int | None
    stages: int | None  # at most so many; None leaves it to the planner
    wanted: tuple[str, ...] = ()  # peers that have just joined for this job: the coordinator waits until it sees them

    @classmethod
    def of(cls, job: Job, costs: Sequence[BlockCost], stages: int | None, wanted: tuple[str, ...] = ()) -> PlanRequest:
        return cls(costs, job.batch_size, job.micro_batch_size, stages, wanted)

    def header(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "micro_batch": self.micro_batch,
            "stages": self.stages,
            "wanted": list(self.wanted),
        }

    def frame(self) -> Frame:
        import msgpack

        costs = [{**asdict(cost), "parameters": []} for cost in self.costs]
        return Frame(messages.PLAN_REQUEST, self.header(), [msgpack.packb(costs)])

    @classmethod
    def from_frame(cls, frame: Frame) -> PlanRequest:
        import msgpack

        if frame.kind != messages.PLAN_REQUEST or len(frame.payloads) != 1:
            raise ProtocolError(f"expected a request for a plan, got a frame of kind {frame.kind!r}")
        try:
            raw = msgpack.unpackb(frame.payloads[0], raw=False)
            if not isinstance(raw, list) or not 1 <= len(raw) <= MAX_BLOCKS:
                raise ProtocolError(f"a job has 1 to {MAX_BLOCKS} blocks")
            if not all(_sensible(n, value) for cost in raw for n, value in cost.items()):
                raise ProtocolError("a block's costs are its name and finite numbers")
            costs = [BlockCost(**{**cost, "parameters": ()}) for cost in raw]
        except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
            raise ProtocolError(f"this is not a list of block costs: {error}") from error
        header = frame.header
        optional = {n: None if header.get(n) is None else need(header, n, int) for n in ("micro_batch", "stages")}
        batch_size = need(header, "batch_size", int)
        micro, stages = optional["micro_batch"], optional["stages"]
        if not 1 <= batch_size <= MAX_BATCH or (micro is not None and (micro < 1 or batch_size % micro)):
            raise ProtocolError(f"a batch has 1 to {MAX_BATCH} samples in equal micro-batches")
        if stages is not None and stages < 1:
            raise ProtocolError("a plan has at least one stage")
        wanted = tuple(map(str, need(header, "wanted", list)[:MAX_WANTED]))
        return cls(costs, batch_size, micro, stages, wanted)

    def plan(self, devices: Mapping[str, DeviceProfile]) -> Plan:
        if not devices:
            raise PlanError(
                "no peer of the mesh has a free device: start one with `meshcee peer --join TOKEN`, or wait until the "
                "running job is over (`meshcee status`)"
            )
        return proportional(devices, self.costs, self.batch_size, self.micro_batch, self.stages)


def _sensible(name: str, value: Any) -> bool:
    if name in ("name", "parameters"):
        return True
    return type(value) in (int, float) and 0 <= value < math.inf


class PlanService:
    """Serves the stream `plan` on every peer; only the coordinator answers with a plan."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        agent.transport.serve("plan", self.serve)

    async def serve(self, stream: Stream) -> None:
        stream.max_payload_bytes = REQUEST_BYTES
        try:
            async with asyncio.timeout(self._agent.timeouts.join_s):
                request = PlanRequest.from_frame(await stream.recv())
            lease = self._agent.lease
            if lease is None or lease.peer_id != self._agent.peer_id:
                holder = lease.peer_id if lease else "nobody yet"
                raise JoinError(f"this peer is not the coordinator ({holder} is); ask again")
            await self._agent.wait_for_peers(request.wanted)
            await self._agent.wait_for_idle()
            plan = await asyncio.to_thread(request.plan, self._agent.devices())
            log.info("planned", stages=len(plan.pipelines[0].stages), owner=stream.peer_id, term=lease.term)
            await stream.send(Frame(messages.PLAN, {"plan": plan.to_json(), "term": list(lease.term)}))
        except MeshceeError as error:
            log.warning("no plan", owner=stream.peer_id, error=str(error))
            await stream.send(Frame(messages.REFUSED, messages.error_header(error)))


async def request_plan(agent: Agent, request: PlanRequest) -> tuple[Plan, tuple[int, str]]:
    """Ask whoever holds the lease, waiting for an election if need be. Raises PlanError or JoinError."""
    last = "nobody holds the coordinator's lease"
    try:
        async with asyncio.timeout(agent.timeouts.join_s):
            while True:
                lease = await agent.coordinator()
                if lease.peer_id == agent.peer_id:
                    return await asyncio.to_thread(request.plan, agent.devices()), lease.term
                try:
                    return await _ask(agent, lease.peer_id, request)
                except (JoinError, StreamClosed) as error:
                    last = str(error)
                    await asyncio.sleep(agent.timeouts.directory_poll_s)
    except TimeoutError as error:
        raise JoinError(f"no coordinator answered within {agent.timeouts.join_s:.0f} s: {last}") from error


async def _ask(agent: Agent, peer_id: str, request: PlanRequest) -> tuple[Plan, tuple[int, str]]:
    stream = await agent.transport.open(peer_id, "plan", agent.addresses_of([peer_id]).get(peer_id, ()))
    stream.max_payload_bytes = 0  # a plan travels in the header
    try:
        await stream.send(request.frame())
        reply = await stream.recv()
    finally:
        await stream.aclose()
    if reply.kind == messages.REFUSED:
        raise messages.error_from(reply.header)
    term = need(reply.header, "term", list)
    return Plan.from_json(need(reply.header, "plan", dict)), (int(term[0]), str(term[1]))
