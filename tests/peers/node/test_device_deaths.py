"""A device's process ends by a signal in the middle of a run, as by an instruction that its processor lacks: that peer is lost."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.one_seed import decided_by
from benchmarks.virtual_chaos import TIMES, captured_job, expected, job_of, now
from meshcee.config import Limits
from meshcee.errors import MeshceeError
from meshcee.files.home import Home
from peers.device.graphs import Graphs
from peers.member.executor import Executor
from peers.node.device_process import DeviceProcess, process, program
from peers.node.device_process.messages import FROM_DEVICE
from peers.node.early import JoinOptions
from peers.node.in_process import InProcess
from peers.node.mesh import Mesh
from peers.transport.bridge import TAKES, Channel, bridged, pair
from peers.transport.bridge.passing import joined
from peers.transport.memory import MemoryNetwork
from peers.transport.stream import FramedStream
from tests.rig.virtual_time import quiet, run

pytestmark = pytest.mark.usefixtures("quick_planning")  # which plan does not matter here

STRUCK = 4  # the step in which devices die


SOCKETS: ContextVar[list[socket.socket]] = ContextVar("those of the streams of this program")


class Inside:
    """As `Child`, of a program that runs in this process: it dies when it is told to, and says no last word."""

    pid, written = 0, ""

    def __init__(self) -> None:
        near, far = pair()
        self.channel = Channel(near, (*FROM_DEVICE, *TAKES))
        self.ready, self.silent_for = asyncio.Event(), 0
        self._how = "ended with status 0"
        self._sockets: list[socket.socket] = []
        token = SOCKETS.set(self._sockets)
        self._serving = asyncio.get_running_loop().create_task(program.serve(far))
        SOCKETS.reset(token)

    def had_s(self) -> float:
        return 0.0

    def kill(self, why: str = "", by: signal.Signals = signal.SIGKILL) -> None:
        self._how = (f"{why}, and " if why else "") + f"was ended by {by.name}"
        self.channel.close()
        for one in self._sockets:
            with contextlib.suppress(OSError):  # it is closed
                one.shutdown(socket.SHUT_RDWR)
        self._serving.cancel()

    async def end(self) -> str:
        self.channel.close()
        await asyncio.wait([self._serving])
        return self._how


async def joined_by_one(end: socket.socket, stream: FramedStream) -> None:
    SOCKETS.get().append(end)
    await joined(end, stream)


@asynccontextmanager
async def a_mesh(folder: Path) -> AsyncIterator[tuple[Mesh, dict[str, DeviceProcess]]]:
    """Three peers whose devices are such processes, by peer id."""
    devices: dict[str, DeviceProcess] = {}
    async with (
        AsyncExitStack() as stack,
        InProcess(JoinOptions(), MemoryNetwork(), TIMES, clock=now, monotonic=now) as here,
    ):
        for i in range(3):
            device = await stack.enter_async_context(DeviceProcess("cpu", Graphs(Limits())))
            devices[(await here.start(f"p{i}", device=device)).peer_id] = device
        yield await here.own("owner", Home(folder)), devices


def trained(
    monkeypatch: pytest.MonkeyPatch, folder: Path, deaths: int
) -> tuple[Mesh, list[str], list[tuple[str, ...]]]:
    """A run in whose step STRUCK the first stage's device dies, so many times: who died, and the members of each plan."""
    died, plans = list[str](), list[tuple[str, ...]]()
    take_actions = Executor.take_actions

    async def story() -> Mesh:
        async with a_mesh(folder) as (mesh, devices), asyncio.timeout(1800):

            async def struck(executor: Executor, round: Any) -> None:
                peer = executor.place.peer
                if round.step == STRUCK and executor.place.is_first and peer not in died and len(died) < deaths:
                    died.append(peer)
                    devices[peer].child.kill(by=signal.SIGILL)  # type: ignore[call-arg]
                    await asyncio.Event().wait()
                await take_actions(executor, round)

            monkeypatch.setattr(Executor, "take_actions", struck)
            on_plan = lambda plan, names: plans.append(plan.peers)  # noqa: E731
            async for _ in mesh.train(job_of(), captured=captured_job(), stages=3, on_plan=on_plan):
                pass
            return mesh

    monkeypatch.setattr(process, "Child", Inside)
    monkeypatch.setattr(bridged, "joined", joined_by_one)
    monkeypatch.setattr(program, "say_by", lambda post: None)
    with quiet(), decided_by(0):  # the same run each time
        return run(story(), inline=True), died, plans


@pytest.mark.slow
def test_a_device_that_dies_by_a_signal_is_the_loss_of_its_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, died, plans = trained(monkeypatch, tmp_path, 1)
    losses, state = expected()
    assert mesh.result.losses == losses
    assert all(torch.equal(mesh.result.state_dict[name], tensor) for name, tensor in state.items())
    assert len(died) == 1
    assert [set(died) <= set(plan) for plan in plans] == [True, False]


@pytest.mark.slow
def test_devices_that_die_alike_at_the_same_work_end_the_run_which_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first stage may be a step ahead of the one that the owner waits for and names.
    says = r"failed in step \d+: the process of its device was ended by SIGILL \(2 peers have failed alike"
    with pytest.raises(BaseExceptionGroup) as caught:
        trained(monkeypatch, tmp_path, 3)
    assert caught.group_contains(MeshceeError, match=says)
