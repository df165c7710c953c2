"""Everything at once, at random, on virtual time: nothing hangs, nothing is reordered or damaged, nothing is left behind.

The idea: many tasks send frames of all sizes over a few streams on a slow, jittery, lossy network; some are cancelled in
the middle, some consumers sleep, some streams are closed or break. Virtual time turns every hang into an error, and
`virtual_time` itself finds tasks that were left behind.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import defaultdict

import pytest
from structlog.testing import capture_logs

from meshcee.config import Limits, Timeouts
from meshcee.errors import JoinError
from meshcee.figures.profile import LinkProfile
from peers.device.emulation.shape import Shape, ShapedTransport
from peers.transport.base import Frame, Stream, StreamClosed, Transport
from peers.transport.memory import Impairment, MemoryNetwork
from tests.peers.transport.harness import KEY
from tests.rig.virtual_time import virtual_time

LIMITS = Limits(window_bytes=256 << 10, chunk_bytes=32 << 10)
TIMEOUTS = Timeouts(dial_s=30.0, handshake_s=30.0, shutdown_s=5.0)


class Soak:
    """One run: what was sent by whom, and what arrived of it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.begun: defaultdict[str, int] = defaultdict(int)  # per sender, the number of its last frame
        self.seen: defaultdict[str, int] = defaultdict(int)
        self.received = self.cancelled = self.broken = 0

    def frame(self, sender: str) -> Frame:
        self.begun[sender] += 1
        size = self.random.choice([0, 0, 10, 1000, 70_000, 200_000, 700_000])
        body = self.random.randbytes(min(size, 1000)) * max(1, size // 1000)
        digest = hashlib.sha256(body).digest()
        return Frame("soak", {"from": sender, "number": self.begun[sender], "digest": digest}, [body] if size else [])

    async def consume(self, stream: Stream) -> None:
        while True:
            if self.random.random() < 0.2:
                await asyncio.sleep(self.random.random())
            try:
                async with asyncio.timeout(self.random.choice([0.05, 100.0])):
                    frame = await stream.recv()
            except TimeoutError:
                continue
            body = b"".join(map(bytes, frame.payloads))
            assert hashlib.sha256(body).digest() == frame.header["digest"]
            sender = frame.header["from"]
            assert frame.header["number"] > self.seen[sender], "repeated or out of order"
            self.seen[sender] = frame.header["number"]
            self.received += 1

    async def produce(self, stream: Stream, sender: str) -> None:
        for _ in range(self.random.randrange(5, 25)):
            try:
                async with asyncio.timeout(self.random.choice([0.01, 0.3, 1000.0, 1000.0])):
                    await stream.send(self.frame(sender))
            except TimeoutError:
                self.cancelled += 1
            await asyncio.sleep(self.random.random() * 0.1)

    async def talk(self, a: Transport, b: str, name: str) -> None:
        """Open a stream and let several tasks send on it while one receives; then close it in one way or another."""
        try:
            stream = await a.open(b, "soak")
            async with asyncio.TaskGroup() as group:
                consuming = group.create_task(self.consume(stream))
                async with asyncio.TaskGroup() as senders:
                    for index in range(3):
                        senders.create_task(self.produce(stream, f"{name}.{index}"))
                if self.random.random() < 0.7:
                    await stream.aclose()
                else:
                    stream.abort()
                consuming.cancel()
        except* (StreamClosed, JoinError):
            self.broken += 1

    async def answer(self, stream: Stream) -> None:
        """The accepting side does both as well."""
        name = f"answer-{self.random.random()}"
        async with asyncio.TaskGroup() as group:
            group.create_task(self.consume(stream))
            group.create_task(self.produce(stream, name))

    async def serve(self, stream: Stream) -> None:
        try:
            await self.answer(stream)
        except* StreamClosed:
            pass


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shaped", [False, True])
@virtual_time
async def test_everything_at_once(seed: int, shaped: bool) -> None:
    soak = Soak(seed)
    impairment = Impairment(0.02, 5e6, 0.01, loss=0.002) if not shaped else Impairment(loss=0.002)
    network = MemoryNetwork(seed=seed, check=True)
    names = ["a", "b", "c"]
    pairs = [(x, y) for x in names for y in names if x != y]
    shape = Shape({pair: LinkProfile(0.02, 5e6) for pair in pairs}, jitter_s=0.01, seed=seed)

    def transport(name: str) -> Transport:
        made = network.transport(name, KEY, timeouts=TIMEOUTS, limits=LIMITS)
        return ShapedTransport(made, shape, limits=LIMITS) if shaped else made

    async with transport("a") as a, transport("b") as b, transport("c") as c:  # type: ignore[attr-defined]
        for each in (a, b, c):
            each.serve("soak", soak.serve)
        for x, y in pairs:
            network.impair(x, y, impairment)
        with capture_logs() as logs:  # where the errors of accepting handlers end
            async with asyncio.timeout(3600), asyncio.TaskGroup() as group:
                for index in range(6):
                    x, y = pairs[index % len(pairs)]
                    group.create_task(soak.talk({"a": a, "b": b, "c": c}[x], y, f"{x}{y}{index}"))
    assert not [entry for entry in logs if entry["log_level"] == "error"]
    assert soak.received > 50
    assert soak.cancelled > 3
