"""`python -m tests.lab.natted IDENTITY_FILE [--no-relay] [--ipv6] [ADDRESS...]`: a peer's transport, for tests of the lab.

It prints who it is and where, as a JSON line. Each line of its standard input is [peer id, [address, ...]] as JSON: it measures the
link to that peer, as a peer of a mesh does, and prints what came of it, and from where that peer sees it come. It ends with its
standard input.
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
from peers.measure.probe import Turns, probe_link
from peers.transport.p2p import Direct, P2PDaemon, RelayedTransport
from peers.transport.seen import seen_from

KEY = b"the key of the mesh under test.."
LISTEN = {"--ipv6": "[::]:4001", "--both": "0.0.0.0:4001,[::]:4001"}
PATIENT = Timeouts(dial_s=15.0, handshake_s=30.0, join_s=120.0)


async def main(file: str, *arguments: str) -> None:
    identity = Identity.load_or_create(Path(file))
    seeds = [argument for argument in arguments if not argument.startswith("--")]
    listen = next((LISTEN[argument] for argument in arguments if argument in LISTEN), "0.0.0.0:4001")
    async with P2PDaemon(identity, listen=[listen], seeds=seeds, timeouts=PATIENT) as daemon:
        direct = Direct(daemon.listening, 4002, PATIENT)
        transport = RelayedTransport(daemon.p2p, KEY, direct=direct, timeouts=PATIENT)
        transport.allow(identity, seeds, passes_on="--no-relay" not in arguments)
        transport.serve("probe", Turns(transport.peer_id).serve)
        async with transport:
            transport.addresses = daemon.addresses
            tell({"peer": transport.peer_id, "addresses": daemon.addresses})
            while line := await asyncio.to_thread(sys.stdin.readline):
                peer_id, addresses = json.loads(line)
                try:
                    probed = await probe_link(transport, peer_id, tuple(addresses), 0.0)
                    sees = await seen_from(transport, peer_id, addresses)
                    found = probed.link
                    tell({"latency_s": found.latency_s, "bytes_per_s": found.bandwidth_bytes_per_s, "sees": sees})
                except JoinError as error:
                    tell({"error": str(error)})


def tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
