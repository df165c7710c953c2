"""The emulated device: what is paced takes its time, and no call makes the next one late."""

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshcee.errors import MeshceeError, PeerLostError
from peers.device.compute import Compute, Pace
from peers.device.emulation.pace import HANG_FILE, paced
from peers.member.executor import Executor


async def test_paced_calls_one_after_the_other_take_the_sum_of_their_times_and_no_more() -> None:
    calls, seconds = 40, 0.0034  # not a whole number of the loop's milliseconds
    async with Compute(pace=Pace(1e9)) as compute:
        await compute.run(lambda: None)  # the thread is there
        first = time.perf_counter()
        await compute.run(lambda: None, flops=1e9 * seconds)
        due_s = compute.paced_until_s
        for _ in range(calls - 1):
            # Nothing can be late by more than the timer: a busy machine makes a call begin anew, which is checked here.
            due_s = max(due_s, time.perf_counter() - 0.002)
            await compute.run(lambda: None, flops=1e9 * seconds)
            assert compute.paced_until_s >= due_s + seconds - 1e-9
            due_s = compute.paced_until_s
        assert due_s - first >= calls * seconds - 1e-3
        assert time.perf_counter() >= due_s - 0.001


async def test_work_without_flops_is_not_paced() -> None:
    async with Compute(pace=Pace(1.0)) as compute:
        assert await compute.run(lambda: 7) == 7


async def test_a_paced_device_hangs_for_good_once_its_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "hang"
    assert paced(1e12) == Pace(1e12)  # without the variable nothing can hang it
    monkeypatch.setenv(HANG_FILE, str(file))
    async with Compute(pace=paced(1e12)) as compute:
        assert await compute.run(lambda: 7, flops=1.0) == 7
        file.touch()
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await compute.run(lambda: 7, flops=1.0)
            file.unlink(missing_ok=True)  # which changes nothing any more
        assert await compute.run(lambda: 7) == 7  # what is no work of the device


async def test_a_stage_is_freed_behind_a_kernel_that_outlasts_whoever_waits_for_it() -> None:
    """Else the next epoch's stage would be built beside it."""
    runner = SimpleNamespace(is_closed=False)
    runner.close = lambda: setattr(runner, "is_closed", True)
    kernel = threading.Event()
    async with Compute() as compute:
        executor = Executor.__new__(Executor)
        vars(executor).update(_compute=compute, _runner=runner)
        running = asyncio.create_task(compute.run(kernel.wait, 30.0))
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await executor.close()
        kernel.set()
        await compute.run(lambda: None)
        assert runner.is_closed


async def test_a_call_that_outlasts_its_work_is_waited_for_and_then_ends_this_devices_use() -> None:
    for aside in (False, True):
        kernel = threading.Event()
        async with Compute() as compute:
            start: Any = compute.run_aside if aside else compute.run
            running = asyncio.ensure_future(start(kernel.wait, 30.0))
            await asyncio.sleep(0.05)
            await compute.calls.free(0.0)  # somebody still wants it
            running.cancel()
            compute.calls.let_go()
            waiting = asyncio.create_task(compute.calls.free(30.0))
            await asyncio.sleep(0.15)
            assert not waiting.done()
            kernel.set()
            await waiting
            kernel.clear()
            running = asyncio.ensure_future(start(kernel.wait, 30.0))
            await asyncio.sleep(0.05)
            for _ in range(2):  # of later work; it counts since the first
                compute.calls.let_go()
                await asyncio.sleep(0.1)
            with pytest.raises(MeshceeError, match=r"has not come back .*; start this peer again$"):
                await compute.calls.free(0.15)
            kernel.set()
            await running
            assert await compute.calls.until_broken() == compute.calls.broken
            with pytest.raises(MeshceeError, match="start this peer again"):  # also when it has come back
                await compute.calls.free(30.0)


async def test_a_gpu_that_answers_nothing_any_more_is_told_from_one_that_refuses_a_call() -> None:
    asserted = RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be ...")
    illegal = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors ...")
    broken: list[Exception] = []

    def synchronize() -> None:
        if broken:
            raise broken[0]

    def fails(error: Exception, breaks: bool = True) -> None:
        broken.extend([error] * breaks)
        raise error

    async with Compute() as compute:
        compute.staging = SimpleNamespace(mark=lambda: SimpleNamespace(synchronize=synchronize))  # type: ignore[assignment]
        for error in (RuntimeError("shapes differ"), torch.OutOfMemoryError("CUDA out of memory")):
            with pytest.raises(type(error), match=str(error)):
                await compute.run(fails, error, False)
        await compute.calls.free(0.0)
    says = {
        asserted: "^CUDA error: device-side assert triggered; an index is out of range .*; look at the data$",
        illegal: "^CUDA error: an illegal .*; the device is broken$",
    }
    for error, told in says.items():
        for start in (Compute.run, Compute.run_aside):
            broken.clear()
            async with Compute(restarts=True) as compute:
                compute.staging = SimpleNamespace(mark=lambda: SimpleNamespace(synchronize=synchronize))  # type: ignore[assignment]
                with pytest.raises(MeshceeError, match=told):
                    await start(compute, fails, error)  # type: ignore[operator]
                with pytest.raises(PeerLostError, match=r"device is broken \(CUDA .*; its process starts again$"):
                    await compute.calls.free(0.0)
            broken.clear()
        async with Compute() as compute:
            compute.staging = SimpleNamespace(mark=lambda: SimpleNamespace(synchronize=synchronize))  # type: ignore[assignment]
            with pytest.raises(MeshceeError, match=told):  # a call only starts kernels
                await compute.run(broken.append, error)
