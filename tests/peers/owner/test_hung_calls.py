"""A device that hangs in any call, and not only in F, B and W: whoever waits has a limit, and blames that peer. On virtual time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks import storm_job
from benchmarks.virtual_chaos import quick_planning, stormy
from meshcee.eager import plain
from meshcee.errors import PeerLostError
from meshcee.job import Job
from peers.state.fetch import Reader
from peers.state.policy import RETRY_S
from peers.transport.base import Stream, StreamClosed
from peers.transport.memory import Impairment
from tests.rig.faults import ALONE, SHARED, STEPS, STRUCK, TIMES, job_of, plan_of, world
from tests.rig.virtual_time import quiet, run

NOT_READY = r"^peer {who} \(stage \d\) was lost before the first step: it has not got on with its offer for 120 s$"
STUCK = r"^{who} \(stage \d\) has not got on with step {step} for \d+ s: it has all that it needs$"


def evaluating(job: Job) -> Job:
    """Three micro-batches, after every other step."""
    return replace(job, eval_data=job.data[:12], eval_every=STRUCK)


def name_of(call: Any) -> str:
    return str(getattr(getattr(call, "func", call), "__qualname__", ""))


class Hang:
    """One member hangs in a call of this name, after so many of them; `at` says at which steps for those that name one first."""

    def __init__(self, what: str, after: int = 0, at: int | None = None) -> None:
        self.began_s: float | None = None
        self.what, self._left, self._at = what, after, at

    def takes(self, call: Any, args: tuple[Any, ...]) -> bool:
        if self.began_s is not None or not name_of(call).endswith(self.what) or self._at not in (None, *args[:1]):
            return False
        self._left -= 1
        if self._left < 0:
            self.began_s = asyncio.get_running_loop().time()
        return self._left < 0

    def strike(self, member: Any, compute: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its device, and the threads that hash for it."""
        run, run_aside, in_thread = compute.run, compute.run_aside, asyncio.to_thread
        loop = asyncio.get_running_loop()

        async def hangs(call: Callable[..., Any], *args: Any, **more: Any) -> Any:
            if not self.takes(call, args):
                return await run(call, *args, **more)
            compute.running += 1
            try:
                await asyncio.Event().wait()
            finally:
                compute.running -= 1

        def hangs_aside(call: Callable[..., Any], *args: Any) -> Any:
            if not self.takes(call, args):
                return run_aside(call, *args)
            with mock.patch.object(loop, "run_in_executor", return_value=loop.create_future()):
                return run_aside(call, *args)

        async def hangs_beside(call: Callable[..., Any], *args: Any, **more: Any) -> Any:
            if getattr(call, "__self__", None) is member.lender.copies and self.takes(call, args):
                await asyncio.Event().wait()
            return await in_thread(call, *args, **more)

        compute.run, compute.run_aside = hangs, hangs_aside
        monkeypatch.setattr(asyncio, "to_thread", hangs_beside)


async def ended(
    folder: Path,
    who: str,
    hang: Hang,
    monkeypatch: pytest.MonkeyPatch,
    job: Job | None = None,
    link: Impairment = Impairment(),  # noqa: B008
    shares: tuple[tuple[int, ...], ...] = ALONE,
    trains: bool = True,
) -> tuple[str, float]:
    """What ends the epoch, or an evaluation by itself, and how long after its device hung."""
    async with world(job or job_of(), plan_of(*shares), folder, link) as here, here.network.transport("owner") as owner:
        hang.strike(here.members[who], here.computes[who], monkeypatch)
        async with asyncio.timeout(3600):
            with pytest.raises(PeerLostError) as lost:
                await (here.epoch(owner) if trains else here.evaluate(owner))
        assert hang.began_s is not None
        return str(lost.value), asyncio.get_running_loop().time() - hang.began_s


@pytest.mark.parametrize(
    ("who", "hang", "step", "told", "within_s"),
    [
        ("p1", Hang("Offer.build"), 1, NOT_READY, TIMES.offer_s),
        ("p1", Hang("load_optimizer_state"), 1, STUCK, TIMES.idle_step_s),  # no step has told how long one takes
        ("p2", Hang("_forward_and_back.<locals>.work", 2 * STRUCK), STRUCK + 1, STUCK, TIMES.hung_s),  # with the loss
        ("p1", Hang("norm_values", STRUCK), STRUCK + 1, STUCK, TIMES.hung_s),
        ("p0", Hang("clip", STRUCK), STRUCK + 1, STUCK, TIMES.hung_s),
        ("p1", Hang("_apply", STRUCK), STRUCK + 1, STUCK, TIMES.hung_s),
        ("p1", Hang("CopyStore.take", at=1), 2, STUCK, TIMES.hung_s),
        ("p1", Hang("CopyStore.take", at=STEPS), STEPS, STUCK, TIMES.hung_s),
        ("p1", Hang("CopyStore.digest", at=1), STEPS, STUCK, TIMES.hung_s),
        ("p1", Hang("CopyStore.digest", at=STEPS), STEPS, STUCK, TIMES.hung_s),
    ],
    ids=lambda value: value.what if isinstance(value, Hang) else "",
)
def test_who_hangs_is_blamed_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str, hang: Hang, step: int, told: str, within_s: float
) -> None:
    with quiet():
        said, after_s = run(ended(tmp_path, who, hang, monkeypatch))
    assert re.match(told.format(who=who, step=step), said), said
    assert within_s < after_s <= within_s + 3 * TIMES.beat_s


@pytest.mark.parametrize("who", ["p0", "p1", "p2"])
@pytest.mark.parametrize(("trains", "step", "within_s"), [(True, STRUCK, TIMES.hung_s), (False, 1, TIMES.idle_step_s)])
def test_who_hangs_in_an_evaluation_is_blamed_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str, trains: bool, step: int, within_s: float
) -> None:
    """Some outputs have come by then."""
    job = evaluating(job_of())
    with quiet():
        said, after_s = run(ended(tmp_path, who, Hang("Executor._evaluated", 1), monkeypatch, job, trains=trains))
    assert re.match(STUCK.format(who=who, step=step), said), said
    assert within_s < after_s <= within_s + 3 * TIMES.beat_s


@pytest.mark.slow
def test_who_hangs_in_an_evaluation_is_left_out_and_the_run_is_as_if_nothing_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang, job = Hang("Executor._evaluated", 1), evaluating(storm_job.job_of(steps=2 * STRUCK))
    expected = plain(job, job.steps, storm_job.MICRO).losses

    async def story() -> None:
        async with stormy(0, tmp_path) as storm, asyncio.timeout(20 * TIMES.hung_s):
            hung = ""
            async for report in storm.mesh.train(job, stages=len(ALONE)):
                if report.step == 0:
                    hung = storm.members()[1]
                    agent = storm.here.agents[hung]
                    hang.strike(agent.member, agent.compute, monkeypatch)
            assert storm.mesh.result.losses == expected
            assert [step + 1 for step, _ in storm.mesh.result.metrics] == [*range(STRUCK, job.steps + 1, STRUCK)]
            assert storm.mesh.result.plan is not None
            assert storm.here.agents[hung].peer_id not in storm.mesh.result.plan.peers

    with quiet(), quick_planning():
        run(story(), inline=True)
    assert hang.began_s is not None


def test_who_computes_on_and_hangs_beside_ends_no_runs_checkpoints_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps go on, and so does the owner: without a limit there would be no checkpoint and no copy any more."""
    job, slow = replace(job_of(), steps=40), Impairment(latency_s=1.0)
    with quiet():
        said, after_s = run(ended(tmp_path, "p1", Hang("CopyStore.digest", at=1), monkeypatch, job, slow))
    assert said == "peer p1 (stage 1) computes, and does not get on with a copy of its stage"
    assert TIMES.hung_s < after_s < 3 * TIMES.hung_s


def test_who_lets_nobody_read_its_copies_keeps_no_run_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers on the stream that it has, and takes no other. Nothing was said, and the last step's weights never came."""
    opened = Reader.open

    async def refused(reader: Reader, peer: str) -> Stream:
        if peer == "p1":
            raise StreamClosed("it takes no more streams")
        return await opened(reader, peer)

    async def story() -> None:
        async with world(job_of(), plan_of(*ALONE), tmp_path) as here, here.network.transport("owner") as owner:
            async with asyncio.timeout(4 * RETRY_S):
                await here.epoch(owner)

    monkeypatch.setattr(Reader, "open", refused)
    with quiet(), pytest.raises(PeerLostError, match=r"^peer p1 \(stage 1\) answers, and nobody has all"):
        run(story())


@pytest.mark.parametrize("call", ["add_up", "flattened"])
def test_who_hangs_beside_its_device_in_a_sum_is_blamed_and_not_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The others of its group wait for it, and it for them."""
    with quiet():
        said, after_s = run(ended(tmp_path, "p1", Hang(call, STRUCK), monkeypatch, shares=SHARED))
    assert re.match(STUCK.format(who="p1", step=r"\d"), said), said
    assert after_s <= TIMES.hung_s + 3 * TIMES.beat_s
