"""What has gone wrong in an epoch, as the owner hears it: errors, and how near each is to the cause.

The idea: several members fail when one does. The lowest rank is told to the user: 0 a cause, 1 a peer that the owner itself
has lost, 2 a peer that another one has lost, 3 silence.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from meshcee.errors import MeshceeError, PeerLostError, leaves
from peers.wire import messages
from peers.wire.messages import Round
from peers.wire.suspects import Fault, is_own

__all__ = ["LOST_HERE", "Failures", "NotFoundError", "most_telling", "reported"]

LOST_HERE = 1  # the rank of a peer that the owner itself has lost: what others say of it will be a consequence
GRACE_S = 0.5  # after word of a peer that another one has lost, for the cause to arrive


class NotFoundError(PeerLostError):
    """A member has not found all of the copies that it is to begin with. `apart`: that member, and who holds what it lacks."""

    def __init__(self, message: str, apart: Iterable[str]) -> None:
        super().__init__(message)
        self.apart = frozenset(apart)


class Failures:
    """Of one epoch."""

    def __init__(self) -> None:
        self.noticed_s: float | None = None  # when the first was, by the loop's clock
        self.blamed: Counter[str] = Counter()  # peers that others have lost, or the owner during offers
        self.missed: set[str] = set()  # members that the owner itself has lost
        self.silent: set[str] = set()  # those of them from which nothing came for too long
        self.stuck: set[str] = set()  # members that answer and do not do what is theirs to do
        self.faults: list[Fault] = []  # errors that members have met by themselves
        self.liars: set[str] = set()  # members that an audit has found
        self.doubted: set[str] = set()  # members that do not show it what it asks for
        self.busy = False  # whether a member runs another job
        self.apart: set[str] = set()  # members that have not found copies, and members that hold them
        self.raised: dict[MeshceeError, tuple[Round, int]] = {}  # by a micro-batch on a member's device
        self._lost: dict[str, str] = {}  # member -> the first peer that it has lost
        self._found: list[tuple[int, MeshceeError]] = []
        self._first, self._explained = asyncio.Event(), asyncio.Event()

    def add(self, rank: int, error: MeshceeError) -> None:
        if self.noticed_s is None:
            self.noticed_s = asyncio.get_running_loop().time()
        self._found.append((rank, error))
        if isinstance(error, NotFoundError):
            self.apart |= error.apart
        self._first.set()
        if rank <= LOST_HERE:
            self._explained.set()

    def blame(self, member: str, lost: Iterable[str]) -> None:
        """A member says that it has lost these."""
        for peer in lost:
            self.blamed[peer] += 1
            self._lost.setdefault(member, peer)

    @property
    def lost(self) -> set[str]:
        """Members that have failed, or that the owner itself has lost."""
        return self.missed | self.stuck | {fault.peer for fault in self.faults}

    @property
    def parted(self) -> set[tuple[str, str]]:
        """Members that have lost each other, both ways. Who had lost a third one, or its owner, was lost for that."""
        pairs = [(a, b) for a, b in self._lost.items() if self._lost.get(b, a) == a and not self.missed & {a, b}]
        return {pair for a, b in pairs for pair in ((a, b), (b, a))}

    async def enough(self) -> None:
        """Return once there is one, and its cause has come or had the time to."""
        await self._first.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self._explained.wait()

    @property
    def cause(self) -> MeshceeError | None:
        return min(self._found, key=lambda found: found[0])[1] if self._found else None


def reported(
    header: Mapping[str, Any], peer_id: str, step: int, describe: Callable[[str], str]
) -> tuple[int, MeshceeError, tuple[str, ...]]:
    """Rank and error of a FAILED frame, and the peer that it blames if any; `describe` gives a peer's name and place."""
    error = messages.error_from(header)
    if isinstance(error, PeerLostError):
        lost = header.get("lost")
        who = describe(lost) if isinstance(lost, str) else "another stage"
        told = PeerLostError(f"peer {who} was lost in step {step + 1}, before it was applied: {error}")
        return 2, told, (lost,) if isinstance(lost, str) else ()
    if is_own(error):  # its message does not say whose it is, or when
        return 0, type(error)(f"peer {describe(peer_id)} failed in step {step + 1}: {error}"), ()
    return 0, error, ()


def most_telling(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of all that ended a member's session: anything before a lost peer, which is often only the consequence."""
    return min(reversed(leaves(failures)), key=lambda e: isinstance(e, PeerLostError))
