"""What the program of a device's process makes of its peer's words, and what it says; run in this process."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import structlog
import torch

from meshcee.errors import PlanError, ProtocolError, StaleTermError
from peers.device.worker.packets import Confinement
from peers.node.device_process import program, sayings
from peers.node.device_process.messages import (
    FROM_DEVICE,
    MOST_CHECKS,
    MOST_FIGURES,
    Answer,
    Bandwidth,
    Begun,
    Drop,
    Leave,
    Ping,
    Pong,
    Ready,
    Said,
    State,
)
from peers.transport.bridge import TAKES, Channel, pair
from tests.peers.node.test_device_process import PROFILE, WAIT_S, begun_on


class FakeMember:
    """What `program` has made of the peer's words."""

    made: FakeMember

    def __init__(self, *ours: Any, **given: Any) -> None:
        FakeMember.made = self
        self.given, self.asked = given, list[str]()
        self.is_busy, self.is_leaving, self.busy_changed = False, False, asyncio.Event()

    def leave(self) -> None:
        self.asked.append("leave")

    async def drop(self) -> None:
        self.asked.append("drop")


@pytest.fixture
async def there(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Channel]:
    """The peer's end of a channel to the program."""
    monkeypatch.setattr(program, "Member", FakeMember)
    near, far = pair()
    channel = Channel(near, (*FROM_DEVICE, *TAKES))
    threads = torch.get_num_threads()
    channel.post(begun_on("cpu", threads))
    before = structlog.get_config()
    confined = Confinement(("landlock",), (), ())
    given_up = (lambda begin: confined, lambda begin, before, memory_bytes: before)
    serving = asyncio.create_task(program.serve(far, given_up))
    try:
        assert (await channel.receive())[0] == Ready(PROFILE, confined)
        yield channel
    finally:
        channel.close()
        await serving
        structlog.configure(**before)


async def test_what_the_peer_says_reaches_the_member(there: Channel) -> None:
    member = FakeMember.made
    for message in (Bandwidth({"p1": 5.0}), Leave(), Drop(), Ping()):
        there.post(message)
    assert await there.receive() == (Pong(), -1)
    await asyncio.sleep(0)
    assert member.asked == ["leave", "drop"]
    bandwidth = member.given["bandwidth"]
    assert (bandwidth("p1"), bandwidth("p2")) == (5.0, math.inf)
    member.given["begun"]()({f"p{i}": 1.0 for i in range(MOST_FIGURES + 1)}, {})
    assert (await there.receive())[0] == Begun()
    assert len((await there.receive())[0].rates) == MOST_FIGURES
    member.is_busy = True
    member.busy_changed.set()
    assert (await there.receive())[0] == State(busy=True)


async def test_an_offer_is_refused_with_the_error_of_who_refuses_it(there: Channel) -> None:
    """A term that is over came as another error, and ended a run whose owner could have planned again (a storm)."""
    accept = FakeMember.made.given["accept"]

    def check_consent(who: str, *, direct_sums: bool) -> None:
        assert not direct_sums
        raise PlanError("leave out direct_sums")

    for check, wrong in ((mock.Mock(), ""), (check_consent, "leave out direct_sums"), (mock.Mock(), "it is late")):
        offer = SimpleNamespace(term=(3, "p9"), check_consent=check)
        accepting = asyncio.create_task(accept("p1", offer))
        asked, _ = await there.receive()
        assert (asked.owner, asked.term) == ("p1", (3, "p9"))
        there.post(Answer(asked.number, *((wrong, "StaleTermError") if check is not check_consent else ())))
        if wrong:
            with pytest.raises(PlanError if check is check_consent else StaleTermError, match=wrong):
                await accepting
        else:
            await accepting


async def test_as_many_graphs_wait_as_the_peer_takes(there: Channel) -> None:
    read = FakeMember.made.given["graphs"].read
    reading = [asyncio.create_task(read([b"graph"])) for _ in range(MOST_CHECKS + 1)]
    asked = [await there.receive() for _ in range(MOST_CHECKS)]
    there.post(Ping())
    assert (await there.receive())[0] == Pong()
    for check, memory in asked:
        os.close(memory)
        there.post(Answer(check.number, "it is bad", "PlanError"))
    last, memory = await there.receive()
    os.close(memory)
    there.post(Answer(last.number, "it is bad", "PlanError"))
    found = await asyncio.gather(*reading, return_exceptions=True)
    assert [(type(one), str(one)) for one in found] == [(PlanError, "it is bad")] * (MOST_CHECKS + 1)


async def test_an_offer_that_is_dropped_makes_no_room_for_checks_before_its_answer(there: Channel) -> None:
    """The peer counts those that it has not answered, and ends a process that asks for more."""
    read = FakeMember.made.given["graphs"].read
    for _ in range(MOST_CHECKS + 4):
        reading = asyncio.create_task(read([b"graph"]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        reading.cancel()
    asked = [await there.receive() for _ in range(MOST_CHECKS)]
    there.post(Ping())
    assert (await there.receive())[0] == Pong()
    for check, memory in asked:
        os.close(memory)
        there.post(Answer(check.number))
    reading = asyncio.create_task(read([b"graph"]))
    last, memory = await there.receive()
    os.close(memory)
    there.post(Answer(last.number, "it is bad", "PlanError"))
    with pytest.raises(PlanError, match="it is bad"):
        await reading


async def test_what_is_logged_stands_in_the_peers_log_and_is_bounded(
    there: Channel, capsys: pytest.CaptureFixture[str]
) -> None:
    log = structlog.get_logger()
    log.debug("nobody wants it")
    log.warning("wide \x1b[2J \u202e", peer="p" * 9999, **{f"more{i}": i for i in range(20)})
    said, _ = await there.receive()
    assert (said.level, said.event) == ("warning", r"wide \x1b[2J \u202e")
    assert len(said.fields["peer"]) == sayings.MOST_TEXT
    for i in range(2 * sayings.MOST_IN_A_MINUTE):
        log.info(f"line {i}")
    there.post(Ping())
    lines = [(await there.receive())[0] for _ in range(sayings.MOST_IN_A_MINUTE)]
    assert [type(line) for line in lines] == [Said] * (sayings.MOST_IN_A_MINUTE - 1) + [Pong]
    assert capsys.readouterr().out == ""


def test_the_peer_believes_no_process_how_much_it_says() -> None:
    now_s = 0.0
    hearing = sayings.Hearing(lambda: now_s)
    with structlog.testing.capture_logs() as lines:
        for _ in range(sayings.MOST_IN_A_MINUTE + 3):
            hearing.hear(Said("error", "a\nb\x07", {"event": "x", "of": "another", "log_level": "info"}))
        now_s = 61.0
        hearing.hear(Said("info", "later", {}))
    assert len(lines) == sayings.MOST_IN_A_MINUTE + 1
    assert lines[0]["log_level"] == "error"
    assert r"a | b\x07" in lines[0].values()
    assert lines[0]["of"] == "the device's process"
    assert lines[-1]["lines_left_out"] == "3"


async def test_a_channel_that_is_closed_here_wakes_who_receives() -> None:
    near, far = pair()
    with far:
        channel = Channel(near, ())
        receiving = asyncio.create_task(channel.receive())
        await asyncio.sleep(0)
        channel.close("enough")
        with pytest.raises(ConnectionError, match="enough"):
            await asyncio.wait_for(receiving, WAIT_S)


async def test_a_process_hears_first_for_whom_it_works() -> None:
    near, far = pair()
    channel = Channel(near, ())
    channel.post(Ping())
    with pytest.raises(ProtocolError, match="for whom"):
        await program.serve(far)
    channel.close()
