"""A member that answers and does not get on is told from one that waits, and left out; nobody is blamed for a slow owner."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import virtual_chaos
from meshcee.config import Timeouts
from meshcee.errors import PeerLostError, ProtocolError
from meshcee.plan import Predicted
from peers.device.compute import Pace
from peers.member.settlement import Settlement
from peers.owner.epoch import Owner, Report
from peers.wire.progress import FIRST_STEPS, HUNG_STEPS, OWNER, RECENT, Doing, Watch
from tests.peers.member.test_training import make_job
from tests.rig.mesh_fixture import even_plan, train
from tests.rig.virtual_time import quiet, run, virtual_time

TIMES = Timeouts()


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_hung_device_is_found_and_left_out(tmp_path: Path, stage: int) -> None:
    """Its peer answers, takes the next offer and becomes ready: until it is left out, all of that again and again."""
    plans: list[set[str]] = []
    hung: list[str] = []
    told_s: list[float] = []

    async def story() -> str:
        async with virtual_chaos.stormy(0, tmp_path) as storm:

            def hear(report: Report) -> None:
                told_s.append(virtual_chaos.now())
                if report.step == 3:
                    hung.append(storm.members()[stage])
                    compute = storm.here.agents[hung[0]].compute
                    assert compute is not None
                    compute.pace = Pace(1e-9)

            async with asyncio.timeout(virtual_chaos.ENDS_WITHIN_S):
                return await virtual_chaos.train(
                    storm,
                    hear,
                    on_plan=lambda plan, names: plans.append({names[peer] for peer in plan.peers}),
                )

    with quiet(), virtual_chaos.quick_planning():
        assert run(story()) == "equal"
    assert len(plans) == 2
    assert hung[0] in plans[0]
    assert hung[0] not in plans[1]
    gaps_s = sorted(b - a for a, b in pairwise(told_s))
    assert gaps_s[-1] < HUNG_STEPS * gaps_s[-2] + TIMES.hung_s + 5 * TIMES.beat_s


@pytest.mark.slow
@virtual_time
async def test_a_member_that_waits_for_nobody_and_does_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: Settlement, round: object) -> None:
        if self.place.index == 1:
            await asyncio.Event().wait()

    monkeypatch.setattr(Settlement, "exchange_totals", never)
    with pytest.raises(PeerLostError, match=r"p1.*stage 1.* has not got on with step 1 for 60\d s: it has all that"):
        await train(make_job(), 3, 6)


@pytest.mark.slow
@virtual_time
async def test_nobody_is_blamed_for_samples_that_are_long_in_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    in_users_thread, waited = Owner.in_users_thread, list[bool]()

    async def slow(self: Owner, call: Any, *args: Any) -> Any:
        if any(getattr(arg, "step", None) == 2 for arg in args) and not waited:
            waited.append(True)
            await asyncio.sleep(20 * TIMES.idle_step_s)
        return await in_users_thread(self, call, *args)

    monkeypatch.setattr(Owner, "in_users_thread", slow)
    trained = await train(make_job(), 3, 6)
    assert waited
    monkeypatch.undo()
    assert trained.losses == (await train(make_job(), 3, 6)).losses


def watch_of(**doing: Doing) -> Watch:
    watch = Watch(even_plan(3, 3, 4, 2), TIMES, 0)
    for peer, what in doing.items():
        watch.hear(peer, what.frame().header)
    return watch


def test_who_computes_owes_before_who_waits() -> None:
    waits = Doing(5, False, 0, ("b",))
    assert watch_of(a=waits, b=Doing(9, True, 0, ("a",)), c=Doing(1, False, 0, ())).stuck() == ["b"]
    assert watch_of(a=waits, b=Doing(9, False, 0, ()), c=Doing(1, False, 0, ("b",))).stuck() == ["b"]
    lost = watch_of(a=waits, b=Doing(9, False, 0, ("a",)), c=Doing(1, False, 0, ("b",)))
    assert lost.stuck() == []
    assert lost.parted() == [("a", "b"), ("b", "a")]
    assert watch_of(a=Doing(5, False, 0, (OWNER,)), b=Doing(5, False, 0, ("a",))).parted() == []


def test_the_limit_follows_from_how_long_steps_take() -> None:
    watch = Watch(even_plan(3, 3, 4, 2), TIMES, 0)
    assert watch.limit_s == TIMES.idle_step_s
    watch.stepped(0.1)
    assert watch.limit_s == TIMES.hung_s
    watch.stepped(60.0)
    watch.stepped(1.0)
    assert watch.limit_s == 60.0 * HUNG_STEPS
    for _ in range(RECENT):
        watch.stepped(0.1)
    assert watch.limit_s == TIMES.hung_s, "a step that a pause made long does not count for ever"
    assert Watch(even_plan(3, 3, 4, 2), TIMES, 10**11).limit_s == TIMES.idle_step_s + 2000
    told = replace(even_plan(3, 3, 4, 2), predicted=Predicted(0.1, 40.0, 0.1))
    assert Watch(told, TIMES, 0).limit_s == FIRST_STEPS * TIMES.hung_s
    slow = replace(even_plan(3, 3, 4, 2), predicted=Predicted(60.0, 0.1, 0.1))
    assert Watch(slow, TIMES, 0).limit_s == 60.0 * HUNG_STEPS, (
        "a prediction that is far off does not make it four times as long"
    )


@virtual_time
async def test_progress_is_a_call_that_ends_or_bytes_that_arrive_and_no_sign_of_life() -> None:
    moved = 0
    watch = Watch(even_plan(3, 3, 4, 2), TIMES, 0, lambda: moved)
    event = asyncio.Event()
    waiting = asyncio.create_task(watch.until(event))
    waits = Doing(0, False, 0, ("b",))
    for k in range(8):
        watch.hear("a", Doing(k, False, 0, ("b",)).frame().header)
        await asyncio.sleep(0.4 * TIMES.idle_step_s)
        watch.hear("a", Doing(k, False, 100 * k + 1, ("b",)).frame().header)
        await asyncio.sleep(0.4 * TIMES.idle_step_s)
        moved += 1
        await asyncio.sleep(0.4 * TIMES.idle_step_s)
    assert not waiting.done()
    began_s = asyncio.get_running_loop().time()
    ticks = 0
    while not waiting.done():
        watch.hear("b", waits.frame().header)
        await asyncio.sleep(TIMES.beat_s)
        ticks += 1
        assert ticks < 1000
    assert not await waiting
    assert asyncio.get_running_loop().time() - began_s <= TIMES.idle_step_s + 3 * TIMES.beat_s


@virtual_time
async def test_nobody_is_late_while_the_owner_works_on_an_answer() -> None:
    watch, event = watch_of(a=Doing(5, True, 0, ()), b=Doing(5, False, 0, (OWNER,))), asyncio.Event()
    waiting = asyncio.create_task(watch.until(event))
    with watch.ours():
        await asyncio.sleep(5 * TIMES.idle_step_s)
        assert not waiting.done()
    await asyncio.sleep(0.5 * TIMES.idle_step_s)
    assert not waiting.done(), "its next word has its own time"
    await asyncio.sleep(TIMES.idle_step_s)
    assert not await waiting


def test_what_a_member_says_it_does_is_checked() -> None:
    with pytest.raises(ProtocolError):
        Doing.from_header({"done": 1, "busy": True, "moved": 1, "wants": [3]})
    doing = Doing(1, True, 2, ("a",))
    assert Doing.from_header(doing.frame().header) == doing
