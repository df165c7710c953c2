"""Signs of life over a stream that may have nothing else to say.

The idea: a peer that is stopped or cut off sends no end of its stream. So one side asks now and then, the other answers,
and each counts whatever has arrived, answers or work: only a stream over which nothing at all has come is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from meshcee.config import Timeouts
from peers import messages
from peers.outbox import Outbox
from peers.transport.base import Frame, Stream

__all__ = ["beat", "silence"]


async def silence(stream: Stream, timeouts: Timeouts, ask: Callable[[], None] = lambda: None) -> None:
    """Return once nothing has arrived for `silent_s`; `ask` is called every `beat_s` that brought something."""
    loop = asyncio.get_running_loop()
    seen, since_s = -1, loop.time()
    while loop.time() - since_s < timeouts.silent_s:
        if stream.received_bytes != seen:
            seen, since_s = stream.received_bytes, loop.time()
            ask()
        await asyncio.sleep(timeouts.beat_s)


async def beat(outbox: Outbox, timeouts: Timeouts, lost: Callable[[], None]) -> None:
    """Ask for signs of life until there are none."""
    await silence(outbox.stream, timeouts, lambda: outbox.post(Frame(messages.PING)))
    lost()
