"""Tensors from peers that hold them: sources that die or lie, links that must rest, and what nobody may read."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from meshcee.config import Timeouts
from meshcee.errors import ProtocolError
from meshcee.events import Event
from meshcee.files.tensor_files import byte_view
from peers.state.fetch import Fetch, Reader, serve
from peers.state.policy import CHUNK_BYTES, Cadence
from peers.transport.base import Frame, Stream
from peers.transport.memory import Impairment, MemoryNetwork
from peers.wire import messages
from peers.wire.weights import digest_of
from tests.mutation import breaks, changed
from tests.rig.virtual_time import run, virtual_time

TIMES = Timeouts()


def some_tensors(count: int, values: int = 200_000) -> dict[str, torch.Tensor]:
    found = [torch.arange(values, dtype=torch.float32) + i for i in range(count)] + [torch.zeros(0), torch.ones(())]
    return {digest_of(tensor): tensor for tensor in found}


Handler = Callable[[Stream], Awaitable[None]]


def honest(tensors: Mapping[str, torch.Tensor]) -> Handler:
    return lambda stream: serve(stream, lambda header, digest: tensors.get(digest), TIMES)


async def fetch_from(
    network: MemoryNetwork,
    sources: Mapping[str, Handler],
    wanted: Mapping[str, torch.Tensor],
    *,
    gently: bool = False,
    befall: Callable[..., None] = lambda: None,
    hurried: bool = False,
    give: Callable[[str, torch.Tensor], None] | None = None,
    watch: Callable[[Stream], Any] = lambda stream: stream,
) -> Fetch:
    async with AsyncExitStack() as stack:
        for name, handler in sources.items():
            (await stack.enter_async_context(network.transport(name))).serve("copies", handler)
        reader = await stack.enter_async_context(network.transport("reader"))

        shapes = {digest: (tensor.dtype, tuple(tensor.shape)) for digest, tensor in wanted.items()}
        fetch = Fetch(shapes, Reader(reader, "run", {}, TIMES, watch), gently=gently, give=give)
        asyncio.get_running_loop().call_later(1.0, befall, *([fetch] if hurried else []))
        await fetch.run([*sources, "nobody"])
        return fetch


def assert_found(fetch: Fetch, wanted: Mapping[str, torch.Tensor]) -> None:
    assert not fetch.missing
    assert fetch.found.keys() == wanted.keys()
    assert all(torch.equal(fetch.found[digest], tensor) for digest, tensor in wanted.items())


@virtual_time
async def test_a_source_that_dies_is_replaced_and_what_it_had_sent_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = some_tensors(6)
    network = MemoryNetwork(impairment=Impairment(latency_s=0.02, bandwidth_bytes_per_s=1e6))
    sent: list[int] = []

    def counted(fetch: Fetch, peer: str, ranges: Sequence[tuple[int, int, int]], frame: Frame) -> Awaitable[None]:
        sent.append(frame.payload_bytes)
        return take(fetch, peer, ranges, frame)

    take = Fetch._take
    monkeypatch.setattr(Fetch, "_take", counted)
    few = dict(list(wanted.items())[:2])
    sources = {"a": honest(wanted), "b": honest(wanted), "c": honest(few)}
    fetch = await fetch_from(network, sources, wanted, befall=lambda: network.kill("a"))
    assert_found(fetch, wanted)
    assert sum(sent) == sum(tensor.nbytes for tensor in wanted.values())  # no byte twice


@pytest.mark.parametrize(
    ("function", "line", "instead"),
    [
        (
            Fetch,
            "except (MeshceeError, StreamClosed, TimeoutError)",
            "except (MeshceeError, TimeoutError)",
        ),
        (Fetch, "source.begun.get(digest, self._left[digest].got)", "source.begun.get(digest, 0)"),
    ],
)
def test_without_its_line_a_dying_source_is_not_replaced_or_what_it_had_sent_is_lost(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., object], line: str, instead: str
) -> None:
    with changed(function, line, instead):
        assert breaks(partial(test_a_source_that_dies_is_replaced_and_what_it_had_sent_stays, monkeypatch))


@virtual_time
async def test_what_nobody_has_is_missing() -> None:
    wanted = some_tensors(3)
    last = list(wanted)[2]
    fetch = await fetch_from(MemoryNetwork(), {"a": honest({d: t for d, t in wanted.items() if d != last})}, wanted)
    assert fetch.missing == {last}


class Trickling:
    """A stream on which a byte comes every few seconds, none of them the last one of an answer."""

    def __init__(self, stream: Stream) -> None:
        object.__setattr__(self, "stream", stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.stream, name, value)

    @property
    def received_bytes(self) -> int:
        return int(asyncio.get_running_loop().time() / 5)


def trickling(tensors: Mapping[str, torch.Tensor]) -> Handler:
    """Says that it has everything, and never sends the whole of an answer."""

    async def handle(stream: Stream) -> None:
        await stream.recv()
        await stream.send(Frame(messages.FOUND, {}, [bytes([1] * len(tensors))]))
        await asyncio.sleep(100_000)

    return handle


async def seconds_of(fetch: Awaitable[Fetch], wanted: Mapping[str, torch.Tensor]) -> float:
    began_s = asyncio.get_running_loop().time()
    assert_found(await fetch, wanted)
    return asyncio.get_running_loop().time() - began_s


@pytest.mark.parametrize("gently", [False, True])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_what_a_trickling_source_owes_comes_from_another(count: int, gently: bool) -> None:
    """It never fell silent, so whoever restored its stage from it waited for ever, beside a peer that had it all."""

    async def story() -> None:
        wanted = some_tensors(count)

        def watch(stream: Stream) -> Any:
            return Trickling(stream) if stream.peer_id == "a" else stream

        network = MemoryNetwork(impairment=Impairment(latency_s=0.02, bandwidth_bytes_per_s=1e7))
        sources = {"a": trickling(wanted), "b": honest(wanted)}
        async with asyncio.timeout(600):
            assert await seconds_of(fetch_from(network, sources, wanted, gently=gently, watch=watch), wanted) < 60

    run(story())
    with changed(Fetch, "other.reading.cancel()", "pass"):
        assert breaks(lambda: run(story()))


def slow_and_quick(bandwidth_bytes_per_s: float) -> MemoryNetwork:
    network = MemoryNetwork(impairment=Impairment(latency_s=0.02, bandwidth_bytes_per_s=1e7))
    network.impair("a", "reader", Impairment(latency_s=0.02, bandwidth_bytes_per_s=bandwidth_bytes_per_s))
    return network


def test_who_has_sent_its_share_takes_from_who_is_slower() -> None:
    async def story(bandwidth_bytes_per_s: float, within_s: float) -> None:
        wanted = some_tensors(30)  # 24 MB
        sources = {"a": honest(wanted), "b": honest(wanted)}
        network = slow_and_quick(bandwidth_bytes_per_s)
        assert await seconds_of(fetch_from(network, sources, wanted), wanted) < within_s

    run(story(1e4, 8.0))  # it takes 80 s for a tensor: that is cut off
    run(story(4e6, 2.2))  # it goes on, and the other takes of what it was not asked for
    with changed(Fetch, "self._owe(idle, taken)", "self._owe(other, taken)"):
        assert breaks(lambda: run(story(4e6, 2.2)))


def test_a_source_that_had_nothing_to_send_for_long_sends_when_another_dies() -> None:
    """Whoever lends to a reader that asks for nothing ends the stream: it was then no source any more."""

    async def story() -> None:
        large = torch.zeros(10_000_000)
        wanted = {digest_of(large): large, **some_tensors(1)}
        network = MemoryNetwork(
            impairment=Impairment(latency_s=0.02, bandwidth_bytes_per_s=2e5)
        )  # 200 s for the large one

        def befall() -> None:
            asyncio.get_running_loop().call_later(TIMES.offer_s + 60, network.kill, "a")

        sources = {"a": honest(wanted), "b": honest(wanted)}
        fetch = await fetch_from(network, sources, wanted, befall=befall)
        assert_found(fetch, wanted)
        assert fetch.moved_bytes < 1.1 * sum(tensor.nbytes for tensor in wanted.values()), "what had come stays"

    run(story())
    with changed(Fetch, "self._hang_up(source)\n        source.reading = None", "source.reading = None"):
        assert breaks(lambda: run(story()))


def lying(tensors: Mapping[str, torch.Tensor], answer: Callable[[bytes], Frame]) -> Handler:
    """Says that it has everything, and answers for the bytes that it was asked for."""

    async def handle(stream: Stream) -> None:
        await stream.recv()
        await stream.send(Frame(messages.FOUND, {}, [bytes([1] * len(tensors))]))
        while True:
            ranges = (await stream.recv()).header["ranges"]
            views = [byte_view(tensor) for tensor in tensors.values()]
            await stream.send(answer(b"".join(views[which][first : first + n] for which, first, n in ranges)))

    return handle


@pytest.mark.parametrize(
    "answer",
    [
        lambda data: Frame(messages.PART, {}, [bytes(len(data))]),
        lambda data: Frame(messages.PART, {}, [data + b"!"]),
        lambda data: Frame(messages.PART, {}, [bytes(2 * CHUNK_BYTES)]),
        lambda data: Frame(messages.PART, {}, []),
        lambda data: Frame(messages.FOUND, {}, [data]),
    ],
    ids=["other bits", "too many", "too large", "nothing", "another kind"],
)
def test_a_source_that_lies_is_left_out(answer: Callable[[bytes], Frame]) -> None:
    async def story() -> None:
        wanted = some_tensors(4)
        with capture_logs() as logged:
            fetch = await fetch_from(MemoryNetwork(), {"a": lying(wanted, answer), "b": honest(wanted)}, wanted)
        assert_found(fetch, wanted)
        assert {e["peer"] for e in logged if e["event"] == Event.SOURCE_LEFT_OUT} == {"a", "nobody"}

    run(story())


@virtual_time
async def test_a_link_that_training_needs_rests_between_two_chunks() -> None:
    wanted = some_tensors(1, 3 * CHUNK_BYTES // 4)
    slow = Impairment(latency_s=0.02, bandwidth_bytes_per_s=CHUNK_BYTES / 2)
    began_s = asyncio.get_running_loop().time()
    fetch = await fetch_from(MemoryNetwork(impairment=slow), {"a": honest(wanted)}, wanted, gently=True)
    assert_found(fetch, wanted)
    assert asyncio.get_running_loop().time() - began_s > 2 * 3 / Cadence.SHARE  # two seconds a chunk, three chunks
    assert fetch.read_s < 0.5  # a link that has rested counts no more


@virtual_time
async def test_once_nothing_is_trained_a_link_rests_no_more() -> None:
    wanted = some_tensors(1, 3 * CHUNK_BYTES)
    slow = Impairment(latency_s=0.02, bandwidth_bytes_per_s=CHUNK_BYTES / 2)
    network, began_s = MemoryNetwork(impairment=slow), asyncio.get_running_loop().time()
    fetch = await fetch_from(network, {"a": honest(wanted)}, wanted, gently=True, befall=Fetch.hurry, hurried=True)
    assert_found(fetch, wanted)
    carried_s = sum(tensor.nbytes for tensor in wanted.values()) / (CHUNK_BYTES / 2)
    assert carried_s < asyncio.get_running_loop().time() - began_s < carried_s + 3
    assert fetch.moved_bytes == sum(tensor.nbytes for tensor in wanted.values())


@virtual_time
async def test_what_comes_from_one_source_comes_in_the_order_in_which_it_is_wanted() -> None:
    sizes = [3, 200_000, 0, 1, 7, 150_000, 2]
    wanted = {digest_of(t): t for t in (torch.full((size,), float(i)) for i, size in enumerate(sizes))}
    given: list[str] = []
    fetch = await fetch_from(
        MemoryNetwork(), {"a": honest(wanted)}, wanted, give=lambda digest, t: given.append(digest)
    )
    assert given == list(wanted)
    assert (fetch.found, fetch.missing) == ({}, set())


@pytest.mark.parametrize(
    "ranges", [[[0, 0, 9]], [[0, -1, 2]], [[2, 0, 1]], [[1, 0, 1]], [[0, 0]], 7, [[0, 0, 8]] * (CHUNK_BYTES // 8 + 1)]
)
async def test_nobody_reads_more_than_there_is(ranges: Any) -> None:
    tensor = torch.arange(2)[:1]
    network = MemoryNetwork()
    async with network.transport("a") as source, network.transport("reader") as reader:
        source.serve("copies", honest({digest_of(tensor): tensor}))
        stream = await reader.open("a", "copies")
        await stream.send(Frame(messages.SEEK, {}, [bytes.fromhex(digest_of(tensor)) + bytes(32)]))
        assert bytes((await stream.recv()).payloads[0]) == b"\x01\x00"
        try:
            await stream.send(Frame(messages.PULL, {"ranges": ranges}))
        except ProtocolError:
            return  # more than a header holds
        with pytest.raises(ConnectionError):
            await stream.recv()


async def test_a_reader_keeps_no_copy_that_its_holder_forgets() -> None:
    """It kept any number of a member's old copies, each by an open stream and a byte now and then."""
    tensor = torch.arange(10.0)
    held, alive = {(digest := digest_of(tensor)): tensor}, weakref.ref(tensor)
    del tensor
    network = MemoryNetwork()
    async with network.transport("a") as source, network.transport("reader") as reader:
        source.serve("copies", honest(held))
        stream = await reader.open("a", "copies")
        await stream.send(Frame(messages.SEEK, {}, [bytes.fromhex(digest)]))
        assert bytes((await stream.recv()).payloads[0]) == b"\x01"
        await stream.send(Frame(messages.PULL, {"ranges": [[0, 0, 8]]}))
        assert len((await stream.recv()).payloads[0]) == 8
        held.clear()
        gc.collect()
        assert alive() is None
        assert not stream.closed
        await stream.send(Frame(messages.PULL, {"ranges": [[0, 8, 8]]}))
        with pytest.raises(ConnectionError):
            await stream.recv()


@virtual_time
async def test_what_a_holder_forgets_while_it_is_read_comes_from_another() -> None:
    wanted = some_tensors(4)
    held = dict(wanted)
    network = MemoryNetwork(impairment=Impairment(latency_s=0.02, bandwidth_bytes_per_s=1e6))
    fetch = await fetch_from(network, {"a": honest(held), "b": honest(wanted)}, wanted, befall=held.clear)
    assert_found(fetch, wanted)
    assert fetch.moved_bytes == sum(tensor.nbytes for tensor in wanted.values())  # no byte twice


async def asked_and_not_read() -> float:
    """For how long a source lends to a reader that asks for a tensor again and again, and takes nothing of it, s."""
    tensor = torch.zeros(CHUNK_BYTES // 4)
    network, over = MemoryNetwork(), asyncio.Event()

    async def lend(stream: Stream) -> None:
        try:
            await honest({digest_of(tensor): tensor})(stream)
        finally:
            over.set()

    loop = asyncio.get_running_loop()
    async with network.transport("a") as source, network.transport("reader") as reader:
        source.serve("copies", lend)
        stream, began_s = await reader.open("a", "copies"), loop.time()
        await stream.send(Frame(messages.SEEK, {}, [bytes.fromhex(digest_of(tensor))]))
        for _ in range(1000):
            await stream.send(Frame(messages.PULL, {"ranges": [[0, 0, CHUNK_BYTES]]}))
        async with asyncio.timeout(10 * TIMES.offer_s):
            await over.wait()
        return loop.time() - began_s


def test_who_asks_and_does_not_read_holds_no_copies() -> None:
    """Its pieces of a model stayed in the source's memory for as long as its stream was open."""
    assert TIMES.offer_s <= run(asked_and_not_read()) < 2 * TIMES.offer_s
    with changed(serve, "while_moving(lend, moved, timeouts.offer_s, timeouts)", "lend()"):
        assert breaks(lambda: run(asked_and_not_read()))
