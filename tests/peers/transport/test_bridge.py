"""Between a peer and its device's process: what a stranger may make the peer hold, and what the device sees of its links."""

from __future__ import annotations

import asyncio
import socket

import pytest

from meshcee.errors import ProtocolError
from peers.transport.base import Frame, Stream
from peers.transport.bridge import GIVES, Bridged, Channel, channel
from peers.transport.bridge.channel import Comes, Rates
from tests.peers.transport.harness import SHORT, SMALL, Beside, eventually, mesh


async def test_a_first_frame_is_refused_before_the_device_has_said_what_it_takes() -> None:
    refused: asyncio.Future[ProtocolError] = asyncio.get_running_loop().create_future()

    async def idle(stream: Stream) -> None:
        """A process that is busy: it says nothing of its limit for now."""
        try:
            await stream.recv()
        except ProtocolError as error:
            refused.set_result(error)

    async with mesh("bridged") as (a, b):
        assert isinstance(b, Beside)
        b.serve("stage", idle, 0)
        near = await a.open(b.peer_id, "stage", b.addresses)
        await near.send(Frame("large", {}, [bytes(1 << 20)]))
        async with asyncio.timeout(30):
            assert "more than 0" in str(await refused)


async def test_the_rates_of_a_whole_step_are_told_though_the_last_second_was_idle() -> None:
    here, there = channel.pair()
    far = Channel(there, GIVES)
    came: list[Stream] = []

    async def take(stream: Stream) -> None:
        came.append(stream)
        await asyncio.get_running_loop().create_future()

    async with Bridged("a", far, limits=SMALL, timeouts=SHORT) as bridged:
        bridged.serve("stage", take)
        near, end = socket.socketpair()
        bridged.take(Comes(stream=1, peer="b", purpose="stage"), end.detach())
        await eventually(lambda: bool(came), 30.0)
        bridged.take(Rates(1, None, 5e6, 0), -1)
        bridged.take(Rates(1, None, None, 7), -1)
        assert came[0].rates() == (None, pytest.approx(5e6))
        assert came[0].under_way() == 7
        assert came[0].rates() == (None, None)
        near.close()
    far.close()
    here.close()
