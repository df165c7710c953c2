"""The network in process: its latency, bandwidth, loss and cuts, exactly and repeatably, on virtual time."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest
from structlog.testing import capture_logs

from meshcee.config import Timeouts
from meshcee.errors import JoinError, UsageError
from meshcee.events import Event
from peers.transport.base import Frame, Stream, StreamClosed
from peers.transport.memory import Impairment, MemoryNetwork
from tests.peers.transport.harness import KEY, SMALL, echo, pair
from tests.rig.virtual_time import virtual_time

PATIENT = Timeouts(dial_s=100.0, handshake_s=100.0)


def now() -> float:
    return asyncio.get_running_loop().time()


@virtual_time
async def test_latency_and_bandwidth_of_each_direction() -> None:
    network = MemoryNetwork()
    async with network.transport("a", KEY) as a, network.transport("b", KEY) as b:
        near, far = await pair(a, b)
        network.impair("a", "b", Impairment(latency_s=0.2, bandwidth_bytes_per_s=1e6))
        start = now()
        sending = asyncio.create_task(near.send(Frame("x", {}, [bytes(1_000_000)])))
        await far.recv()
        assert now() - start == pytest.approx(1.2, abs=0.001)
        await sending
        start = now()
        await far.send(Frame("back", {}, [bytes(1_000_000)]))
        await near.recv()
        assert now() - start < 0.001


@virtual_time
async def test_a_service_that_waits_in_vain_is_no_error_of_this_peer() -> None:
    network = MemoryNetwork()
    async with network.transport("a", KEY) as a, network.transport("b", KEY) as b:

        async def waits(stream: Stream) -> None:
            async with asyncio.timeout(5.0):
                await stream.recv()

        b.serve("waits", waits)
        with capture_logs() as logs:
            stream = await a.open("b", "waits", ())
            with pytest.raises(StreamClosed):
                await stream.recv()
    (closed,) = logs
    assert closed["event"] is Event.STREAM_CLOSED
    assert (closed["log_level"], closed["reason"]) == ("debug", "nothing came in time")


@virtual_time
async def test_the_window_bounds_what_a_long_link_can_carry() -> None:
    """A window a round trip, as on a real link: 1 MiB per 0.4 s whatever the bandwidth."""
    network = MemoryNetwork(impairment=Impairment(latency_s=0.2))
    async with (
        network.transport("a", KEY, limits=SMALL, timeouts=PATIENT) as a,
        network.transport("b", KEY, limits=SMALL, timeouts=PATIENT) as b,
    ):
        near, far = await pair(a, b)
        start = now()

        async def sender() -> None:
            for _ in range(40):
                await near.send(Frame("x", {}, [bytes(256 << 10)]))

        async with asyncio.TaskGroup() as group:
            group.create_task(sender())
            for _ in range(40):
                await far.recv()
        rate = 40 * (256 << 10) / (now() - start)
        assert 0.6 * SMALL.window_bytes / 0.4 < rate < 1.5 * SMALL.window_bytes / 0.4


@virtual_time
async def test_jitter_keeps_the_order() -> None:
    network = MemoryNetwork(seed=3, impairment=Impairment(latency_s=0.01, jitter_s=0.5))
    async with network.transport("a", KEY, timeouts=PATIENT) as a, network.transport("b", KEY, timeouts=PATIENT) as b:
        near, far = await pair(a, b)
        for index in range(200):
            await near.send(Frame("x", {"index": index}, [bytes(100)]))
        for index in range(200):
            assert (await far.recv()).header["index"] == index


@virtual_time
async def test_losses_come_from_the_seed() -> None:
    async def frames_until_loss(seed: int) -> int:
        network = MemoryNetwork(seed=seed)
        async with network.transport("a", KEY) as a, network.transport("b", KEY) as b:
            b.serve("echo", echo)
            stream = await a.open("b", "echo")
            network.impair("a", "b", Impairment(loss=0.05))
            for count in range(1000):
                try:
                    await stream.send(Frame("x"))
                    await stream.recv()
                except StreamClosed:
                    return count
            return 1000

    counts = [await frames_until_loss(seed) for seed in range(8)]
    assert counts == [await frames_until_loss(seed) for seed in range(8)]
    assert len(set(counts)) > 3
    assert max(counts) < 1000


@virtual_time
async def test_cut_partition_heal_and_kill() -> None:
    network = MemoryNetwork()
    async with network.transport("a", KEY) as a, network.transport("b", KEY) as b, network.transport("c", KEY) as c:
        for transport in (a, b, c):
            transport.serve("echo", echo)
        ab, ac = await a.open("b", "echo"), await a.open("c", "echo")
        network.cut("a", "b")
        with pytest.raises(StreamClosed, match="the link was cut"):
            await ab.recv()
        with pytest.raises(JoinError, match="cannot be reached"):
            await b.open("a", "echo")
        await ac.send(Frame("x"))
        assert (await ac.recv()).kind == "x"
        network.partition(["a"], ["b", "c"])
        with pytest.raises(StreamClosed):
            await ac.recv()
        bc = await b.open("c", "echo")
        network.heal()
        ab = await a.open("b", "echo")
        network.kill("b")
        for stream in (ab, bc):
            with pytest.raises(StreamClosed, match="the peer was killed"):
                await stream.recv()
        with pytest.raises(JoinError):
            await a.open("b", "echo")
        with pytest.raises(JoinError):
            await b.open("a", "echo")
        assert (await a.open("c", "echo")).peer_id == "c"


@virtual_time
async def test_two_peers_cannot_have_one_id() -> None:
    network = MemoryNetwork()
    async with network.transport("a", KEY):
        with pytest.raises(UsageError, match="two peers"):
            async with network.transport("a", KEY):
                pass
    async with network.transport("a", KEY):  # free again
        pass


@virtual_time
async def test_a_shaped_end_of_file_follows_what_was_sent() -> None:
    network = MemoryNetwork(impairment=Impairment(latency_s=1.0, bandwidth_bytes_per_s=1e5))
    async with network.transport("a", KEY, timeouts=PATIENT) as a, network.transport("b", KEY, timeouts=PATIENT) as b:
        near, far = await pair(a, b)
        await near.send(Frame("x", {}, [bytes(50_000)]))
        await near.aclose()
        assert (await far.recv()).payload_bytes == 50_000
        with pytest.raises(StreamClosed):
            await far.recv()


@virtual_time
async def test_time_stands_still_while_a_thread_computes() -> None:
    """Of the virtual clock itself: a thread that works is never overtaken by a time-out."""
    import time

    start = now()
    async with asyncio.timeout(0.01):
        await asyncio.to_thread(time.sleep, 0.05)
    assert now() == start
    await asyncio.sleep(3600)
    assert now() == start + 3600


@virtual_time
async def test_the_receiver_reads_the_bandwidth_off_large_frames() -> None:
    network = MemoryNetwork()
    async with network.transport("a", KEY) as a, network.transport("b", KEY) as b:
        near, far = await pair(a, b)
        for speed in (1e6, 250e3):
            network.impair("a", "b", Impairment(latency_s=0.2, bandwidth_bytes_per_s=speed))
            assert far.rates() == (None, None)
            sending = asyncio.create_task(near.send(Frame("x", {}, [bytes(1_000_000)])))
            await far.recv()
            await sending
            out, seen = far.rates()
            assert out is None
            assert seen == pytest.approx(speed, rel=0.1)
            await near.send(Frame("small", {}, [bytes(1000)]))
            await far.recv()
        assert near.rates() == (None, None), "nothing large has come to it"


@virtual_time
async def test_a_stream_that_is_over_holds_next_to_no_memory() -> None:
    """Whoever still refers to it: a task that waits for the collector, an error with its traceback."""
    count, network = 50, MemoryNetwork()
    async with network.transport("a", KEY) as a, network.transport("b", KEY) as b:
        await pair(a, b)  # what the first stream needs for good
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            streams = [await pair(a, b) for _ in range(count)]
            for near, far in streams:
                sending = asyncio.create_task(near.send(Frame("x", {}, [bytes(100_000)])))
                await far.recv()
                await sending
            open_bytes = tracemalloc.get_traced_memory()[0] - before
            for near, _ in streams[: count // 2]:
                near.abort()
            async with asyncio.TaskGroup() as group:
                for near, _ in streams[count // 2 :]:
                    group.create_task(near.aclose())
            await asyncio.sleep(1)
            assert all(near.closed and far.closed for near, far in streams)
            held_bytes = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
    assert 100_000 < open_bytes / (2 * count) < 250_000
    assert held_bytes / (2 * count) < 20_000
