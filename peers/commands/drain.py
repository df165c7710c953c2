"""`meshcee drain PEER`: ask a peer to leave, and wait until it has gone."""

from __future__ import annotations

import time

from meshcee.errors import PeerLostError, UsageError
from peers.assemble import JoinOptions, join
from peers.commands.session import configure_logging, run_async
from peers.departure import ask_to_leave, find_peer
from peers.home import Home
from peers.strict_json import dumps

__all__ = ["run_drain"]


def run_drain(wanted: str, token: str | None, *, as_json: bool) -> None:
    """Raises PeerLostError when the peer left before its job could go on without it."""
    if token is None:
        raise UsageError("say which mesh: --join TOKEN, the line that `meshcee peer` printed (or set MESHCEE_JOIN)")
    configure_logging(as_json=as_json, level="warning")
    run_async(_drain(wanted, token, as_json=as_json))


async def _drain(wanted: str, token: str, *, as_json: bool) -> None:
    async with join(JoinOptions(token=token, name="drain", observes=True), Home()) as mesh:
        await mesh.agent.directory.refresh()
        peer = find_peer(mesh.agent.directory.peers, wanted)

        def hear(within_s: float) -> None:
            if not as_json:
                print(f"{peer.name} leaves, within {within_s:.0f} s", flush=True)

        start_s = time.perf_counter()
        in_time = await ask_to_leave(mesh.agent, peer.peer_id, hear)
        took_s = time.perf_counter() - start_s
    if not in_time:
        raise PeerLostError(
            f"{peer.name} has gone before its job could go on without it: the owner goes on from its newest checkpoint"
        )
    if as_json:
        print(dumps({"left": {"peer": peer.peer_id, "name": peer.name, "took_s": took_s}}), flush=True)
    else:
        print(f"{peer.name} has gone, after {took_s:.1f} s")
