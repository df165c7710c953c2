"""Two owners that both believe a run to be theirs: every member follows the same one of them, and the other hears so."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from meshcee.config import Limits, Timeouts
from meshcee.errors import ProtocolError
from peers.device.calls import Calls
from peers.device.compute import Compute
from peers.device.graphs import Graphs
from peers.member.service import Member
from peers.transport import Frame, Stream, StreamClosed
from peers.transport.memory import MemoryNetwork
from peers.wire import messages, unless_closed
from tests.rig.mesh_fixture import agreed
from tests.rig.virtual_time import virtual_time

RUN = "a run"


def offer(epoch: tuple[int, int], run: str = RUN) -> Frame:
    """All of an offer that decides who is followed."""
    return Frame(messages.OFFER, {"epoch": list(epoch), "term": [1, "c"], "resumes": False, "run": run})


async def followed(*offers: tuple[str, Frame]) -> list[str]:
    """What a member answers to each: "" where it looks into the offer, else why it does not."""
    network, answers = MemoryNetwork(), list[str]()
    async with network.transport("member") as here, Compute("cpu") as compute:
        member = Member(here, compute, memory_bytes=1, timeouts=Timeouts(), graphs=Graphs(Limits()), accept=agreed)
        looked: list[Any] = []

        async def prepare(*args: Any) -> None:
            looked.append(args)
            raise ProtocolError("as far as this test goes")

        member.prepare = prepare  # type: ignore[method-assign, assignment]
        for owner, frame in offers:
            async with network.transport(owner) as there, asyncio.timeout(60):
                stream = await there.open("member", "job")
                await stream.send(frame)
                answer = messages.error_from((await stream.recv()).header)
                answers.append("" if "this test" in str(answer) else str(answer))
    return answers


@virtual_time
@pytest.mark.parametrize("first", ["a", "b"])
async def test_of_two_owners_with_one_count_the_greater_is_followed_whoever_came_first(first: str) -> None:
    second = "b" if first == "a" else "a"
    answers = await followed((first, offer((7, 1))), (second, offer((7, 1))), (first, offer((7, 2))))
    if first == "b":
        assert (
            answers[1]
            == "epoch 7.1 is over: 7.1 was offered since by b, who owns the run now: it goes on there, or has ended there"
        )
        assert (answers[0], answers[2]) == ("", "")
    else:
        assert answers[:2] == ["", ""]
        assert (
            answers[2]
            == "epoch 7.2 is over: 7.1 was offered since by b, who owns the run now: it goes on there, or has ended there"
        )


@virtual_time
async def test_a_later_incarnation_is_followed_whoever_it_is_and_other_runs_do_not_count() -> None:
    answers = await followed(
        ("z", offer((7, 9))), ("a", offer((8, 1))), ("z", offer((7, 10))), ("z", offer((1, 1), "x"))
    )
    assert (answers[0], answers[1], answers[3]) == ("", "", "")
    assert (
        answers[2]
        == "epoch 7.10 is over: 8.1 was offered since by a, who owns the run now: it goes on there, or has ended there"
    )


@virtual_time
@pytest.mark.parametrize("run", ["", "x" * 401])
async def test_a_run_has_a_name_of_bearable_length(run: str) -> None:
    (answer,) = await followed(("a", offer((1, 1), run)))
    assert "'run' must have 1 to 400 characters" in answer


@virtual_time
@pytest.mark.parametrize("offered", [("b", "c"), ("c", "b")])
async def test_of_two_offers_that_wait_for_a_third_ones_work_to_end_the_later_owner_is_followed(
    offered: tuple[str, str],
) -> None:
    """The work of "a" takes a while to end; whoever came first went on when it had, and the later one was refused."""
    network, worked = MemoryNetwork(), list[str]()
    compute: Any = SimpleNamespace(done=0, calls=Calls())

    async def answer(owner: str, frame: Frame, after_s: float) -> str:
        async with network.transport(owner) as there:
            await asyncio.sleep(after_s)
            stream = await there.open("member", "job")
            await stream.send(frame)
            with contextlib.suppress(StreamClosed):
                while (said := await stream.recv()).kind == messages.PONG:
                    pass
                return str(messages.error_from(said.header))
            return ""

    async with network.transport("member") as here:
        member = Member(here, compute, memory_bytes=1, timeouts=Timeouts(), graphs=Graphs(Limits()), accept=agreed)

        async def prepare(stream: Stream, *more: Any) -> None:
            worked.append(stream.peer_id)
            try:
                await unless_closed(asyncio.Event().wait, stream, Timeouts())
            finally:
                await asyncio.sleep(1)

        member.prepare = prepare  # type: ignore[method-assign, assignment]
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(answer(owner, offer((1, 1)), after_s))
                for owner, after_s in (("a", 0.0), (offered[0], 5.0), (offered[1], 5.5))
            ]
            await asyncio.sleep(20)
            assert member.is_busy
            for task in tasks:
                task.cancel()
    assert worked == ["a", "c"]
