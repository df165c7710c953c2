"""An event loop whose clock jumps: whenever everybody sleeps, it is at once the time at which somebody wakes.

The idea: asyncio sleeps only in its selector's `select(timeout)`. Ours looks whether anything is ready, and if not,
moves the loop's clock forward by the time-out instead of waiting. An hour of slow links takes milliseconds, exactly.
While a thread of `run_in_executor` computes, time stands still and the loop really waits for it. An `inline` loop starts no
threads: it makes such a call itself, in its turn. That is faster where calls are short, and the same each time; no call may then
wait for the loop.

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
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar
from unittest import mock

import structlog

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["Still", "VirtualTimeLoop", "quiet", "run", "virtual_time"]

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

    def __init__(self, inline: bool = False) -> None:
        selector = _JumpingSelector()
        selector.loop = self
        self.now = _START_S
        self.threads = 0
        self._inline = inline
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        if self._inline:
            future = self.create_future()
            self.call_soon(_make, future, func, *args)
            return future
        future = super().run_in_executor(executor, func, *args)
        self.threads += 1
        future.add_done_callback(self._thread_done)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Without the limit that Python 3.12 sets: the clock would jump there while a thread ends."""
        await super().shutdown_default_executor()

    def _thread_done(self, future: asyncio.Future[Any]) -> None:
        self.threads -= 1


def _make(future: asyncio.Future[Any], call: Callable[..., Any], *args: Any) -> None:
    """The call, unless nobody wants it any more."""
    if future.cancelled():
        return
    try:
        result = call(*args)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def run(main: Coroutine[Any, Any, T], *, inline: bool = False) -> T:
    """asyncio.run on virtual time; tasks that are left over are an error."""

    async def leaving_nothing() -> T:
        result = await main
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks were left behind: {left}"
        return result

    with asyncio.Runner(loop_factory=functools.partial(VirtualTimeLoop, inline)) as runner:
        return runner.run(leaving_nothing())


def virtual_time(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """An async test as a plain one that runs on virtual time; its fixtures must be plain ones too."""

    @functools.wraps(test)
    def on_virtual_time(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(test(*args, **kwargs))

    return on_virtual_time


_WHO: ContextVar[str] = ContextVar("who", default="")


class Still:
    """Some of what runs on a loop stands still, as a process that is stopped: none of its tasks, timers and callbacks runs.

    Whatever is started inside `of(who)` is of that one. It goes on where it was: what has come due meanwhile, in that order.
    """

    def __init__(self) -> None:
        self._held: dict[str, list[asyncio.Handle]] = {}

    @contextlib.contextmanager
    def possible(self) -> Iterator[None]:
        """On the running loop."""
        make, held = asyncio.Handle._run, self._held

        def unless_still(handle: Any) -> None:
            found = held.get(handle._context.get(_WHO, "")) if held else None
            if found is None:
                make(handle)
            else:
                found.append(handle)

        with mock.patch.object(asyncio.Handle, "_run", unless_still):
            try:
                yield
            finally:
                self.end()

    @contextlib.contextmanager
    def of(self, who: str) -> Iterator[None]:
        token = _WHO.set(who)
        try:
            yield
        finally:
            _WHO.reset(token)

    @staticmethod
    def who() -> str:
        """Of whom the code is that runs now; "" for nobody's."""
        return _WHO.get()

    def __contains__(self, who: str) -> bool:
        return who in self._held

    def begin(self, who: str) -> None:
        self._held.setdefault(who, [])

    def end(self, *who: str) -> None:
        """Of these, or of all."""
        ready: Any = asyncio.get_running_loop()
        for one in who or tuple(self._held):
            ready._ready.extend(handle for handle in self._held.pop(one, ()) if not handle.cancelled())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No log, for hours of many peers in one process."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)
