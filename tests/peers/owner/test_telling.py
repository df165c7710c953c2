"""A step that counts reaches callbacks, folder and user once, whatever ends its epoch meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

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


def test_a_second_call_waits_for_the_first_and_has_its_error() -> None:
    """An epoch ends while a callback runs; what comes next must not run beside it, nor the step be told of as heard."""
    begun, events = threading.Event(), list[str]()

    def listener() -> None:
        begun.set()
        time.sleep(0.2)
        events.append("heard")
        raise ValueError("no room for figures")

    hear = once(listener)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(hear)
        assert begun.wait(10)
        with pytest.raises(ValueError, match="no room for figures"):
            hear()
        events.append("second call over")
        assert isinstance(first.exception(), ValueError)
    assert events == ["heard", "second call over"]
