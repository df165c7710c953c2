"""What a peer spends on owners who ask for plans, before it knows whether they may and while many ask at once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshcee.config import Timeouts
from meshcee.errors import PlanError
from peers.mesh_view import MeshView
from peers.planning.coordinator import ASKED_AT_ONCE, PlanService
from peers.transport import Frame, Stream
from peers.wire import messages


class Asked:
    """A stream of an owner's, that has sent its request."""

    def __init__(self, owner: str) -> None:
        self.peer_id, self.max_payload_bytes, self.heard = owner, 0, 0
        self.answers: list[Frame] = []

    async def recv(self) -> Frame:
        self.heard += 1
        return Frame(messages.PLAN_REQUEST, {}, [b""])

    async def send(self, frame: Frame) -> None:
        self.answers.append(frame)


def service(coordinator: str) -> PlanService:
    lease = SimpleNamespace(peer_id=coordinator, term=(1, coordinator))
    transport = SimpleNamespace(serve=lambda *how: None)
    agent = SimpleNamespace(transport=transport, lease=lease, peer_id="me", timeouts=Timeouts())
    return PlanService(cast(MeshView, agent))


async def ask(plans: PlanService, owners: list[str]) -> list[Asked]:
    streams = [Asked(owner) for owner in owners]
    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(plans.serve(cast(Stream, stream)))
    return streams


async def test_who_does_not_coordinate_reads_no_request() -> None:
    (stream,) = await ask(service("another"), ["owner"])
    assert stream.heard == 0
    assert [answer.kind for answer in stream.answers] == [messages.REFUSED]


async def test_requests_are_read_one_at_a_time_and_an_owner_has_few(monkeypatch: pytest.MonkeyPatch) -> None:
    now, most = 0, 0

    async def read(function: Any, *arguments: Any) -> Any:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0)
        now -= 1
        raise PlanError("there is no way")

    monkeypatch.setattr(asyncio, "to_thread", read)
    plans = service("me")
    streams = await ask(plans, ["a"] * (ASKED_AT_ONCE + 3) + ["b"] * 2)
    assert most == 1
    assert [stream.heard for stream in streams] == [1] * ASKED_AT_ONCE + [0] * 3 + [1] * 2
    assert all(answer.kind == messages.REFUSED for stream in streams for answer in stream.answers)
    assert [stream.heard for stream in await ask(plans, ["a"])] == [1], "its earlier ones are over"
