"""Two peers that cannot dial each other, behind two routers: a member that both have reached passes their bytes on.

The idea: who cannot reach a peer asks a member, the relay, for a stream to it; the relay opens one, over the connection which that
peer has made itself. On these two carriers runs a third stream, from end to end, with a handshake of its own, so all above sees a
stream like any other. Both ends sign fresh X25519 keys with their identities, and every byte between them is sealed under these.
So a relay sees who talks, when and how much, and can do nothing but stop. It holds a few megabytes of a stream and direction at
most. Only members ask, as carriers are streams: their handshake takes a certificate.

    dialer -> relay        to       {peer, key}
    relay -> acceptor      from     {peer, key}              or, to the dialer: refused {reason}
    acceptor -> dialer     through  {key, signature}
    dialer -> acceptor     proof    {signature}
    both                   sealed   one payload: a record, numbered by its place, under AES-256-GCM
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgpack
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from msgspec import Meta

from dht import Identity, peer_of, verify
from meshcee.errors import JoinError, MeshceeError, NotPermittedError, ProtocolError, leaves
from meshcee.fields import read
from peers.transport import handshake
from peers.transport.base import Frame, Stream, StreamClosed, passed
from peers.transport.direct import derive
from peers.transport.endpoint import Endpoint
from peers.transport.stream import FramedStream, short

__all__ = ["RELAY", "RELAYED", "Relayed"]

RELAY, RELAYED = "relay", "relayed"  # the purposes of the two carriers
FORGET_S = 300.0  # until a peer that could not be dialled is dialled again
MOST_RELAYED = 64  # streams that one peer passes on at once
MOST_OF_ONE = 32  # of them, for one dialer
MOST_ASKED = 2  # relays that have tried, one after the other
MOST_TRIED = 8  # of all that may be relays
NO_MORE = "it passes on no more streams"
RECORD_BYTES = 128 * 1024
WINDOW_BYTES = 4 << 20  # that may wait at a relay, of a stream and direction
KEY_BYTES, _TAG_BYTES = 32, 16
_TEXT_CHARS = 512
_Id = Annotated[str, Meta(min_length=1, max_length=64)]
_Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]


@dataclass(frozen=True)
class Asked:
    """Of `to` and `from`: the peer at the other end, and the dialer's key."""

    peer: _Id
    key: _Key


@dataclass(frozen=True)
class Through:
    key: _Key
    signature: _Signature


@dataclass(frozen=True)
class Proof:
    signature: _Signature


@dataclass(frozen=True)
class Refusal:
    reason: Annotated[str, Meta(max_length=_TEXT_CHARS)]


class _NoRelay(JoinError):
    """It was not asked for the peer at all: it does not pass on, or was not reached."""


class Carrier(FramedStream):
    """Any stream; one that turns out to carry another lends little, and takes no payload but a record."""

    def establish(self, purpose: str) -> None:
        if purpose in (RELAY, RELAYED):
            most = RECORD_BYTES + _TAG_BYTES
            self._limits = replace(self._limits, window_bytes=WINDOW_BYTES, payload_bytes=most, payloads=1)
        super().establish(purpose)


class Relayed(Endpoint):
    """An endpoint that reaches peers through others, and passes on for others: to be mixed into a transport.

    Nothing is relayed before `allow`.
    """

    makes = Carrier
    signer: Identity | None = None

    def allow(self, signer: Identity, seeds: Sequence[str], *, passes_on: bool) -> None:
        """From now on, reach peers through others: who has streams with this peer, seeds first, then the other seeds. Each asks
        only a few. And pass on for others, if so said."""
        self.signer = signer
        self._seeds = [peer for seed in seeds if (peer := peer_of(seed)) is not None]
        self._afar: dict[str, float] = {}  # peer id -> until when it is not dialled
        self._passing: Counter[str] = Counter()  # dialers
        self._most = MOST_RELAYED if passes_on else 0
        self.serve(RELAYED, self._come)
        self.serve(RELAY, self._pass_on)

    # -- the dialer

    async def open(self, peer_id: str, purpose: str, addresses: Sequence[str] = ()) -> Stream:
        if self.signer is None or purpose in (RELAY, RELAYED) or not (relays := self._via(peer_id)):
            return await super().open(peer_id, purpose, addresses)
        problem: JoinError | None = None
        if self._afar.get(peer_id, 0.0) <= asyncio.get_running_loop().time():
            try:
                return await super().open(peer_id, purpose, addresses)
            except JoinError as error:
                if peer_id not in self._afar:  # it was reached, and has refused
                    raise
                problem = error
            except BaseException:
                self._afar.pop(peer_id, None)
                raise
        said: list[str] = []
        asked = 0
        for relay in relays:
            if asked == MOST_ASKED:
                break
            try:
                async with asyncio.timeout(self.timeouts.dial_s + self.timeouts.handshake_s):
                    tunnel = await self._agree(relay, peer_id)
            except (JoinError, StreamClosed, ProtocolError, TimeoutError) as error:
                said.append(f"{short(relay)} ({str(error) or 'no answer in time'})")
                asked += not isinstance(error, _NoRelay)
            else:
                return await self._open_in(tunnel, peer_id, purpose)
        self._afar.pop(peer_id, None)  # the next one tries everything again
        ports = dict.fromkeys(re.findall(r"/tcp/([0-9]+)", " ".join(addresses)))
        raise JoinError(
            f"peer {short(peer_id)} cannot be reached from {short(self.peer_id)}, nor through {', '.join(said)}: "
            f"check that it runs; else let TCP port {' or '.join(ports) or 'PORT'} in at its router, and start it with "
            "`--listen 0.0.0.0:PORT --announce ITS-PUBLIC-ADDRESS:PORT`; either of the two peers will do"
        ) from problem

    def _via(self, peer_id: str) -> list[str]:
        here = {s.peer_id for s in self.streams if s.purpose and not s.closed and not isinstance(s.transport, Tunnel)}
        near = [seed for seed in self._seeds if seed in here]
        found = dict.fromkeys((*near, *sorted(here), *self._seeds))
        return [relay for relay in found if relay not in (peer_id, self.peer_id)][:MOST_TRIED]

    async def _connect(self, stream: FramedStream, addresses: Sequence[str]) -> None:
        if self.signer is None:
            return await super()._connect(stream, addresses)  # type: ignore[safe-super]
        try:
            await super()._connect(stream, addresses)  # type: ignore[safe-super]
        except BaseException:
            now = asyncio.get_running_loop().time()
            self._afar = {peer: until for peer, until in self._afar.items() if until > now}
            self._afar[stream.peer_id] = now + FORGET_S
            raise
        self._afar.pop(stream.peer_id, None)

    def _accepted(self, stream: FramedStream) -> None:
        if self.signer is not None and not isinstance(stream.transport, Tunnel):
            self._afar.pop(stream.peer_id, None)  # it has a connection to here
        super()._accepted(stream)

    async def _open_in(self, tunnel: Tunnel, peer_id: str, purpose: str) -> FramedStream:
        """The stream itself, whose hands are shaken from end to end."""
        assert self._group is not None
        self._group.create_task(tunnel.carry())
        stream = self.make_stream(peer_id, purpose)
        try:
            stream.attach(tunnel)
            shaking = handshake.dial(stream, self.peer_id, purpose, self._mesh_key, members=self.members)
            return await self._shake(stream, shaking, None)
        except BaseException:
            tunnel.abort()
            stream.abort()
            self._forget(stream)
            raise

    async def _agree(self, relay: str, peer_id: str) -> Tunnel:
        """Ask a relay for the peer, and agree with that on keys."""
        assert self.signer is not None
        try:
            carrier = await super().open(relay, RELAY)
        except JoinError as error:
            raise _NoRelay(str(error)) from error
        try:
            private = X25519PrivateKey.generate()
            key = private.public_key().public_bytes_raw()
            await carrier.send(Frame("to", {"peer": peer_id, "key": key}))
            reply = await carrier.recv()
            if reply.kind == "refused":
                reason = read(reply.header, Refusal, "a relay's refusal").reason
                raise (_NoRelay if reason == NO_MORE else JoinError)(reason)
            if reply.kind != "through":
                raise ProtocolError(f"expected the other end's key from a relay, got {reply.kind!r}")
            said = read(reply.header, Through, "the other end's key")
            talk = [self.peer_id, peer_id, key, said.key]
            if not verify(peer_id, _signed("acceptor", talk), said.signature):
                raise ProtocolError(f"what a relay has passed on is not from peer {short(peer_id)}")
            dialers, acceptors = _keys(private, said.key, talk)
            await carrier.send(Frame("proof", {"signature": self.signer.sign(_signed("dialer", talk))}))
        except BaseException:
            carrier.abort()
            raise
        return Tunnel(carrier, dialers, acceptors)

    # -- the acceptor

    async def _come(self, carrier: Stream) -> None:
        assert self.signer is not None
        async with asyncio.timeout(self.timeouts.handshake_s):
            frame = await carrier.recv()
            if frame.kind != "from":
                raise ProtocolError(f"expected to hear from a relay who comes, got {frame.kind!r}")
            asked = read(frame.header, Asked, "who comes through a relay")
            private = X25519PrivateKey.generate()
            key = private.public_key().public_bytes_raw()
            talk = [asked.peer, self.peer_id, asked.key, key]
            dialers, acceptors = _keys(private, asked.key, talk)
            signature = self.signer.sign(_signed("acceptor", talk))
            await carrier.send(Frame("through", {"key": key, "signature": signature}))
            frame = await carrier.recv()
            proof = read(frame.header, Proof, "the proof of who comes through a relay").signature
            if frame.kind != "proof" or not verify(asked.peer, _signed("dialer", talk), proof):
                raise NotPermittedError(f"who comes through {short(carrier.peer_id)} is not peer {short(asked.peer)}")
        stream = self.make_stream(asked.peer)
        tunnel = Tunnel(carrier, acceptors, dialers)
        stream.attach(tunnel)
        self._accepted(stream)
        await tunnel.carry()

    # -- the relay

    async def _pass_on(self, carrier: Stream) -> None:
        async with asyncio.timeout(self.timeouts.handshake_s):
            frame = await carrier.recv()
        if frame.kind != "to":
            raise ProtocolError(f"expected whom to pass on to, got {frame.kind!r}")
        asked = read(frame.header, Asked, "whom to pass on to")
        dialer = carrier.peer_id
        if self._passing.total() >= self._most or self._passing[dialer] >= MOST_OF_ONE:
            await carrier.send(Frame("refused", {"reason": NO_MORE}))
            return
        self._passing[dialer] += 1
        try:
            try:
                further = await super().open(asked.peer, RELAYED)
            except (MeshceeError, StreamClosed) as error:
                await carrier.send(Frame("refused", {"reason": str(error)[:_TEXT_CHARS]}))
                return
            try:
                await further.send(Frame("from", {"peer": dialer, "key": asked.key}))
                async with asyncio.TaskGroup() as group:
                    group.create_task(passed(carrier, further))
                    group.create_task(passed(further, carrier))
            finally:
                further.abort()
        finally:
            self._passing[dialer] -= 1
            if not self._passing[dialer]:
                del self._passing[dialer]


def _signed(role: str, talk: Sequence[Any]) -> bytes:
    return bytes(msgpack.packb(["meshcee relay", role, *talk]))


def _keys(private: X25519PrivateKey, theirs: bytes, talk: Sequence[Any]) -> tuple[bytes, bytes]:
    """Of the dialer's and of the acceptor's records."""
    salt = hashlib.sha256(_signed("keys", talk)).digest()
    both = derive(private, theirs, 2 * KEY_BYTES, salt, b"meshcee relay")
    return both[:KEY_BYTES], both[KEY_BYTES:]


class Tunnel(asyncio.Transport):
    """An asyncio transport for a FramedStream, over a carrier. `carry` is what runs; it returns when the stream is over."""

    def __init__(self, carrier: Stream, seal_key: bytes, open_key: bytes) -> None:
        super().__init__()
        self._carrier = carrier
        self._seal_key, self._open_key = AESGCM(seal_key), AESGCM(open_key)
        self._sealed = self._opened = 0  # records
        self._queue: deque[memoryview] = deque()  # written and not yet sealed
        self._protocol: asyncio.BufferedProtocol | None = None
        self._wanted = asyncio.Event()  # there is something to send, or to end
        self._closing = False

    # -- asyncio.Transport, as far as a FramedStream needs it

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Nobody here knows what has arrived at the far end."""
        return default

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.BufferedProtocol)
        self._protocol = protocol

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Always zero: the protocol is paused until the last byte is sealed, and its memory free."""

    def pause_reading(self) -> None:
        """Nothing is read before `carry`."""

    def resume_reading(self) -> None:
        """See `pause_reading`."""

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if data and not self._closing:
            if not self._queue and self._protocol is not None:
                self._protocol.pause_writing()
            self._queue.append(memoryview(data))
            self._wanted.set()

    def close(self) -> None:
        self._closing = True
        self._wanted.set()

    def abort(self) -> None:
        self._closing = True
        self._queue.clear()
        self._carrier.abort()
        self._wanted.set()

    # -- at work

    async def carry(self) -> None:
        why: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self._send())
                await self._receive()
                sending.cancel()
        except* (StreamClosed, ProtocolError) as failures:
            why = ConnectionResetError(str(leaves(failures)[0]))
        finally:
            ended = self._closing
            self.abort()
            if self._protocol is not None:
                self._protocol.connection_lost(None if ended else why)

    async def _send(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self._queue:
                record = self._seal_key.encrypt(self._sealed.to_bytes(12, "big"), self._next(), None)
                self._sealed += 1
                await self._carrier.send(Frame("sealed", {}, [record]))
            if self._closing:
                await self._carrier.aclose()
                return
            if self._protocol is not None:
                self._protocol.resume_writing()

    def _next(self) -> bytes:
        """As much of what was written as goes into a record."""
        parts: list[memoryview] = []
        room = RECORD_BYTES
        while self._queue and room:
            part, rest = self._queue[0][:room], self._queue[0][room:]
            parts.append(part)
            room -= len(part)
            if rest:
                self._queue[0] = rest
            else:
                self._queue.popleft()
        return b"".join(parts)

    async def _receive(self) -> None:
        while True:
            frame = await self._carrier.recv()
            if frame.kind != "sealed" or len(frame.payloads) != 1:
                raise ProtocolError(f"expected a sealed record from a relay, got {frame.kind!r}")
            try:
                data = self._open_key.decrypt(self._opened.to_bytes(12, "big"), frame.payloads[0], None)
            except InvalidTag:
                raise ProtocolError("a record that came through a relay is not from the peer at the far end") from None
            self._opened += 1
            rest = memoryview(data)
            while rest and self._protocol is not None and not self._closing:
                buffer = memoryview(self._protocol.get_buffer(len(rest)))
                part = min(len(buffer), len(rest))
                buffer[:part] = rest[:part]
                rest = rest[part:]
                self._protocol.buffer_updated(part)
