"""Transports to test: the same mesh of a few peers in process or over real p2pd processes on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from socket import socketpair
from typing import Any, Self

import pytest

from meshcee.config import Limits, Timeouts
from meshcee.figures.profile import LinkProfile
from peers.device.emulation.shape import Shape, ShapedTransport
from peers.transport.base import Frame, Handler, Stream, StreamClosed, Transport
from peers.transport.bridge import Bridged, Channel, Passing, channel
from peers.transport.bridge.bridged import GIVES
from peers.transport.bridge.passing import TAKES
from peers.transport.direct import Direct
from peers.transport.memory import MemoryNetwork
from peers.transport.p2p.libp2p import Libp2pTransport
from peers.transport.stream import FramedStream

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from hivemind.p2p import P2P

KEY = b"the key of the mesh under test.."
HERE = "/ip4/127.0.0.1/tcp/0"
SHORT = Timeouts(dial_s=3.0, handshake_s=1.0, shutdown_s=2.0)
# Small enough that a test reaches every bound with a few megabytes.
SMALL = Limits(window_bytes=1 << 20, chunk_bytes=128 << 10, streams_per_peer=4)


@contextlib.asynccontextmanager
async def p2pd(**options: Any) -> AsyncIterator[P2P]:
    """One p2pd on loopback, whose shutdown is bounded: hivemind's hangs once p2pd has been killed."""
    with warnings.catch_warnings():  # hivemind finds its binary by a deprecated function
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LIBP2P_TCP_REUSEPORT", "false")  # as our own p2pd has it
            p2p = await P2P.create(nat_port_map=False, auto_nat=False, use_relay=False, **options)
    try:
        yield p2p
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3.0):
                await p2p.shutdown()
        Path(p2p.daemon_listen_maddr["unix"]).unlink(missing_ok=True)  # hivemind leaves that of a p2pd that was killed


async def nowhere(peer: str) -> tuple[str, ...]:
    return ()


class Everything(dict[str, int]):
    """Any purpose, with the same first limit."""

    def __init__(self, first_bytes: int) -> None:
        super().__init__()
        self._first_bytes = first_bytes

    def __contains__(self, purpose: object) -> bool:
        return True

    def __missing__(self, purpose: str) -> int:
        return self._first_bytes


class Beside(Bridged):
    """The transport of a process beside `inner`'s, here in the same one."""

    def __init__(self, inner: Transport, limits: Limits, timeouts: Timeouts) -> None:
        near, far = channel.pair()
        self._here, self._there = Channel(near, TAKES), Channel(far, GIVES)
        super().__init__(inner.peer_id, self._there, limits=limits, timeouts=timeouts)
        self._inner = inner
        self.addresses = inner.addresses
        self._passing = Passing(
            inner,
            self._here,
            serves={},
            opens=Everything(limits.payload_bytes),
            addresses=nowhere,
            limits=limits,
            timeouts=timeouts,
        )
        self._running: list[asyncio.Task[None]] = []

    def serve(self, purpose: str, handler: Handler, first_bytes: int | None = None) -> None:
        super().serve(purpose, handler)
        self._passing.serve(purpose, self.limits.payload_bytes if first_bytes is None else first_bytes)

    async def _take(self) -> None:
        while True:
            self.take(*await self._there.receive())

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        self._running = [asyncio.create_task(work) for work in (self._passing.run(), self._take())]
        return await super().__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        await super().__aexit__(*error)
        for task in self._running:
            task.cancel()
        await asyncio.wait(self._running)
        await self._inner.__aexit__(*error)
        self._here.close()
        self._there.close()


@contextlib.asynccontextmanager
async def mesh(
    kind: str,
    count: int = 2,
    *,
    keys: Sequence[bytes] = (),
    limits: Limits = SMALL,
    timeouts: Timeouts = SHORT,
) -> AsyncIterator[list[Transport]]:
    """`count` running transports of the kind "memory", "shaped" (over memory), "direct" (hands shaken there) or "libp2p"."""
    link = LinkProfile(latency_s=0.002, bandwidth_bytes_per_s=1e9)
    shape = Shape({(f"peer-{i}", f"peer-{j}"): link for i in range(count) for j in range(count) if i != j})
    async with contextlib.AsyncExitStack() as stack:
        network = MemoryNetwork(check=True)
        transports: list[Transport] = []
        for index in range(count):
            key = keys[index] if keys else KEY
            if kind in ("memory", "shaped", "direct", "bridged"):
                made: Any = network.transport(f"peer-{index}", key, timeouts=timeouts, limits=limits)
                if kind == "direct":
                    made.addresses = (HERE,)
                    made.direct = Direct([HERE], 0, timeouts)
                if kind == "shaped":
                    made = ShapedTransport(made, shape, limits=limits, close_s=timeouts.shutdown_s)
                if kind == "bridged":
                    made = Beside(made, limits, timeouts)
            else:
                made = Libp2pTransport(await stack.enter_async_context(p2pd()), key, timeouts=timeouts, limits=limits)
            transports.append(await stack.enter_async_context(made))
        yield transports


async def pair(a: Transport, b: Transport, purpose: str = "test") -> tuple[Stream, Stream]:
    """Both ends of a new stream; the accepted end lives until its transport is left."""
    accepted: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()

    async def handler(stream: Stream) -> None:
        accepted.set_result(stream)
        await asyncio.get_running_loop().create_future()

    b.serve(purpose, handler)
    near = await a.open(b.peer_id, purpose, b.addresses)
    return near, await accepted


async def last_words(a: Transport, b: Transport, count: int) -> list[int]:
    """What a hears of so many frames that b sends before it closes the stream, while a goes on sending."""

    async def answer(stream: Stream) -> None:
        await stream.recv()
        for index in range(count):
            await stream.send(Frame("last", {"index": index}, [bytes(1000)]))

    async def keep_sending() -> None:
        with contextlib.suppress(StreamClosed):
            while True:
                await stream.send(Frame("more", {}, [bytes(1000)]))
                await asyncio.sleep(0)

    b.serve("question", answer)
    stream, heard = await a.open(b.peer_id, "question", b.addresses), list[int]()
    async with asyncio.TaskGroup() as group:
        group.create_task(keep_sending())
        with contextlib.suppress(StreamClosed):
            while True:
                heard.append((await stream.recv()).header["index"])
    stream.abort()
    return heard


async def settled(stream: Stream) -> int:
    """The bytes that a stream has sent once it has stopped sending: no change over several polls."""
    last, same = -1, 0
    while same < 5:
        await asyncio.sleep(0.02)
        same = same + 1 if stream.sent_bytes == last else 0
        last = stream.sent_bytes
    return last


async def eventually(condition: Callable[[], bool], within_s: float = 3.0) -> None:
    """Until a condition holds that nothing announces."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def sockets(
    a: str = "a", b: str = "b", limits: Limits = SMALL
) -> AsyncIterator[tuple[FramedStream, FramedStream]]:
    """Two bare streams over a pair of sockets, before any handshake: the one with b, and the one with a."""
    loop = asyncio.get_running_loop()
    near, far = FramedStream(b, limits=limits, close_s=1.0), FramedStream(a, limits=limits, close_s=1.0)
    for stream, socket in zip((near, far), socketpair(), strict=True):
        await loop.create_connection(functools.partial(_same, stream), sock=socket)
    try:
        yield near, far
    finally:
        near.abort()
        far.abort()
        await asyncio.sleep(0)  # the sockets are closed by callbacks


def _same(stream: FramedStream) -> FramedStream:
    return stream


async def echo(stream: Stream) -> None:
    while True:
        await stream.send(await stream.recv())


def same(a: Frame, b: Frame) -> bool:
    return (a.kind, dict(a.header), [bytes(p) for p in a.payloads]) == (
        b.kind,
        dict(b.header),
        [bytes(p) for p in b.payloads],
    )
