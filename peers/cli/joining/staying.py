"""One `meshcee peer` from its start to its end: it lends, is away while its machine's owner needs that, and comes back.

The idea: to yield is to leave as `meshcee drain` makes a peer leave, and to come back is to join again with the same identity. So
a job goes on without the peer first, and nothing else of meshcee knows of owners.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

from meshcee.errors import JoinError, unwrap
from peers.cli.joining.yielding import Rule, Seen, Standing
from peers.node.departure import Departure

__all__ = ["Stay", "Watch"]

LOOK_EVERY_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0  # before a peer that cannot come back tries again

Lend = Callable[[], AbstractAsyncContextManager[Departure]]
Tell = Callable[[str], None]


class Watch:
    """Looks at a machine again and again, by a rule."""

    def __init__(
        self,
        rule: Rule,
        look: Callable[[], Awaitable[Seen]],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.standing = Standing()
        self._rule, self._look, self._sleep = rule, look, sleep

    async def begin(self) -> None:
        self.standing = Standing.at_first(await self._look(), self._rule)

    async def change(self) -> None:
        """Until the peer shall go, or come back."""
        before = self.standing.lends
        while self.standing.lends is before:
            await self._sleep(LOOK_EVERY_S)
            self.standing = self.standing.after(await self._look(), self._rule)


class Stay:
    """`ask` ends it in order, from a signal; `run` returns then, or when somebody drains the peer."""

    def __init__(
        self, watch: Watch | None = None, sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep
    ) -> None:
        self._watch, self._sleep = watch, sleep
        self._departure: Departure | None = None
        self._is_away = False
        self._stopped = asyncio.Event()

    def ask(self) -> bool:
        """Whether it could be asked: while it joins it cannot."""
        if self._departure is None and not self._is_away:
            return False
        self._stopped.set()
        if self._departure is not None:
            self._departure.ask()
        return True

    async def run(self, lend: Lend, tell: Tell) -> bool:
        """Whether no job has lost a stage with this peer. `tell` hears in sentences why it is away."""
        if self._watch is not None:
            await self._watch.begin()
        has_joined = False
        while True:
            if self._watch is not None and not self._watch.standing.lends:
                tell(f"away: {self._watch.standing.why}. This peer comes back by itself; Ctrl-C ends it")
                if not await self._away(self._watch.change()):
                    return True
                tell("back: its owner does not need this machine")
            async with AsyncExitStack() as stack:
                departure = await self._joined(stack, lend, tell if has_joined else None)
                if departure is None:
                    return True
                self._departure, has_joined = departure, True
                try:
                    in_time = await self._lent(departure)
                finally:
                    self._departure = None
            if self._watch is None or departure.is_drained or self._stopped.is_set():
                return in_time
            if not in_time:
                tell("a job has lost a stage with this peer: it could not go on without it in time")

    async def _lent(self, departure: Departure) -> bool:
        """Until it has left: whether in time."""
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._yield(departure)) if self._watch is not None else None
            in_time = await departure.run()
            if watching is not None:
                watching.cancel()
        return in_time

    async def _yield(self, departure: Departure) -> None:
        assert self._watch is not None
        await self._watch.change()
        departure.ask()

    async def _joined(self, stack: AsyncExitStack, lend: Lend, tell: Tell | None) -> Departure | None:
        """With `tell` it tries again and again: a mesh that was joined before can be, sooner or later. None once it shall end."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return await stack.enter_async_context(lend())
            except (JoinError, BaseExceptionGroup) as error:
                if tell is None or not isinstance(why := unwrap(error), JoinError):
                    raise
            tell(f"not back yet: {why}. This peer tries again in {pause_s:.0f} s; Ctrl-C ends it")
            if not await self._away(self._sleep(pause_s)):
                return None
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _away(self, work: Coroutine[Any, Any, None]) -> bool:
        """Until the work is done, or it was asked to end: whether it goes on."""
        self._is_away = True
        async with asyncio.TaskGroup() as group:
            tasks = {group.create_task(work), group.create_task(self._stopped.wait())}
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
        self._is_away = False
        return not self._stopped.is_set()
