"""Signs of life over a stream that may have nothing else to say.

The idea: a peer that is stopped or cut off sends no end of its stream. So an owner asks now and then, and each side counts
whatever has arrived, answers or work: only a stream over which nothing at all has come is given up. A member says unasked
that it lives, to its owner and its neighbours, as long as it hears them: a question may be stuck behind much else. While it
takes an offer and may read nothing for long, as it builds, it says so whatever it hears.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from meshcee.config import Timeouts
from peers.transport import Frame, Stream, StreamClosed
from peers.wire import messages
from peers.wire.outbox import Outbox

__all__ = [
    "SILENT",
    "beat",
    "live",
    "silence",
    "unless_closed",
    "unless_late",
    "unless_silent",
    "while_alive",
    "while_moving",
]

T = TypeVar("T")

SILENT = "nothing has come from it for too long"


async def silence(stream: Stream, timeouts: Timeouts, ask: Callable[[], None] = lambda: None) -> None:
    """Return once nothing has arrived for `silent_s`; `ask` is called every `beat_s` that brought something.

    A pause of this process counts as no more than two beats: what came meanwhile has not been read yet.
    """
    loop = asyncio.get_running_loop()
    seen, silent_s, looked_s = -1, 0.0, loop.time()
    while silent_s < timeouts.silent_s:
        if stream.received_bytes != seen:
            seen, silent_s = stream.received_bytes, 0.0
            ask()
        await asyncio.sleep(timeouts.beat_s)
        before_s, looked_s = looked_s, loop.time()
        silent_s += min(looked_s - before_s, 2 * timeouts.beat_s)


async def beat(outbox: Outbox, timeouts: Timeouts, lost: Callable[[], None]) -> None:
    """Ask for signs of life until there are none."""
    await silence(outbox.stream, timeouts, partial(outbox.sign, Frame(messages.PING)))
    lost()


async def live(outbox: Outbox, timeouts: Timeouts, sign: Callable[[], Frame] = lambda: Frame(messages.PONG)) -> None:
    """Say that we live as long as the other side is heard; StreamClosed once it is not."""
    await silence(outbox.stream, timeouts, lambda: outbox.sign(sign()))
    raise StreamClosed(SILENT)


async def while_alive(
    work: Callable[[], Awaitable[T]],
    stream: Stream,
    timeouts: Timeouts,
    sign: Callable[[], Frame] = lambda: Frame(messages.PONG),
) -> T:
    """What `work` gives; meanwhile a PONG goes out every `beat_s`, whatever else is sent."""

    async def tell() -> None:
        with contextlib.suppress(StreamClosed):
            while True:
                await asyncio.sleep(timeouts.beat_s)
                await stream.send(sign())

    return await _beside(work, tell())


async def unless_silent(work: Callable[[], Awaitable[T]], stream: Stream, timeouts: Timeouts) -> T:
    """What `work` gives; raises StreamClosed once nothing has arrived for `silent_s`."""

    async def watch() -> None:
        await silence(stream, timeouts)
        raise StreamClosed(SILENT)

    return await _beside(work, watch())


async def while_moving(
    work: Callable[[], Awaitable[T]], moved: Callable[[], object], limit_s: float, timeouts: Timeouts
) -> T:
    """What `work` gives; TimeoutError once `moved` has given the same for `limit_s`. A pause counts as two beats at most."""

    async def watch() -> None:
        loop, seen, still_s = asyncio.get_running_loop(), moved(), 0.0
        while still_s < limit_s:
            began_s = loop.time()
            await asyncio.sleep(min(timeouts.beat_s, limit_s))
            still_s += min(loop.time() - began_s, 2 * timeouts.beat_s)
            if (now := moved()) != seen:
                seen, still_s = now, 0.0
        raise TimeoutError

    return await _beside(work, watch())


async def unless_late(work: Callable[[], Awaitable[T]], limit_s: float, timeouts: Timeouts) -> T:
    """What `work` gives; TimeoutError after `limit_s`. A pause of this process counts as two beats at most: `work` could not go on
    meanwhile, and what it waits for has not been read yet."""
    return await while_moving(work, lambda: None, limit_s, timeouts)


async def unless_closed(work: Callable[[], Awaitable[T]], stream: Stream, timeouts: Timeouts) -> T:
    """What `work` gives; raises StreamClosed soon after the stream, which nobody reads meanwhile, is closed."""

    async def watch() -> None:
        while True:
            await asyncio.sleep(timeouts.beat_s / 4)
            if stream.closed:
                raise StreamClosed(f"{stream.peer_id} has closed it")

    return await _beside(work, watch())


async def _beside(work: Callable[[], Awaitable[T]], other: Coroutine[Any, Any, None]) -> T:
    """What `work` gives or raises, with `other` running beside it; what that raises ends both."""
    outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    async def run() -> None:
        try:
            outcome.set_result(await work())
        except Exception as error:
            outcome.set_exception(error)
            outcome.exception()  # if both fail, nobody else asks for it
        beside.cancel()

    try:
        async with asyncio.TaskGroup() as group:
            beside = group.create_task(other)
            group.create_task(run())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return outcome.result()
