"""A step that counts reaches callbacks, folder and user once, whatever ends its epoch meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, cast
from unittest import mock

import pytest

from peers.owner.result import Telling, once
from peers.transport.memory import Impairment, MemoryNetwork
from tests.peers.member.test_training import make_job
from tests.rig.mesh_fixture import train
from tests.rig.virtual_time import virtual_time


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


@virtual_time
async def test_whoever_hears_late_of_a_step_makes_it_no_longer_and_the_next_ones_no_shorter() -> None:
    """A search for another plan made one step that seemed slow, and several that seemed to take no time."""
    network = MemoryNetwork(impairment=Impairment(latency_s=0.05))
    with mock.patch.object(time, "perf_counter", asyncio.get_running_loop().time):
        late = (10, lambda: asyncio.sleep(5.0))
        trained = await train(make_job(steps=30), 2, 6, network=network, after_step=late)
    seconds = [report.step_s for report in trained.reports]
    usual_s = median(seconds)
    assert 0 < usual_s < 0.5, "so it was late by ten steps or more"
    assert all(usual_s / 2 < took_s < 2 * usual_s for took_s in seconds[1:])
