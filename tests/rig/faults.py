"""A run that something befalls inside a step, and one that nothing befalls: what tests of faults share.

The idea: a fault strikes just before one frame of one step, named by its kind, sender and receiver, on virtual time: a link is
cut, its sender is killed, or the link delivers nothing any more and no error either. Then a second epoch begins with the newest
checkpoint; what it and the first have told, and its weights, must be those of the other run.
"""

from __future__ import annotations

import asyncio
import functools
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from meshcee.capture import Capture, capture
from meshcee.config import Limits, Timeouts
from meshcee.errors import PeerLostError
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.plan import Plan
from meshcee.stage.runner import StageRunner
from peers.device.compute import Compute
from peers.device.graphs import Graphs
from peers.member.service import Member
from peers.owner.epoch import Owner, Report
from peers.owner.evaluation import EvaluationFeed
from peers.owner.feed import Feed
from peers.state.checkpoint import CheckpointStore
from peers.state.keeping import Supplies
from peers.state.policy import Cadence
from peers.transport.memory import Impairment, MemoryNetwork
from peers.wire.failures import GRACE_S
from tests.rig.frames import watched_frames
from tests.rig.mesh_fixture import agreed, beside, even_plan, grouped
from tests.rig.virtual_time import run

MICRO, MICROS, STEPS, STRUCK = 4, 2, 4, 2  # samples, micro-batches a step, steps, the step that the fault strikes in
TIMES, LIMITS = Timeouts(), Limits()
PROC = Path("/proc/self")
HOW = ("cut", "kill", "stall")
NOTHING_COMES = Impairment(latency_s=1e6)
GIVEN_UP_S = 3600.0
LEFT_WITHIN_S = {"cut": GRACE_S, "kill": GRACE_S, "stall": TIMES.silent_s + TIMES.beat_s + GRACE_S}
PER_STEP = {"f": MICROS, "b": MICROS, "shared": MICROS}  # frames of a kind over one link; of others one


class Net(nn.Module):
    """Dropout, and a weight that the first stage and the last share: whatever is lost or done twice changes a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(7, 8), nn.Linear(8, 8), nn.Linear(8, 7, bias=False)
        self.drop = nn.Dropout(0.1)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.tanh(self.middle(self.embed(x)))))


@functools.cache
def job_of(clip_norm: float | None = 0.5, direct_sums: bool = False) -> Job:
    torch.manual_seed(0)
    return Job(
        model=Net().double(),
        loss=nn.functional.cross_entropy,
        data=[(i % 7, (i + 1) % 7) for i in range(40)],
        optimizer=Optimizer("AdamW", lr=1e-2),
        batch_size=MICRO * MICROS,
        micro_batch_size=MICRO,
        steps=STEPS,
        seed=3,
        clip_norm=clip_norm,
        checkpoint_every=1,
        direct_sums=direct_sums,
    )


@functools.cache
def captured_job(evaluates: bool = False) -> Capture:
    return capture(job_of(), evaluate=evaluates)


def plan_of(*shares: tuple[int, ...]) -> Plan:
    """Stages on groups of these shares of a micro-batch, members named p0, p1, ... in order."""
    blocks = captured_job().train.num_blocks
    return grouped(even_plan(blocks, len(shares), MICRO * MICROS, MICRO), shares)


def beside_plan() -> Plan:
    """Two pipelines of two stages, cut differently: p0 p1 and p2 p3, with a micro-batch of every step each."""
    each = (MICRO,)
    blocks = captured_job().train.num_blocks
    return beside(plan_of(each), (1, [(1, each), (blocks, each)]), (1, [(blocks - 1, each), (blocks, each)]))


ALONE = ((MICRO,), (MICRO,), (MICRO,))
SHARED = ((1, 3), (MICRO,))


@dataclass
class Fault:
    """Of a link, or of its sender, just before a frame in a step of the first epoch."""

    how: str
    kind: str
    sender: str
    receiver: str
    step: int = STRUCK
    struck_s: float | None = None
    _seen: int = 0

    def about_to_send(self, network: MemoryNetwork, sender: str, receiver: str, kind: str) -> None:
        if (kind, sender, receiver) != (self.kind, self.sender, self.receiver) or self.struck_s is not None:
            return
        self._seen += 1
        if self._seen <= self.step * PER_STEP.get(kind, 1):
            return
        self.struck_s = asyncio.get_running_loop().time()
        if self.how == "cut":
            network.cut(sender, receiver)
        elif self.how == "kill":
            network.kill(sender)
        else:
            self._set(network, NOTHING_COMES)

    def mend(self, network: MemoryNetwork) -> None:
        network.heal()
        self._set(network, Impairment())

    def _set(self, network: MemoryNetwork, how: Impairment) -> None:
        network.impair(self.sender, self.receiver, how)
        network.impair(self.receiver, self.sender, how)


@dataclass
class Told:
    """`losses` are by step and epoch; `applied` has a step of the first epoch for each member that applied it."""

    losses: list[dict[int, float]] = field(default_factory=list)
    applied: list[int] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    left_s: float = 0.0  # from the fault until owner and members had left the epoch
    sockets_close: bool = False  # all that the epoch had opened, soon


class World:
    """Members of one plan and their owner on an in-process network."""

    def __init__(self, stack: AsyncExitStack, network: MemoryNetwork, job: Job, plan: Plan, folder: Path) -> None:
        self.network, self.plan, self.job = network, plan, job
        self.members: dict[str, Member] = {}
        self.computes: dict[str, Compute] = {}
        self.told = Told()
        self._stack, self._epochs = stack, 0
        self._captured = captured_job(job.eval_data is not None)
        self._store = CheckpointStore.of(folder, job, self._captured, MICRO)

    async def start(self, name: str) -> None:
        """A new process under this name."""
        transport = await self._stack.enter_async_context(self.network.transport(name))
        self.computes[name] = compute = await self._stack.enter_async_context(Compute())
        self.members[name] = Member(
            transport,
            compute,
            memory_bytes=1 << 30,
            timeouts=TIMES,
            graphs=Graphs(LIMITS),
            accept=agreed,
        )

    async def epoch(self, owner: Any) -> None:
        """From the newest checkpoint to the end of the job, or to a failure."""
        self._epochs += 1
        found: dict[int, float] = {}
        self.told.losses.append(found)
        newest = self._store.complete()[:1]
        base = newest[0] if newest else None
        start = base.next_step if base is not None else 0

        async def hear(report: Report) -> None:
            found[report.step] = report.loss

        epoch = self._owner(owner, Supplies(base, self._store, Cadence(1), start))
        self.told.state = dict(await epoch.train(Feed(self.job, self._captured, MICRO, start), hear))

    async def evaluate(self, owner: Any) -> dict[str, float]:
        """The metrics of the first weights."""
        self._epochs += 1
        return await self._owner(owner).evaluate(EvaluationFeed(self.job, self._captured, MICRO))

    def _owner(self, transport: Any, kept: Supplies | None = None) -> Owner:
        return Owner(
            self.job,
            self._captured,
            self.plan,
            (1, "p0"),
            (1, self._epochs),
            transport,
            addresses={},
            names={},
            timeouts=TIMES,
            limits=LIMITS,
            kept=kept,
        )

    async def idle(self) -> None:
        for member in self.members.values():
            await member.wait_until_idle()


@asynccontextmanager
async def world(
    job: Job,
    plan: Plan,
    folder: Path,
    link: Impairment = Impairment(),  # noqa: B008
) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        found = World(stack, MemoryNetwork(impairment=link), job, plan, folder)
        for name in plan.peers:
            await found.start(name)
        yield found


async def trained(job: Job, plan: Plan, folder: Path, fault: Fault | None = None) -> Told:
    """A run that the fault strikes, in two epochs; without one, a run in one."""
    apply, epochs = StageRunner.apply, 0
    async with world(job, plan, folder) as here, here.network.transport("owner") as owner:

        def noted(runner: StageRunner, *args: Any) -> None:
            if epochs == 1:
                here.told.applied.append(runner.step)
            apply(runner, *args)

        def about_to_send(sender: str, receiver: str, kind: str) -> None:
            if fault is not None:
                fault.about_to_send(here.network, sender, receiver, kind)

        with mock.patch.object(StageRunner, "apply", noted), watched_frames(about_to_send):
            epochs = 1
            if fault is None:
                await here.epoch(owner)
                return here.told
            sockets = open_sockets()
            why = rf"in step ({fault.step}|{fault.step + 1}), before it was applied"
            async with asyncio.timeout(GIVEN_UP_S):
                with pytest.raises(PeerLostError, match=why):
                    await here.epoch(owner)
                await here.idle()
            assert fault.struck_s is not None
            here.told.left_s = asyncio.get_running_loop().time() - fault.struck_s
            here.told.sockets_close = falls_to(open_sockets, sockets)
            fault.mend(here.network)
            if fault.how == "kill":
                await here.start(fault.sender)
            epochs = 2
            await here.epoch(owner)
        return here.told


@functools.cache
def undisturbed(shares: tuple[tuple[int, ...], ...], clip_norm: float | None, direct_sums: bool = False) -> Told:
    with tempfile.TemporaryDirectory(prefix="meshcee-run-") as folder:
        return run(trained(job_of(clip_norm, direct_sums), plan_of(*shares), Path(folder)))


def assert_done_again(told: Told, expected: Told, step: int) -> None:
    """The step that was struck counts in the second epoch only, and nothing differs from an undisturbed run."""
    first, second = told.losses
    (losses,) = expected.losses
    assert step not in first  # it counts once all have applied it
    assert step in second
    for found in (first, second):
        assert found == {step: losses[step] for step in found}
    assert sorted(first | second) == list(range(STEPS))
    assert told.state.keys() == expected.state.keys()
    for name, tensor in told.state.items():
        assert torch.equal(tensor, expected.state[name]), name


def open_sockets() -> int:
    if not PROC.exists():
        return 0
    return sum(is_socket(fd) for fd in os.listdir(PROC / "fd"))


def is_socket(fd: str) -> bool:
    try:
        return os.readlink(PROC / "fd" / fd).startswith("socket:")
    except FileNotFoundError:  # that of the listing itself
        return False


def count_threads() -> int:
    """Of Python and of torch, whose own have no Python object."""
    return len(os.listdir(PROC / "task"))


def falls_to(count: Callable[[], int], wanted: int) -> bool:
    """Within two minutes, of real time: threads of torch end when a busy machine lets them, and gloo tries to connect for five
    times its time-out, which is five seconds in the longest test."""
    began_s = time.monotonic()
    while count() > wanted and time.monotonic() - began_s < 120:
        time.sleep(0.01)
    return count() <= wanted
