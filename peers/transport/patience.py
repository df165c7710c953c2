"""How many handshakes a peer answers to those who have not proven the mesh's key: so many as they may fail, and no more. And how
much it says of streams that end badly.

The idea: what costs is a handshake that leads nowhere, so only these are counted. Whoever has failed too often, or has failed
while strangers fail too often, is hung up on before a byte of its hello is read. Members are never counted. Who has not failed is
always answered: a newcomer, and every member after this peer was started again.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from meshcee.errors import MeshceeError, leaves
from meshcee.events import Event
from peers.transport.base import StreamClosed

__all__ = ["Patience", "Seldom"]

log = structlog.get_logger(__name__)

OF_ONE, OF_ALL = (64, 2.0), (512, 50.0)  # failures at once, and then a second: of one stranger, and of all together
MOST_REMEMBERED = 4096  # peers that have proven the key, and as many that have failed
REFUSALS = 20  # told of in REFUSALS_S, and as many failures: whoever is refused may come again at once
REFUSALS_S = 60.0
AT_ONCE_S = 2.0  # of streams that end together, as all do when a peer wakes, one is told of


@dataclass
class _Failures:
    """How many more there may be: `left` at this time of the loop's clock."""

    most: int
    per_s: float
    left: float
    at_s: float

    def more(self, now_s: float) -> bool:
        self.left, self.at_s = min(self.most, self.left + self.per_s * (now_s - self.at_s)), now_s
        return self.left >= 1


class Patience:
    """Of one endpoint. `clock` is the loop's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._proven: dict[str, None] = {}  # peers that have, before; newest last
        self._failed: dict[str, _Failures] = {}  # of others; who failed last is last
        self._all: _Failures | None = None

    def __contains__(self, peer: str) -> bool:
        """Whether it has proven the key before."""
        return peer in self._proven

    def is_over(self, peer: str) -> bool:
        """Whether this peer is to be hung up on."""
        if peer in self._proven:
            return False
        one, now_s = self._failed.get(peer), self._clock()
        if one is None:
            return False
        return not one.more(now_s) or not (self._all is None or self._all.more(now_s))

    def failed(self, peer: str) -> None:
        """A handshake with it led nowhere."""
        if peer in self._proven:
            return
        now_s = self._clock()
        self._all = self._all or _Failures(*OF_ALL, OF_ALL[0], now_s)
        one = self._failed.pop(peer, None) or _Failures(*OF_ONE, OF_ONE[0], now_s)
        self._failed[peer] = one
        for failures in (one, self._all):
            failures.more(now_s)
            failures.left -= 1
        if len(self._failed) > MOST_REMEMBERED:
            del self._failed[next(iter(self._failed))]

    def forget(self, peer: str) -> None:
        """It is a member no longer."""
        self._proven.pop(peer, None)

    def proven(self, peer: str) -> None:
        """It has proven the key, now."""
        self._failed.pop(peer, None)
        self._proven.pop(peer, None)
        self._proven[peer] = None
        if len(self._proven) > MOST_REMEMBERED:
            del self._proven[next(iter(self._proven))]


class Seldom:
    """What a log says of streams that are refused or fail, which neither strangers nor members must fill."""

    def __init__(self) -> None:
        self._logged_s = defaultdict[Event, deque[float]](lambda: deque(maxlen=REFUSALS))
        self._last_s = -math.inf
        self._more = Counter[Event]()  # that were not logged since

    def ended(self, error: Exception, **about: str) -> None:
        """What a stream's handler has raised. A bug of ours, which nobody has foreseen, always has its traceback."""
        causes = leaves(error)
        others = [e for e in causes if not isinstance(e, StreamClosed | TimeoutError)]
        if not others:  # whoever opened it is gone, or paused, or cut off
            log.debug(Event.STREAM_CLOSED, **about, reason=str(causes[0]) or "nothing came in time")
        elif all(isinstance(e, MeshceeError) for e in others):  # as of an epoch that is over
            self.log(Event.HANDLER_FAILED, **about, error=repr(others[0]))
        else:
            log.exception(Event.HANDLER_FAILED, **about)

    def log(self, event: Event, **about: str) -> None:
        now_s, logged_s = asyncio.get_running_loop().time(), self._logged_s[event]
        often = len(logged_s) == REFUSALS and now_s - logged_s[0] < REFUSALS_S
        if often or now_s - self._last_s < AT_ONCE_S:
            self._more[event] += 1
            return
        self._last_s = now_s
        logged_s.append(now_s)
        more = self._more.pop(event, 0)
        log.warning(event, **about, **({"untold": more} if more else {}))
