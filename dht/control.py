"""Talking to a running p2pd: hivemind's names in one place, and one request at a time over a connection of its own.

The idea: hivemind's own calls have no time-out and leak their socket when they are cancelled, so the few that we need
are made here. Its logging is silenced: what matters is in our errors and in our log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import types
import warnings
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def _put_off(name: str) -> Iterator[None]:
    """Meanwhile a module is not imported by who names it, but when something of it is used: its package looks for it then."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = types.ModuleType(name)
    try:
        yield
    finally:
        del sys.modules[name]


# hivemind imports much of torch that warns of its own deprecations. Of scipy it uses a solver for training that nobody here calls.
with warnings.catch_warnings(), _put_off("scipy.optimize"):
    warnings.simplefilter("ignore")
    from hivemind.p2p import P2P, PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, read_pbmsg_safe, write_pbmsg
    from hivemind.proto import p2pd_pb2
    from hivemind.utils.multiaddr import Multiaddr

__all__ = ["ENOUGH_S", "P2P", "P2PDaemonError", "PeerID", "answers", "ask", "at_once", "attach", "dial", "packed"]

ENOUGH_S = 0.3  # for the others, once one of many has answered

if "HIVEMIND_LOGLEVEL" not in os.environ:
    logging.getLogger("hivemind").setLevel(logging.CRITICAL)


class _Calls(dict[Any, Any]):
    """hivemind's calls that p2pd has yet to answer: an answer to one that was given up would end its reading."""

    def __contains__(self, call: object) -> bool:
        return super().__contains__(call) and not self[call].done()


async def attach(socket: str, folder: str) -> P2P:
    """hivemind's handle of the p2pd that listens on this socket; its own socket goes into the folder."""
    ours: Any = type("OurP2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{folder}/"})
    p2p: P2P = await ours.replicate(Multiaddr(f"/unix{socket}"))
    control = p2p._client.control
    control._pending_calls = _Calls()
    for task in (control._read_task, control._write_task):  # they fail when p2pd dies, and nobody awaits them
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return p2p


async def ask(p2p: P2P, request: Any) -> Any:
    """One request to p2pd; raises OSError or EOFError when it is gone, P2PDaemonError when it refuses."""
    reader, writer = await p2p._client.control.daemon_connector.open_connection()
    try:
        await write_pbmsg(writer, request)
        response = p2pd_pb2.Response()
        await read_pbmsg_safe(reader, response)
    finally:
        writer.close()
    if response.type == p2pd_pb2.Response.ERROR:
        raise P2PDaemonError(response.error.msg)
    return response


async def answers(p2p: P2P, timeout_s: float) -> bool:
    """Whether p2pd is there and answers at all."""
    try:
        async with asyncio.timeout(timeout_s):
            await ask(p2p, p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY))
    except (TimeoutError, OSError, EOFError, P2PDaemonError):
        return False
    return True


def packed(addresses: Iterable[str]) -> list[bytes]:
    """As p2pd takes them. An address that its library does not read is left out: it may come from another peer's record."""
    found = []
    for address in addresses:
        with contextlib.suppress(Exception):  # the multiaddr library raises whatever it likes
            found.append(Multiaddr(address).to_bytes())
    return found


async def dial(p2p: P2P, peer_id: str, addresses: Sequence[str], timeout_s: float) -> str:
    """Connect to a peer at these addresses (without /p2p/ID); what went wrong, "" for nothing."""
    try:
        peer = PeerID.from_base58(peer_id).to_bytes()
    except ValueError as error:
        return f"{peer_id[:80]!r} is no peer's id: {error}"
    where = packed(addresses)
    if not where and addresses:
        return f"libp2p reads none of its addresses, {', '.join(addresses)[:200]}"
    request = p2pd_pb2.Request(
        type=p2pd_pb2.Request.CONNECT,
        connect=p2pd_pb2.ConnectRequest(peer=peer, addrs=where, timeout=max(1, round(timeout_s))),
    )
    try:
        async with asyncio.timeout(timeout_s):
            await ask(p2p, request)
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except (OSError, EOFError, P2PDaemonError) as error:
        return str(error) or repr(error)
    return ""


async def at_once(calls: Iterable[Awaitable[bool]], enough_s: float | None = None) -> None:
    """Await all of these, each of which says whether somebody has answered. Once one has, the others have `enough_s` seconds more,
    if that is said, and are then given up: an address that leads nowhere costs no more than that."""
    loop = asyncio.get_running_loop()

    async def one(call: Awaitable[bool]) -> None:
        if await call and enough_s is not None and limit.when() is None:
            limit.reschedule(loop.time() + enough_s)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(one(call))
