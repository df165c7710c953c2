"""What breaks inside a step: all leave the epoch in time, nobody has applied the step, and the next epoch computes it again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import virtual_chaos
from peers.device.compute import Pace
from peers.transport.memory import Impairment
from tests.rig.faults import (
    ALONE,
    HOW,
    LEFT_WITHIN_S,
    MICRO,
    SHARED,
    STRUCK,
    TIMES,
    Fault,
    Told,
    assert_done_again,
    captured_job,
    job_of,
    plan_of,
    trained,
    undisturbed,
    world,
)
from tests.rig.frames import watched_frames
from tests.rig.mesh_fixture import even_plan
from tests.rig.virtual_time import quiet, run


@pytest.mark.cases(3)
@pytest.mark.parametrize("how", HOW)
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


@pytest.mark.slow
def test_a_device_that_computes_for_longer_than_silence_may_last_is_slow_and_not_dead(tmp_path: Path) -> None:
    activations = virtual_chaos.Activations()
    told_s: list[float] = []

    async def story() -> str:
        async with virtual_chaos.stormy(0, tmp_path) as storm:
            slow = await storm.here.start("slow", pace=Pace(virtual_chaos.PACE.speed_flops_per_s / 400))
            peers = [storm.here.agents["p0"].peer_id, slow.peer_id, storm.here.agents["p1"].peer_id]
            plan = even_plan(virtual_chaos.captured_job().train.num_blocks, 3, 8, virtual_chaos.MICRO, peers=peers)
            return await virtual_chaos.train(storm, lambda report: told_s.append(virtual_chaos.now()), plan=plan)

    with quiet(), virtual_chaos.quick_planning(), activations.watched():
        assert run(story()) == "equal"
    assert min(b - a for a, b in pairwise(told_s)) > 3 * virtual_chaos.TIMES.silent_s
    assert len(activations.plans) == 1
