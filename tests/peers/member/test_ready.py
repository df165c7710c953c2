"""A member that acknowledges something else than it was offered is refused: its epoch does not begin, and the next one may."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from meshcee.errors import PlanError, ProtocolError, StaleTermError
from peers.owner.epoch import Owner
from peers.owner.offering import Offering
from peers.transport.base import Frame
from peers.transport.stream import FramedStream
from peers.wire import messages
from peers.wire.failures import Failures
from peers.wire.member_link import Link
from peers.wire.offer import Offer
from tests.mutation import breaks, changed
from tests.peers.member.test_training import make_job
from tests.rig.faults import ALONE, STEPS, job_of, plan_of, undisturbed, world
from tests.rig.mesh_fixture import train
from tests.rig.virtual_time import run, virtual_time

ANOTHER: dict[str, Any] = {"plan": "0" * 64, "state": "0" * 64, "epoch": [1, 2], "term": [2, "p0"]}


@contextmanager
def lying(lie: dict[str, Any], times: int = 1) -> Iterator[list[str]]:
    """The member that is ready first acknowledges something else, or so many times; yields the kinds of all frames sent."""
    send, sent = FramedStream.send, list[str]()

    async def lies(stream: FramedStream, frame: Frame) -> None:
        first = frame.kind == messages.READY and messages.READY not in sent
        sent.append(frame.kind)
        told = Frame(frame.kind, {**frame.header, **lie}, frame.payloads) if first else frame
        for _ in range(times if first else 1):
            await send(stream, told)

    with mock.patch.object(FramedStream, "send", lies):
        yield sent


def refused(folder: Path, match: str, lie: dict[str, Any], times: int = 1) -> list[str]:
    """What was sent in an epoch that a lie ended; the same members and owner then run one to its end."""
    sent, losses = run(after_a_lie(folder, match, lie, times))
    assert losses == [{}, undisturbed(ALONE, 0.5).losses[0]]
    assert len(losses[1]) == STEPS
    return sent


async def after_a_lie(
    folder: Path, match: str, lie: dict[str, Any], times: int
) -> tuple[list[str], list[dict[int, float]]]:
    async with world(job_of(), plan_of(*ALONE), folder) as here, here.network.transport("owner") as owner:
        with lying(lie, times) as sent, pytest.raises(ProtocolError, match=match):
            await here.epoch(owner)
        await here.idle()
        await here.epoch(owner)
    return sent, here.told.losses


@pytest.mark.parametrize("what", ANOTHER)
def test_a_member_that_acknowledges_another_is_named_and_no_step_begins(tmp_path: Path, what: str) -> None:
    match = rf"^peer p\d \(stage \d\): it is ready for another {what} than was offered$"
    sent = refused(tmp_path, match, {what: ANOTHER[what]})
    assert messages.STEP not in sent


def test_a_member_that_knows_a_newer_term_refuses_its_offer_and_no_step_begins(tmp_path: Path) -> None:
    async def knows_a_newer_one(owner: str, offer: Offer) -> None:
        raise StaleTermError(f"{tuple(offer.term)} has been replaced")

    async def story() -> list[dict[int, float]]:
        async with world(job_of(), plan_of(*ALONE), tmp_path) as here, here.network.transport("owner") as owner:
            with (
                mock.patch.object(here.members["p1"], "accept", knows_a_newer_one),
                lying({}) as sent,
                pytest.raises(StaleTermError, match=r"\(1, 'p0'\) has been replaced"),
            ):
                await here.epoch(owner)
            assert messages.STEP not in sent
            await here.idle()
            await here.epoch(owner)
        return here.told.losses

    assert run(story()) == [{}, undisturbed(ALONE, 0.5).losses[0]]


def test_a_member_that_is_ready_twice_is_named(tmp_path: Path) -> None:
    refused(tmp_path, r"^peer p\d \(stage \d\): it sent a frame of kind 'ready'", {}, times=2)


def test_that_a_member_runs_another_job_is_known_from_a_refusal_of_another_cause(tmp_path: Path) -> None:
    """Whoever took one member may have taken others, so the next plan goes by their records."""
    taken = list[tuple[bool, set[str]]]()
    enough = Failures.enough

    async def ends(failures: Failures) -> None:
        await enough(failures)
        taken.append((failures.busy, set(failures.stuck)))

    async def has_no_room(owner: str, offer: Offer) -> None:
        raise PlanError("no room")

    async def works(*args: Any) -> None:
        await asyncio.Event().wait()

    async def story() -> None:
        async with world(job_of(), plan_of(*ALONE), tmp_path) as here, here.network.transport("owner") as owner:
            with (
                mock.patch.object(here.members["p1"], "accept", has_no_room),
                pytest.raises(PlanError, match="no room"),
            ):
                await here.epoch(owner)
            await here.idle()
            async with here.network.transport("other") as other:
                stream = await other.open("p1", "job")
                with mock.patch.object(here.members["p1"], "prepare", works):
                    await stream.send(Frame(messages.OFFER, {"epoch": [1, 1], "run": "other"}))
                    await asyncio.sleep(1)
                with pytest.raises(PlanError, match="already runs a job"):
                    await here.epoch(owner)

    with mock.patch.object(Failures, "enough", ends):
        run(story())
    assert taken == [(False, {"p1"}), (True, {"p1"})]


@contextmanager
def ready_as_the_epoch_ends() -> Iterator[None]:
    """All but the first are ready between the beginning of the end of their epoch and the end of their own offers."""
    offer, enough = Owner.offer, Failures.enough
    links, late, ending = list[Link](), list[Link](), asyncio.Event()

    async def offers(owner: Owner, *args: Any) -> Link:
        links.append(link := await offer(owner, *args))
        if len(links) > 1:
            owner.failures.add(0, ProtocolError("the first has sent nonsense"))
            await ending.wait()
            await asyncio.sleep(0)
            late.append(link)
        return link

    async def ends(failures: Failures) -> None:
        await enough(failures)
        ending.set()

    with mock.patch.object(Owner, "offer", offers), mock.patch.object(Failures, "enough", ends):
        yield
    assert late


def test_a_member_gets_ready_just_as_another_ends_the_epoch(tmp_path: Path) -> None:
    """Traces in order by what Owner._offer_all asks before it starts tasks for a member: their group may be ending."""

    async def story() -> None:
        async with world(job_of(), plan_of(*ALONE), tmp_path) as here, here.network.transport("owner") as owner:
            with ready_as_the_epoch_ends(), pytest.raises(ProtocolError, match="the first has sent nonsense"):
                await here.epoch(owner)
            await here.idle()

    run(story())


LATE_READY = "if self.failures.cause is not None:  # of one"


def test_without_its_line_a_member_that_gets_ready_late_hides_why_its_epoch_ended(tmp_path: Path) -> None:
    with changed(Owner, LATE_READY, "if False:  # of one"):
        assert breaks(partial(test_a_member_gets_ready_just_as_another_ends_the_epoch, tmp_path))


@pytest.mark.parametrize(("line", "instead"), [('"plan": ', '"epoch": '), (" and wrong:", " and False:")])
def test_without_its_line_another_plan_would_be_run(tmp_path: Path, line: str, instead: str) -> None:
    with changed(Offering, line, instead):
        assert breaks(partial(test_a_member_that_acknowledges_another_is_named_and_no_step_begins, tmp_path, "plan"))


@pytest.mark.cases(1)
@virtual_time
@pytest.mark.parametrize("late", range(3))
async def test_a_neighbour_may_attach_as_soon_as_a_member_is_ready(monkeypatch: pytest.MonkeyPatch, late: int) -> None:
    """Nothing that a member does after it has told so may be needed for that."""
    send, told = FramedStream.send, list[str]()

    async def lingers(stream: FramedStream, frame: Frame) -> None:
        await send(stream, frame)
        if frame.kind == messages.READY:
            told.append(stream.peer_id)
            await asyncio.sleep(1.0 if len(told) == late + 1 else 0.0)

    monkeypatch.setattr(FramedStream, "send", lingers)
    trained = await train(make_job(), 3, 6)
    assert len(told) == 3
    monkeypatch.undo()
    assert trained.losses == (await train(make_job(), 3, 6)).losses
