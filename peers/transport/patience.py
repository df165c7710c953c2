"""How many handshakes a peer answers to strangers: so many as they may fail, and no more; and how much it says of what fails.

The idea: what costs is a handshake that leads nowhere, so only these are counted. Whoever has failed too often, or has failed
while strangers fail too often, is hung up on before a byte of its hello is read. Members are never counted. Who has not failed is
always answered: a newcomer, and every member after this peer was started again.
"""

from __future__ import annotations

import asyncio
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
EVERY_S = 3.0  # from one line of a kind to the next: whoever is refused may come again at once


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
    """An event in the log, which neither strangers nor members must fill: one is told of, and how many have come since."""

    def __init__(self, event: Event) -> None:
        self._event, self._quiet_until_s, self._more = event, 0.0, 0

    def log(self, **about: str) -> None:
        self._more += 1
        if (now_s := asyncio.get_running_loop().time()) >= self._quiet_until_s:
            log.warning(self._event, **about, **({"untold": self._more - 1} if self._more > 1 else {}))
            self._quiet_until_s, self._more = now_s + EVERY_S, 0

    def ended(self, error: Exception, **about: str) -> None:
        """A stream's handler has raised this. A bug of ours, which nobody has foreseen, always has its traceback."""
        others = [e for e in leaves(error) if not isinstance(e, StreamClosed | TimeoutError)]
        if not others:  # whoever opened it is gone, or paused, or cut off
            log.debug(Event.STREAM_CLOSED, **about, reason=str(leaves(error)[0]) or "nothing came in time")
        elif all(isinstance(e, MeshceeError) for e in others):  # many at once where a peer wakes
            self.log(**about, error=repr(others[0]))
        else:
            log.exception(self._event, **about)
