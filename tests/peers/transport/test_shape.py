"""Emulated links, on virtual time: every figure here is worked out by hand and met to the microsecond."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from meshcee.errors import ProtocolError
from meshcee.figures.profile import LinkProfile
from peers.device.emulation.shape import AHEAD_S, Shape, ShapedTransport
from peers.transport.base import Frame, Stream, StreamClosed
from peers.transport.memory import MemoryNetwork
from tests.peers.transport.harness import KEY, SMALL, pair
from tests.rig.virtual_time import virtual_time

MB = 1_000_000
HEAD = 200  # more than the bytes around a payload in these tests


@contextlib.asynccontextmanager
async def shaped(shape: Shape, names: str = "ab") -> AsyncIterator[list[ShapedTransport]]:
    network = MemoryNetwork()
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(ShapedTransport(network.transport(name, KEY), shape)) for name in names]


def now() -> float:
    return asyncio.get_running_loop().time()


async def arrivals(stream: Stream, count: int) -> list[float]:
    times = []
    for _ in range(count):
        await stream.recv()
        times.append(now())
    return times


def near(seconds: float, bandwidth: float = 10 * MB, frames: int = 1) -> object:
    """`seconds`, give or take what the heads of the frames need."""
    return pytest.approx(seconds, abs=frames * HEAD / bandwidth)


@virtual_time
async def test_a_frame_takes_its_bytes_over_the_bandwidth_and_then_the_latency() -> None:
    async with shaped(Shape({("a", "b"): LinkProfile(0.1, 10 * MB)})) as (a, b):
        there, back = await pair(a, b)
        start = now()
        receiving = asyncio.create_task(arrivals(back, 1))
        await there.send(Frame("x", {}, [bytes(5 * MB)]))
        assert now() - start == near(0.5 - AHEAD_S)
        assert (await receiving)[0] - start == near(0.6)


@virtual_time
async def test_the_sender_knows_how_fast_its_frames_left() -> None:
    for speed in (10 * MB, 2 * MB):
        async with shaped(Shape({("a", "b"): LinkProfile(0.1, speed)})) as (a, b):
            there, back = await pair(a, b)
            receiving = asyncio.create_task(arrivals(back, 1))
            await there.send(Frame("x", {}, [bytes(MB)]))
            await receiving
            out, _ = there.rates()
            assert out == pytest.approx(speed, rel=0.02)


@virtual_time
async def test_latency_is_pipelined_and_bandwidth_is_not() -> None:
    async with shaped(Shape({("a", "b"): LinkProfile(0.3, 10 * MB)})) as (a, b):
        there, back = await pair(a, b)
        start = now()
        receiving = asyncio.create_task(arrivals(back, 5))
        for _ in range(5):
            await there.send(Frame("x", {}, [bytes(MB)]))
        assert now() - start == near(0.5 - AHEAD_S, frames=5)
        for index, time in enumerate(await receiving):
            assert time - start == near(0.1 * (index + 1) + 0.3, frames=5)


@virtual_time
async def test_many_small_frames_lose_no_bandwidth_to_the_granularity_of_sleep() -> None:
    async with shaped(Shape({("a", "b"): LinkProfile(0.01, 10 * MB)})) as (a, b):
        there, back = await pair(a, b)
        start = now()
        receiving = asyncio.create_task(arrivals(back, 1000))
        for _ in range(1000):
            await there.send(Frame("x", {}, [bytes(10_000)]))
        assert (await receiving)[-1] - start == pytest.approx(1.01, rel=0.02)


@virtual_time
async def test_both_directions_are_independent() -> None:
    links = {("a", "b"): LinkProfile(0.1, 10 * MB), ("b", "a"): LinkProfile(0.0, MB)}
    async with shaped(Shape(links)) as (a, b):
        there, back = await pair(a, b)
        start = now()
        receiving = asyncio.gather(arrivals(back, 1), arrivals(there, 1))
        await asyncio.gather(there.send(Frame("x", {}, [bytes(MB)])), back.send(Frame("x", {}, [bytes(MB)])))
        (forth,), (reply,) = await receiving
        assert forth - start == near(0.2)
        assert reply - start == near(1.0, MB)


@virtual_time
async def test_streams_between_two_peers_share_their_link_fairly() -> None:
    async with shaped(Shape({("a", "b"): LinkProfile(0.0, 10 * MB)})) as (a, b):
        big, big_end = await pair(a, b, "big")
        small, small_end = await pair(a, b, "small")
        start = now()
        receiving = asyncio.gather(arrivals(big_end, 1), arrivals(small_end, 1))
        sending = asyncio.create_task(big.send(Frame("x", {}, [bytes(10 * MB)])))
        await asyncio.sleep(0.2)
        await small.send(Frame("x"))
        assert now() - start < 0.23  # the big frame takes a second, but nobody waits for all of it
        await sending
        (last,), (first,) = await receiving
        assert first - start < 0.23
        assert last - start == near(1.0, frames=2)


@virtual_time
async def test_two_long_frames_on_two_streams_get_half_each() -> None:
    async with shaped(Shape({("a", "b"): LinkProfile(0.0, 10 * MB)})) as (a, b):
        one, one_end = await pair(a, b, "one")
        two, two_end = await pair(a, b, "two")
        start = now()
        receiving = asyncio.gather(arrivals(one_end, 1), arrivals(two_end, 1))
        await asyncio.gather(one.send(Frame("x", {}, [bytes(5 * MB)])), two.send(Frame("x", {}, [bytes(5 * MB)])))
        (first,), (second,) = await receiving
        assert first - start == pytest.approx(1.0, abs=0.02)
        assert second - start == pytest.approx(1.0, abs=0.02)


@virtual_time
async def test_jitter_keeps_the_order_and_comes_from_the_seed() -> None:
    async def run(seed: int) -> list[float]:
        shape = Shape({("a", "b"): LinkProfile(0.05, 100 * MB)}, jitter_s=0.1, seed=seed)
        async with shaped(shape) as (a, b):
            there, back = await pair(a, b)
            start = now()
            for index in range(50):
                await there.send(Frame("x", {"index": index}))
            times = []
            for index in range(50):
                assert (await back.recv()).header["index"] == index
                times.append(round(now() - start, 6))
            return times

    first, again, other = await run(1), await run(1), await run(2)
    assert first == again != other
    assert 0.05 <= first[0] <= first[-1] <= 0.16


@virtual_time
async def test_a_port_and_a_shared_line_are_shared() -> None:
    link = LinkProfile(0.0, 10 * MB)
    links = {("a", "b"): link, ("a", "c"): link, ("d", "c"): link}
    for shape, seconds in (
        (Shape(links), (0.5, 0.5, 0.5)),
        (Shape(links, ports={"a": 10 * MB}), (1.0, 1.0, 0.5)),
        (Shape(links, shared={"wan": ([("a", "b"), ("d", "c")], 10 * MB)}), (1.0, 0.5, 1.0)),
    ):
        async with shaped(shape, "abcd") as (a, b, c, d):
            ends = [await pair(a, b, "1"), await pair(a, c, "2"), await pair(d, c, "3")]
            start = now()
            receiving = asyncio.gather(*(arrivals(back, 1) for _, back in ends))
            await asyncio.gather(*(there.send(Frame("x", {}, [bytes(5 * MB)])) for there, _ in ends))
            taken = [times[0] - start for times in await receiving]
            assert taken == pytest.approx(seconds, abs=0.03)


@virtual_time
async def test_peers_are_known_by_name() -> None:
    shape = Shape({("edge", "cloud"): LinkProfile(1.0, 10 * MB)})
    shape.alias("a", "edge")
    shape.alias("b", "cloud")
    async with shaped(shape) as (a, b):
        there, back = await pair(a, b)
        start = now()
        await there.send(Frame("x"))
        assert (await arrivals(back, 1))[0] - start == near(1.0)


@virtual_time
async def test_opening_takes_two_round_trips() -> None:
    async with shaped(Shape({("a", "b"): LinkProfile(0.1, MB), ("b", "a"): LinkProfile(0.2, MB)})) as (a, b):
        start = now()
        await pair(a, b)
        assert now() - start == pytest.approx(0.6)


@virtual_time
async def test_memory_may_be_reused_and_a_bad_frame_is_refused_at_once() -> None:
    async with shaped(Shape({("a", "b"): LinkProfile(0.5, 10 * MB)})) as (a, b):
        there, back = await pair(a, b)
        memory = bytearray(b"before")
        await there.send(Frame("x", {}, [memory]))
        memory[:] = b"after!"
        assert bytes((await back.recv()).payloads[0]) == b"before"
        with pytest.raises(ProtocolError):
            await there.send(Frame("x", {"x": object()}))


@virtual_time
async def test_a_slow_consumer_stops_a_shaped_sender() -> None:
    network = MemoryNetwork()
    shape = Shape({("a", "b"): LinkProfile(0.01, 1000 * MB)})
    async with (
        ShapedTransport(network.transport("a", KEY, limits=SMALL), shape, limits=SMALL) as a,
        ShapedTransport(network.transport("b", KEY, limits=SMALL), shape, limits=SMALL) as b,
    ):
        there, back = await pair(a, b)
        sent = 0

        async def sender() -> None:
            nonlocal sent
            for _ in range(100):
                await there.send(Frame("x", {}, [bytes(100_000)]))
                sent += 1

        sending = asyncio.create_task(sender())
        await asyncio.sleep(1000)
        assert sent * 100_000 < 3 * SMALL.window_bytes
        await arrivals(back, 100)
        await sending


@virtual_time
async def test_aclose_lets_what_was_sent_arrive_and_abort_does_not() -> None:
    async with shaped(Shape({("a", "b"): LinkProfile(20.0, 10 * MB)})) as (a, b):
        there, back = await pair(a, b)
        await there.send(Frame("x"))
        start = now()
        closing = asyncio.create_task(there.aclose())
        assert (await back.recv()).kind == "x"
        await closing
        assert now() - start == near(20.0)
        with pytest.raises(StreamClosed):
            await back.recv()
        there, back = await pair(a, b)
        await there.send(Frame("x"))
        there.abort()
        with pytest.raises(StreamClosed):
            await back.recv()
        with pytest.raises(StreamClosed):
            await there.send(Frame("x"))


@virtual_time
async def test_a_handler_sends_through_the_shape_too() -> None:
    async def answer(stream: Stream) -> None:
        await stream.recv()
        await stream.send(Frame("answer", {}, [bytes(5 * MB)]))

    async with shaped(Shape({("b", "a"): LinkProfile(0.25, 10 * MB)})) as (a, b):
        b.serve("ask", answer)
        stream = await a.open("b", "ask")
        start = now()
        await stream.send(Frame("ask"))
        assert (await stream.recv()).kind == "answer"
        assert now() - start == near(0.75)
        with pytest.raises(StreamClosed):
            await stream.recv()
