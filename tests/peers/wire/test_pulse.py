"""Work beside signs of life."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any, NoReturn

from meshcee.config import Timeouts
from peers.transport.base import StreamClosed
from peers.wire.pulse import unless_closed


async def test_work_that_fails_as_it_is_cancelled_leaves_no_word_in_the_log() -> None:
    stream: Any = SimpleNamespace(closed=False, peer_id="p0")
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["message"]))

    async def work() -> NoReturn:
        tasks.pop().cancel()
        raise StreamClosed("the other side is gone")

    tasks = [asyncio.create_task(unless_closed(work, stream, Timeouts()))]
    await asyncio.wait(tasks)
    assert tasks == []
    gc.collect()
    assert complaints == []
