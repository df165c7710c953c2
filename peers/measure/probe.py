"""A peer's links to the others, measured.

The idea: measured, never advertised by hand. A link is timed by a few empty round trips and payloads sized so that each takes
about a tenth of a second, or half of that beside training. Each end measures the direction in which it sends. Two peers that
probe each other take turns: the short answers of each would wait behind the payloads of the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from meshcee.config import Timeouts
from meshcee.errors import ProtocolError
from meshcee.figures import LinkProfile
from peers.transport import Frame, Stream, Transport
from peers.wire import messages, need

__all__ = ["LIGHT_S", "MOST_MEASURED_BYTES_PER_S", "TARGET_S", "Probed", "Turns", "probe_link"]

PING_COUNT = 7
PAYLOAD_COUNT = 3
FIRST_PAYLOAD_BYTES = 64 * 1024
MAX_PAYLOAD_BYTES = 4 << 20  # a probe never sends more than this at once
TARGET_S = 0.1  # that a payload takes
LIGHT_S = 0.05  # where steps may need the link
MOST_MEASURED_BYTES_PER_S = 12.5e9  # 4 MiB in 0.3 ms: a shorter time is that of the event loop, not of a link
RAMP = 1.5  # times faster than before: a connection that had idled (TCP begins slowly again) had not got going before


@dataclass
class _Own:
    """A probe of this peer's. It goes on once the other has answered for the first time."""

    goes_on: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Turns:
    """One peer's answers to probes, and its own probes: of one other peer either the answers or the probe, not both at a time.

    A prober has one stream, for so long: who reads no answer, or opens more, would hold what these have not taken yet.
    """

    def __init__(self, peer_id: str, longest_s: float = Timeouts().join_s) -> None:
        self._peer_id = peer_id
        self._longest_s = longest_s
        self._own: dict[str, _Own] = {}
        self._answered: dict[str, Stream] = {}

    @contextlib.contextmanager
    def own(self, peer_id: str) -> Iterator[Callable[[], None]]:
        """Around a probe of this peer. The prober calls what is given, once it has the first answer."""
        self._own[peer_id] = own = _Own()

        def answered() -> None:
            own.goes_on = True

        try:
            yield answered
        finally:
            del self._own[peer_id]
            own.over.set()

    async def serve(self, stream: Stream) -> None:
        """Answer pings until the prober closes: the first once no probe of that peer goes on here. Of two probes that have just
        begun, the one of the lesser id goes first.
        """
        if (before := self._answered.pop(stream.peer_id, None)) is not None:
            before.abort()
        self._answered[stream.peer_id] = stream
        try:
            async with asyncio.timeout(self._longest_s):
                await self._answer(stream)
        finally:
            if self._answered.get(stream.peer_id) is stream:
                del self._answered[stream.peer_id]

    async def _answer(self, stream: Stream) -> None:
        stream.max_payload_bytes = MAX_PAYLOAD_BYTES
        frame = await _next_ping(stream)
        if (own := self._own.get(stream.peer_id)) is not None and (own.goes_on or self._peer_id < stream.peer_id):
            await own.over.wait()
        while True:
            await stream.send(Frame(messages.PONG, {"bytes": frame.payload_bytes}))
            frame = await _next_ping(stream)


async def _next_ping(stream: Stream) -> Frame:
    frame = await stream.recv()
    if frame.kind != messages.PING:
        raise ProtocolError(f"a probe holds pings only, got {frame.kind!r}")
    return frame


async def _ping(stream: Stream, payload: bytes, clock: Callable[[], float]) -> float:
    start_s = clock()
    await stream.send(Frame(messages.PING, {}, [payload] if payload else []))
    reply = await stream.recv()
    elapsed_s = clock() - start_s
    if reply.kind != messages.PONG or need(reply.header, "bytes", int) != len(payload):
        raise ProtocolError(f"peer {stream.peer_id} answered a probe with something else")
    return elapsed_s


class Probed(NamedTuple):
    """What a probe has shown, and how much it sent for that."""

    link: LinkProfile
    sent_bytes: int


async def probe_link(
    transport: Transport,
    peer_id: str,
    addresses: tuple[str, ...],
    now: float,
    clock: Callable[[], float] = time.perf_counter,
    target_s: float = TARGET_S,
    answered: Callable[[], None] = lambda: None,
) -> Probed:
    """Latency is half an empty round trip; bandwidth what a payload took beyond the median one. Raises JoinError.

    target_s  that a payload is to take: short ones need less of the link, and show less of it
    answered  called at the first answer (`Turns.own`)
    """
    stream = await transport.open(peer_id, "probe", addresses)
    stream.max_payload_bytes = 0  # answers have none
    try:
        await _ping(stream, b"", clock)  # whatever a first use costs
        answered()
        pings_s = [await _ping(stream, b"", clock) for _ in range(PING_COUNT)]
        round_trip_s, fastest_s = statistics.median(pings_s), min(pings_s)
        size, sent = int(FIRST_PAYLOAD_BYTES * target_s / TARGET_S), 0
        rates: list[float] = []
        while len(rates) < PAYLOAD_COUNT:
            took_s = await _ping(stream, bytes(size), clock)
            # Where empty round trips were held up, the median of them may be all that a payload takes.
            elapsed_s = max(took_s - round_trip_s, (took_s - fastest_s) / 2, size / MOST_MEASURED_BYTES_PER_S)
            sent += size
            if elapsed_s >= target_s / 2 or size >= MAX_PAYLOAD_BYTES:
                if rates and size / elapsed_s > RAMP * max(rates):
                    rates.clear()
                rates.append(size / elapsed_s)
            else:
                size = min(MAX_PAYLOAD_BYTES, max(2 * size, int(size * target_s / elapsed_s)))
            await asyncio.sleep(0)
        (low_s, high_s), (least, most) = _range([p / 2 for p in pings_s]), _range(rates)
        spans = (low_s, high_s), (least, most)
        return Probed(LinkProfile(round_trip_s / 2, statistics.median(rates), now, *spans), sent)
    finally:
        await stream.aclose()


def _range(values: list[float]) -> tuple[float, float]:
    """p10 and p90, which lie around the median."""
    found = statistics.quantiles(values, n=10, method="inclusive")
    middle = statistics.median(values)
    return min(found[0], middle), max(found[8], middle)
