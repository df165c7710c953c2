"""Whether ports of a peer's machine are open from outside: another member dials them, and says which answered.

The idea: only somebody outside can know. Who is asked dials one address alone, that from which the asker's own connection comes. So
nobody can be made to knock at the doors of a third machine. Ports, dials at once and seconds have bounds.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from dht import host_of
from meshcee.errors import ProtocolError
from meshcee.fields import read
from peers.transport.base import Frame, Stream, Transport
from peers.transport.stream import FramedStream

__all__ = ["KNOCK", "MOST_PORTS", "Knocked", "Knocking", "knocked_from"]

KNOCK = "knock"  # the purpose, and the kind of the question
KNOCKED = "knocked"
MOST_PORTS = 4
MOST_AT_ONCE = 4  # askers that one peer dials for
DIAL_S, ASK_S = 2.0, 5.0
_Port = Annotated[int, Meta(ge=1, le=65535)]
_Ports = Annotated[list[_Port], Meta(max_length=MOST_PORTS)]


@dataclass(frozen=True)
class Knock:
    ports: _Ports


@dataclass(frozen=True)
class Knocked:
    """`host` is where the asker's connection comes from, "" where nobody knows; `answered` are the TCP ports open there."""

    host: Annotated[str, Meta(max_length=64)]
    answered: _Ports


class Knocking:
    """One peer's answers."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(MOST_AT_ONCE)

    async def serve(self, stream: Stream) -> None:
        """For whoever asks; a stream that another member passes on comes from nowhere."""
        stream.max_payload_bytes = 0
        async with asyncio.timeout(ASK_S):
            frame = await stream.recv()
        if frame.kind != KNOCK:
            raise ProtocolError(f"expected the ports to dial, got a frame of kind {frame.kind!r}")
        ports = read(frame.header, Knock, "the ports to dial").ports
        host = _ip(stream.came_from) if isinstance(stream, FramedStream) else ""
        answered: list[int] = []
        if host:
            async with self._free:
                answers = await asyncio.gather(*(_answers(host, port) for port in ports))
            answered = [port for port, answer in zip(ports, answers, strict=True) if answer]
        await stream.send(Frame(KNOCKED, {"host": host, "answered": answered}))


async def knocked_from(transport: Transport, peer_id: str, addresses: Sequence[str], ports: Sequence[int]) -> Knocked:
    """What that peer finds open where this one comes from. Raises JoinError, also of an older peer, StreamClosed and ProtocolError;
    time-outs are the caller's."""
    stream = await transport.open(peer_id, KNOCK, addresses)
    stream.max_payload_bytes = 0
    try:
        await stream.send(Frame(KNOCK, {"ports": list(ports)}))
        frame = await stream.recv()
        if frame.kind != KNOCKED:
            raise ProtocolError(f"expected which ports answered, got a frame of kind {frame.kind!r}")
        return read(frame.header, Knocked, "which ports answered")
    finally:
        await stream.aclose()


def _ip(address: str) -> str:
    """The host of a multiaddress, if it is an IP address."""
    with suppress(ValueError, IndexError):
        return str(ipaddress.ip_address(host_of(address)))
    return ""


async def _answers(host: str, port: int) -> bool:
    with suppress(OSError):  # TimeoutError is one
        async with asyncio.timeout(DIAL_S):
            _, writer = await asyncio.open_connection(host, port)
        writer.transport.abort()
        return True
    return False
