"""A block that changes hands is trained once its weights are there; its moments come behind the first step's micro-batches."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from meshcee.capture import Capture, capture
from meshcee.config import Limits, Timeouts
from meshcee.eager import plain
from meshcee.errors import PeerLostError
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.plan import Plan
from meshcee.stage.runner import StageRunner
from peers.owner.epoch import Owner, Report
from peers.owner.feed import Feed
from peers.state.fetch import Fetch, Reader
from peers.state.keeping import Supplies
from peers.state.manifest import CopySet, Manifest
from peers.state.policy import Cadence, Keepers, near_keepers
from peers.state.restoring import Lender
from peers.transport.base import Transport
from peers.transport.memory import Impairment, MemoryNetwork
from peers.wire import messages
from peers.wire.offer import Offer
from peers.wire.weights import digest_of
from tests.rig.frames import watched_frames
from tests.rig.mesh_fixture import even_plan, members
from tests.rig.virtual_time import virtual_time

WIDTH, MICRO, MICROS, STEPS, OVER = 64, 2, 2, 16, 3
FIRST_STEP = (messages.F, "p1", "p2"), (messages.B, "p2", "p1")
SLOW = Impairment(latency_s=0.01, bandwidth_bytes_per_s=20e3)  # of which a layer's moments take more than a second


@functools.cache
def job_of() -> Job:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]
    generator = torch.Generator().manual_seed(1)
    return Job(
        model=nn.Sequential(*layers),
        loss=nn.functional.mse_loss,
        data=[(torch.randn(WIDTH, generator=generator), torch.randn(WIDTH, generator=generator)) for _ in range(16)],
        optimizer=Optimizer("AdamW", lr=1e-2),
        batch_size=MICRO * MICROS,
        micro_batch_size=MICRO,
        steps=STEPS,
        codec="none",
    )


@functools.cache
def captured_job() -> Capture:
    return capture(job_of())


def plan_of(*peers: str) -> Plan:
    return even_plan(captured_job().train.num_blocks, len(peers), MICRO * MICROS, MICRO, peers=peers)


@dataclass
class Epochs:
    """Of one job on members p0, p1 and p2: what each has told, and what its members did, in order."""

    network: MemoryNetwork
    transport: Transport
    copies: Manifest = field(default_factory=Manifest)
    losses: list[dict[int, float]] = field(default_factory=list)
    events: list[tuple[str, ...]] = field(default_factory=list)
    about_to_send: Callable[[str, str, str], None] = lambda sender, receiver, kind: None

    async def run(self, plan: Plan, gone: str = "", until: int = STEPS) -> Mapping[str, torch.Tensor]:
        """From the newest copies on; hands over once a step is done, if there are more."""
        base = self.copies.newest(STEPS, [gone])
        start = base.next_step if base is not None else 0
        found: dict[int, float] = {}
        self.losses.append(found)
        self.events.clear()

        async def hear(report: Report) -> None:
            found[report.step] = report.loss
            if report.step == until:
                owner.stop(hand_over=True)

        near = near_keepers(plan, {}) if base is None else {}
        kept = Supplies(base, holders=frozenset(plan.peers), copies=self.copies, keepers=Keepers(near, {}))
        order = (1, "p0"), (1, len(self.losses))
        owner = Owner(
            job_of(),
            captured_job(),
            plan,
            *order,
            self.transport,
            addresses={},
            names={},
            timeouts=Timeouts(),
            limits=Limits(),
            kept=kept,
        )
        return await owner.train(Feed(job_of(), captured_job(), MICRO, start), hear)

    async def hand_over(self) -> CopySet:
        """An epoch on all three that ends before the job does."""
        await self.run(plan_of("p0", "p1", "p2"), until=OVER)
        found = self.copies.newest(STEPS)
        assert found is not None
        assert found.handed
        return found

    def assert_undisturbed(self, state: Mapping[str, torch.Tensor]) -> None:
        losses, _, model, _ = plain(job_of(), STEPS, MICRO)
        for told in self.losses:
            assert told == {step: losses[step] for step in told}
        assert set().union(*self.losses) == set(range(STEPS))
        for name, tensor in model.state_dict().items():
            assert torch.equal(state[name], tensor), name


@asynccontextmanager
async def epochs(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Epochs]:
    monkeypatch.setattr(Cadence, "is_due", lambda *args: True)
    network = MemoryNetwork()
    async with members(network, 3, Limits()), network.transport("owner") as transport:
        here = Epochs(network, transport)
        load, apply = StageRunner.load_optimizer_state, StageRunner.apply

        def note(what: str, call: Any, runner: StageRunner, *args: Any) -> None:
            here.events.append((what, str(runner.index)))
            call(runner, *args)

        def sent(sender: str, receiver: str, kind: str) -> None:
            here.events.append((kind, sender, receiver))
            here.about_to_send(sender, receiver, kind)

        monkeypatch.setattr(
            StageRunner, "load_optimizer_state", lambda runner, *args: note("load", load, runner, *args)
        )
        monkeypatch.setattr(StageRunner, "apply", lambda runner, *args: note("apply", apply, runner, *args))
        with watched_frames(sent):
            yield here


@virtual_time
async def test_the_first_step_begins_before_the_moments_of_a_moved_block_have_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with epochs(monkeypatch) as here:
        await here.hand_over()

        def sag(sender: str, receiver: str, kind: str) -> None:
            if (sender, kind) == ("p1", messages.READY):
                here.network.impair("p0", "p1", SLOW)

        here.about_to_send = sag
        state = await here.run(plan_of("p1", "p2"))
        loaded = here.events.index(("load", "0"))
        parts = [i for i, event in enumerate(here.events) if event == (messages.PART, "p0", "p1")]
        first, last = [[i for i, e in enumerate(here.events) if e == way][:MICROS] for way in FIRST_STEP]
        ready = here.events.index((messages.READY, "p1", "owner"))
        assert parts[0] < ready < first[0] < last[-1] < parts[-1] < loaded < here.events.index(("apply", "0"))
        here.assert_undisturbed(state)


@virtual_time
async def test_a_source_that_dies_behind_the_parameters_costs_the_steps_since_the_last_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with epochs(monkeypatch) as here:
        handed = await here.hand_over()

        def kill(sender: str, receiver: str, kind: str) -> None:
            if (sender, kind) == ("p1", messages.READY):
                here.network.impair("p0", "p1", SLOW)
            elif (kind, sender, receiver) == FIRST_STEP[1]:
                here.network.kill("p0")

        here.about_to_send = kill
        with pytest.raises(PeerLostError, match=f"not all of the state after {handed.next_step} steps has reached"):
            await here.run(plan_of("p1", "p2"))
        assert FIRST_STEP[1] in here.events
        assert ("apply", "0") not in here.events
        assert here.losses[-1] == {}
        found = here.copies.newest(STEPS, ["p0"])
        assert found is not None
        assert not found.handed
        assert 0 < found.next_step < handed.next_step
        here.assert_undisturbed(await here.run(plan_of("p1", "p2"), gone="p0"))


@virtual_time
async def test_moments_of_other_bits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with epochs(monkeypatch) as here:
        handed = await here.hand_over()
        moments = {digest for stage in handed.stages for digest in stage.optimizer.values()}
        find = Lender._find

        def other(remains: Lender, header: Mapping[str, Any], digest: str) -> torch.Tensor | None:
            found = find(remains, header, digest)
            return found if found is None or digest not in moments else found + 1

        with (
            mock.patch.object(Lender, "_find", other),
            pytest.raises(PeerLostError, match="not all of the state after"),
        ):
            await here.run(plan_of("p1", "p2"))
        assert ("apply", "0") not in here.events
        assert here.losses[-1] == {}
        assert handed.missed == 1
        here.assert_undisturbed(await here.run(plan_of("p1", "p2")))
        assert here.copies.newest(STEPS) is handed


@virtual_time
async def test_what_is_left_of_an_epoch_is_not_forgotten_while_somebody_reads() -> None:
    network, times = MemoryNetwork(), Timeouts()
    async with network.transport("p0") as source, network.transport("p1") as reader:
        network.impair("p0", "p1", Impairment(bandwidth_bytes_per_s=5e3))
        remains, tensor = Lender(source, times), torch.randn(100_000)
        digest = digest_of(tensor)
        remains.of = "run"
        remains.copies.keep("p2", 3, {"weight": digest}, {digest: tensor})
        remains.over()
        wanted = {digest: (tensor.dtype, tuple(tensor.shape))}
        fetch = Fetch(wanted, Reader(reader, "run", {}, times), gently=True, urgent=True)
        began_s = asyncio.get_running_loop().time()
        await fetch.run(["p0"])
        assert fetch.missing == set()
        assert asyncio.get_running_loop().time() - began_s > times.regroup_s
        await asyncio.sleep(times.regroup_s / 2)
        assert remains.copies.find(digest) is not None, "it may read more"
        await asyncio.sleep(times.regroup_s)
        assert remains.copies.find(digest) is None


@virtual_time
async def test_who_leaves_lends_what_the_next_epoch_begins_with_until_it_has_been_read() -> None:
    network, times = MemoryNetwork(), Timeouts()
    clock, tensor = asyncio.get_running_loop().time, torch.randn(100_000)
    digest = digest_of(tensor)
    async with network.transport("p0") as source, network.transport("p1") as reader:
        lender = Lender(source, times)
        began_s = clock()
        await lender.until_read()
        assert clock() == began_s, "nothing was lent"
        offer = mock.Mock(spec=Offer, run="run", terms=times)

        lender.for_epoch(offer).goes_on = False  # its owner said that nothing goes on
        lender.over()
        await lender.until_read()
        assert clock() == began_s

        lender.for_epoch(offer)
        lender.over()
        await lender.until_read()
        assert times.leave_s / 4 < clock() - began_s < times.leave_s / 2, "nobody came"

        network.impair("p0", "p1", Impairment(bandwidth_bytes_per_s=20e3))  # 400 kB take 20 s
        lender.for_epoch(offer).keep("p2", 3, {"weight": digest}, {digest: tensor})
        lender.over()
        wanted = {digest: (tensor.dtype, tuple(tensor.shape))}
        fetch = Fetch(wanted, Reader(reader, "run", {}, times), gently=True, urgent=True)
        began_s = clock()
        async with asyncio.TaskGroup() as group:
            group.create_task(fetch.run(["p0"]))
            await lender.until_read()
        assert fetch.missing == set()
        assert clock() - began_s > times.leave_s / 2
