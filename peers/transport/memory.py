"""The network inside one process: the same streams, frames and handshakes over pipes of bytes.

The idea: only the socket is replaced. A `MemoryNetwork` knows every transport by its id and gives each ordered pair
of peers its own latency, bandwidth, jitter and loss, drawn from the network's seed. It can cut, partition and kill.
It uses nothing but the running loop's clock, so under virtual time an hour of slow links takes milliseconds. Without
shape (the default) a byte is copied once, from the sender's payload into the receiver's, and not checksummed:
`--local` trains on it. What arrives at a peer, arrives in the context of that peer's transport.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dht import Members
from meshcee.config import Limits, Timeouts
from meshcee.errors import JoinError, UsageError
from peers.transport.endpoint import Endpoint
from peers.transport.stream import FramedStream, short

__all__ = ["Impairment", "MemoryNetwork", "MemoryTransport"]


@dataclass(frozen=True)
class Impairment:
    """What one direction between two peers does to bytes; the default does nothing at all."""

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = float("inf")
    jitter_s: float = 0.0  # uniformly up to this much more latency; order is kept
    loss: float = 0.0  # the probability that a write breaks the stream

    @property
    def is_nothing(self) -> bool:
        return self == _NOTHING


_NOTHING = Impairment()


class _Direction:
    """One ordered pair: all streams of the pair share its bandwidth."""

    def __init__(self, impairment: Impairment, seed: str) -> None:
        self.impairment = impairment
        self.random = random.Random(seed)
        self.free_at = 0.0
        self.last_arrival = 0.0

    def loses(self) -> bool:
        return self.impairment.loss > 0 and self.random.random() < self.impairment.loss

    def schedule(self, size: int, now: float) -> tuple[float, float]:
        """(when the last byte has left, when it arrives)"""
        leaves = max(now, self.free_at) + size / self.impairment.bandwidth_bytes_per_s
        self.free_at = leaves
        delay = self.impairment.latency_s + self.random.random() * self.impairment.jitter_s
        self.last_arrival = max(leaves + delay, self.last_arrival)
        return leaves, self.last_arrival


class _Pipe(asyncio.Transport):
    """One end of a pipe: an asyncio transport whose bytes reach the protocol of the other end."""

    def __init__(self, protocol: FramedStream, direction: _Direction, context: contextvars.Context) -> None:
        super().__init__()
        self._protocol = protocol
        self._direction = direction
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._leaving: deque[tuple[float, memoryview | None]] = deque()  # when they have left; None: on their way
        self._leaving_bytes = 0
        self._leaving_timer: asyncio.Handle | None = None
        # What is on its way to us: arrival and bytes, None for the end of file. A deque, because the loop's timers of
        # one instant have no order.
        self._arriving: deque[tuple[float, memoryview | None]] = deque()
        self._arriving_timer: asyncio.Handle | None = None
        self._closing = False
        self._lost = False
        self.other: _Pipe

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._leaving_bytes if name == "under_way" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Always zero: `write` pauses the protocol until its bytes have left."""

    def get_write_buffer_size(self) -> int:
        return self._leaving_bytes

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self._closing or not data:
            return
        if self._direction.loses():
            self.break_off("the network lost it")
            return
        if not self._leaving:
            self._protocol.pause_writing()
        view = memoryview(data)
        self._leaving_bytes += len(view)
        if self._is_instant:
            self._leaving.append((0.0, view))
        else:
            leaves, arrives = self._direction.schedule(len(view), self._loop.time())
            self.other.expect(arrives, memoryview(bytes(view)))  # a copy: the sender may reuse its memory meanwhile
            self._leaving.append((leaves, None))
        self._plan_leaving()

    @property
    def _is_instant(self) -> bool:
        """Nothing delays what is written now, nor is anything under way that it must not overtake."""
        return self._direction.impairment.is_nothing and not self.other._arriving

    def _plan_leaving(self) -> None:
        if self._leaving_timer is None:
            leaves, view = self._leaving[0]
            self._leaving_timer = (
                self._loop.call_at(leaves, self._left) if view is None else self._loop.call_soon(self._left)
            )

    def _left(self) -> None:
        """The first of what was written has left, and perhaps more."""
        self._leaving_timer = None
        due = True  # comparing the first with the clock could fail by an ulp
        while self._leaving and (due or self._leaving[0][0] <= self._loop.time()):
            due = False
            _, view = self._leaving.popleft()
            if view is not None:
                self.other.receive(view)
        if self._leaving:
            self._plan_leaving()
            return
        self._leaving_bytes = 0
        if self._closing:
            self._hang_up()
        else:
            self._protocol.resume_writing()

    def expect(self, arrives: float, view: memoryview | None) -> None:
        """Bytes of the other end, or its end of file, will arrive."""
        self._arriving.append((arrives, view))
        if self._arriving_timer is None:
            self._arriving_timer = self._loop.call_at(arrives, self._arrived, context=self._context)

    def _arrived(self) -> None:
        _, view = self._arriving.popleft()
        self._arriving_timer = None
        if self._arriving:
            self._arriving_timer = self._loop.call_at(self._arriving[0][0], self._arrived, context=self._context)
        if view is None:
            self.lose(None)
        else:
            self.receive(view)

    def receive(self, view: memoryview) -> None:
        while len(view) and not self._closing:
            buffer = self._protocol.get_buffer(len(view))
            size = min(len(buffer), len(view))
            buffer[:size] = view[:size]
            self._protocol.buffer_updated(size)
            view = view[size:]

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            if not self._leaving:
                self._hang_up()

    def _hang_up(self) -> None:
        """Everything has left: the end of file follows it at the same pace."""
        self._loop.call_soon(self.lose, None)
        if self._is_instant:
            self._loop.call_soon(self.other.lose, None, context=self.other._context)
        else:
            self.other.expect(self._direction.schedule(0, self._loop.time())[1], None)

    def abort(self) -> None:
        if not self._lost:
            already = self._closing and not self._leaving  # its end of file is on its way
            self._closing = True
            self._drop()
            if not already:
                self._hang_up()

    def break_off(self, why: str) -> None:
        """Both ends lose the connection now."""
        for end in (self, self.other):
            end._closing = True
            end._drop()
            self._loop.call_soon(end.lose, ConnectionResetError(why), context=end._context)

    def lose(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = self._closing = True
            self._drop()
            self._protocol.connection_lost(error)

    def _drop(self) -> None:
        self._leaving.clear()
        for timer in (self._leaving_timer, self._arriving_timer if self._lost else None):
            if timer is not None:
                timer.cancel()
        self._leaving_timer = None
        if self._lost:
            self._arriving.clear()
            self._arriving_timer = None


class MemoryNetwork:
    """Every transport of one process, and what lies between them."""

    def __init__(self, *, seed: int = 0, impairment: Impairment = _NOTHING, check: bool = False) -> None:
        self.check = check  # checksums; without them nothing but our own memory could be damaged
        self._seed = seed
        self._default = impairment
        self._directions: dict[tuple[str, str], _Direction] = {}
        self._transports: dict[str, MemoryTransport] = {}
        self._cut: set[frozenset[str]] = set()
        self._pipes: dict[frozenset[str], list[_Pipe]] = {}

    def transport(
        self,
        peer_id: str,
        mesh_key: bytes = b"",
        *,
        timeouts: Timeouts | None = None,
        limits: Limits | None = None,
        members: Members | None = None,
    ) -> MemoryTransport:
        return MemoryTransport(self, peer_id, mesh_key, timeouts=timeouts, limits=limits, members=members)

    def impair(self, source: str, target: str, impairment: Impairment) -> None:
        """Change one direction, at any time; what is under way keeps its arrival."""
        self._direction(source, target).impairment = impairment

    def cut(self, a: str, b: str) -> None:
        """No stream between the two lives or can be opened, until `heal`."""
        self._cut.add(frozenset((a, b)))
        self._break(frozenset((a, b)), "the link was cut")

    def partition(self, *sides: Iterable[str]) -> None:
        """Cut every pair of peers that are on different sides."""
        groups = [list(side) for side in sides]
        for index, group in enumerate(groups):
            for other in groups[index + 1 :]:
                for a in group:
                    for b in other:
                        self.cut(a, b)

    def heal(self) -> None:
        self._cut.clear()

    def kill(self, peer_id: str) -> None:
        """The peer's process is gone: nobody reaches it, and all its streams break."""
        self._transports.pop(peer_id, None)
        for pair in [pair for pair in self._pipes if peer_id in pair]:
            self._break(pair, "the peer was killed")

    # -- for MemoryTransport

    def register(self, transport: MemoryTransport) -> None:
        if transport.peer_id in self._transports:
            raise UsageError(f"two peers of this network are called {transport.peer_id!r}: give each its own id")
        self._transports[transport.peer_id] = transport

    def unregister(self, transport: MemoryTransport) -> None:
        if self._transports.get(transport.peer_id) is transport:
            del self._transports[transport.peer_id]

    async def connect(self, source: MemoryTransport, stream: FramedStream) -> None:
        there, back = self._direction(source.peer_id, stream.peer_id), self._direction(stream.peer_id, source.peer_id)
        if not there.impairment.is_nothing:
            await asyncio.sleep(there.impairment.latency_s)
        target = self._transports.get(stream.peer_id)
        pair = frozenset((source.peer_id, stream.peer_id))
        if target is None or self._transports.get(source.peer_id) is not source or pair in self._cut:
            raise JoinError(f"peer {short(stream.peer_id)} cannot be reached: start it, or heal the network")
        accepted = target.new_stream(source.peer_id)
        near, far = _Pipe(stream, there, source.context), _Pipe(accepted, back, target.context)
        near.other, far.other = far, near
        pipes = self._pipes.setdefault(pair, [])
        pipes[:] = [pipe for pipe in pipes if not pipe.is_closing()]
        pipes.append(near)
        stream.connection_made(near)
        accepted.connection_made(far)
        target.context.copy().run(target.take, accepted)

    def _direction(self, source: str, target: str) -> _Direction:
        key = (source, target)
        if key not in self._directions:
            self._directions[key] = _Direction(self._default, f"{self._seed}:{source}>{target}")
        return self._directions[key]

    def _break(self, pair: frozenset[str], why: str) -> None:
        for pipe in self._pipes.pop(pair, []):
            pipe.break_off(why)


class MemoryTransport(Endpoint):
    """base.Transport on a MemoryNetwork. Made by `MemoryNetwork.transport`."""

    def __init__(
        self,
        network: MemoryNetwork,
        peer_id: str,
        mesh_key: bytes,
        *,
        timeouts: Timeouts | None = None,
        limits: Limits | None = None,
        members: Members | None = None,
    ) -> None:
        super().__init__(peer_id, mesh_key, timeouts=timeouts, limits=limits, members=members)
        self.addresses = (f"/memory/{peer_id}",)
        self.context = contextvars.copy_context()
        self._network = network

    async def _start(self) -> None:
        self._network.register(self)

    async def _stop(self) -> None:
        self._network.unregister(self)

    async def _connect(self, stream: FramedStream, addresses: Sequence[str]) -> None:
        await self._network.connect(self, stream)

    def new_stream(self, peer_id: str) -> FramedStream:
        return self.make_stream(peer_id)

    def take(self, stream: FramedStream) -> None:
        self._accepted(stream)

    def make_stream(self, peer_id: str, purpose: str = "", check: bool = True) -> FramedStream:
        return super().make_stream(peer_id, purpose, check=self._network.check)
