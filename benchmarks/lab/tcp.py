"""Raw TCP between two hosts of a lab: what any system could reach at best, and whether the lab keeps what it promises.

The idea: plain sockets and nothing else. `--serve` swallows what comes and answers each connection's end with the number of
bytes and the seconds from the first to the last; the other end sends for a while over one or more connections at once.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
import time
from typing import Any

PORT = 4200
PIECE_BYTES = 256 * 1024


def serve() -> None:
    """Until killed."""
    with socket.create_server(("0.0.0.0", PORT)) as server:
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_swallow, args=(connection,), daemon=True).start()


def _swallow(connection: socket.socket) -> None:
    piece, total, first = bytearray(PIECE_BYTES), 0, 0.0
    with connection:
        while got := connection.recv_into(piece):
            first = first or time.monotonic()
            total += got
        if total:
            seconds = time.monotonic() - first
            connection.sendall(json.dumps({"bytes": total, "seconds": seconds}).encode())


def send(address: str, seconds: float, connections: int, buffer_bytes: int) -> dict[str, Any]:
    """Bits per second that arrived over all connections, and a round trip of the idle network.

    `buffer_bytes` sets the sockets' buffers (within the system's limits); 0 leaves them to the kernel.
    """
    trips = []
    for _ in range(5):
        start_s = time.perf_counter()
        socket.create_connection((address, PORT), 10).close()
        trips.append(time.perf_counter() - start_s)
    opened = [socket.create_connection((address, PORT), 10) for _ in range(connections)]
    found: list[dict[str, Any]] = []
    threads = [threading.Thread(target=_send, args=(c, seconds, buffer_bytes, found)) for c in opened]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bits_per_s = sum(8 * f["bytes"] for f in found) / max(f["seconds"] for f in found)
    return {"bits_per_s": bits_per_s, "rtt_s": min(trips), "bytes": sum(f["bytes"] for f in found)}


def _send(connection: socket.socket, seconds: float, buffer_bytes: int, found: list[dict[str, Any]]) -> None:
    piece = bytes(PIECE_BYTES)
    with connection:
        if buffer_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            connection.sendall(piece)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(60)
        found.append(json.loads(connection.makefile("rb").read()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", nargs="?", help="where the other end is")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--buffer", type=int, default=0)
    options = parser.parse_args()
    if options.serve:
        serve()
    elif options.address is None:
        sys.exit("say where to send: an address, or --serve")
    else:
        print(json.dumps(send(options.address, options.seconds, options.connections, options.buffer)))


if __name__ == "__main__":
    main()
