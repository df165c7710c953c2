"""base.Transport over libp2p: hivemind's p2pd carries the bytes, we frame and authenticate them.

The idea: p2pd hands every stream to us as a Unix socket. We take the socket's asyncio transport away from hivemind's
reader and let `FramedStream` be its protocol, so that no byte passes through a StreamReader. One libp2p protocol name
serves all purposes: the purpose is in the handshake. The remote peer id comes from p2pd, which has verified its key.
Dialling talks to p2pd itself rather than through `call_binary_stream_handler`, which leaks its socket when a dial
fails and has no time-out. After a restart of p2pd, `rebind` puts the transport on the new one; open streams died with
the old.
"""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections.abc import Sequence
from typing import Any, cast

import structlog

from dht import Members
from dht.control import packed
from meshcee.config import Limits, Timeouts
from meshcee.errors import JoinError, UsageError
from peers.transport.direct import Direct
from peers.transport.endpoint import Endpoint
from peers.transport.frame import FRAME_VERSION
from peers.transport.p2p.dial_back import KNOCK, Knocking
from peers.transport.p2p.relay import Relayed
from peers.transport.seen import SEEN, tell_whence
from peers.transport.stream import FramedStream, short

with warnings.catch_warnings():  # hivemind imports much of torch that warns of its own deprecations
    warnings.simplefilter("ignore")
    from hivemind.p2p import P2P, PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, read_pbmsg_safe, write_pbmsg
    from hivemind.proto import p2pd_pb2

__all__ = ["PROTOCOL", "Libp2pTransport", "RelayedTransport"]

PROTOCOL = f"meshcee/{FRAME_VERSION}"

log = structlog.get_logger(__name__)


class Libp2pTransport(Endpoint):
    """Streams between libp2p peers. The P2P instance belongs to the caller, who also restarts and shuts it down.

    With `direct`, streams that carry much leave libp2p for TCP connections of their own, where these can be made.
    """

    def __init__(
        self,
        p2p: P2P,
        mesh_key: bytes,
        *,
        direct: Direct | None = None,
        timeouts: Timeouts | None = None,
        limits: Limits | None = None,
        members: Members | None = None,
    ) -> None:
        super().__init__(p2p.peer_id.to_base58(), mesh_key, timeouts=timeouts, limits=limits, members=members)
        self._p2p = p2p
        self.direct = direct
        self.serve(SEEN, tell_whence)
        self.serve(KNOCK, Knocking().serve)

    async def rebind(self, p2p: P2P) -> None:
        """Go on over a new p2pd with the same identity: listen there, dial from there."""
        if p2p.peer_id.to_base58() != self.peer_id:
            raise UsageError(f"the new p2pd is peer {p2p.peer_id}, not {self.peer_id}: give it the same identity file")
        self._p2p = p2p
        with contextlib.suppress(Exception):  # a try before this one may have come so far, and its answer not
            async with asyncio.timeout(self.timeouts.dial_s):
                await p2p.remove_binary_stream_handler(PROTOCOL)
        await self._start()

    async def _start(self) -> None:
        try:
            async with asyncio.timeout(self.timeouts.dial_s):
                await self._p2p.add_binary_stream_handler(PROTOCOL, self._on_stream)
                self.addresses = tuple(str(address) for address in await self._p2p.get_visible_maddrs())
        except (TimeoutError, OSError, EOFError) as error:
            raise JoinError(f"this peer's own p2pd does not answer ({error!r}): look at its last log lines") from error

    async def _stop(self) -> None:
        with contextlib.suppress(OSError, EOFError):  # p2pd is gone: then nothing listens
            await self._p2p.remove_binary_stream_handler(PROTOCOL)

    # -- accepting

    async def _on_stream(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Called by hivemind in a task of its own, which ends at once: the stream lives in our TaskGroup."""
        stream = self.make_stream(info.peer_id.to_base58())
        with contextlib.suppress(Exception):  # the multiaddr library raises whatever it likes
            stream.came_from = str(info.addr)
        await _take_over(stream, reader, writer)
        self._accepted(stream)

    # -- dialling

    async def _connect(self, stream: FramedStream, addresses: Sequence[str]) -> None:
        try:
            peer = PeerID.from_base58(stream.peer_id)
        except Exception as error:  # the base58 library raises whatever it likes
            raise JoinError(f"{stream.peer_id!r} is not a peer id: {error!r}") from error
        dialled = packed(address.removesuffix(f"/p2p/{stream.peer_id}") for address in addresses)
        if addresses and not dialled:
            raise JoinError(f"libp2p reads none of the addresses of {stream.peer_id}: {list(addresses)}")
        seconds = max(1, round(self.timeouts.dial_s))
        try:
            if dialled:
                request = p2pd_pb2.Request(
                    type=p2pd_pb2.Request.CONNECT,
                    connect=p2pd_pb2.ConnectRequest(peer=peer.to_bytes(), addrs=dialled, timeout=seconds),
                )
                _, _, writer = await self._ask(request)
                writer.close()
            request = p2pd_pb2.Request(
                type=p2pd_pb2.Request.STREAM_OPEN,
                streamOpen=p2pd_pb2.StreamOpenRequest(peer=peer.to_bytes(), proto=[PROTOCOL], timeout=seconds),
            )
            _, reader, writer = await self._ask(request)
        except (OSError, EOFError) as error:
            raise JoinError(
                f"this peer's own p2pd does not answer ({error!r}): it is being restarted, retry"
            ) from error
        except P2PDaemonError as error:
            raise JoinError(
                f"peer {short(stream.peer_id)} cannot be reached ({error}): check that it runs, that its meshcee "
                "is as new as this one, and that its address and port are reachable from here"
            ) from error
        await _take_over(stream, reader, writer)

    async def _ask(self, request: Any) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
        """One request to p2pd over a connection of its own, which is closed unless the answer is good."""
        reader, writer = await self._p2p._client.control.daemon_connector.open_connection()
        try:
            await write_pbmsg(writer, request)
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, response)
            if response.type == p2pd_pb2.Response.ERROR:
                raise P2PDaemonError(response.error.msg)
        except BaseException:
            writer.transport.abort()
            raise
        return response, reader, writer


class RelayedTransport(Relayed, Libp2pTransport):
    """The same, and where no connection can be made to a peer, another member passes on."""


async def _take_over(stream: FramedStream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Make `stream` the protocol of a connection that asyncio's stream pair has opened."""
    transport = cast(asyncio.Transport, writer.transport)
    stream.keep = writer  # asyncio closes the connection when its writer is collected
    transport.pause_reading()
    # What has been read already is in the reader; only a HELLO can be, since then the dialer waits for its answer.
    # With the end fed to it, the reader gives that out without waiting.
    reader.feed_eof()
    stream.attach(transport, await reader.read())
