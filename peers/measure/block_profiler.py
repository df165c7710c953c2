"""How long a device takes for F, B and W of a job's blocks: asked by the owner, measured by the peer that would run them.

The idea: each distinct block runs as a stage of its own, by the code and through the thread that will run it later, with
random weights and inputs. So a paced device shows its pace and a throttled card its throttle. A device spends BUDGET_S on
a job it does not know; what that did not allow to measure lies between sizes that were, or is scaled up from the largest.
Results are kept by the hash of the request, so a second run of the job soon after asks for nothing. A device may have been
busy with other work, so a result is kept for FRESH_S only.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any

import msgpack
import numpy as np
import structlog
import torch
from msgspec import Meta

from meshcee.capture import Program, StageSpec
from meshcee.capture.graph import Value, unfolded
from meshcee.capture.graph.sizes import integer
from meshcee.config import Timeouts
from meshcee.errors import MeshceeError, PlanError, ProtocolError
from meshcee.fields import Count, plain, read, unpack
from meshcee.figures import KINDS, MAX_DISTINCT, MAX_SIZES, BlockTimes, Triple
from meshcee.figures.amounts import size as told_size
from meshcee.files import large_apart
from meshcee.optim import Optimizer
from meshcee.plan import MOST_THREADS
from meshcee.stage import StageRunner, tensors
from peers.device import Compute, Graphs
from peers.transport import Frame, Stream
from peers.wire import messages, need, while_moving

__all__ = ["BUDGET_S", "FRESH_S", "BlockProfiler", "ProfileRequest"]

log = structlog.get_logger()

BUDGET_S = 3.0  # that a device measures for one job; the first pass of a block at its smallest size may exceed it
LONGEST = 10  # times the budget, after which a device is too slow for the job
REPEATS_LEAST, REPEATS_MOST = 3, 7  # of each block and size, beside one to warm up
CALLS = 9  # empty ones, for what a call costs whatever is in it
PACED_CALL_S = 0.005
MOST_KNOWN = 16
FRESH_S = 300.0  # that a result counts
REQUEST_BYTES = 1 << 20
_Flops = Annotated[float, Meta(ge=0, lt=1e21)]
_Size = Annotated[int, Meta(ge=1, le=1 << 24)]
SEED = 0x5EED


@dataclass(frozen=True)
class ProfileRequest:
    """What the owner wants to know. `most` bounds the random values of integer inputs (ids of tokens, classes)."""

    blocks: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_DISTINCT)]  # distinct ones, by first places
    pair: int | None  # this block and the next are the same work: measured together, they show what a call costs
    sizes: Annotated[tuple[_Size, ...], Meta(min_length=1, max_length=MAX_SIZES)]
    flops: tuple[_Flops, ...]  # forward, per sample, of each of `blocks`: what an emulated device is paced by
    precision: str
    optimizer: Optimizer
    most: Mapping[str, int]
    threads: Annotated[int, Meta(ge=0, le=MOST_THREADS)] = 0  # of a CPU; 0: as it is

    def pack(self) -> bytes:
        return bytes(msgpack.packb(plain(self)))

    @classmethod
    def unpack(cls, data: Any) -> ProfileRequest:
        """ProtocolError on anything that is not a request."""
        what = "a request for a profile"
        found = read(unpack(data, REQUEST_BYTES, what), cls, what)
        if len(found.flops) != len(found.blocks):
            raise ProtocolError(f"{what} is of blocks each with its FLOPs")
        if list(found.sizes) != sorted(set(found.sizes)):
            raise ProtocolError(f"{what} has ascending micro-batch sizes")
        if found.precision not in ("fp32", "bf16"):
            raise ProtocolError(f"unknown precision {found.precision[:40]!r}")
        return found


class BlockProfiler:
    """Serves the stream `profile`: one request at a time, none while the peer trains."""

    def __init__(
        self,
        compute: Compute,
        *,
        memory_bytes: int,
        graphs: Graphs,
        is_busy: Callable[[], bool],
        timeouts: Timeouts | None = None,
        budget_s: float = BUDGET_S,
        clock: Callable[[], float] = time.perf_counter,
        quiet: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        self._compute = compute
        self._memory_bytes = memory_bytes
        self._quiet = quiet  # while no other peer of this host measures
        self._graphs = graphs
        self._is_busy = is_busy
        self._timeouts = timeouts or Timeouts()
        self._budget_s = budget_s
        self._clock = clock
        self._turn = asyncio.Lock()
        self._known: dict[str, tuple[float, BlockTimes]] = {}  # with when they were measured

    async def serve(self, stream: Stream) -> None:
        stream.max_payload_bytes = REQUEST_BYTES
        try:
            frame = await self._arrival(stream)
            if frame.kind != messages.PROFILE or len(frame.payloads) != 1:
                raise ProtocolError(f"expected a request for a profile, got a frame of kind {frame.kind!r}")
            key = need(frame.header, "graph", str)[:64] + hashlib.sha256(frame.payloads[0]).hexdigest()
            if not self._is_fresh(key):
                request = ProfileRequest.unpack(frame.payloads[0])
                stream.max_payload_bytes = self._graphs.limits.graph_bytes
                await stream.send(Frame(messages.WANTED))
                graph = await self._arrival(stream)
                if graph.kind != messages.GRAPH or len(graph.payloads) != 1:
                    raise ProtocolError(f"expected a graph, got a frame of kind {graph.kind!r}")
                data = bytes(graph.payloads[0])
                if hashlib.sha256(data).hexdigest() != frame.header["graph"]:
                    raise ProtocolError("the graph that came is another than was announced")
                [program] = await self._graphs.read([data])
                async with self._turn, self._quiet():
                    await self._compute.calls.free(self._timeouts.hung_s)
                    if self._is_busy():
                        raise PlanError("this peer runs a job and measures nothing meanwhile")
                    await self._compute.use_threads(request.threads)
                    packed = unfolded(enumerate(program.inputs), enumerate(program.nodes, len(program.inputs)))
                    try:
                        async with asyncio.timeout(LONGEST * self._budget_s):
                            with large_apart() if packed else nullcontext():  # as a member of such a stage has it
                                self._remember(key, await self.measure(program, request))
                    except TimeoutError as error:
                        self._compute.calls.let_go()
                        late = (
                            f"one pass of the job's blocks takes this peer more than {LONGEST * self._budget_s:.0f} s"
                        )
                        raise PlanError(late) from error
            await stream.send(Frame(messages.PROFILED, {}, [msgpack.packb(plain(self._known[key][1]))]))
        except MeshceeError as error:
            log.info("blocks not profiled", owner=stream.peer_id, error=str(error))  # the owner tells its user
            await stream.send(Frame(messages.REFUSED, messages.error_header(error)))

    async def _arrival(self, stream: Stream) -> Frame:
        """Nobody holds a stream's memory by saying nothing."""
        return await while_moving(stream.recv, lambda: stream.received_bytes, self._timeouts.offer_s, self._timeouts)

    def _is_fresh(self, key: str) -> bool:
        return key in self._known and self._clock() - self._known[key][0] < FRESH_S

    def _remember(self, key: str, times: BlockTimes) -> None:
        self._known.pop(key, None)
        self._known[key] = self._clock(), times
        while len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]

    async def measure(self, program: Program, request: ProfileRequest) -> BlockTimes:
        """Every distinct block at every size, within the budget. Raises ProtocolError or PlanError."""
        if max(request.blocks) >= program.num_blocks or (request.pair or 0) + 2 > program.num_blocks + 1:
            raise ProtocolError("a profile was asked for blocks that the graph does not have")
        program = program.unasserted()
        until = self._clock() + self._budget_s
        count = len(request.blocks)
        call_s = await self._call_s()
        rows: list[list[list[Triple]]] = []  # block, size, kind
        apply_s: list[float] = []
        for k, (block, flops) in enumerate(zip(request.blocks, request.flops)):
            share_until = self._clock() + (until - self._clock()) / (count - k)
            bench = await self._bench(program, block, block + 1, request, flops)
            found, applied = await bench.run(request.sizes, share_until)
            rows.append(found)
            apply_s.append(applied)
        calls = (call_s, call_s, call_s)
        if request.pair is not None and request.pair in request.blocks:
            flops = request.flops[request.blocks.index(request.pair)]
            one = await self._bench(program, request.pair, request.pair + 1, request, flops)
            two = await self._bench(program, request.pair, request.pair + 2, request, 2 * flops)
            calls = await self._saved_s(one, two, request.sizes[0], call_s)
        seconds = tuple(
            tuple(tuple(_less(rows[k][s][kind], calls[kind]) for k in range(count)) for s in range(len(request.sizes)))
            for kind in range(len(KINDS))
        )
        times = BlockTimes(request.blocks, request.sizes, seconds, tuple(apply_s), calls)
        log.info("blocks profiled", blocks=count, sizes=request.sizes, spread=round(times.spread, 3))
        return times

    async def _saved_s(self, one: _Bench, two: _Bench, size: int, call_s: float) -> Triple:
        """What F, B and W of two blocks in one call save: what a call costs. Whatever disturbs a measurement makes it longer,
        so the shortest are compared; no less than an empty call, no more than half a block."""
        singly, together = [await one.once(size)], [await two.once(size)]  # warm up
        until = self._clock() + self._budget_s / 2
        while len(singly) <= REPEATS_MOST and (len(singly) < 2 or self._clock() < until):
            singly.append(await one.once(size))
            together.append(await two.once(size))
        shortest = [(min(a), min(b)) for a, b in zip(zip(*singly[1:]), zip(*together[1:]))]
        f, b, w = (min(max(call_s, 2 * a - b), a / 2) for a, b in shortest[: len(KINDS)])
        return f, b, w

    async def _call_s(self) -> float:
        """Seconds that a call takes when there is nothing in it: the least, as what disturbs one makes it longer."""
        pace = self._compute.pace
        wanted_s = PACED_CALL_S if pace is not None else 0.0
        flops = pace.speed_flops_per_s * wanted_s if pace is not None else 0.0
        found = []
        for _ in range(CALLS):
            start_s = self._clock()
            await self._compute.run(_nothing, flops=flops)
            found.append(_took_s(self._compute, self._clock, start_s) - wanted_s)
        return max(0.0, min(found))

    async def _bench(self, program: Program, first: int, end: int, request: ProfileRequest, flops: float) -> _Bench:
        spec = program.slice(first, end)
        state = [v.value.nbytes(1) for _, v in spec.inputs if v.kind in ("parameter", "buffer")]
        if (needed := 4 * sum(state) + _touched_bytes(spec, request.sizes[0])) > self._memory_bytes:
            raise PlanError(
                f"block {first} needs {told_size(needed)}, {told_size(needed - self._memory_bytes)} more than this peer offers"
            )
        try:
            runner = await self._compute.run(_runner, spec, request, self._compute.device)
        except RuntimeError as error:
            raise PlanError(f"block {first} cannot be built here: {str(error).splitlines()[0]}") from error
        return _Bench(runner, program, spec, request, flops, self._compute, self._memory_bytes, self._clock)


class _Bench:
    """One block, or two, as a stage."""

    def __init__(
        self,
        runner: StageRunner,
        program: Program,
        spec: StageSpec,
        request: ProfileRequest,
        flops: float,
        compute: Compute,
        memory_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._runner, self._program, self._spec, self._request = runner, program, spec, request
        self._flops = flops
        self._compute, self._memory_bytes, self._clock = compute, memory_bytes, clock
        self._step = 0
        self._given: dict[int, tuple[dict[str, torch.Tensor], list[Any]]] = {}

    async def run(self, sizes: tuple[int, ...], until: float) -> tuple[list[list[Triple]], float]:
        """(p10, p50, p90) of F, B and W at each size; the optimizer's seconds.

        Sizes for which there is no time lie on the line between measured ones, or are scaled up from the largest.
        """
        rows: dict[int, list[Triple]] = {}
        applied: list[float] = []
        rest = [n for n in sizes if n == sizes[0] or _touched_bytes(self._spec, n) <= self._memory_bytes]
        while rest and (size := _next(rows, rest, until - self._clock())):
            stop = self._clock() + (until - self._clock()) / len(rest)
            taken: list[tuple[float, ...]] = []
            try:
                await self.once(size)  # warms up
                while len(taken) < REPEATS_MOST and (len(taken) < REPEATS_LEAST or self._clock() < stop):
                    taken.append(await self.once(size))
            except MeshceeError:
                raise
            except Exception as error:  # out of memory, above all
                if not rows:
                    said = (str(error).splitlines() or [type(error).__name__])[0]
                    raise PlanError(f"block {self._spec.first} does not run here: {said}") from error
                rest = [n for n in rest if n < size]
                continue
            rest.remove(size)
            *kinds, apply_s = zip(*taken)
            if self._compute.pace is not None:
                # What took longer than an emulated device's pace is the doing of this machine's other ones.
                kinds = [(min(kind),) for kind in kinds]
            rows[size] = [_triple(kind) for kind in kinds]
            applied += apply_s
        return [_filled(rows, size) for size in sizes], float(np.median(applied))

    async def once(self, size: int) -> tuple[float, ...]:
        """Seconds of F, B, W and the optimizer, each as the executor does it, with what it packs for the wire."""
        runner, work = self._runner, self._flops * size
        if size not in self._given:
            self._given = {size: await self._compute.run(self._inputs, size)}
        raw, received = self._given[size]
        runner.begin(self._step)
        self._step += 1
        rng: Any = SEED if self._spec.is_first else _state(runner.device) if self._spec.uses_random else None
        took: list[float] = []
        start_s = self._clock()
        sent, after, _ = await self._compute.run(
            _settled, runner.device, runner.forward, 0, raw, received, rng, flops=work
        )
        self._packed([*sent, after])
        took.append(_took_s(self._compute, self._clock, start_s))
        grads = [
            torch.ones_like(t) if v.requires_grad and isinstance(t, torch.Tensor) else None
            for v, t in zip(self._spec.sent, sent)
        ]
        start_s = self._clock()
        back = await self._compute.run(_settled, runner.device, runner.backward_input, 0, grads, 1.0, flops=work)
        self._packed(back)
        took.append(_took_s(self._compute, self._clock, start_s))
        start_s = self._clock()
        await self._compute.run(_settled, runner.device, runner.backward_weight, 0, flops=work)
        took.append(_took_s(self._compute, self._clock, start_s))
        start_s = self._clock()
        await self._compute.run(_settled, runner.device, runner.apply)
        return *took, self._clock() - start_s

    def _packed(self, values: Sequence[Any]) -> None:
        """What the executor does before it goes on; what leaves a GPU is packed beside it."""
        if self._runner.device.type == "cpu":
            tensors.pack(values)

    def _inputs(self, size: int) -> tuple[dict[str, torch.Tensor], list[Any]]:
        generator = torch.Generator().manual_seed(SEED)
        raw = {
            v.name: self._random(v, size, generator, self._request.most.get(v.name, 0)) for v in self._spec.raw_inputs
        }
        received: list[Any] = []
        for number, value in zip(self._spec.received_numbers, self._spec.received):
            if value.is_tensor:
                on_wire = value.to_wire(self._random(value, size, generator, 0))
                received.append(on_wire.to(self._runner.device))  # it is there before F begins
            else:
                received.append(integer(self._program, number, size))
        return raw, received

    @staticmethod
    def _random(value: Value, size: int, generator: torch.Generator, most: int) -> torch.Tensor:
        assert value.dtype is not None
        shape = value.sizes(size, usual=True)
        if value.dtype.is_floating_point or value.dtype.is_complex:  # from 0 to 1, as losses of likelihoods ask for
            return torch.rand(shape, generator=generator).to(value.dtype)
        if value.dtype == torch.bool:
            return torch.ones(shape, dtype=torch.bool)
        return torch.randint(0, max(most, 0) + 1, shape, generator=generator).to(value.dtype)


def _runner(spec: StageSpec, request: ProfileRequest, device: torch.device) -> StageRunner:
    """The block with random weights; called on the compute thread."""
    generator = torch.Generator().manual_seed(SEED)
    state = {}
    for _, entry in spec.inputs:
        if entry.kind not in ("parameter", "buffer"):
            continue
        dtype, shape = entry.value.dtype, entry.value.sizes(1)
        assert dtype is not None
        if request.precision == "bf16" and dtype == torch.bfloat16:
            dtype = torch.float32  # as members receive them
        if entry.kind == "parameter" and dtype.is_floating_point:
            state[entry.name] = (0.02 * torch.randn(shape, generator=generator)).to(dtype)
        else:
            state[entry.name] = (
                torch.ones(shape, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
            )
    return StageRunner(spec, state, request.optimizer, device=device)


def _settled(device: torch.device, call: Callable[..., Any], *args: Any) -> Any:
    """The call, and everything that it has started on the device."""
    result = call(*args)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return result


def _took_s(compute: Compute, clock: Callable[[], float], start_s: float) -> float:
    """Seconds since a call began, which has just ended. On an emulated device those that it took itself. Its timer is late by
    up to a millisecond, and makes up for that in the next call, so short calls would seem to take anything."""
    return clock() - start_s if compute.pace is None else compute.last_s


def _nothing() -> None:
    return None


def _state(device: torch.device) -> torch.Tensor:
    return torch.Generator(device).manual_seed(SEED).get_state()


def _touched_bytes(spec: StageSpec, size: int) -> int:
    """Everything that F makes, and as much again on the way back."""
    return 2 * sum(node.value.nbytes(size, usual=True) for _, node in spec.nodes)


def _triple(seconds: Any) -> Triple:
    a, b, c = (float(x) for x in np.percentile(np.asarray(seconds), (10, 50, 90)))
    return a, b, c


def _next(rows: Mapping[int, list[Triple]], rest: Sequence[int], left_s: float) -> int:
    """The size to measure next; 0 where there is time for none. The smallest is first, and those between others are last.

    On the way up it is the largest for which there surely is time: a GPU may take no longer for many samples than for one.
    """
    if not rows:
        return rest[0]
    due = [n for n in rest if (1 + REPEATS_LEAST) * sum(t[1] for t in _filled(rows, n)) <= left_s] or [0]
    return due[-1] if due[-1] > max(rows) else due[len(due) // 2]


def _filled(rows: Mapping[int, list[Triple]], size: int) -> list[Triple]:
    """Seconds at a size: on the line between those around it, or scaled up from the largest.

    More samples at once are never slower than one after the other.
    """
    low, high = max(n for n in rows if n <= size), min((n for n in rows if n >= size), default=0)
    if not high:
        return [(a * size / low, b * size / low, c * size / low) for a, b, c in rows[low]]
    share = (size - low) / max(high - low, 1)
    less = 1 - share  # so that p10 <= p50 <= p90 whatever is rounded
    return [
        (less * a + share * x, less * b + share * y, less * c + share * z)
        for (a, b, c), (x, y, z) in zip(rows[low], rows[high])
    ]


def _less(triple: Triple, call_s: float) -> Triple:
    a, b, c = (max(x - call_s, 0.05 * x) for x in triple)
    return a, b, c
