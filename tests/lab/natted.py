"""`python -m tests.lab.natted IDENTITY_FILE [--no-relay] [ADDRESS...]`: a peer's transport, for test_two_nats.py.

It prints who it is and where, as a JSON line. Each line of its standard input is [peer id, [address, ...]] as JSON: it measures the
link to that peer, as a peer of a mesh does, and prints what came of it. It ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from dht import Identity
from meshcee.config import Timeouts
from meshcee.errors import JoinError
from peers.measure.probe import probe_link, serve_probe
from peers.transport.p2p import Direct, P2PDaemon, RelayedTransport

KEY = b"the key of the mesh under test.."
PATIENT = Timeouts(dial_s=15.0, handshake_s=30.0, join_s=120.0)


async def main(file: str, *arguments: str) -> None:
    identity = Identity.load_or_create(Path(file))
    seeds = [argument for argument in arguments if argument != "--no-relay"]
    async with P2PDaemon(identity, listen=["0.0.0.0:4001"], seeds=seeds, timeouts=PATIENT) as daemon:
        direct = Direct(daemon.listening, 4002, PATIENT)
        transport = RelayedTransport(daemon.p2p, KEY, direct=direct, timeouts=PATIENT)
        transport.allow(identity, seeds, passes_on="--no-relay" not in arguments)
        transport.serve("probe", serve_probe)
        async with transport:
            transport.addresses = daemon.addresses
            tell({"peer": transport.peer_id, "addresses": daemon.addresses})
            while line := await asyncio.to_thread(sys.stdin.readline):
                peer_id, addresses = json.loads(line)
                try:
                    probed = await probe_link(transport, peer_id, tuple(addresses), 0.0)
                    tell({"latency_s": probed.link.latency_s, "bytes_per_s": probed.link.bandwidth_bytes_per_s})
                except JoinError as error:
                    tell({"error": str(error)})


def tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
