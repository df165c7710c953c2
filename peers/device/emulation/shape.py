"""Links of an emulated cluster, without root: a transport whose sends take as long as they would on the given links.

The idea: what limits a link is a clock that says when it is free again. A send reserves its bytes on the clock of its
link (and of the ports and shared lines that it crosses), waits until they have left, and returns. A courier hands the
frame to the real stream one latency later, while the next is already leaving. Order is kept, jitter included; all
streams between two peers share their link in small slices, so a short frame is not stuck behind a long one.

Limits: clocks are per process. A link of an ordered pair has one sender and is exact; a sending port too. Receiving
ports and lines shared by several senders are exact only among transports that share one `Shape`, that is, in one
process. Credits travel unshaped. The real network and the copy of each payload must be faster than what is emulated.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from meshcee.config import Limits
from meshcee.errors import UsageError
from meshcee.figures import LinkProfile, Rate
from peers.transport.base import Frame, Handler, Stream, StreamClosed
from peers.transport.frame import PRELUDE_BYTES, Encoder, views

__all__ = ["Shape", "ShapedTransport"]

_SLICE_S = 0.005  # of a link's time that one stream takes before another may have its turn
_SLICE_BYTES = 16 * 1024
AHEAD_S = 0.005  # a send returns when its bytes leave within this time: what a socket's buffer would hold


class _Line:
    """Anything with a bandwidth: a link, a port, an uplink of a region."""

    def __init__(self, bandwidth_bytes_per_s: float) -> None:
        self.bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self.free_at = 0.0


class Shape:
    """The links between named peers, one per ordered pair; what is not named is not shaped.

    ports   name -> bytes/s, in each direction, shared by all links of that device
    shared  label -> (ordered pairs, bytes/s), e.g. everything that crosses from one region to another
    Jitter adds up to `jitter_s` to a latency, drawn from the seed for each ordered pair.
    """

    def __init__(
        self,
        links: Mapping[tuple[str, str], LinkProfile],
        *,
        ports: Mapping[str, float] | None = None,
        shared: Mapping[str, tuple[Iterable[tuple[str, str]], float]] | None = None,
        jitter_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._links = dict(links)
        self._jitter_s = jitter_s
        self._seed = seed
        self._names: dict[str, str] = {}
        self._lines: dict[tuple[str, ...], _Line] = {}
        self._crossing: dict[tuple[str, str], list[_Line]] = {}
        self._random: dict[tuple[str, str], random.Random] = {}
        for name, bandwidth in (ports or {}).items():
            self._lines["out", name] = _Line(bandwidth)
            self._lines["in", name] = _Line(bandwidth)
        for label, (pairs, bandwidth) in (shared or {}).items():
            line = self._lines["shared", label] = _Line(bandwidth)
            for pair in pairs:
                self._crossing.setdefault(pair, []).append(line)

    def alias(self, peer_id: str, name: str) -> None:
        """The peer with this id is the one that the links call `name`."""
        self._names[peer_id] = name

    def link(self, source: str, target: str) -> LinkProfile | None:
        """By peer ids or names."""
        return self._links.get(self._pair(source, target))

    def reserve(self, source: str, target: str, size: int, at: float) -> float:
        """When `size` bytes have left that were ready at time `at`; takes the time of every line on the way."""
        pair = self._pair(source, target)
        link = self._links.get(pair)
        if link is None:
            return at
        line = self._lines.setdefault(("link", *pair), _Line(link.bandwidth_bytes_per_s))
        line.bandwidth_bytes_per_s = link.bandwidth_bytes_per_s
        ports = [self._lines[key] for key in (("out", pair[0]), ("in", pair[1])) if key in self._lines]
        lines = [line, *ports, *self._crossing.get(pair, ())]
        start = at
        for line in lines:
            start = max(start, line.free_at)
        leaves = start
        for line in lines:
            line.free_at = start + size / line.bandwidth_bytes_per_s
            leaves = max(leaves, line.free_at)
        return leaves

    def slice_bytes(self, source: str, target: str) -> int:
        link = self.link(source, target)
        return max(_SLICE_BYTES, int(link.bandwidth_bytes_per_s * _SLICE_S)) if link else _SLICE_BYTES

    def delay_s(self, source: str, target: str) -> float:
        """The latency of what leaves now."""
        pair = self._pair(source, target)
        link = self._links.get(pair)
        if link is None:
            return 0.0
        if not self._jitter_s:
            return link.latency_s
        generator = self._random.setdefault(pair, random.Random(f"{self._seed}:{pair[0]}>{pair[1]}"))
        return link.latency_s + self._jitter_s * generator.random()

    def _pair(self, source: str, target: str) -> tuple[str, str]:
        return self._names.get(source, source), self._names.get(target, target)


class _ShapedStream:
    """base.Stream whose sends take time."""

    def __init__(self, inner: Stream, shape: Shape, source: str, limits: Limits, close_s: float) -> None:
        self._inner = inner
        self._shape = shape
        self._pair = (source, inner.peer_id)
        self._limits = limits
        self._encoder = Encoder(limits)
        self._close_s = close_s
        self._turn = asyncio.Lock()
        self._under_way: deque[tuple[float, Frame]] = deque()  # bounded by the window, as unread bytes are
        self._under_way_bytes = 0
        self._last_arrival = 0.0
        self._changed = asyncio.Condition()
        self._over: BaseException | None = None
        self.courier: asyncio.Task[None] | None = None
        self._rate = Rate()  # of what leaves: the courier hands frames over whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # what a stream knows of itself and of its peer

    @property
    def max_payload_bytes(self) -> int:
        return self._inner.max_payload_bytes

    @max_payload_bytes.setter
    def max_payload_bytes(self, value: int) -> None:
        self._inner.max_payload_bytes = value

    @property
    def closed(self) -> bool:
        return self._over is not None or self._inner.closed

    def rates(self) -> tuple[float | None, float | None]:
        return self._rate.take(), None

    def under_way(self) -> int | None:
        return self._under_way_bytes

    async def recv(self) -> Frame:
        return await self._inner.recv()

    async def send(self, frame: Frame) -> None:
        payloads = views(frame)
        head, _ = self._encoder.head(frame, [len(view) for view in payloads])  # refuse here, not in the courier
        size = len(head) + sum(len(view) + PRELUDE_BYTES for view in payloads)
        loop = asyncio.get_running_loop()
        async with self._turn:
            unshaped = self._shape.link(*self._pair) is None and not self._under_way
            if unshaped or (self._inner.closed and self._over is None):  # a closed stream says best itself why it is
                await self._inner.send(frame)
                return
            async with self._changed:
                await self._changed.wait_for(
                    lambda: self._over is not None or self._under_way_bytes <= self._limits.window_bytes
                )
            if self._over is not None:
                raise StreamClosed(str(self._over))
            began_s = leaves = loop.time()
            whole = size
            while size > 0:
                part = min(size, self._shape.slice_bytes(*self._pair))
                # The next slice was ready when the last had left, however late this task was woken.
                leaves = self._shape.reserve(*self._pair, part, leaves)
                size -= part
                await _sleep_until(leaves - AHEAD_S)
            self._rate.add(whole, leaves - began_s)
            self._last_arrival = max(self._last_arrival, leaves + self._shape.delay_s(*self._pair))
            copied = Frame(frame.kind, dict(frame.header), [bytes(view) for view in payloads])
            async with self._changed:
                self._under_way.append((self._last_arrival, copied))
                self._under_way_bytes += copied.payload_bytes
                self._changed.notify_all()

    async def carry(self) -> None:
        """The courier: hands over each frame when it arrives, until the stream is over or the task is cancelled."""
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: bool(self._under_way))
                    arrival, frame = self._under_way[0]
                await _sleep_until(arrival)
                await self._inner.send(frame)
                async with self._changed:
                    self._under_way.popleft()
                    self._under_way_bytes -= frame.payload_bytes
                    self._changed.notify_all()
        except Exception as error:  # StreamClosed, usually; the next send says so
            self._over = error
            self._inner.abort()
            async with self._changed:
                self._changed.notify_all()

    async def aclose(self) -> None:
        """What was sent arrives, after its latency; then the stream closes as the real one does."""
        remaining_s = self._last_arrival - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._close_s + max(0.0, remaining_s)), self._turn, self._changed:
                await self._changed.wait_for(lambda: self._over is not None or not self._under_way)
            await self._inner.aclose()
        except TimeoutError:
            self._inner.abort()
        finally:
            self.abort()

    def abort(self) -> None:
        if self._over is None:
            self._over = StreamClosed(f"the stream {self._inner.purpose!r} was closed here")
        self._inner.abort()
        if self.courier is not None and self.courier is not asyncio.current_task():
            self.courier.cancel()


async def _sleep_until(moment: float) -> None:
    wait_s = moment - asyncio.get_running_loop().time()
    if wait_s > 0:
        await asyncio.sleep(wait_s)


class ShapedTransport:
    """base.Transport: `inner`, with every stream shaped. `async with` enters and leaves `inner` too."""

    def __init__(self, inner: Any, shape: Shape, *, limits: Limits | None = None, close_s: float = 3.0) -> None:
        self._inner = inner
        self._shape = shape
        self._limits = limits or Limits()
        self._close_s = close_s
        self._group: asyncio.TaskGroup | None = None
        self._couriers: set[asyncio.Task[None]] = set()

    @property
    def peer_id(self) -> str:
        return str(self._inner.peer_id)

    @property
    def addresses(self) -> Sequence[str]:
        return self._inner.addresses  # type: ignore[no-any-return]

    @property
    def inner(self) -> Any:
        """The transport below, e.g. to rebind it after a restart of p2pd."""
        return self._inner

    async def __aenter__(self) -> Self:
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        try:
            await self._inner.__aenter__()
        except BaseException:
            await self._group.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._group is not None
        try:
            await self._inner.__aexit__(kind, error, trace)
        finally:
            for courier in list(self._couriers):
                courier.cancel()
            await self._group.__aexit__(None, None, None)

    def serve(self, purpose: str, handler: Handler) -> None:
        async def shaped(stream: Stream) -> None:
            wrapped = self._wrap(stream)
            try:
                await handler(wrapped)
                await wrapped.aclose()
            finally:
                wrapped.abort()

        self._inner.serve(purpose, shaped)

    async def open(self, peer_id: str, purpose: str, addresses: Sequence[str] = ()) -> Stream:
        # A dial and a handshake are a round trip each; they run unshaped below, so their time is added here.
        there, back = self._shape.delay_s(self.peer_id, peer_id), self._shape.delay_s(peer_id, self.peer_id)
        if there or back:
            await asyncio.sleep(2 * (there + back))
        return self._wrap(await self._inner.open(peer_id, purpose, addresses))

    def _wrap(self, stream: Stream) -> _ShapedStream:
        if self._group is None:
            raise UsageError("the transport is not running: use it inside `async with`")
        wrapped = _ShapedStream(stream, self._shape, self.peer_id, self._limits, self._close_s)
        wrapped.courier = self._group.create_task(wrapped.carry())
        self._couriers.add(wrapped.courier)
        wrapped.courier.add_done_callback(self._couriers.discard)
        return wrapped
