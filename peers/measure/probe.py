"""A peer's links to the others, measured.

The idea: measured, never advertised by hand. A link is timed by a few empty round trips and payloads sized so that each takes
about a tenth of a second, or half of that beside training. Each end measures the direction in which it sends.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from meshcee.errors import ProtocolError
from meshcee.figures import LinkProfile
from peers.transport import Frame, Stream, Transport
from peers.wire import messages, need

__all__ = ["LIGHT_S", "MOST_MEASURED_BYTES_PER_S", "TARGET_S", "Probed", "probe_link", "serve_probe"]

PING_COUNT = 7
PAYLOAD_COUNT = 3
FIRST_PAYLOAD_BYTES = 64 * 1024
MAX_PAYLOAD_BYTES = 4 << 20  # a probe never sends more than this at once
TARGET_S = 0.1  # that a payload takes
LIGHT_S = 0.05  # where steps may need the link
MOST_MEASURED_BYTES_PER_S = 12.5e9  # 4 MiB in 0.3 ms: a shorter time is that of the event loop, not of a link
RAMP = 1.5  # times faster than before: a connection that had idled (TCP begins slowly again) had not got going before


async def serve_probe(stream: Stream) -> None:
    """Answer pings until the prober closes."""
    stream.max_payload_bytes = MAX_PAYLOAD_BYTES
    while True:
        frame = await stream.recv()
        if frame.kind != messages.PING:
            raise ProtocolError(f"a probe holds pings only, got {frame.kind!r}")
        await stream.send(Frame(messages.PONG, {"bytes": frame.payload_bytes}))


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
) -> Probed:
    """Latency is half an empty round trip; bandwidth what a payload took beyond the median one. Raises JoinError.

    target_s  that a payload is to take: short ones need less of the link, and show less of it
    """
    stream = await transport.open(peer_id, "probe", addresses)
    stream.max_payload_bytes = 0  # answers have none
    try:
        await _ping(stream, b"", clock)  # whatever a first use costs
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
