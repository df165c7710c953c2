"""A step that counts reaches callbacks, folder and user once, whatever ends its epoch meanwhile."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

from peers.owner.result import Telling, once


async def test_what_was_interrupted_is_gone_on_with_and_nothing_is_done_twice() -> None:
    done: list[str] = []
    called, reports = asyncio.Event(), asyncio.Queue[Any](maxsize=1)
    reports.put_nowait(None)  # there is no room
    loop = asyncio.get_running_loop()

    heard = asyncio.Event()

    def listener() -> None:
        loop.call_soon_threadsafe(called.set)
        time.sleep(0.05)
        done.append("heard")
        loop.call_soon_threadsafe(heard.set)

    hear = once(listener)

    async def way() -> None:
        await loop.run_in_executor(None, hear)

    telling = Telling(reports)
    first = asyncio.create_task(telling.tell(cast(Any, 7), way))
    await called.wait()
    first.cancel()  # its thread goes on
    await asyncio.wait([first])
    second = asyncio.create_task(telling.go_on())
    await heard.wait()
    second.cancel()  # while it waits for room
    await asyncio.wait([second])
    assert reports.get_nowait() is None
    await telling.go_on()
    assert reports.get_nowait() == 7
    await telling.go_on()
    assert reports.empty()
    assert done == ["heard"]
