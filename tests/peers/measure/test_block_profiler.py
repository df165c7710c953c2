"""Profiling a job's blocks on a device: what is measured, what it may cost, and what is refused."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import msgpack
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshcee.capture import Capture, capture, encode_program
from meshcee.capture.graph.same_work import alike, tied
from meshcee.config import Limits, Timeouts
from meshcee.errors import PlanError, ProtocolError
from meshcee.figures.timing import BlockTimes
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.stage.runner import StageRunner
from peers.device.compute import Compute, Pace
from peers.device.graphs import Graphs
from peers.measure import block_profiler
from peers.measure.block_profiler import BlockProfiler, ProfileRequest
from peers.planning.job_costs import costs_of, sizes_of
from peers.transport.base import Frame, StreamClosed
from peers.transport.memory import MemoryNetwork
from peers.wire import messages
from tests.peers.member.test_training import make_job
from tests.rig import zoo
from tests.rig.virtual_time import VirtualTimeLoop, virtual_time

MEMORY = 1 << 30


@functools.cache
def captured_job() -> tuple[Job, Capture]:
    job = make_job()
    return job, capture(job)


def request_of(job: Job, captured: Capture, **changes: Any) -> ProfileRequest:
    blocks = tuple(sorted(set(alike(captured.train))))
    flops = tuple(max(captured.costs[k].flops, 1.0) for k in blocks)
    most = {"x": 22, "y": 22}
    settings: dict[str, Any] = {"blocks": blocks, "pair": None, "sizes": (2, 6), "flops": flops, "most": most}
    return ProfileRequest(**{**settings, "precision": job.precision, "optimizer": job.optimizer, **changes})


def the_loop() -> VirtualTimeLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop


def profiler(compute: Compute, **changes: Any) -> BlockProfiler:
    settings: dict[str, Any] = {"memory_bytes": MEMORY, "graphs": Graphs(Limits()), "is_busy": lambda: False}
    return BlockProfiler(compute, **{**settings, **changes})


def test_identical_blocks_are_found_and_tied_ones_named() -> None:
    _, captured = captured_job()
    places = alike(captured.train)
    assert len(places) == captured.train.num_blocks
    assert len(set(places)) < len(places)  # six layers, all the same
    assert all(places[k] == k for k in set(places))
    assert places[0] == 0
    assert places[-1] == len(places) - 1  # the loss is like nothing else
    assert tied(captured.train) == ((0, places[-1], 23 * 16 * 4),)


@virtual_time
async def test_a_paced_device_measures_its_pace() -> None:
    """On virtual time, where a call takes what it is paced to."""
    job, captured = captured_job()
    request = request_of(job, captured)
    speed = sum(request.flops) / 100
    async with Compute(pace=Pace(speed)) as compute:
        clock = asyncio.get_running_loop().time
        times = await profiler(compute, budget_s=1e9, clock=clock).measure(captured.train, request)
    for rows in times.seconds:
        for size, row in zip(request.sizes, rows):
            for flops, (p10, p50, p90) in zip(request.flops, row):
                assert p10 <= p50 <= p90
                assert p50 == pytest.approx(flops * size / speed, rel=0.05, abs=1.0)  # of what is really computed
    assert times.speed_flops_per_s(alike(captured.train), [c.flops for c in captured.costs]) == pytest.approx(
        speed, rel=0.1
    )


async def test_a_loss_of_likelihoods_is_measured() -> None:
    """Its kernel refuses numbers outside of [0, 1], for what the model says and for the target."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())
    data = [(torch.rand(8), torch.rand(8)) for _ in range(8)]
    job = Job(
        model=model, loss=F.binary_cross_entropy, data=data, optimizer=Optimizer("SGD", lr=0.1), batch_size=4, steps=1
    )
    captured = capture(job)
    async with Compute() as compute:
        times = await profiler(compute, budget_s=0.1).measure(captured.train, request_of(job, captured, most={}))
    assert all(len(row) == len(set(alike(captured.train))) for rows in times.seconds for row in rows)


@virtual_time
async def test_short_calls_of_a_paced_device_are_not_measured_by_its_timer() -> None:
    """Which is late by up to a millisecond, and makes up for it in the next call: neither may count as the block's."""
    job, captured = captured_job()
    request = request_of(job, captured, sizes=(2,), pair=1)
    speed = 2 * max(request.flops) / 0.004  # the largest block takes 4 ms
    loop, sleep = the_loop(), asyncio.sleep

    async def late(seconds: float) -> None:
        await sleep(seconds)
        loop.now += 0.0008

    async with Compute(pace=Pace(speed)) as compute:
        with mock.patch("asyncio.sleep", late):
            times = await profiler(compute, budget_s=0.3, clock=loop.time).measure(captured.train, request)
    largest = request.flops.index(max(request.flops))
    for (row,) in times.seconds:
        assert row[largest][0] == pytest.approx(0.004, rel=0.01)


@virtual_time
async def test_an_emulated_device_is_not_as_slow_as_the_machine_was_meanwhile() -> None:
    """Where other emulated devices had the cores during most passes, the median would be their doing."""
    loop = the_loop()

    def disturbed(call: Callable[..., Any], *args: Any) -> Any:
        loop.now += 0.012
        return call(*args)

    class Disturbed(Compute):
        paced = 0

        async def run(self, call: Any, *args: Any, flops: float = 0.0) -> Any:
            self.paced += flops > 0
            late = flops > 0 and self.paced % 5 != 0
            return await super().run(partial(disturbed, call) if late else call, *args, flops=flops)

    job, captured = captured_job()
    request = request_of(job, captured, sizes=(2,))
    speed = 2 * max(request.flops) / 0.004  # the largest block takes 4 ms
    async with Disturbed(pace=Pace(speed)) as compute:
        times = await profiler(compute, budget_s=4.0, clock=loop.time).measure(captured.train, request)
    largest = request.flops.index(max(request.flops))
    for (row,) in times.seconds:
        assert row[largest] == pytest.approx((0.004,) * 3, rel=0.02)


@virtual_time
async def test_what_the_budget_does_not_allow_is_scaled_up() -> None:
    job, captured = captured_job()
    request = request_of(job, captured, sizes=(1, 2, 4, 8))
    async with Compute(pace=Pace(sum(request.flops) / 100)) as compute:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        times = await profiler(compute, budget_s=1.0, clock=loop.time).measure(captured.train, request)
        took_s = loop.time() - start_s
    once_s = 3 * sum(t[1] for t in times.seconds[0][0])
    assert took_s < 6 * once_s  # one size alone, four times
    for rows in times.seconds:
        for block in range(len(request.blocks)):
            assert [row[block][1] / rows[0][block][1] for row in rows] == pytest.approx([1, 2, 4, 8])


@virtual_time
async def test_a_device_that_takes_no_longer_for_more_samples_is_measured_at_the_largest_size() -> None:
    """As a GPU, where kernels are short beside their start. For every size there was no time, and 64 counted as 64 times 1."""
    loop = the_loop()

    class Flat(Compute):
        async def run(self, call: Any, *args: Any, flops: float = 0.0) -> Any:
            loop.now += 0.001 if flops else 0.0
            return await super().run(call, *args)

    job, captured = captured_job()
    request = request_of(job, captured, sizes=(1, 2, 4, 8, 16, 32, 64))
    budget_s = 3.0 / 40 * len(request.blocks)  # as much for each as of 40 blocks
    async with Flat() as compute:
        start_s = loop.time()
        times = await profiler(compute, budget_s=budget_s, clock=loop.time).measure(captured.train, request)
        assert loop.time() - start_s <= 1.1 * budget_s
    for rows in times.seconds:
        for smallest, largest in zip(rows[0], rows[-1]):
            assert largest[1] < 2 * smallest[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["char_gpt", "cnn", "many", "unet"])
async def test_any_model_can_be_profiled(name: str) -> None:
    """Sizes that cross cuts, masks, buffers, several inputs: all of it is made up well enough to run."""
    job = zoo.make(name)
    captured = capture(job)
    costs = costs_of(job, captured)
    request = request_of(job, captured, sizes=sizes_of(job, costs, MEMORY)[:1], most={})
    async with Compute() as compute:
        times = await profiler(compute, budget_s=0.01).measure(captured.train, request)
    assert times.kind_times(costs.alike).stage(0, len(costs.blocks), request.sizes[0]).total_s > 0


async def test_a_second_request_is_answered_from_memory_without_the_graph_until_it_is_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, captured = captured_job()
    data = encode_program(captured.train)
    ask = Frame(
        messages.PROFILE,
        {"graph": hashlib.sha256(data).hexdigest()},
        [request_of(job, captured, pair=1, sizes=(2,)).pack()],
    )
    async with Compute() as compute:
        network = MemoryNetwork()
        async with network.transport("owner") as owner, network.transport("peer") as peer:
            peer.serve("profile", profiler(compute).serve)
            stream = await owner.open("peer", "profile")
            await stream.send(ask)
            assert (await stream.recv()).kind == messages.WANTED
            await stream.send(Frame(messages.GRAPH, {}, [data]))
            first = await stream.recv()
            assert first.kind == messages.PROFILED, first.header
            again = await owner.open("peer", "profile")
            await again.send(ask)
            second = await again.recv()
            assert second.kind == messages.PROFILED
            assert bytes(second.payloads[0]) == bytes(first.payloads[0])
            assert BlockTimes.from_json(msgpack.unpackb(second.payloads[0])).sizes == (2,)
            monkeypatch.setattr(block_profiler, "FRESH_S", 0.0)  # the device may have been busy with other work
            late = await owner.open("peer", "profile")
            await late.send(ask)
            assert (await late.recv()).kind == messages.WANTED
            await late.send(Frame(messages.GRAPH, {}, [data]))
            third = await late.recv()
            assert bytes(third.payloads[0]) != bytes(first.payloads[0])


async def refusal(data: bytes, ask: Frame, graph: Frame, **settings: Any) -> Frame:
    async with Compute() as compute:
        network = MemoryNetwork()
        async with network.transport("owner") as owner, network.transport("peer") as peer:
            peer.serve("profile", profiler(compute, **settings).serve)
            stream = await owner.open("peer", "profile")
            await stream.send(ask)
            reply = await stream.recv()
            if reply.kind == messages.WANTED:
                await stream.send(graph)
                reply = await stream.recv()
            return reply


@pytest.mark.parametrize(
    ("changes", "settings", "says"),
    [
        ({"sizes": (4, 2)}, {}, "ascending"),
        ({"sizes": (1 << 30,)}, {}, "sizes[0]: expected `int` <= 16777216"),
        ({"flops": (1.0,)}, {}, "each with its FLOPs"),
        ({"precision": "int3"}, {}, "precision"),
        ({"blocks": (0, 99), "flops": (1.0, 1.0)}, {}, "blocks that the graph does not have"),
        ({"pair": 99}, {}, "blocks that the graph does not have"),
        ({}, {"memory_bytes": 1000}, "block 0 needs 6 KiB, 5."),
        ({"sizes": (1 << 23,)}, {}, "more than this peer offers"),
        ({}, {"is_busy": lambda: True}, "runs a job"),
    ],
)
async def test_absurd_requests_are_refused_in_a_sentence(changes: dict[str, Any], settings: Any, says: str) -> None:
    job, captured = captured_job()
    data = encode_program(captured.train)
    header = {"graph": hashlib.sha256(data).hexdigest()}
    ask = Frame(messages.PROFILE, header, [request_of(job, captured, **changes).pack()])
    reply = await refusal(data, ask, Frame(messages.GRAPH, {}, [data]), **settings)
    assert reply.kind == messages.REFUSED
    assert says in reply.header["message"]
    assert isinstance(messages.error_from(reply.header), (ProtocolError, PlanError))


async def test_a_block_that_never_comes_back_is_found_by_the_next_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    job, captured = captured_job()
    data, comes_back = encode_program(captured.train), threading.Event()
    ask = Frame(messages.PROFILE, {"graph": hashlib.sha256(data).hexdigest()}, [request_of(job, captured).pack()])
    monkeypatch.setattr(StageRunner, "forward", lambda runner, *args: comes_back.wait(30.0))
    network = MemoryNetwork()
    async with Compute() as compute, network.transport("owner") as owner, network.transport("peer") as peer:
        peer.serve("profile", profiler(compute, budget_s=0.02, timeouts=Timeouts(hung_s=0.2)).serve)
        try:
            for says in ("one pass of the job's blocks takes this peer more than", "has not come back"):
                stream = await owner.open("peer", "profile")
                await stream.send(ask)
                assert (await stream.recv()).kind == messages.WANTED
                await stream.send(Frame(messages.GRAPH, {}, [data]))
                async with asyncio.timeout(20):
                    refused = await stream.recv()
                assert refused.kind == messages.REFUSED
                assert says in refused.header["message"]
        finally:
            comes_back.set()


async def test_another_graph_than_announced_and_one_that_is_none_are_refused() -> None:
    job, captured = captured_job()
    data = encode_program(captured.train)
    request = request_of(job, captured).pack()
    other = await refusal(
        data, Frame(messages.PROFILE, {"graph": "0" * 64}, [request]), Frame(messages.GRAPH, {}, [data])
    )
    assert "another than was announced" in other.header["message"]
    junk = b"\x93junk"
    header = {"graph": hashlib.sha256(junk).hexdigest()}
    none = await refusal(junk, Frame(messages.PROFILE, header, [request]), Frame(messages.GRAPH, {}, [junk]))
    assert none.kind == messages.REFUSED
    assert none.header["error"] == "GraphError"


@pytest.mark.parametrize("says", ["nothing", "no graph"])
async def test_who_asks_for_a_profile_and_says_no_more_is_let_go(says: str) -> None:
    job, captured = captured_job()
    async with Compute() as compute:
        network = MemoryNetwork()
        async with network.transport("owner") as owner, network.transport("peer") as peer:
            peer.serve("profile", profiler(compute, timeouts=Timeouts(offer_s=0.2)).serve)
            stream = await owner.open("peer", "profile")
            if says == "no graph":
                await stream.send(Frame(messages.PROFILE, {"graph": "0" * 64}, [request_of(job, captured).pack()]))
                assert (await stream.recv()).kind == messages.WANTED
            async with asyncio.timeout(20):
                with pytest.raises(StreamClosed):
                    await stream.recv()
