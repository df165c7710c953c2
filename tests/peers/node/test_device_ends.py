"""A device's process ends by itself where it computes nothing any more, and the next one trains the next job."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshcee.config import Limits, Timeouts
from meshcee.errors import MeshceeError, PeerLostError
from meshcee.stage.runner import StageRunner
from peers.device import Compute, compute
from peers.device.graphs import Graphs
from peers.member import Member
from peers.node.device_process import DeviceProcess, confine, process, program
from peers.node.device_process.messages import Pong
from peers.transport.bridge import bridged
from peers.transport.memory import MemoryNetwork
from tests.peers.member.test_training import make_job
from tests.peers.node.test_device_deaths import Inside, joined_by_one
from tests.peers.node.test_device_process import BARE, WAIT_S, begin, begun_on
from tests.rig.mesh_fixture import Trained, agreed, train

HUNG_S = 0.5
Trains = Callable[[str], Any]
ASSERT = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"


class Gpu:
    """What `Compute` and `Coding` ask of a GPU; once it is broken it answers nothing in this process."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_broken = device, False

    def mark(self) -> SimpleNamespace:
        return SimpleNamespace(synchronize=self.synchronize)

    def synchronize(self) -> None:
        if self.is_broken:
            raise RuntimeError(ASSERT)

    def leave(self, made: Any, call: Callable[[], Any], held: Any = None) -> Any:
        return call()

    def arrive(self, call: Callable[[], Any]) -> list[Any]:
        return list(call())

    def to_host(self, flat: torch.Tensor) -> torch.Tensor:
        return flat

    to_device = to_host


@asynccontextmanager
async def lent(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[DeviceProcess, Trains]]:
    """A device of such a process, and how an owner trains a job of this name there."""
    monkeypatch.setattr(process, "Child", Inside)
    monkeypatch.setattr(bridged, "joined", joined_by_one)
    monkeypatch.setattr(program, "say_by", lambda post: None)
    network = MemoryNetwork()
    async with DeviceProcess("cpu", Graphs(Limits())) as device, network.transport("p0") as transport:
        await begin(device, transport, replace(Timeouts(), hung_s=HUNG_S, shutdown_s=HUNG_S))

        @asynccontextmanager
        async def here(_: MemoryNetwork, count: int) -> AsyncIterator[list[Any]]:
            yield [device]

        yield device, lambda name: train(make_job(name=name), 1, 6, network=network, here=here)


async def until_back(device: DeviceProcess, before: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while device.child is before or device.is_busy:
            device.busy_changed.clear()
            await device.busy_changed.wait()


async def check_the_next_one(device: DeviceProcess, before: Any, trains: Trains) -> None:
    await until_back(device, before)
    again: Trained = await trains("again")
    assert again.losses == (await train(make_job(), 1, 6)).losses


@contextmanager
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.Event]:
    """Set when a first call of a stage hangs; later ones do not. At the end it comes back."""
    hangs, comes_back, forward = asyncio.Event(), threading.Event(), StageRunner.forward
    loop = asyncio.get_running_loop()

    def hung(self: StageRunner, *args: Any) -> Any:
        if not hangs.is_set() and args[0] == 0:
            loop.call_soon_threadsafe(hangs.set)
            comes_back.wait(WAIT_S)
        return forward(self, *args)

    monkeypatch.setattr(StageRunner, "forward", hung)
    try:
        yield hangs
    finally:
        comes_back.set()


async def until_hung(training: Coroutine[Any, Any, Any], hangs: asyncio.Event) -> None:
    """Then its owner leaves."""
    first = asyncio.create_task(training)
    await hangs.wait()
    first.cancel()
    await asyncio.wait([first])


@pytest.mark.slow
async def test_a_call_that_never_comes_back_costs_the_next_owner_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    with hanging(monkeypatch) as hangs:
        async with lent(monkeypatch) as (device, trains):
            child = device.child
            await until_hung(trains("first"), hangs)
            async with asyncio.timeout(WAIT_S):
                await device.wait_until_unneeded()
            assert device.child is child, "copies for a regroup lie there"
            with pytest.raises(PeerLostError, match=r"has not come back .*; its process starts again"):
                await trains("second")
            await check_the_next_one(device, child, trains)


async def test_a_peer_whose_own_process_has_such_a_call_is_busy_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times, network = replace(Timeouts(), hung_s=HUNG_S, shutdown_s=HUNG_S), MemoryNetwork()
    with hanging(monkeypatch) as hangs:
        async with Compute() as own, network.transport("p0") as transport:
            lends = {"memory_bytes": 1 << 30, "timeouts": times, "graphs": Graphs(Limits()), "accept": agreed}
            member = Member(transport, own, **lends)  # type: ignore[arg-type]

            @asynccontextmanager
            async def here(_: MemoryNetwork, count: int) -> AsyncIterator[list[Any]]:
                yield [member]

            await until_hung(train(make_job(name="first"), 1, 6, network=network, here=here), hangs)
            async with asyncio.timeout(WAIT_S):
                await member.wait_until_idle()
            assert not member.is_busy, "copies for a regroup lie there"
            with pytest.raises(MeshceeError, match=r"peer p0 .*has not come back .*; start this peer again") as refused:
                await train(make_job(name="second"), 1, 6, network=network, here=here)
            assert not isinstance(refused.value, PeerLostError), "its run would try it again and again"
            assert member.is_busy


@pytest.mark.slow
async def test_a_gpu_that_a_label_has_broken_is_another_processes_for_the_next_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus, forward = list[Gpu](), StageRunner.forward

    def staging_of(device: torch.device) -> Gpu:
        gpus.append(Gpu(device))
        return gpus[-1]

    def breaks(self: StageRunner, *args: Any) -> Any:
        gpus[-1].is_broken = len(gpus) == 1
        return forward(self, *args)

    monkeypatch.setattr(compute, "staging_of", staging_of)
    monkeypatch.setattr(StageRunner, "forward", breaks)
    async with lent(monkeypatch) as (device, trains):
        child = device.child
        with pytest.raises(MeshceeError, match=r"device-side assert triggered; an index is out of range on a GPU"):
            await trains("first")
        await check_the_next_one(device, child, trains)


@pytest.mark.parametrize(("said", "fraction"), [(4 << 30, (1.25 * (4 << 30) + (512 << 20)) / (80 << 30)), (None, None)])
def test_torch_takes_no_more_of_a_gpu_than_is_lent(
    monkeypatch: pytest.MonkeyPatch, said: int | None, fraction: float | None
) -> None:
    asked: list[tuple[float, str]] = []
    monkeypatch.setattr(confine, "POSSIBLE", {})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: asked.append(given))
    begun = replace(begun_on("cuda:0"), memory_bytes=said)
    found = confine.confine_fully(begun, BARE, said or 70 << 30)
    assert asked == ([] if fraction is None else [(fraction, "cuda:0")])
    assert found.got == (() if fraction is None else ("GPU memory",))
    confine.limit_card("cuda:0", 100 << 30)
    assert asked[-1] == (1.0, "cuda:0")


@pytest.mark.slow
async def test_the_last_line_of_a_process_says_why_it_has_ended() -> None:
    """The peer's log has that line. Of an error inside of task groups it was the foot of a frame."""
    async with MemoryNetwork().transport("p0") as transport, DeviceProcess("cpu", Graphs(Limits())) as device:
        await begin(device, transport)
        child = device.child
        child.channel.post(Pong())
        assert await asyncio.wait_for(child.end(), WAIT_S) == "ended with status 1"
    assert "Pong" in child.written
