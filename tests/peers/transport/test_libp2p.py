"""What only a real p2pd shows: it dies, comes back, knows who is there; and the same under uvloop, as peers run it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from pathlib import Path

import pytest
import uvloop
from structlog.testing import capture_logs

from meshcee.config import Timeouts
from meshcee.errors import JoinError, UsageError
from meshcee.figures.profile import LinkProfile
from peers.device.emulation.shape import Shape, ShapedTransport
from peers.transport.base import Frame, StreamClosed
from peers.transport.p2p.dial_back import KNOCK, MOST_PORTS, Knocking, knocked_from
from peers.transport.p2p.libp2p import Libp2pTransport
from peers.transport.seen import seen_from
from tests.peers.transport.harness import KEY, SHORT, SMALL, echo, eventually, mesh, p2pd, pair

pytestmark = pytest.mark.alone


async def test_a_killed_p2pd_closes_every_stream_at_both_ends_quickly() -> None:
    async with p2pd() as p, p2pd() as q:
        async with (
            Libp2pTransport(p, KEY, timeouts=SHORT, limits=SMALL) as a,
            Libp2pTransport(q, KEY, timeouts=SHORT, limits=SMALL) as b,
        ):
            near, far = await pair(a, b)
            receiving = [asyncio.create_task(near.recv()), asyncio.create_task(far.recv())]
            sending = asyncio.create_task(near.send(Frame("big", {}, [bytes(8 << 20)])))
            await asyncio.sleep(0)
            began = time.monotonic()
            q._child.kill()
            for task in (*receiving, sending):
                with pytest.raises(StreamClosed, match="connection was lost") as caught:
                    async with asyncio.timeout(2.0):
                        await task
            assert time.monotonic() - began < 1.0
            assert b.peer_id[-8:] in str(caught.value)
            with pytest.raises(JoinError, match="cannot be reached"):
                await a.open(b.peer_id, "test")
            with pytest.raises(JoinError, match="own p2pd does not answer"):
                await b.open(a.peer_id, "test")
            left = time.monotonic()
        assert time.monotonic() - left < 2 * SHORT.shutdown_s


async def test_a_peer_is_told_from_which_address_it_is_seen_to_come() -> None:
    async with (
        p2pd() as p,
        p2pd() as q,
        Libp2pTransport(p, KEY, timeouts=SHORT, limits=SMALL) as a,
        Libp2pTransport(q, KEY, timeouts=SHORT, limits=SMALL) as b,
    ):
        found = await seen_from(a, b.peer_id, b.addresses)
    assert found.startswith("/ip4/127.0.0.1/tcp/")


async def test_a_peer_dials_ports_where_who_asks_comes_from_and_nowhere_else() -> None:
    came = asyncio.Event()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        writer.close()

    async with (
        p2pd() as p,
        p2pd() as q,
        Libp2pTransport(p, KEY, timeouts=SHORT, limits=SMALL) as a,
        Libp2pTransport(q, KEY, timeouts=SHORT, limits=SMALL) as b,
        await asyncio.start_server(accept, "127.0.0.1", 0) as server,
    ):
        port = server.sockets[0].getsockname()[1]
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))  # and does not listen
            found = await knocked_from(a, b.peer_id, b.addresses, [port, closed.getsockname()[1]])
        assert (found.host, found.answered) == ("127.0.0.1", [port])
        async with asyncio.timeout(2.0):
            await came.wait()
        with pytest.raises(StreamClosed):
            await knocked_from(a, b.peer_id, b.addresses, list(range(1000, 1001 + MOST_PORTS)))


async def test_a_stream_without_a_connection_of_its_own_is_dialled_nowhere() -> None:
    """As one that another member passes on."""
    async with mesh("memory") as (a, b):
        b.serve(KNOCK, Knocking().serve)
        found = await knocked_from(a, b.peer_id, b.addresses, [22])
    assert (found.host, found.answered) == ("", [])


async def test_a_restarted_p2pd_is_taken_up_again(tmp_path: Path) -> None:
    identity = str(tmp_path / "identity")
    async with p2pd() as p, contextlib.AsyncExitStack() as old:
        first = await old.enter_async_context(p2pd(identity_path=identity))
        async with (
            Libp2pTransport(p, KEY, timeouts=SHORT, limits=SMALL) as a,
            Libp2pTransport(first, KEY, timeouts=SHORT, limits=SMALL) as b,
        ):
            b.serve("echo", echo)
            stream = await a.open(b.peer_id, "echo", b.addresses)
            first._child.kill()
            with pytest.raises(StreamClosed):
                await stream.recv()
            before = b.addresses
            async with p2pd(identity_path=identity) as second:
                await b.rebind(second)
                assert b.addresses != before
                again = await a.open(b.peer_id, "echo", b.addresses)
                await again.send(Frame("x"))
                assert (await again.recv()).kind == "x"
                a.serve("echo", echo)
                back = await b.open(a.peer_id, "echo", a.addresses)
                await back.send(Frame("y"))
                assert (await back.recv()).kind == "y"
                with pytest.raises(UsageError, match="identity"):
                    await b.rebind(p)


async def test_an_address_where_nobody_or_somebody_else_listens() -> None:
    async with mesh("libp2p", 3) as (a, b, c):
        b.serve("echo", echo)
        c.serve("echo", echo)
        port_of_c = c.addresses[0].split("/p2p/")[0]
        with pytest.raises(JoinError, match="cannot be reached"):
            await a.open(b.peer_id, "echo", ["/ip4/127.0.0.1/tcp/9"])
        with pytest.raises(JoinError, match="cannot be reached"):  # c's key does not give b's id
            await a.open(b.peer_id, "echo", [port_of_c])
        with pytest.raises(JoinError, match="libp2p reads none of the addresses"):
            await a.open(b.peer_id, "echo", ["127.0.0.1:9"])
        with pytest.raises(JoinError, match="is not a peer id"):
            await a.open("not base58 0OIl", "echo")
        stream = await a.open(b.peer_id, "echo", b.addresses)  # and the right address still works
        await stream.send(Frame("x"))
        assert (await stream.recv()).kind == "x"


async def test_a_dial_that_nobody_answers_is_bounded() -> None:
    listener = socket.create_server(("127.0.0.1", 0))  # accepts, and never says a word
    port = listener.getsockname()[1]
    async with p2pd() as p, Libp2pTransport(p, KEY, timeouts=Timeouts(dial_s=0.3), limits=SMALL) as a:
        began = time.monotonic()
        with pytest.raises(JoinError, match=r"did not answer within 0\.3 s"):
            await a.open("QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC", "echo", [f"/ip4/127.0.0.1/tcp/{port}"])
        assert time.monotonic() - began < 1.0
    listener.close()


async def test_a_libp2p_peer_that_is_no_meshcee_peer_and_one_that_babbles() -> None:
    async with p2pd() as p, p2pd() as q, Libp2pTransport(p, KEY, timeouts=SHORT, limits=SMALL) as a:
        addresses = [str(address) for address in await q.get_visible_maddrs()]
        with pytest.raises(JoinError, match="its meshcee is as new as this one"):
            await a.open(q.peer_id.to_base58(), "echo", addresses)
        a.serve("echo", echo)
        with capture_logs() as logs:
            _, reader, writer = await q.call_binary_stream_handler(p.peer_id, "meshcee/1")
            writer.write(b"x" * 100_000)
            with contextlib.suppress(ConnectionResetError):  # the rest was still under way
                assert await reader.read() == b""
            await eventually(lambda: bool(logs))
            writer.close()
        assert "not a meshcee frame" in logs[0]["error"]
        assert logs[0]["peer"] == f"..{q.peer_id.to_base58()[-8:]}"


async def test_a_shaped_link_over_real_sockets_is_as_slow_as_it_says() -> None:
    """On the wall clock, so only the lower bound is tight; the figures themselves are tested on virtual time."""
    shape = Shape({("a", "b"): LinkProfile(latency_s=0.05, bandwidth_bytes_per_s=20e6)})
    async with (
        p2pd() as p,
        p2pd() as q,
        ShapedTransport(Libp2pTransport(p, KEY, timeouts=SHORT), shape) as a,
        ShapedTransport(Libp2pTransport(q, KEY, timeouts=SHORT), shape) as b,
    ):
        shape.alias(a.peer_id, "a")
        shape.alias(b.peer_id, "b")
        near, far = await pair(a, b)
        began = time.monotonic()
        for _ in range(4):
            await near.send(Frame("x", {}, [bytes(500_000)]))
        for _ in range(4):
            await far.recv()
        assert 0.15 <= time.monotonic() - began < 1.0


def test_the_same_under_uvloop() -> None:
    async def talk() -> None:
        # pytest-timeout's signal does not interrupt uvloop.
        async with asyncio.timeout(30), mesh("libp2p") as (a, b):
            near, far = await pair(a, b)
            payload = bytes(range(256)) * 20_000
            memory = bytearray(payload)
            for index in range(10):
                sending = asyncio.create_task(near.send(Frame("x", {"index": index}, [memory, b"tail"])))
                frame = await far.recv()
                assert frame.header["index"] == index
                assert frame.payloads[0] == payload
                await sending
            sending = asyncio.create_task(near.send(Frame("never read", {}, [bytes(8 << 20)])))
            await asyncio.sleep(0.05)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            await near.send(Frame("next"))
            assert (await far.recv()).kind == "next"
            await near.send(Frame("last", {}, [payload[:300_000]]))
            await near.aclose()
            assert (await far.recv()).kind == "last"
            with pytest.raises(StreamClosed, match="the other side closed it"):
                await far.recv()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(talk())
