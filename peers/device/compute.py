"""One thread per device: everything that touches the device runs here, so the event loop never waits for a kernel.

The idea: `await compute.run(fn, ...)` is the only door to the device; results come back in order. What may run beside
the device's work (encoding, decoding, a GPU's copies) has one thread of its own, `compute.run_aside(fn, ...)`. A call on a GPU
is over when its kernels are, so what comes next is chosen when the device is free, and times are the device's. For
emulation a device can be paced: the small real computation is done, then the thread's result is held until the emulated time
has passed.

A GPU's kernels may add in another order each time. A step that is done again must have the same bits. So while this process has a
GPU at work, torch takes only kernels that always give the same. An operator without one is an error.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from meshcee.errors import PlanError
from meshcee.sampling import KERNELS
from peers.device.calls import Calls
from peers.device.memory import MemoryCount

if TYPE_CHECKING:
    from peers.device.staging import Staging

__all__ = ["Compute", "Pace", "one_thread"]

T = TypeVar("T")
fills: Any = torch.utils.deterministic
_TIMER_S = 0.002  # of waking up late, and of the loop's own work between two calls


@dataclass(frozen=True)
class Pace:
    """An emulated device: `flops` of work take flops / speed seconds, never less than the real computation."""

    speed_flops_per_s: float
    claimed_flops_per_s: float | None = None  # what it tells others, if that is another speed

    def seconds(self, flops: float) -> float:
        return flops / self.speed_flops_per_s


def one_thread(name: str) -> ThreadPoolExecutor:
    """OpenMP counts threads for each thread that calls it. Without a word, kernels here may be cut into other pieces than
    where the number was set, and then they round differently."""
    threads = torch.get_num_threads()
    return ThreadPoolExecutor(1, name, initializer=torch.set_num_threads, initargs=(threads,))


def staging_of(device: torch.device) -> Staging | None:
    """Only a GPU has memory of its own."""
    if device.type != "cuda":
        return None
    from peers.device.staging import Staging

    return Staging(device)


class _Repeatable:
    """While a GPU of this process is at work, torch takes kernels that always give the same bits; then what was set before."""

    def __init__(self) -> None:
        self._users, self._before = 0, (False, False)

    @contextmanager
    def here(self) -> Iterator[None]:
        if not self._users:
            self._before = torch.are_deterministic_algorithms_enabled(), fills.fill_uninitialized_memory
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at this process's first product
            torch.use_deterministic_algorithms(True)
            fills.fill_uninitialized_memory = False  # slow, and no kernel of torch reads what nobody has written
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                exact, fills.fill_uninitialized_memory = self._before
                torch.use_deterministic_algorithms(exact)


_repeatable = _Repeatable()


class Compute:
    """The compute thread of one device. Lifetime is `async with`; leaving waits for the running call only."""

    def __init__(self, device: str = "cpu", pace: Pace | None = None, *, restarts: bool = False) -> None:
        self.device = torch.device(device)
        self.pace = pace
        self.calls = Calls(restarts)
        self.staging = staging_of(self.device)
        self.memory = MemoryCount(self.device)
        self.paced_until_s = 0.0  # when the emulated device is free, on the loop's clock
        self.running = self.done = 0  # calls under way or waiting, on both threads, and those that have ended
        self.last_s = 0.0  # that the device itself took for the last call: no timer is late in it
        self._threads = torch.get_num_threads()
        self._pool, self._helper = (one_thread(f"{name}-{device}") for name in ("compute", "beside"))
        self._scope = ExitStack()

    async def __aenter__(self) -> Compute:
        self.calls.begin()
        if self.device.type == "cuda":
            self._scope.enter_context(_repeatable.here())
        else:
            self._scope.enter_context(self.memory.here())
        return self

    async def get_ready(self) -> None:
        """For the first step: torch's optimizers import its compiler, and nothing is imported once a run waits."""
        await asyncio.to_thread(importlib.import_module, "torch._dynamo")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A kernel cannot be interrupted: the thread ends with the call that it is in.
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._helper.shutdown(wait=False, cancel_futures=True)
        self._scope.close()

    def run_aside(self, call: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Start on the thread beside the device's, after what was started there before; await the result or not."""
        self.running += 1
        future = asyncio.get_running_loop().run_in_executor(self._helper, self.calls.noted, self.staging, call, *args)
        future.add_done_callback(self._ended)
        return future

    def behind(self, call: Callable[[], None]) -> asyncio.Future[None]:
        """Start behind all that was started on either thread; who no longer waits for the result does not undo it."""
        computing = partial(_with_kernels, call)
        return asyncio.shield(
            self.run_aside(lambda: self._pool.submit(self.calls.noted, self.staging, computing).result())
        )

    def _ended(self, call: object = None) -> None:
        self.running, self.done = self.running - 1, self.done + 1

    async def use_threads(self, count: int) -> None:
        """From now on a CPU computes with so many; 0: as before. Raises PlanError when the machine does not have them.

        So does this thread: its copies of tensors need no cores that others were promised.
        """
        if not count or self.device.type != "cpu":
            return
        if count > (most := max(os.cpu_count() or 1, self._threads)):
            raise PlanError(
                f"the plan computes with {count} threads and this peer has {most}; plan again, or give Job(threads=...)"
            )
        torch.set_num_threads(count)  # first: of some libraries it sets the number for all threads
        await self.run(torch.set_num_threads, count)
        await self.run_aside(torch.set_num_threads, count)

    async def run(self, call: Callable[..., T], *args: Any, flops: float = 0.0) -> T:
        """Run on the compute thread. `flops` is the work that an emulated device is paced by."""
        self.running += 1
        try:
            return await self._run(call, *args, flops=flops)
        finally:
            self._ended()

    async def _run(self, call: Callable[..., T], *args: Any, flops: float) -> T:
        loop = asyncio.get_running_loop()
        asked_s = loop.time()  # the loop's clock, which sleep goes by
        if self.staging is not None:
            call = partial(self._settled, self.staging, call)
        computing = partial(_with_kernels, call, *args)
        result = await loop.run_in_executor(self._pool, self.calls.noted, self.staging, computing)
        self.last_s = loop.time() - asked_s
        if self.pace is not None and flops > 0:
            # A timer wakes us up to a millisecond late; a device that had work waiting began it when it was free.
            begun_s = self.paced_until_s if asked_s - self.paced_until_s < _TIMER_S else asked_s
            self.last_s = max(self.last_s, self.pace.seconds(flops))
            self.paced_until_s = begun_s + self.pace.seconds(flops)
            left_s = self.paced_until_s - loop.time()
            if left_s > 0:
                await asyncio.sleep(left_s)
        return result

    @staticmethod
    def _settled(staging: Staging, call: Callable[..., T], *args: Any) -> T:
        result = call(*args)
        staging.mark().synchronize()
        return result


def _with_kernels(call: Callable[..., T], *args: Any) -> T:
    with KERNELS.used():
        return call(*args)
