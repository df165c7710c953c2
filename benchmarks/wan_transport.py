"""Our transport against raw TCP over long links, in the WAN lab (needs root): bits per second that arrive, one way.

The idea: what is compared runs on the very same link, one after the other: one raw connection as the kernel makes it, one with
buffers that hold twice what is under way, four raw connections at once, and frames of ours over one stream and over four, both
as they go by default and as they go when they stay with the libp2p daemon. The
first seconds pay for slow start and are not counted: between peers that train, connections are warm.

    python -m benchmarks.wan_transport [--mbit 50 --mbit 200] [--rtt 5 --rtt 50] [--seconds S] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lab import Lab, pair_of_hosts, why_not
from benchmarks.measure import machine, row

PORT = 4300
MBITS, RTTS_MS = (50, 200, 1000), (5, 50, 200)
WARM_S = 3.0
PIECE_BYTES = 256 * 1024
FRAME_BYTES = 1 << 20
KEY = b"the benchmark's mesh key, 32 by."
# Linux's numbers of the options that go beyond net.core.rmem_max, for root.
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33


class Meter:
    """Bytes that arrive over all connections after the first arrival that is WARM_S old: what that one brought began earlier."""

    def __init__(self) -> None:
        self.first_s = self.begun_s = self.last_s = 0.0
        self.bytes = 0

    def count(self, size: int) -> None:
        now = time.monotonic()
        self.first_s = self.first_s or now
        if now - self.first_s < WARM_S:
            return
        if self.begun_s:
            self.bytes += size
        self.begun_s = self.begun_s or now
        self.last_s = now

    @property
    def bits_per_s(self) -> float:
        return 8 * self.bytes / max(self.last_s - self.begun_s, 1e-9)


# -- raw connections ---------------------------------------------------------------------------------------------------


def serve_raw(buffer_bytes: int) -> Meter:
    """Swallow all connections from the first that comes until the last has ended."""
    meter, lock = Meter(), threading.Lock()

    def swallow(connection: socket.socket) -> None:
        piece = bytearray(PIECE_BYTES)
        with connection:
            while got := connection.recv_into(piece):
                with lock:
                    meter.count(got)

    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if buffer_bytes:
            server.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, buffer_bytes)
        server.bind(("0.0.0.0", PORT))
        server.listen()
        print("ready", flush=True)
        server.settimeout(20)
        threads = []
        while True:
            connection, _ = server.accept()
            connection.settimeout(None)
            threads.append(threading.Thread(target=swallow, args=(connection,)))
            threads[-1].start()
            server.settimeout(1)
            if len(threads) == int(os.environ["CONNECTIONS"]):
                break
        for thread in threads:
            thread.join()
    return meter


def send_raw(address: str, seconds: float, buffer_bytes: int) -> None:
    def send() -> None:
        piece = bytes(PIECE_BYTES)
        with socket.socket() as connection:
            if buffer_bytes:
                connection.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, buffer_bytes)
            connection.connect((address, PORT))
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                connection.sendall(piece)

    threads = [threading.Thread(target=send) for _ in range(int(os.environ["CONNECTIONS"]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# -- ours --------------------------------------------------------------------------------------------------------------


def transport_of(daemon: Any) -> Any:
    from meshcee.config import Timeouts
    from peers.transport.direct import Direct
    from peers.transport.p2p.libp2p import Libp2pTransport

    direct = Direct(daemon.listening, 0, Timeouts()) if os.environ["WAY"] == "frames" else None
    return Libp2pTransport(daemon.p2p, KEY, direct=direct)


async def serve_frames(address: str) -> Meter:
    from dht.signing import Identity
    from peers.transport.base import Stream, StreamClosed
    from peers.transport.p2p.p2pd import P2PDaemon

    meter, streams = Meter(), int(os.environ["CONNECTIONS"])
    ended = asyncio.Queue[None](streams)

    async def swallow(stream: Stream) -> None:
        try:
            while True:
                meter.count((await stream.recv()).payload_bytes)
        except StreamClosed:
            ended.put_nowait(None)

    identity = Identity.load_or_create(Path(os.environ["HOME"]) / "there")
    async with P2PDaemon(identity, listen=[f"{address}:0"]) as daemon, transport_of(daemon) as transport:
        transport.serve("frames", swallow)
        print(json.dumps({"peer": daemon.peer_id, "addresses": list(daemon.addresses)}), flush=True)
        for _ in range(streams):
            await ended.get()
    return meter


async def send_frames(address: str, where: dict[str, Any], seconds: float) -> None:
    from dht.signing import Identity
    from peers.transport.base import Frame
    from peers.transport.p2p.p2pd import P2PDaemon

    payload = os.urandom(FRAME_BYTES)
    identity = Identity.load_or_create(Path(os.environ["HOME"]) / "here")
    async with P2PDaemon(identity, listen=[f"{address}:0"]) as daemon, transport_of(daemon) as transport:

        async def send() -> None:
            stream = await transport.open(where["peer"], "frames", where["addresses"])
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                await stream.send(Frame("bulk", {}, [payload]))
            await stream.aclose()

        async with asyncio.TaskGroup() as group:
            for _ in range(int(os.environ["CONNECTIONS"])):
                group.create_task(send())


# -- one comparison ----------------------------------------------------------------------------------------------------

KINDS = {  # kind -> (way, connections or streams, buffers tuned)
    "raw": ("raw", 1, False),
    "raw, tuned": ("raw", 1, True),
    "raw x 4": ("raw", 4, False),
    "frames": ("frames", 1, False),
    "frames x 4": ("frames", 4, False),
    "libp2p": ("libp2p", 1, False),  # frames that stay with the daemon
    "libp2p x 4": ("libp2p", 4, False),
}


async def compare(mbit: float, rtt_ms: float, kinds: Sequence[str], seconds: float, home: str) -> dict[str, float]:
    """Mbit/s by kind; all over the same lab, one after the other."""
    found = {}
    for kind in kinds:
        way, connections, tuned = KINDS[kind]
        buffers = max(1 << 18, int(2 * mbit * 1e6 / 8 * rtt_ms / 1e3)) if tuned else 0
        environment = {**os.environ, "CONNECTIONS": str(connections), "WAY": way, "HOME": home}
        async with Lab(pair_of_hosts(mbit * 1e6 / 8, rtt_ms / 1e3)) as lab:

            async def start(host: str, *arguments: str, lab: Lab = lab, environment: Any = environment) -> Any:
                command = [sys.executable, "-m", "benchmarks.wan_transport", *arguments]
                return await lab.run(host, command, env=environment, stdout=asyncio.subprocess.PIPE)

            there = await start("there", "--serve", way, "--buffer", str(buffers), "--address", lab.addresses["there"])
            where = (await there.stdout.readline()).decode().strip()
            here = await start(
                "here", "--send", way, "--buffer", str(buffers), "--seconds", str(WARM_S + seconds),
                "--address", lab.addresses["there" if way == "raw" else "here"], "--where", where,
            )  # fmt: skip
            out, _ = await there.communicate()
            await here.wait()
            lines = out.decode().strip().splitlines()
            found[kind] = float(lines[-1]) / 1e6 if lines else 0.0
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wan_transport", description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, action="append", default=[])
    parser.add_argument("--rtt", type=float, action="append", default=[], help="round trip in ms")
    parser.add_argument("--kind", choices=list(KINDS), action="append", default=[])
    parser.add_argument("--seconds", type=float, default=5.0, help="measured, after the first three")
    parser.add_argument("--out", type=Path)
    for inner in ("--serve", "--send", "--address", "--where"):
        parser.add_argument(inner, help=argparse.SUPPRESS)
    parser.add_argument("--buffer", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve or options.send:
        _inside(options)
        return
    if reason := why_not():
        sys.exit(f"the benchmark needs the WAN lab, which cannot run here: {reason}")
    asyncio.run(_all(options))


def _inside(options: argparse.Namespace) -> None:
    """One end, in a namespace of the lab; the receiving one prints bits per second."""
    import uvloop

    from peers.cli.session import configure_logging

    configure_logging(as_json=True, level="error")
    if options.send == "raw":
        send_raw(options.address, options.seconds, options.buffer)
    elif options.send:
        uvloop.run(send_frames(options.address, json.loads(options.where), options.seconds))
    else:
        raw = options.serve == "raw"
        meter = serve_raw(options.buffer) if raw else uvloop.run(serve_frames(options.address))
        print(meter.bits_per_s, flush=True)


async def _all(options: argparse.Namespace) -> None:
    import tempfile

    kinds = options.kind or list(KINDS)
    report: dict[str, Any] = {"machine": machine(), "links": []}
    print(row("link", *kinds, "ours / better raw"))
    print(row(*["---"] * (len(kinds) + 2)), flush=True)
    for mbit in options.mbit or MBITS:
        for rtt_ms in options.rtt or RTTS_MS:
            with tempfile.TemporaryDirectory(prefix="wan-transport-") as home:
                found = await compare(mbit, rtt_ms, kinds, options.seconds, home)
            better = max(found.get("raw, tuned", 0.0), found.get("raw x 4", 0.0))
            ratio = max(found.get("frames", 0.0), found.get("frames x 4", 0.0)) / better if better else 0.0
            report["links"].append({"mbit_per_s": mbit, "rtt_ms": rtt_ms, "found_mbit_per_s": found, "ratio": ratio})
            print(
                row(f"{mbit:g} Mbit/s, {rtt_ms:g} ms", *(f"{v:.0f}" for v in found.values()), f"{ratio:.2f}"),
                flush=True,
            )
            if options.out:
                options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
