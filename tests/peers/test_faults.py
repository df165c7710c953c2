"""What breaks inside a step: all leave the epoch in time, nobody has applied the step, and the next epoch computes it again.

The idea: a fault strikes just before one frame of one step, named by its kind, sender and receiver, on virtual time: a link is
cut, its sender is killed, or the link delivers nothing any more and no error either. Then a second epoch begins with the newest
checkpoint; what it and the first have told, and its weights, are those of a run that nothing befell.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks.virtual_chaos import watched_frames
from meshcee.capture import Capture, capture
from meshcee.config import Limits, Timeouts
from meshcee.errors import PeerLostError
from meshcee.job import Job, Optimizer
from meshcee.plan import Plan
from peers.checkpoint import CheckpointStore
from peers.compute import Compute
from peers.failures import GRACE_S
from peers.feed import Feed
from peers.member import Member
from peers.owner import Owner, Report
from peers.snapshots import Cadence, Kept
from peers.stage import StageRunner
from peers.transport.memory import Impairment, MemoryNetwork
from tests.peers.mesh_fixture import even_plan, grouped
from tests.virtual_time import quiet, run

MICRO, MICROS, STEPS, STRUCK = 4, 2, 4, 2  # samples, micro-batches a step, steps, the step that the fault strikes in
TIMES, LIMITS = Timeouts(), Limits()
PROC = Path("/proc/self")
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
def captured_job() -> Capture:
    return capture(job_of())


def plan_of(*shares: tuple[int, ...]) -> Plan:
    """Stages on groups of these shares of a micro-batch, members named p0, p1, ... in order."""
    blocks = captured_job().train.num_blocks
    return grouped(even_plan(blocks, len(shares), MICRO * MICROS, MICRO), shares)


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
        self.told = Told()
        self._stack, self._epochs = stack, 0
        self._store = CheckpointStore.of(folder, job, captured_job(), MICRO)

    async def start(self, name: str) -> None:
        """A new process under this name."""
        transport = await self._stack.enter_async_context(self.network.transport(name))
        compute = await self._stack.enter_async_context(Compute())
        self.members[name] = Member(
            transport, compute, memory_bytes=1 << 30, timeouts=TIMES, limits=LIMITS, accept=lambda owner, term: None
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

        epoch = Owner(
            self.job,
            captured_job(),
            self.plan,
            (1, "p0"),
            (1, self._epochs),
            owner,
            addresses={},
            names={},
            timeouts=TIMES,
            limits=LIMITS,
            kept=Kept(base, self._store, Cadence(1), start),
        )
        self.told.state = dict(await epoch.train(Feed(self.job, captured_job(), MICRO, start), hear))

    async def idle(self) -> None:
        for member in self.members.values():
            await member.wait_until_idle()


@asynccontextmanager
async def world(job: Job, plan: Plan, folder: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        found = World(stack, MemoryNetwork(), job, plan, folder)
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
            why = rf"in step ({fault.step - 1}|{fault.step}), before it was applied"
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def of(shares: tuple[tuple[int, ...], ...], clip_norm: float | None, direct_sums: bool = False) -> Told:
        return run(trained(job_of(clip_norm, direct_sums), plan_of(*shares), tmp_path_factory.mktemp("run")))

    return of


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


HOW = pytest.mark.parametrize("how", ["cut", "kill", "stall"])


@HOW
@pytest.mark.parametrize(
    ("shares", "clip_norm", "kind", "sender", "receiver"),
    [
        (ALONE, 0.5, "f", "p0", "p1"),
        (ALONE, 0.5, "b", "p1", "p0"),
        (ALONE, None, "shared", "p2", "p0"),  # what both stages of a tied weight add up
        (ALONE, 0.5, "norms", "p1", "p0"),  # after the last B, before the commit
        (ALONE, 0.5, "commit", "p0", "p1"),
        (ALONE, None, "commit", "p1", "p2"),
        (SHARED, 0.5, "f", "p1", "p2"),
        (SHARED, 0.5, "part", "p0", "p1"),
        (SHARED, None, "sum", "p1", "p0"),
        (SHARED, 0.5, "norms", "p1", "p0"),
    ],
)
def test_a_fault_inside_a_step(
    undisturbed: Any,
    tmp_path: Path,
    shares: Any,
    clip_norm: float | None,
    kind: str,
    sender: str,
    receiver: str,
    how: str,
) -> None:
    job, fault = job_of(clip_norm), Fault(how, kind, sender, receiver)
    with quiet():
        told = run(trained(job, plan_of(*shares), tmp_path, fault))
    assert told.left_s <= LEFT_WITHIN_S[how]
    # Who sends the commit has it: the step is safe then, and no longer aborted; whoever has not heard of it has not applied it.
    assert told.applied.count(STRUCK) <= ({"p0": 1, "p1": 2}[sender] if kind == "commit" else 0)
    assert_done_again(told, undisturbed(shares, clip_norm), STRUCK)


# -- sums through process groups ---------------------------------------------------------------------------------------


def open_sockets() -> int:
    if not PROC.exists():
        return 0
    return sum(is_socket(fd) for fd in os.listdir(PROC / "fd"))


def is_socket(fd: str) -> bool:
    try:
        return os.readlink(PROC / "fd" / fd).startswith("socket:")
    except FileNotFoundError:  # that of the listing itself
        return False


def threads() -> int:
    """Of Python and of torch, whose own have no Python object."""
    return len(os.listdir(PROC / "task"))


def falls_to(count: Callable[[], int], wanted: int) -> bool:
    """Within five seconds, of real time."""
    began_s = time.monotonic()
    while count() > wanted and time.monotonic() - began_s < 5:
        time.sleep(0.01)
    return count() <= wanted


@pytest.mark.skipif(not PROC.exists(), reason="threads and sockets are counted in /proc")
@HOW
@pytest.mark.parametrize(
    ("kind", "sender", "receiver", "step"), [("meet", "p0", "p1", 0), ("whole", "p1", "p0", STRUCK)]
)
def test_a_fault_before_a_direct_sum_leaves_no_thread_and_no_socket(
    undisturbed: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    sender: str,
    receiver: str,
    step: int,
    how: str,
) -> None:
    monkeypatch.setattr("peers.direct_sum.TIMEOUT_S", 1.0)
    job, fault = job_of(0.5, True), Fault(how, kind, sender, receiver, step)
    with quiet():
        expected = undisturbed(SHARED, 0.5, True)
        before = threads()
        told = run(trained(job, plan_of(*SHARED), tmp_path, fault))
    assert told.left_s <= LEFT_WITHIN_S[how]
    assert step not in told.applied
    assert told.sockets_close
    assert falls_to(threads, before)
    assert not torch.distributed.is_initialized()
    assert_done_again(told, expected, step)


# -- what is slow and no fault -----------------------------------------------------------------------------------------


def test_a_member_that_is_fed_slowly_is_not_taken_for_a_silent_one(tmp_path: Path) -> None:
    """The owner's questions wait behind its samples for longer than a silent member would be given; nothing else is said."""
    micros, input_bytes, input_s = 24, 130, 2.0
    of = job_of()
    data = [of.data[i % len(of.data)] for i in range(MICRO * micros)]
    job = replace(of, data=data, batch_size=len(data), steps=1)
    plan = even_plan(captured_job().train.num_blocks, 2, len(data), MICRO)

    async def fed() -> tuple[Told, float]:
        async with world(job, plan, tmp_path) as here, here.network.transport("owner") as owner:

            def about_to_send(sender: str, receiver: str, kind: str) -> None:
                if (sender, receiver, kind) == ("owner", "p0", "step"):
                    here.network.impair("owner", "p0", Impairment(bandwidth_bytes_per_s=input_bytes / input_s))

            with watched_frames(about_to_send):
                began_s = asyncio.get_running_loop().time()
                await here.epoch(owner)
            return here.told, asyncio.get_running_loop().time() - began_s

    with quiet():
        told, took_s = run(fed())
    assert took_s > 2 * TIMES.silent_s
    assert sorted(told.losses[0]) == [0]
