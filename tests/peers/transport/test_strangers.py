"""Who cannot prove the mesh's key keeps nobody out, costs little memory, and does not fill the log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from meshcee.config import Timeouts
from meshcee.errors import JoinError, MeshceeError, NotPermittedError, ProtocolError
from meshcee.events import Event
from peers.transport import endpoint, handshake, patience
from peers.transport.base import Frame, Stream, StreamClosed
from peers.transport.stream import HELLO_BYTES
from tests.peers.transport.harness import echo, eventually, mesh

PATIENT = Timeouts(dial_s=30.0, handshake_s=30.0, shutdown_s=2.0)


@contextmanager
def saying(monkeypatch: pytest.MonkeyPatch, hello: Any) -> Iterator[None]:
    """Whoever dials in here does this in place of shaking hands."""
    with monkeypatch.context() as patch:
        patch.setattr(handshake, "dial", hello)
        yield


@pytest.fixture(params=["memory", "libp2p"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_strangers_who_say_nothing_keep_nobody_out(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_STRANGERS", 3)
    come: asyncio.Queue[str] = asyncio.Queue(maxsize=100)

    async def silent(stream: Stream, *_: Any, **__: Any) -> str:
        await come.put(stream.peer_id)
        await stream.recv()  # until it is hung up on
        raise AssertionError("nobody answers to silence")

    async with mesh(kind, 3, timeouts=PATIENT) as (stranger, member, newcomer):
        here = newcomer
        here.serve("test", echo)
        near = await member.open(here.peer_id, "test", here.addresses)  # proves the key, for the first time
        await near.aclose()
        with saying(monkeypatch, silent):
            held = asyncio.create_task(member.open(here.peer_id, "test", here.addresses))  # a member that is slow
            await come.get()
            dialled = [asyncio.create_task(stranger.open(here.peer_id, "test", here.addresses)) for _ in range(7)]
            for _ in dialled:
                await come.get()
            await eventually(lambda: sum(task.done() for task in dialled) == 4)
        assert not held.done()  # no stranger takes the place of who has proven the key
        assert all(isinstance(task.exception(), JoinError) for task in dialled if task.done())
        async with asyncio.timeout(10):
            near = await member.open(here.peer_id, "test", here.addresses)
            await near.send(Frame("ping"))
            assert (await near.recv()).kind == "ping"
        for task in (held, *dialled):
            task.cancel()
        await asyncio.gather(held, *dialled, return_exceptions=True)


async def test_a_newcomer_is_let_in_while_strangers_hold_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_STRANGERS", 3)
    come: asyncio.Queue[str] = asyncio.Queue(maxsize=100)

    async def silent(stream: Stream, *_: Any, **__: Any) -> str:
        await come.put(stream.peer_id)
        await stream.recv()
        raise AssertionError("nobody answers to silence")

    async with mesh("memory", 3, timeouts=PATIENT) as (stranger, newcomer, here):
        here.serve("test", echo)
        with saying(monkeypatch, silent):
            dialled = [asyncio.create_task(stranger.open(here.peer_id, "test")) for _ in range(3)]
            for _ in dialled:
                await come.get()
        async with asyncio.timeout(10):
            near = await newcomer.open(here.peer_id, "test")
            await near.send(Frame("ping"))
            assert (await near.recv()).kind == "ping"
        for task in dialled:
            task.cancel()
        await asyncio.gather(*dialled, return_exceptions=True)


async def test_the_header_of_a_hello_is_small(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def long(stream: Stream, *_: Any, **__: Any) -> str:
        await stream.send(Frame("hello", {"version": handshake.PROTOCOL_VERSION, "more": [{}] * HELLO_BYTES}))
        await stream.recv()
        raise AssertionError("nobody answers to this")

    async with mesh(kind) as (stranger, here):
        here.serve("test", echo)
        with capture_logs() as logs, saying(monkeypatch, long), pytest.raises((MeshceeError, ProtocolError)):
            await stranger.open(here.peer_id, "test", here.addresses)
        await eventually(lambda: any("more than 2048" in str(line.get("error")) for line in logs))


async def test_a_long_header_right_behind_the_proof_arrives(kind: str) -> None:
    arrived: asyncio.Queue[int] = asyncio.Queue(maxsize=9)

    async def handler(stream: Stream) -> None:
        await arrived.put(len((await stream.recv()).header["text"]))

    async with mesh(kind) as (a, b):
        b.serve("test", handler)
        for _ in range(5):
            near = await a.open(b.peer_id, "test", b.addresses)
            await near.send(Frame("first", {"text": "x" * 10 * HELLO_BYTES}))
            async with asyncio.timeout(10):
                assert await arrived.get() == 10 * HELLO_BYTES
            await near.aclose()


async def test_refusals_are_counted_and_do_not_fill_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "EVERY_S", 0.5)
    async with mesh("memory", keys=[b"another key of another mesh.....", b"the key"]) as (stranger, here):
        here.serve("test", echo)
        with capture_logs() as logs:
            for pause_s in [0.0] * 35 + [0.6]:
                await asyncio.sleep(pause_s)
                with pytest.raises(NotPermittedError):
                    await stranger.open(here.peer_id, "test")
    told = [line for line in logs if line["event"] == Event.STREAM_REFUSED]
    assert sum(line.get("untold", 0) for line in told) + len(told) == 36
    assert len(told) < 12  # in as many half seconds


async def test_a_member_whose_streams_fail_does_not_fill_the_log() -> None:
    async def confused(stream: Stream) -> None:
        raise ProtocolError("what it said has no meaning")

    async with mesh("memory") as (member, here):
        here.serve("test", confused)
        with capture_logs() as logs:
            for _ in range(35):
                stream = await member.open(here.peer_id, "test")
                with pytest.raises(StreamClosed):
                    await stream.recv()
    assert sum(line["event"] == Event.HANDLER_FAILED for line in logs) < 4  # one in three seconds
