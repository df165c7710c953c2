"""Frames of meshcee against hivemind's raw binary streams: bytes a second and round trips over loopback.

The idea: the other end is a process of its own, as in a mesh; each end has one p2pd for both kinds of stream, and the
kinds run in turns. A raw message is bytes and nothing else; a frame has a header, a checksum and byte credits.

`python benchmarks/transport.py [--turns N] [--out FILE]`; with `--serve` it is the other end, which prints its addresses
and ends when its input does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import struct
import sys
import time
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop
from measure import Turns, machine, row

from meshcee.config import Timeouts
from peers.transport.base import Frame, Stream
from peers.transport.direct import Direct
from peers.transport.p2p.libp2p import Libp2pTransport

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from hivemind.p2p import P2P, PeerID

__all__ = ["frames_against_raw"]

KEY = b"the benchmark's mesh key, 32 by."
SIZES_BYTES = (64 << 10, 1 << 20, 8 << 20)
TRIP_BYTES = (1, 64 << 10, 1 << 20)  # one way; the answer is as short as it can be
BYTES_A_TURN = 128 << 20
ROUND_TRIPS = 200
PREFIX = struct.Struct("!?I")  # answer wanted, bytes that follow


@contextlib.asynccontextmanager
async def p2pd(**options: Any) -> AsyncIterator[P2P]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        p2p = await P2P.create(nat_port_map=False, auto_nat=False, use_relay=False, **options)
    try:
        yield p2p
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3):
                await p2p.shutdown()


async def serve() -> None:
    """The other end: swallows messages, answers those that want an answer."""

    async def raw(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                answer, size = PREFIX.unpack(await reader.readexactly(PREFIX.size))
                await reader.readexactly(size)
                if answer:
                    writer.write(b"!")
        writer.close()

    async def frames(stream: Stream) -> None:
        while True:
            frame = await stream.recv()
            if frame.header["answer"]:
                await stream.send(Frame("pong"))

    direct = Direct(["/ip4/127.0.0.1/tcp/0"], 0, Timeouts())
    async with p2pd() as p2p, Libp2pTransport(p2p, KEY, direct=direct) as transport:
        await p2p.add_binary_stream_handler("raw", raw)
        transport.serve("frames", frames)
        print(json.dumps({"peer": transport.peer_id, "addresses": list(transport.addresses)}), flush=True)
        await asyncio.to_thread(sys.stdin.read)


class Raw:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, payload: bytes, *, answer: bool) -> None:
        self._writer.write(PREFIX.pack(answer, len(payload)))
        self._writer.write(payload)
        await self._writer.drain()
        if answer:
            await self._reader.readexactly(1)


class Frames:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def send(self, payload: bytes, *, answer: bool) -> None:
        await self._stream.send(Frame("ping", {"answer": answer}, [payload]))
        if answer:
            await self._stream.recv()


async def _one_way(end: Raw | Frames, payload: bytes) -> float:
    """Seconds until the last of BYTES_A_TURN is answered."""
    count = BYTES_A_TURN // len(payload)
    start_s = time.perf_counter()
    for i in range(count):
        await end.send(payload, answer=i == count - 1)
    return time.perf_counter() - start_s


async def _round_trips(end: Raw | Frames, payload: bytes) -> float:
    start_s = time.perf_counter()
    for _ in range(ROUND_TRIPS):
        await end.send(payload, answer=True)
    return (time.perf_counter() - start_s) / ROUND_TRIPS


async def frames_against_raw(turns: int, direct: bool = True) -> list[dict[str, Any]]:
    """One entry for each size of a round trip and of a message; the ratio is raw seconds over ours.

    Frames go directly, as they do by default, or else through the libp2p daemon, as raw streams do.
    """
    other = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--serve", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        where = json.loads(await other.stdout.readline())
        async with (
            p2pd(initial_peers=where["addresses"]) as p2p,
            Libp2pTransport(p2p, KEY, direct=Direct([], 0, Timeouts()) if direct else None) as transport,
        ):
            _, reader, writer = await p2p.call_binary_stream_handler(PeerID.from_base58(where["peer"]), "raw")
            stream = await transport.open(where["peer"], "frames", where["addresses"])
            found = await _compare(Raw(reader, writer), Frames(stream), turns)
            writer.close()
    finally:
        other.stdin.close()
        await other.wait()
    return found


async def _compare(raw: Raw, frames: Frames, turns: int) -> list[dict[str, Any]]:
    ends: tuple[Raw | Frames, Raw | Frames] = (raw, frames)
    trips: dict[int, tuple[list[float], list[float]]] = {size: ([], []) for size in TRIP_BYTES}
    ways: dict[int, tuple[list[float], list[float]]] = {size: ([], []) for size in SIZES_BYTES}
    for turn in range(turns + 1):  # the first turn warms up
        for measure, by_size in ((_round_trips, trips), (_one_way, ways)):
            for size, pair in by_size.items():
                payload = os.urandom(size)
                for i, end in enumerate(ends):
                    seconds = await measure(end, payload)
                    if turn:
                        pair[i].append(seconds)
    found = []
    for size, pair in trips.items():
        result = Turns(*pair).to_json()
        what = "round trip of one byte" if size == 1 else f"round trip, {size >> 10} KiB there"
        times = [f"{result[key] * 1e3:.2f} ms" for key in ("baseline_s", "ours_s")]
        found.append({"what": what, "raw": times[0], "frames": times[1], **result})
    for size, pair in ways.items():
        result = Turns(*pair).to_json()
        rates = [f"{BYTES_A_TURN / result[key] / 1e6:.0f} MB/s" for key in ("baseline_s", "ours_s")]
        found.append({"what": f"one way, {size >> 10} KiB messages", "raw": rates[0], "frames": rates[1], **result})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", action="store_true", help="be the other end")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--libp2p", action="store_true", help="frames go through the libp2p daemon, too")
    parser.add_argument("--out", type=Path, help="write machine and figures as JSON to this file")
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve())
        return
    report = {"machine": machine(), "transport": uvloop.run(frames_against_raw(options.turns, not options.libp2p))}
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(row("what", "raw hivemind streams", "meshcee frames", "ratio", "over the turns"))
    print(row(*["---"] * 5))
    for r in report["transport"]:
        spread = f"{r['ratio_min']:.2f} to {r['ratio_max']:.2f}"
        print(row(r["what"], r["raw"], r["frames"], f"{r['ratio']:.2f}", spread))


if __name__ == "__main__":
    main()
