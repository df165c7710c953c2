"""Who owes what everybody waits for: members tell with their signs of life what they do, and the owner adds it up.

The idea: that a member lives is no progress. Progress are answers, calls to devices that end, and bytes of tensors that arrive.
When there is none for far longer than a step takes, the member whose device is in a call is stuck; if none is, the one that
waits for nobody. Two that wait for each other have lost a frame between them. Where all wait for the owner nobody is to blame.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshcee.config import Timeouts
from meshcee.plan import Plan
from peers.transport import Frame
from peers.wire import messages
from peers.wire.messages import need

__all__ = ["OWNER", "Doing", "Watch"]

OWNER = "owner"  # in the place of a peer that is waited for
HUNG_STEPS = 10  # so many steps without progress are too many
RECENT = 8  # steps, of which the longest counts: one that a pause has made long is forgotten
FIRST_STEPS = 4  # times as long at least, until a step of the epoch is done: kernels are compiled, memory is taken
SLOWEST_STATE_BYTES_PER_S = 50e6  # at which a device copies and hashes its state, in one call
MOST_WANTED = 1024


@dataclass(frozen=True)
class Doing:
    """What a member does: calls to its device that have ended, whether it is in one, bytes of tensors that have arrived, and
    whom it waits for."""

    done: int
    busy: bool
    moved_bytes: int
    wants: tuple[str, ...]

    def frame(self) -> Frame:
        header = {
            "done": self.done,
            "busy": self.busy,
            "moved": self.moved_bytes,
            "wants": list(self.wants[:MOST_WANTED]),
        }
        return Frame(messages.PONG, header)

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Doing:
        wants = need(header, "wants", list[str])
        return cls(need(header, "done", int), need(header, "busy", bool), need(header, "moved", int), tuple(wants))


class Watch:
    """Of one epoch, by its owner. `state_bytes` is the largest stage's; `moved` gives bytes of tensors that have come to the
    owner."""

    def __init__(self, plan: Plan, timeouts: Timeouts, state_bytes: int, moved: Callable[[], int] = lambda: 0) -> None:
        self._moved = moved
        self._moved_bytes = 0
        self._timeouts = timeouts
        self._state_s = state_bytes / SLOWEST_STATE_BYTES_PER_S
        self._predicted_s = plan.predicted.step_s if plan.predicted is not None else None
        self._steps_s: deque[float] = deque(maxlen=RECENT)  # of the epoch's newest
        self._doing: dict[str, Doing] = {}
        self._ours = 0  # answers that the owner itself is working on
        self.idle_s = self._counted_s = 0.0  # without progress; by the loop's clock, until when that is counted

    @property
    def limit_s(self) -> float:
        """That may pass without progress."""
        steps_s, least_s = list(self._steps_s), self._timeouts.hung_s
        if self._predicted_s is not None:
            steps_s.append(self._predicted_s)
        if not steps_s:
            return self._timeouts.idle_step_s + self._state_s
        first = 1 if self._steps_s else FIRST_STEPS
        return max(first * least_s, HUNG_STEPS * max(steps_s)) + self._state_s

    def stepped(self, seconds: float) -> None:
        """A step is done, and has taken so long."""
        self._steps_s.append(seconds)

    def progress(self) -> None:
        """Somebody has answered."""
        self.idle_s = 0.0

    @contextlib.contextmanager
    def ours(self) -> Iterator[None]:
        """While the owner works on an answer, as a slow metric does, it reads no more of that member: nobody is late."""
        self._ours += 1
        try:
            yield
        finally:
            self._ours -= 1
            self.progress()

    def hear(self, peer: str, header: Mapping[str, Any]) -> None:
        """A sign of life. While it took its offer it had no more to say than that."""
        if "wants" in header:
            before, now = self._doing.get(peer), Doing.from_header(header)
            self._doing[peer] = now
            if before is None or (before.done, before.moved_bytes) != (now.done, now.moved_bytes):
                self.progress()

    async def until(self, event: asyncio.Event) -> bool:
        """Whether it was set, before there was no progress for too long. A pause of this process counts as two beats at most."""
        loop, beat_s = asyncio.get_running_loop(), self._timeouts.beat_s
        self.progress()
        while not event.is_set():
            began_s = loop.time()
            try:
                async with asyncio.timeout(beat_s):
                    await event.wait()
            except TimeoutError:
                self.idle_s += min(loop.time() - max(began_s, self._counted_s), 2 * beat_s)  # others may wait, too
                self._counted_s = loop.time()
                before, self._moved_bytes = self._moved_bytes, self._moved()
                if self._ours or self._moved_bytes != before:
                    self.progress()
                if self.idle_s > self.limit_s and not self._owner_owes:
                    return False
        return True

    @property
    def _owner_owes(self) -> bool:
        """Samples that are long in coming are the user's; a report that nobody takes, too."""
        return not self.stuck() and not self.parted() and any(OWNER in doing.wants for doing in self._doing.values())

    def stuck(self) -> list[str]:
        """Members that owe something and do not get on."""
        busy = [peer for peer, doing in self._doing.items() if doing.busy]
        return busy or [peer for peer, doing in self._doing.items() if not doing.wants]

    def parted(self) -> list[tuple[str, str]]:
        """Members that wait for each other, both ways."""
        wants = {(peer, other) for peer, doing in self._doing.items() for other in doing.wants}
        return sorted((a, b) for a, b in wants if (b, a) in wants)
