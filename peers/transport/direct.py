"""Straight from peer to peer: TCP connections beside the libp2p daemon, agreed on inside a stream's handshake.

The idea: the handshake of a stream (handshake.py) runs over libp2p, which has proven both peer ids. In it both sides exchange
X25519 keys, and the accepting one says where it listens. The keys of the connections follow from that exchange, the mesh key
and all that the handshake said, so that only these two ends can have them. The dialer tries the addresses and names, with its
proof of the mesh key, the connections on which both have shown their keys. From then on the stream runs over those (bundle.py).
When none could be made, because of a router or a firewall, the stream stays where it is and the peer is left alone for a while.

    dialer    hello   direct: X25519 key
    acceptor  answer  direct: [X25519 key, [multiaddress, ...]]
    dialer    TCP     ticket (16 bytes), number of the connection (1), HMAC (32)
    acceptor  TCP     HMAC (32)
    dialer    proof   direct: [numbers]
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import os
import struct
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import Meta

from dht import checked, dialable, host_of
from meshcee.config import Timeouts
from meshcee.errors import JoinError, ProtocolError
from meshcee.fields import Count, read
from peers.transport.base import StreamClosed
from peers.transport.bundle import Bundle, Connection

__all__ = ["Direct", "Path", "derive"]

# Purposes of a few frames: not worth two round trips, nor the seconds that a firewall costs who waits for less than that.
BRIEF = frozenset({"join", "gossip", "plan", "profile", "sound", "leave"})
KEY_BYTES = 32
MAX_CONNECTIONS = 12
# One connection more for each such part of a round trip. Linux lets one have some 2.7 MB under way, if not told otherwise:
# 1.4 Gbit/s at 15 ms.
RTT_STEP_S = 0.015
TRIED_AT_ONCE = 4  # addresses
_Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_Numbers = Annotated[list[Count], Meta(max_length=MAX_CONNECTIONS)]
FORGET_S = 300.0  # until a peer that could not be reached is tried again
MAX_STRANGERS = 256  # connections that have not shown a ticket yet
GREETING = struct.Struct("!16sB32s")
_MAC_BYTES = 32


class Offer(NamedTuple):
    """Where an answer says to connect to."""

    key: _Key
    addresses: Annotated[list[str], Meta(max_length=TRIED_AT_ONCE)]


class Direct:
    """A peer's port for connections, and what the handshakes under way expect there."""

    def __init__(self, listen: Sequence[str], port: int, timeouts: Timeouts) -> None:
        """On the interfaces of these multiaddresses, on `port` (0: any free one)."""
        self._hosts = tuple(dict.fromkeys(host_of(address) for address in listen))
        self._wanted_port = port
        self._timeouts = timeouts
        self.ports: dict[int, int] = {}  # IP version -> where we listen
        self.expected: dict[bytes, Path] = {}  # by ticket
        self._servers: list[asyncio.Server] = []
        self.strangers: dict[Connection, asyncio.TimerHandle] = {}
        self._unreached: dict[str, float] = {}  # peer id -> until when it is not tried

    async def start(self) -> None:
        """Listen; JoinError when the port is taken."""
        loop = asyncio.get_running_loop()
        for host in self._hosts:
            try:
                server = await loop.create_server(self._accept, host, self._wanted_port)
            except OSError as error:
                raise JoinError(
                    f"this peer cannot listen for direct connections on {host} ({os.strerror(error.errno or 0)}): choose another "
                    "port for them"
                ) from error
            self._servers.append(server)
            self.ports[6 if ":" in host else 4] = server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        for server in self._servers:
            server.close()
        for connection, timer in list(self.strangers.items()):
            timer.cancel()
            connection.abort()

    # -- paths

    def to(self, peer_id: str, purpose: str) -> Path | None:
        """For a stream that we open; None where it is not worth trying."""
        if purpose in BRIEF or self._unreached.get(peer_id, 0.0) > asyncio.get_running_loop().time():
            return None
        return Path(self, peer_id)

    def here(self, addresses: Sequence[str]) -> Path | None:
        """For a stream that comes in, where others know us by these addresses; None when we do not listen."""
        where = []
        for address in addresses:
            kind = address.split("/")[1]
            port = self.ports.get(6 if kind in ("ip6", "dns6") else 4)
            if port is not None and "/p2p-circuit" not in address:
                where.append(f"/{kind}/{host_of(address)}/tcp/{port}")
        return Path(self, "", tuple(dict.fromkeys(where))[:TRIED_AT_ONCE]) if where else None

    def not_reached(self, peer_id: str) -> None:
        now = asyncio.get_running_loop().time()
        self._unreached = {peer: until for peer, until in self._unreached.items() if until > now}
        self._unreached[peer_id] = now + FORGET_S

    @property
    def patience_s(self) -> float:
        """For a dialer's tries, which the other side waits for with the proof."""
        return min(self._timeouts.direct_s, self._timeouts.handshake_s / 2)

    # -- accepting

    def _accept(self) -> Connection:
        connection = Connection(GREETING.size, self._greeted)
        if len(self.strangers) >= MAX_STRANGERS:  # the oldest makes room
            oldest = next(iter(self.strangers))
            self.strangers.pop(oldest).cancel()
            oldest.abort()
        loop = asyncio.get_running_loop()
        self.strangers[connection] = loop.call_later(self._timeouts.handshake_s, self._give_up, connection)
        return connection

    def _give_up(self, connection: Connection) -> None:
        del self.strangers[connection]
        connection.abort()

    def _greeted(self, connection: Connection, greeting: bytes) -> None:
        timer = self.strangers.pop(connection, None)
        if timer is not None:
            timer.cancel()
        if not greeting:
            return
        ticket, number, mac = GREETING.unpack(greeting)
        path = self.expected.get(ticket)
        if path is None or not path.admit(connection, number, mac):
            connection.abort()


class Path:
    """The direct way of one stream while its handshake runs; `bundle` is what has come of it, `close` ends the rest."""

    def __init__(self, direct: Direct, peer_id: str, addresses: Sequence[str] = ()) -> None:
        self._direct = direct
        self._peer_id = peer_id
        self._addresses = addresses
        self.ticket = self._mac_key = b""
        self._keys = (b"", b"")  # for what we send and for what we receive
        self.greeted: dict[int, Connection] = {}
        self._chosen: list[Connection] = []

    @functools.cached_property
    def _private(self) -> X25519PrivateKey:
        return X25519PrivateKey.generate()

    @property
    def key(self) -> bytes:
        """The public half of our key, made for this stream alone."""
        return self._private.public_key().public_bytes_raw()

    def bundle(self) -> Bundle | None:
        """The connections that were agreed on, as one transport; None when the stream stays where it is."""
        chosen, self._chosen = self._chosen, []
        return Bundle(chosen, *self._keys) if chosen else None

    def close(self) -> None:
        self._direct.expected.pop(self.ticket, None)
        for connection in [*self.greeted.values(), *self._chosen]:
            connection.abort()

    def _agree(self, theirs: Any, salt: bytes) -> tuple[bytes, bytes]:
        """Ticket and HMAC key, and the keys of the dialer's and of the acceptor's records."""
        key = read(theirs, _Key, "the key of a direct path")
        secrets = derive(self._private, key, 16 + 3 * KEY_BYTES, salt, b"meshcee direct")
        self.ticket, self._mac_key = secrets[:16], secrets[16 : 16 + KEY_BYTES]
        return secrets[-2 * KEY_BYTES : -KEY_BYTES], secrets[-KEY_BYTES:]

    def _mac(self, role: bytes, number: int) -> bytes:
        return hmac.digest(self._mac_key, role + bytes([number]), hashlib.sha256)

    # -- the accepting side

    def offer(self) -> list[Any]:
        """What the answer says."""
        return [self.key, list(self._addresses)]

    def expect(self, theirs: Any, salt: bytes) -> None:
        """From now on the dialer's connections are admitted; `salt` is secret to the mesh and of this handshake alone."""
        there, here = self._agree(theirs, salt)
        self._keys = (here, there)
        self._direct.expected[self.ticket] = self

    def admit(self, connection: Connection, number: int, mac: bytes) -> bool:
        if (
            not hmac.compare_digest(mac, self._mac(b"dialer", number))
            or number in self.greeted
            or len(self.greeted) >= MAX_CONNECTIONS + TRIED_AT_ONCE
        ):
            return False
        self.greeted[number] = connection
        connection.write(self._mac(b"acceptor", number))
        return True

    def choose(self, numbers: Any) -> None:
        """The dialer's choice, heard with its proof."""
        for number in read(numbers, _Numbers, "the direct connections of a proof"):
            if number not in self.greeted:
                raise StreamClosed(f"the direct connection {number} is gone")
            self._chosen.append(self.greeted.pop(number))

    # -- the dialing side

    async def dial(self, offer: Any, salt: bytes) -> list[int]:
        """Connect to what the answer offers; the numbers of the connections that the other side knows for ours."""
        key, addresses = read(offer, Offer, "where an answer says to connect to")
        self._keys = self._agree(key, salt)
        places = [_place(address) for address in addresses]
        # Loopback is of use to a peer of the same machine, who has no other address to tell then.
        outside = [_place(address) for address in dialable(addresses)]
        found: list[int] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._direct.patience_s):
                await self._gather(outside or places, found)
        if not found:
            self._direct.not_reached(self._peer_id)
        self._chosen = [self.greeted.pop(number) for number in found]
        return found

    async def _gather(self, places: Sequence[tuple[str, int]], found: list[int]) -> None:
        """The place that answers first, and as many connections to it as its distance asks for."""
        fastest: tuple[float, int] | None = None
        async with asyncio.TaskGroup() as group:
            tries = [group.create_task(self._try(number, place)) for number, place in enumerate(places)]
            for done in asyncio.as_completed(tries):
                if (fastest := await done) is not None:
                    break
            for task in tries:
                task.cancel()
        if fastest is None:
            return
        round_trip_s, number = fastest
        found.append(number)
        count = min(MAX_CONNECTIONS, 1 + int(round_trip_s / RTT_STEP_S))
        async with asyncio.TaskGroup() as group:
            more = range(len(places), len(places) + count - 1)
            tries = [group.create_task(self._try(each, places[number])) for each in more]
            for done in asyncio.as_completed(tries):
                if (another := await done) is not None:
                    found.append(another[1])

    async def _try(self, number: int, place: tuple[str, int]) -> tuple[float, int] | None:
        """One connection; (round trip in seconds, number) when the right peer answers."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[bytes] = loop.create_future()

        def greeted(_: Connection, answer: bytes) -> None:
            if not answered.done():
                answered.set_result(answer)

        connection = Connection(_MAC_BYTES, greeted)
        began_s = loop.time()
        try:
            await loop.create_connection(lambda: connection, *place)
            round_trip_s = loop.time() - began_s
            connection.write(GREETING.pack(self.ticket, number, self._mac(b"dialer", number)))
            if hmac.compare_digest(await answered, self._mac(b"acceptor", number)):
                self.greeted[number] = connection
                return round_trip_s, number
        except (OSError, ValueError):  # nobody there, or no such name
            return None
        finally:
            if number not in self.greeted:
                connection.abort()
        return None


def _place(address: str) -> tuple[str, int]:
    """(host, port); ProtocolError when it is no address."""
    parts = checked(address).split("/")
    if len(parts) != 5 or parts[3] != "tcp":
        raise ProtocolError(f"{str(address)[:80]!r} is not an address to connect to")
    return parts[2], int(parts[4])


def derive(private: X25519PrivateKey, theirs: bytes, size: int, salt: bytes, use: bytes) -> bytes:
    """As many secret bytes as are wanted, from our key and the other end's; `use` parts them from those of any other use."""
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError as error:
        raise ProtocolError(f"the other end's key is not one: {error}") from error
    return HKDF(SHA256(), size, salt, use).derive(shared)
