"""Strangers who fail again and again cost no more handshakes than a few a second, and no member pays for them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from meshcee.errors import JoinError, MeshceeError, NotPermittedError
from peers.transport import handshake, patience
from peers.transport.base import Frame
from peers.transport.memory import MemoryNetwork
from peers.transport.patience import Patience
from tests.peers.transport.harness import echo
from tests.rig.virtual_time import virtual_time

KEY = b"the key of this mesh"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_whoever_fails_may_fail_a_few_times_and_then_now_and_then() -> None:
    clock = Clock()
    patient = Patience(clock)
    most, per_s = patience.OF_ONE
    for _ in range(most):
        assert not patient.is_over("a")
        patient.failed("a")
    assert patient.is_over("a")
    assert not patient.is_over("b"), "another stranger does not pay for it"
    clock.now_s += 1 / per_s
    assert not patient.is_over("a")
    patient.failed("a")
    assert patient.is_over("a")
    clock.now_s += 3600
    assert not patient.is_over("a")


def test_strangers_who_have_failed_are_bounded_together_and_newcomers_and_members_are_not() -> None:
    patient = Patience(Clock())
    patient.proven("member")
    for i in range(patience.OF_ALL[0]):
        assert not patient.is_over(f"stranger {i}")
        patient.failed(f"stranger {i}")
    assert patient.is_over("stranger 0")
    assert not patient.is_over("one more"), "who has not failed is a newcomer"
    assert not patient.is_over("member")
    for _ in range(2 * patience.OF_ONE[0]):
        patient.failed("member")
    assert not patient.is_over("member")


def test_who_is_a_member_no_longer_is_counted_as_others_are() -> None:
    patient = Patience(Clock())
    patient.proven("a")
    patient.forget("a")
    assert "a" not in patient
    for _ in range(patience.OF_ONE[0]):
        patient.failed("a")
    assert patient.is_over("a")


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "MOST_REMEMBERED", 3)
    patient = Patience(Clock())
    for i in range(5):
        patient.proven(f"member {i}")
    assert [f"member {i}" in patient for i in range(5)] == [False, False, True, True, True]


@virtual_time
async def test_a_flood_of_hellos_costs_few_answers_and_a_member_and_a_newcomer_come_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, answered = MemoryNetwork(), 0
    accept = handshake.accept

    async def counted(stream: Any, peer_id: str, *args: Any, **more: Any) -> str:
        nonlocal answered
        answered += peer_id == "here"
        return await accept(stream, peer_id, *args, **more)

    async with (
        network.transport("stranger", b"another key") as stranger,
        network.transport("member", KEY) as member,
        network.transport("newcomer", KEY) as newcomer,
        network.transport("here", KEY) as here,
    ):
        here.serve("test", echo)
        await (await member.open("here", "test")).aclose()
        monkeypatch.setattr(handshake, "accept", counted)
        refused = cut = 0
        for _ in range(1000):  # in ten seconds
            await asyncio.sleep(0.01)
            try:
                await stranger.open("here", "test")
            except NotPermittedError:
                refused += 1
            except (JoinError, MeshceeError):
                cut += 1
        most, per_s = patience.OF_ONE
        assert refused == answered
        assert most <= answered <= most + 12 * per_s
        assert cut == 1000 - refused
        for other in (member, newcomer):
            near = await other.open("here", "test")
            await near.send(Frame("ping"))
            assert (await near.recv()).kind == "ping"
