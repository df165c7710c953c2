"""What only a direct path shows: when it is taken, what becomes of it, and that nobody between the ends can read or forge."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from meshcee.errors import JoinError, ProtocolError
from peers.transport import bundle, direct
from peers.transport.base import Frame, StreamClosed
from peers.transport.direct import Direct
from peers.transport.p2p.libp2p import Libp2pTransport
from peers.transport.stream import FramedStream
from tests.peers.transport.harness import HERE, KEY, SHORT, SMALL, echo, eventually, mesh, p2pd, pair
from tests.rig.virtual_time import virtual_time

PATIENT = replace(SHORT, handshake_s=20.0, direct_s=10.0)  # a busy machine must not make a stream stay
SECRET = b"what nobody else may read"


def bundle_of(stream: Any) -> bundle.Bundle | None:
    """What a stream runs over, where that is a bundle."""
    return stream.transport if isinstance(stream.transport, bundle.Bundle) else None


@contextlib.asynccontextmanager
async def between(b: Any, meddle: Callable[[bytes], bytes] = lambda data: data) -> AsyncIterator[list[bytes]]:
    """Put somebody between a peer and those who dial it; what goes to it is kept, and passed through `meddle`."""
    heard: list[bytes] = []
    port = b.direct.ports[4]
    passing: set[asyncio.Task[None]] = set()

    async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter, inward: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                if inward:
                    heard.append(data)
                    data = meddle(data)
                target.write(data)
        target.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        group = asyncio.gather(pass_on(reader, inner_writer, True), pass_on(inner_reader, writer, False))
        passing.add(group)  # type: ignore[arg-type]
        await group

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    b.direct.ports = {4: server.sockets[0].getsockname()[1]}
    try:
        yield heard
    finally:
        server.close()
        await asyncio.gather(*passing, return_exceptions=True)


async def test_a_stream_leaves_for_as_many_connections_as_its_distance_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with mesh("direct", timeouts=PATIENT) as (a, b):
        for step_s, count in ((1e9, 1), (1e-9, direct.MAX_CONNECTIONS)):
            monkeypatch.setattr(direct, "RTT_STEP_S", step_s)
            near, far = await pair(a, b)
            found = [bundle_of(near), bundle_of(far)]
            assert [len(each.connections) for each in found if each] == [count, count]
            assert [each.get_extra_info("peername")[1] for each in found if each][:1] == [b.direct.ports[4]]  # type: ignore[attr-defined]
            await eventually(lambda: len(a.streams) == len(b.streams) == 1)  # type: ignore[attr-defined]
            await near.aclose()
        assert b.direct.expected == {}  # type: ignore[attr-defined]
        assert b.direct.strangers == {}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("full_bytes", "used"), [(0, direct.MAX_CONNECTIONS), (1 << 40, 1)])
async def test_one_connection_carries_all_until_its_window_is_full(
    monkeypatch: pytest.MonkeyPatch, full_bytes: int, used: int
) -> None:
    monkeypatch.setattr(direct, "RTT_STEP_S", 1e-9)
    monkeypatch.setattr(bundle, "FULL_BYTES", full_bytes)
    async with mesh("direct", timeouts=PATIENT) as (a, b):
        near, far = await pair(a, b)
        found = bundle_of(near)
        assert found is not None
        carried = dict.fromkeys(found.connections, 0)
        seal = bundle.Connection.seal

        def counted(connection: bundle.Connection, *record: Any) -> None:
            if connection in carried:  # and not at the far end
                carried[connection] += 1
            seal(connection, *record)

        monkeypatch.setattr(bundle.Connection, "seal", counted)
        frame = Frame("x", {}, [bytes(16 << 20)])
        async with asyncio.TaskGroup() as group:
            group.create_task(near.send(frame))
            assert (await far.recv()).payload_bytes == 16 << 20
        assert sum(count > 0 for count in carried.values()) == used


async def test_bytes_of_a_stream_that_has_left_stay_in_the_count() -> None:
    async with mesh("direct", timeouts=PATIENT) as (a, b):
        before = a.carried_bytes()  # type: ignore[attr-defined]
        near, _ = await pair(a, b)
        before = max(before, a.carried_bytes())  # type: ignore[attr-defined]
        await eventually(lambda: len(a.streams) == len(b.streams) == 1, 30.0)  # type: ignore[attr-defined]
        sent, received = a.carried_bytes()  # type: ignore[attr-defined]
        assert sent >= before[0] > 0
        assert received >= before[1] > 0
        await near.aclose()


async def test_brief_streams_stay_and_so_do_those_of_a_peer_without() -> None:
    async with mesh("direct") as (a, b):
        assert bundle_of((await pair(a, b, "gossip"))[0]) is None
        b.direct.stop()  # type: ignore[attr-defined]
        b.direct = None  # type: ignore[attr-defined]
        near, far = await pair(a, b)
        assert bundle_of(near) is bundle_of(far) is None
        await near.send(Frame("x", {}, [SECRET]))
        assert bytes((await far.recv()).payloads[0]) == SECRET


@pytest.mark.parametrize("silent", [False, True])
async def test_where_nobody_answers_the_stream_stays_and_the_peer_is_left_alone(silent: bool) -> None:
    """As behind a firewall that refuses, or that swallows."""
    async with mesh("direct") as (a, b):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            b.direct.ports = {4: listener.getsockname()[1]}  # type: ignore[attr-defined]
            if not silent:
                listener.close()
            began = time.monotonic()
            near, far = await pair(a, b)
            assert bundle_of(near) is bundle_of(far) is None
            assert not silent or time.monotonic() - began >= SHORT.handshake_s / 2
            await near.send(Frame("x", {}, [SECRET]))
            assert bytes((await far.recv()).payloads[0]) == SECRET
            assert a.direct.to(b.peer_id, "test") is None  # type: ignore[attr-defined]
            assert a.direct.to("another", "test") is not None  # type: ignore[attr-defined]


async def test_who_listens_between_two_peers_learns_nothing_and_is_noticed_when_he_forges() -> None:
    flip = False

    def meddle(data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1]) if flip else data

    async with mesh("direct", timeouts=PATIENT) as (a, b), between(b, meddle) as heard:
        near, far = await pair(a, b)
        assert bundle_of(near) is not None
        await near.send(Frame("x", {"text": SECRET.decode()}, [SECRET * 10_000]))
        assert bytes((await far.recv()).payloads[0]) == SECRET * 10_000
        assert sum(map(len, heard)) > len(SECRET) * 10_000
        assert SECRET[:8] not in b"".join(heard)
        flip = True
        await near.send(Frame("y"))
        with pytest.raises(StreamClosed, match="not from the peer: a record that does not open"):
            await far.recv()
        with pytest.raises(StreamClosed):
            await near.recv()


async def test_strangers_get_nowhere_and_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "MAX_STRANGERS", 3)
    async with mesh("direct", timeouts=replace(SHORT, handshake_s=0.3)) as (_, b):
        port = b.direct.ports[4]  # type: ignore[attr-defined]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(os.urandom(49))
        assert await reader.read() == b""
        writer.close()
        waiting = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        assert await waiting[0][0].read() == b""  # made room
        assert len(b.direct.strangers) == 3  # type: ignore[attr-defined]
        for reader, writer in waiting[1:]:  # and the others have their time
            async with asyncio.timeout(5.0):
                assert await reader.read() == b""
            writer.close()
        waiting[0][1].close()
        assert b.direct.strangers == {}  # type: ignore[attr-defined]


async def test_a_ticket_that_was_overheard_is_not_enough() -> None:
    here = Direct([HERE], 0, SHORT)
    await here.start()
    theirs, path = direct.Path(here, "b"), direct.Path(here, "", [HERE])
    path.expect(theirs.key, b"salt")
    reader, writer = await asyncio.open_connection("127.0.0.1", here.ports[4])
    writer.write(direct.GREETING.pack(path.ticket, 0, bytes(32)))
    assert await reader.read() == b""
    writer.close()
    assert path.greeted == {}
    path.close()
    assert here.expected == {}
    here.stop()


@pytest.mark.parametrize("salt", [b"salt", b"of another mesh"])
async def test_only_who_knows_the_mesh_key_gets_in(salt: bytes) -> None:
    """The salt is an HMAC under the mesh key; everything else goes over the wire."""
    here = Direct([HERE], 0, PATIENT)
    await here.start()
    path, theirs = here.here([HERE]), here.to("b", "job")
    assert path is not None
    assert theirs is not None
    path.expect(theirs.key, b"salt")
    assert bool(await theirs.dial(path.offer(), salt)) == (salt == b"salt")
    for each in (path, theirs):
        each.close()
    here.stop()
    await asyncio.sleep(0)  # the sockets are closed by callbacks


async def test_a_name_that_nobody_has_is_no_place() -> None:
    assert await direct.Path(Direct([], 0, SHORT), "b").dial([b"k" * 32, ["/dns4/a..b/tcp/9"]], b"salt") == []


async def test_the_rate_of_a_direct_stream_is_seen() -> None:
    async with mesh("direct", timeouts=PATIENT) as (a, b):
        near, far = await pair(a, b)
        assert bundle_of(far) is not None
        await asyncio.gather(near.send(Frame("x", {}, [bytes(8 << 20)])), far.recv())
        out, seen = far.rates()
        assert out is None
        assert seen is not None
        assert 1e6 < seen < 1e11


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux paces a socket for who is not root")
async def test_a_direct_stream_sends_no_faster_than_it_may() -> None:
    def limit_of(connection: Any) -> int:
        found: socket.socket = connection.transport.get_extra_info("socket")
        return found.getsockopt(socket.SOL_SOCKET, 47)  # SO_MAX_PACING_RATE

    async with mesh("direct", timeouts=PATIENT) as (a, b):
        near, far = await pair(a, b)
        direct_one = bundle_of(near)
        assert direct_one is not None
        near.throttle(4e6)
        assert {limit_of(connection) for connection in direct_one.connections} == {4_000_000}
        begun_s = asyncio.get_running_loop().time()
        await asyncio.gather(near.send(Frame("x", {}, [bytes(2 << 20)])), far.recv())
        took_s = asyncio.get_running_loop().time() - begun_s
        assert took_s > 0.25 * (2 << 20) / 4e6 / len(direct_one.connections), (
            "a busy machine may take longer, none may be faster"
        )
        near.throttle(math.inf)
        assert {limit_of(connection) & 0xFFFFFFFF for connection in direct_one.connections} == {0xFFFFFFFF}


async def test_what_the_other_machine_has_not_acknowledged_is_under_way() -> None:
    async with mesh("direct", timeouts=PATIENT) as (a, b):
        near, far = await pair(a, b)
        await eventually(lambda: near.under_way() == 0)
        sending = asyncio.create_task(near.send(Frame("x", {}, [bytes(8 << 20)])))
        await asyncio.sleep(0)
        assert (near.under_way() or 0) > 1 << 16
        await asyncio.gather(sending, far.recv())
        await eventually(lambda: near.under_way() == 0)
        near.abort()
        assert near.under_way() is None


@pytest.mark.parametrize(
    "offer",
    [None, [b"k" * 32], [b"k" * 32, ["127.0.0.1:9"]], [b"k" * 31, []], [bytes(32), []], [b"k" * 32, [HERE] * 5]],
)
async def test_an_offer_that_is_none_is_refused(offer: Any) -> None:
    with pytest.raises(ProtocolError):
        await direct.Path(Direct([], 0, SHORT), "b").dial(offer, b"salt")


async def test_the_choice_of_what_was_never_connected_is_refused() -> None:
    path = direct.Path(Direct([], 0, SHORT), "")
    for numbers in ("all", [1.0], list(range(20))):
        with pytest.raises(ProtocolError):
            path.choose(numbers)
    with pytest.raises(StreamClosed, match="direct connection 3 is gone"):
        path.choose([3])


async def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(JoinError, match="choose another port"):
        await Direct([HERE], listener.getsockname()[1], SHORT).start()


async def test_one_lost_connection_of_many_ends_the_stream_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "RTT_STEP_S", 1e-9)
    async with mesh("direct", timeouts=PATIENT) as (a, b):
        near, far = await pair(a, b)
        receiving = [asyncio.create_task(near.recv()), asyncio.create_task(far.recv())]
        await asyncio.sleep(0)
        found = bundle_of(near)
        assert found is not None
        found.connections[5].abort()
        async with asyncio.timeout(5.0):
            for task in receiving:
                with pytest.raises(StreamClosed, match="connection was lost"):
                    await task


async def test_a_connection_that_was_lost_before_its_stream_began_ends_it() -> None:
    connection = bundle.Connection(1, lambda *_: None)
    connection.connection_lost(None)
    stream = FramedStream("b")
    bundle.Bundle([connection], bytes(32), bytes(32)).start(stream)
    stream.establish("job")
    with pytest.raises(StreamClosed, match="lost before it was used"):
        await stream.recv()


RECORDS = {  # number and size in the header, what it is sealed as; None: not at all
    "one twice": [(0, 17, 0), (0, 17, 0)],
    "one of nothing": [(0, 16, None)],
    "one too large": [(0, bundle.RECORD_BYTES + 17, None)],
    "one left out": [(1, 17, 1)],
    "one under another's number": [(0, 17, 1)],
}


@pytest.mark.parametrize("what", RECORDS)
async def test_records_out_of_line_end_the_stream(what: str) -> None:
    """From a peer who holds the keys, or somebody who replays what he overheard."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    _, connection = await loop.create_connection(lambda: bundle.Connection(1, lambda *_: None), sock=ours)
    over: asyncio.Future[Exception | None] = loop.create_future()

    class Protocol(asyncio.BufferedProtocol):
        def get_buffer(self, sizehint: int) -> memoryview:
            return memoryview(bytearray(1))

        def connection_lost(self, exc: Exception | None) -> None:
            over.set_result(exc)

    key = bytes(32)
    bundle.Bundle([connection], key, key).start(Protocol())
    for number, size, sealed_as in RECORDS[what]:
        body = b"" if sealed_as is None else AESGCM(key).encrypt(sealed_as.to_bytes(12, "big"), b"x", None)
        await loop.sock_sendall(theirs, bundle.HEADER.pack(number, size) + body)
    async with asyncio.timeout(5.0):
        assert "not from the peer" in str(await over)
    theirs.close()


class Unread(asyncio.BufferedProtocol):
    """Whatever comes is dropped."""

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(bytearray(sizehint))


@virtual_time
async def test_the_rate_is_seen_of_small_frames_and_of_all_connections_together() -> None:
    """Frames of a record each, over two connections that share a link of 1 MB/s."""
    transport = mock.Mock(is_closing=lambda: True)  # nothing is read from it
    connections = [bundle.Connection(1, lambda *_: None) for _ in range(2)]
    for connection in connections:
        connection.connection_made(transport)
    key, size = bytes(32), 40_000
    both = bundle.Bundle(connections, key, key)
    both.start(Unread())

    async def send(connection: bundle.Connection, numbers: range) -> None:
        sealed = [AESGCM(key).encrypt(n.to_bytes(12, "big"), bytes(size), None) for n in numbers]
        wire = memoryview(b"".join(bundle.HEADER.pack(n, len(s)) + s for n, s in zip(numbers, sealed)))
        while wire:
            await asyncio.sleep(0.001)
            left = memoryview(wire[:500])
            while left:
                room = connection.get_buffer(-1)
                part = min(len(room), len(left))
                room[:part] = left[:part]
                connection.buffer_updated(part)
                left = left[part:]
            wire = wire[500:]

    assert both.get_extra_info("rate") is None
    for first in (0, 20):  # whether or not anybody has asked meanwhile
        async with asyncio.TaskGroup() as group:
            for k, connection in enumerate(connections):
                group.create_task(send(connection, range(first + k, first + 20, 2)))
        await asyncio.sleep(10.0)  # nothing comes
        assert both.get_extra_info("rate") == pytest.approx(1e6, rel=0.05)


async def test_streams_survive_the_libp2p_daemon_that_introduced_them() -> None:
    async with (
        p2pd() as p,
        p2pd() as q,
        Libp2pTransport(p, KEY, direct=Direct([HERE], 0, PATIENT), timeouts=PATIENT, limits=SMALL) as a,
        Libp2pTransport(q, KEY, direct=Direct([HERE], 0, PATIENT), timeouts=PATIENT, limits=SMALL) as b,
    ):
        b.serve("echo", echo)
        stream = await a.open(b.peer_id, "echo", b.addresses)
        assert bundle_of(stream) is not None
        await stream.send(Frame("introduced"))
        assert (await stream.recv()).kind == "introduced"
        q._child.kill()
        with pytest.raises(JoinError):
            await a.open(b.peer_id, "echo")
        payload = os.urandom(3_000_001)
        _, back = await asyncio.gather(stream.send(Frame("x", {}, [payload])), stream.recv())
        assert back.payloads[0] == payload
