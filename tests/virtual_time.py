"""An event loop whose clock jumps: whenever everybody sleeps, it is at once the time at which somebody wakes.

The idea: asyncio sleeps only in its selector's `select(timeout)`. Ours looks whether anything is ready, and if not,
moves the loop's clock forward by the time-out instead of waiting. An hour of slow links takes milliseconds, exactly.
While a thread of `run_in_executor` computes, time stands still and the loop really waits for it.

    @virtual_time
    async def test_slow_link() -> None: ...
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import selectors
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, ParamSpec, TypeVar

import structlog

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["VirtualTimeLoop", "quiet", "run", "virtual_time"]

_START_S = 1000.0
_DEADLOCK_S = 10.0  # of real time, for threads that the loop does not know of


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits while the loop may jump."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        if self.loop.threads:
            return super().select(None)  # a thread wakes the loop when it has done
        ready = super().select(0 if timeout is not None else _DEADLOCK_S)
        if not ready:
            if timeout is None:
                raise RuntimeError("everybody waits, and for nothing that could happen")
            self.loop.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`now` is the clock, `threads` the number of executor calls under way."""

    def __init__(self) -> None:
        selector = _JumpingSelector()
        selector.loop = self
        self.now = _START_S
        self.threads = 0
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = super().run_in_executor(executor, func, *args)
        self.threads += 1
        future.add_done_callback(self._thread_done)
        return future

    def _thread_done(self, future: asyncio.Future[Any]) -> None:
        self.threads -= 1


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on virtual time; tasks that are left over are an error."""

    async def leaving_nothing() -> T:
        result = await main
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks were left behind: {left}"
        return result

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(leaving_nothing())


def virtual_time(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """An async test as a plain one that runs on virtual time; its fixtures must be plain ones too."""

    @functools.wraps(test)
    def on_virtual_time(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(test(*args, **kwargs))

    return on_virtual_time


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No log, for hours of many peers in one process."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)
