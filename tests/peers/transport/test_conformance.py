"""One suite for every transport: what base.py promises, in process and over real p2pd."""

from __future__ import annotations

import asyncio
import itertools
import os
from dataclasses import replace

import pytest
import structlog
from structlog.testing import capture_logs

from meshcee.errors import JoinError, NotPermittedError, ProtocolError
from meshcee.events import Event
from peers.cli.session import configure_logging
from peers.transport import bundle, direct, patience
from peers.transport.base import Frame, Stream, StreamClosed
from peers.transport.frame import MAX_CHUNK_BYTES
from peers.transport.stream import FIRST_WINDOW_BYTES
from tests.peers.transport.harness import KEY, SMALL, echo, eventually, last_words, mesh, pair, same, settled


@pytest.fixture(autouse=True)
def _many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Direct streams have as many connections as over the longest links."""
    monkeypatch.setattr(direct, "RTT_STEP_S", 1e-9)
    monkeypatch.setattr(bundle, "FULL_BYTES", 0)


@pytest.fixture(params=["memory", "libp2p", "shaped", "direct", "bridged"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["memory", "libp2p", "direct"])
def bare(request: pytest.FixtureRequest) -> str:
    """Where `send` itself waits for credit; a shaped send ends when its bytes have left and then counts as under way."""
    return str(request.param)


async def test_frames_arrive_as_they_were_sent(bare: str) -> None:
    frames = [
        Frame("empty"),
        Frame("header", {"int": 1 << 62, "float": 0.1, "none": None, "list": [1, [2]], "text": "ü", "bytes": b"\x00"}),
        Frame("zero-length", {}, [b"", b"", b""]),
        Frame("mixed", {"n": 3}, [b"a", bytearray(os.urandom(3_000_001)), b"", memoryview(os.urandom(65_537))]),
        Frame("many", {}, [bytes([i]) * i for i in range(200)]),
    ]
    async with mesh(bare) as (a, b):
        near, far = await pair(a, b)
        assert (near.peer_id, far.peer_id) == (b.peer_id, a.peer_id)
        assert near.purpose == far.purpose == "test"
        for frame in frames:
            _, there = await asyncio.gather(near.send(frame), far.recv())
            assert same(there, frame)
            _, back = await asyncio.gather(far.send(there), near.recv())
            assert same(back, frame)
        assert near.sent_bytes > 3_000_001
        assert far.received_bytes >= near.sent_bytes  # the handshake's bytes are counted alike
        assert far.sent_bytes >= near.received_bytes


async def test_payload_memory_may_be_reused_after_send_and_written_after_recv(kind: str) -> None:
    async with mesh(kind) as (a, b):
        near, far = await pair(a, b)
        memory = bytearray(300_000)
        for value in range(8):
            memory[:] = bytes([value]) * len(memory)
            await near.send(Frame("x", {"value": value}, [memory]))
            memory[:] = b"\xff" * len(memory)
            frame = await far.recv()
            payload = memoryview(frame.payloads[0])
            assert payload == bytes([frame.header["value"]]) * len(memory)
            payload[0] = 77


async def test_frames_of_many_senders_are_never_interleaved(kind: str) -> None:
    async with mesh(kind) as (a, b):
        near, far = await pair(a, b)

        async def sender(number: int) -> None:
            for index in range(5):
                await near.send(Frame("x", {"from": number, "index": index}, [bytes([number]) * 400_000, b"end"]))

        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(sender(number))
            following = [0] * 4
            for _ in range(20):
                frame = await far.recv()
                number = frame.header["from"]
                assert frame.header["index"] == following[number]
                following[number] += 1
                assert bytes(frame.payloads[0]) == bytes([number]) * 400_000


async def test_a_slow_consumer_stops_the_sender(bare: str) -> None:
    async with mesh(bare) as (a, b):
        near, far = await pair(a, b)
        frames = 40

        async def sender() -> None:
            for index in range(frames):
                await near.send(Frame("x", {"index": index}, [bytes(256 << 10)]))

        async with asyncio.TaskGroup() as group:
            group.create_task(sender())
            stopped_at = await settled(near)
            assert SMALL.window_bytes // 2 < stopped_at <= SMALL.window_bytes + SMALL.chunk_bytes + 64_000
            for index in range(frames):
                assert (await far.recv()).header["index"] == index


async def test_a_stream_lends_its_window_only_once_its_first_frame_was_taken(bare: str) -> None:
    limits = replace(SMALL, window_bytes=8 << 20)
    async with mesh(bare, limits=limits) as (a, b):
        near, far = await pair(a, b)

        async def sender() -> None:
            for index in range(40):
                await near.send(Frame("x", {"index": index}, [bytes(512 << 10)]))

        async with asyncio.TaskGroup() as group:
            group.create_task(sender())
            slack = 2 * limits.chunk_bytes + 64_000
            assert FIRST_WINDOW_BYTES // 2 < await settled(near) <= FIRST_WINDOW_BYTES + slack
            assert (await far.recv()).header["index"] == 0
            assert await settled(near) <= 2 * FIRST_WINDOW_BYTES + slack, "no other is awaited yet"
            assert (await far.recv()).header["index"] == 1
            assert await settled(near) > limits.window_bytes
            for index in range(2, 40):
                assert (await far.recv()).header["index"] == index


async def test_who_opened_a_stream_need_not_read_signs_of_life(kind: str) -> None:
    """An owner sends weights for an hour, and reads nothing meanwhile; the member says every two seconds that they come."""
    async with mesh(kind, limits=replace(SMALL, window_bytes=8 << 20)) as (a, b):
        near, far = await pair(a, b)
        async with asyncio.timeout(20):
            for index in range(1000):
                await far.send(Frame("pong", {"moved": index}))
        assert (await near.recv()).header["moved"] == 0


async def test_small_frames_count_against_the_window_too(bare: str) -> None:
    async with mesh(bare) as (a, b):
        near, far = await pair(a, b)
        count = 5000

        async def sender() -> None:
            for index in range(count):
                await near.send(Frame("x", {"index": index}))

        async with asyncio.TaskGroup() as group:
            group.create_task(sender())
            stopped_at = await settled(near)
            assert stopped_at < 100_000  # some 40 bytes each: the window weighs them as the objects that they become
            for index in range(count):
                assert (await far.recv()).header["index"] == index


async def test_frames_larger_than_the_window_pass_each_other(kind: str) -> None:
    size = 5 * SMALL.window_bytes + 7
    async with mesh(kind) as (a, b):
        near, far = await pair(a, b)
        payload = os.urandom(size)
        async with asyncio.timeout(20):
            results = await asyncio.gather(
                near.send(Frame("out", {}, [payload])),
                far.send(Frame("back", {}, [payload])),
                far.recv(),
                near.recv(),
            )
        assert results[2].kind == "out"
        assert results[2].payloads[0] == results[3].payloads[0] == payload


async def test_a_cancelled_send_takes_its_frame_back(bare: str) -> None:
    async with mesh(bare) as (a, b):
        near, far = await pair(a, b)
        sending = asyncio.create_task(near.send(Frame("big", {}, [bytes(8 * SMALL.window_bytes)])))
        await settled(near)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        for index in range(12):  # several windows full: the credits of the retracted bytes have come back
            receiving = asyncio.create_task(far.recv())
            await near.send(Frame("next", {"index": index}, [bytes(400_000)]))
            frame = await receiving
            assert (frame.kind, frame.header["index"]) == ("next", index)


async def test_a_cancelled_send_that_still_waits_for_its_turn_sends_nothing(bare: str) -> None:
    async with mesh(bare) as (a, b):
        near, far = await pair(a, b)
        first = asyncio.create_task(near.send(Frame("first", {}, [bytes(4 * SMALL.window_bytes)])))
        second = asyncio.create_task(near.send(Frame("second")))
        third = asyncio.create_task(near.send(Frame("third")))
        await settled(near)
        second.cancel()
        assert [(await far.recv()).kind for _ in range(2)] == ["first", "third"]
        await asyncio.gather(first, third)
        assert second.cancelled()


async def test_a_cancelled_recv_loses_nothing(kind: str) -> None:
    async with mesh(kind) as (a, b):
        near, far = await pair(a, b)
        for index in range(5):
            receiving = asyncio.create_task(far.recv())
            await asyncio.sleep(0)
            receiving.cancel()
            await near.send(Frame("x", {"index": index}, [bytes(200_000)]))
            await asyncio.wait([receiving])
            assert (await far.recv()).header["index"] == index


async def test_only_one_task_may_receive(kind: str) -> None:
    async with mesh(kind) as (a, b):
        near, far = await pair(a, b)
        receiving = asyncio.create_task(far.recv())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="two tasks"):
            await far.recv()
        await near.send(Frame("x"))
        assert (await receiving).kind == "x"


@pytest.mark.parametrize("kind", ["memory", "libp2p", "direct", "bridged"], indirect=True)
async def test_more_payload_than_allowed_ends_the_stream(kind: str) -> None:
    async with mesh(kind) as (a, b):
        near, far = await pair(a, b)
        far.max_payload_bytes = 1000
        await near.send(Frame("good", {}, [bytes(1000)]))
        assert (await far.recv()).kind == "good"
        await near.send(Frame("bad", {}, [bytes(600), bytes(401)]))
        with pytest.raises(ProtocolError, match=r"'bad' announces 1001 payload bytes.*1000"):
            await far.recv()
        with pytest.raises(StreamClosed):
            await near.recv()
        with pytest.raises(StreamClosed):
            await near.send(Frame("more"))


async def test_what_was_sent_before_aclose_arrives(kind: str) -> None:
    async with mesh(kind) as (a, b):
        near, far = await pair(a, b)
        for index in range(3):
            await near.send(Frame("x", {"index": index}, [bytes(200_000)]))
        await near.aclose()
        for index in range(3):
            assert (await far.recv()).header["index"] == index
        with pytest.raises(StreamClosed, match="the other side closed it") as caught:
            await far.recv()
        assert a.peer_id[-8:] in str(caught.value)
        with pytest.raises(StreamClosed):
            await far.send(Frame("x"))
        with pytest.raises(StreamClosed, match="closed here"):
            await near.send(Frame("x"))
        await near.aclose()  # a second time does nothing


async def test_both_sides_may_close_at_once(kind: str) -> None:
    async with mesh(kind) as (a, b):
        near, far = await pair(a, b)
        async with asyncio.timeout(1.0):
            await asyncio.gather(near.aclose(), far.aclose())


async def test_aclose_is_bounded_when_the_other_side_does_not_read(bare: str) -> None:
    async with mesh(bare) as (a, b):
        near, far = await pair(a, b)
        sending = asyncio.create_task(near.send(Frame("big", {}, [bytes(4 * SMALL.window_bytes)])))
        await settled(near)
        async with asyncio.timeout(4.0):
            await near.aclose()
        with pytest.raises(StreamClosed):
            await sending
        with pytest.raises(StreamClosed):
            await far.recv()


async def test_abort_is_noticed_at_once_and_may_be_repeated(kind: str) -> None:
    async with mesh(kind) as (a, b):
        near, far = await pair(a, b)
        receiving = asyncio.create_task(far.recv())
        await asyncio.sleep(0)
        near.abort()
        near.abort()
        async with asyncio.timeout(1.0):
            with pytest.raises(StreamClosed):
                await receiving
        with pytest.raises(StreamClosed, match="closed here"):
            await near.recv()


async def test_abort_wakes_a_waiting_sender_and_receiver(bare: str) -> None:
    async with mesh(bare) as (a, b):
        near, _ = await pair(a, b)
        sending = asyncio.create_task(near.send(Frame("big", {}, [bytes(4 * SMALL.window_bytes)])))
        receiving = asyncio.create_task(near.recv())
        await settled(near)
        near.abort()
        for waiting in (sending, receiving):
            with pytest.raises(StreamClosed, match="closed here"):
                await waiting


async def test_a_handlers_last_frame_arrives(kind: str) -> None:
    async def answer(stream: Stream) -> None:
        frame = await stream.recv()
        await stream.send(Frame("answer", frame.header, [bytes(100_000)]))
        await stream.send(Frame("last"))

    async with mesh(kind) as (a, b):
        b.serve("question", answer)
        stream = await a.open(b.peer_id, "question", b.addresses)
        await stream.send(Frame("ask", {"number": 6}))
        answered = await stream.recv()
        assert (answered.kind, answered.header, (await stream.recv()).kind) == ("answer", {"number": 6}, "last")
        with pytest.raises(StreamClosed):
            await stream.recv()


@pytest.mark.cases(5)
@pytest.mark.parametrize("answers", [1, 20])
async def test_last_words_arrive_though_the_other_side_keeps_sending(kind: str, answers: int) -> None:
    """Whoever passes frames on finds one way over first: what has come the other way is still to be passed on."""
    async with mesh(kind) as (a, b):
        for _ in range(20):
            assert await last_words(a, b, answers) == list(range(answers))


async def test_a_handlers_error_ends_its_stream_and_nothing_else(kind: str) -> None:
    async def broken(stream: Stream) -> None:
        await stream.recv()
        raise ValueError("a bug in a handler")

    async with mesh(kind) as (a, b):
        b.serve("broken", broken)
        b.serve("echo", echo)
        good = await a.open(b.peer_id, "echo", b.addresses)
        with capture_logs() as logs:
            bad = await a.open(b.peer_id, "broken")
            await bad.send(Frame("x"))
            with pytest.raises(StreamClosed):
                await bad.recv()
            await good.send(Frame("still here"))
            assert (await good.recv()).kind == "still here"
        assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == [Event.HANDLER_FAILED]
        again = await a.open(b.peer_id, "echo")
        await again.send(Frame("new"))
        assert (await again.recv()).kind == "new"


async def test_leaving_a_transport_closes_its_streams(kind: str) -> None:
    async with mesh(kind) as (a, b):
        near, far = await pair(a, b)
        receiving = asyncio.create_task(near.recv())
        async with asyncio.timeout(4.0):
            await b.__aexit__(None, None, None)  # type: ignore[attr-defined]
            with pytest.raises(StreamClosed):
                await receiving
        with pytest.raises(StreamClosed):
            await far.recv()
        with pytest.raises(JoinError):
            await a.open(b.peer_id, "test")


async def test_streams_per_peer_are_limited_in_words(kind: str) -> None:
    async with mesh(kind) as (a, b):
        b.serve("echo", echo)
        streams = [await a.open(b.peer_id, "echo", b.addresses) for _ in range(SMALL.streams_per_peer)]
        with pytest.raises(JoinError, match=f"it has {SMALL.streams_per_peer} streams"):
            await a.open(b.peer_id, "echo")
        await streams[0].aclose()
        async with asyncio.timeout(2.0):
            while True:
                try:
                    streams[0] = await a.open(b.peer_id, "echo")
                    break
                except JoinError:
                    await asyncio.sleep(0.01)
        for stream in streams:
            await stream.send(Frame("x"))
            assert (await stream.recv()).kind == "x"


async def test_an_unserved_purpose_an_unknown_peer_and_oneself(kind: str) -> None:
    async with mesh(kind) as (a, b):
        with pytest.raises(JoinError, match="does not serve 'nothing'"):
            await a.open(b.peer_id, "nothing", b.addresses)
        stranger = "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
        with pytest.raises(JoinError, match="inSupNKC cannot be reached"):
            await a.open(stranger, "test")
        with pytest.raises(JoinError, match="this peer itself"):
            await a.open(a.peer_id, "test")


async def test_another_mesh_key_is_refused_on_both_sides(kind: str) -> None:
    async with mesh(kind, keys=[KEY, b"another mesh"]) as (a, b):
        b.serve("echo", echo)
        with capture_logs() as logs:
            with pytest.raises(NotPermittedError, match="the token belongs to another mesh") as caught:
                await a.open(b.peer_id, "echo", b.addresses)
            await eventually(lambda: bool(logs))
        assert "another mesh" in logs[0]["error"]
        assert logs[0]["event"] == Event.STREAM_REFUSED
        shown = str(caught.value) + str(logs)
        assert KEY.decode() not in shown
        assert KEY.hex() not in shown


async def test_three_peers_talk_at_once(kind: str) -> None:
    async with mesh(kind, 3) as peers:
        for peer in peers:
            peer.serve("echo", echo)

        async def talk(a: int, b: int) -> None:
            stream = await peers[a].open(peers[b].peer_id, "echo", peers[b].addresses)
            for size in (0, 10, 70_000, MAX_CHUNK_BYTES + 1):
                frame = Frame("x", {"from": a, "to": b}, [os.urandom(size)])
                _, back = await asyncio.gather(stream.send(frame), stream.recv())
                assert same(back, frame)
            await stream.aclose()

        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            for a in range(3):
                for b in range(3):
                    if a != b:
                        group.create_task(talk(a, b))


async def test_a_frame_right_behind_the_proof_of_a_long_handshake_arrives(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a direct path was tried in vain, so that the stream stays where the hands were shaken."""
    purpose, arrived = "x" * 120, asyncio.Queue[bytes](maxsize=5)

    async def handler(stream: Stream) -> None:
        await arrived.put(bytes((await stream.recv()).payloads[0]))

    async with mesh(kind) as (a, b):
        if kind == "direct":
            b.direct.ports = {4: 1}  # type: ignore[attr-defined]
            monkeypatch.setattr(a.direct, "not_reached", lambda peer: None)  # type: ignore[attr-defined]
        b.serve(purpose, handler)
        for _ in range(5):
            near = await a.open(b.peer_id, purpose, b.addresses)
            await near.send(Frame("first", {}, [b"payload"]))
            async with asyncio.timeout(10):
                assert await arrived.get() == b"payload"
            await near.aclose()


async def test_of_many_streams_that_end_at_once_one_is_told_of(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that woke from a suspension printed 560 lines of traceback."""
    refusal, ending = NotPermittedError("attached to an epoch that is not running here"), asyncio.Event()
    causes = itertools.cycle(
        [
            refusal,
            ExceptionGroup("session", [StreamClosed("gone"), refusal]),
            ExceptionGroup("", [StreamClosed("gone")]),
        ]
    )

    async def end(stream: Stream) -> None:
        await ending.wait()
        raise next(causes)

    monkeypatch.setattr(patience, "EVERY_S", 60.0)
    async with mesh(kind) as (a, b):
        b.serve("test", end)
        opened = [await a.open(b.peer_id, "test", b.addresses) for _ in range(3)]
        with capture_logs() as logs:
            ending.set()
            for near in opened:
                with pytest.raises(StreamClosed):
                    await near.recv()
    (told,) = (entry for entry in logs if entry["log_level"] not in ("debug", "info"))
    assert (told["event"], told["error"], told.get("exc_info")) == (Event.HANDLER_FAILED, repr(refusal), None)


async def test_what_a_handler_foresees_is_one_line_and_a_bug_has_its_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A peer that wakes from a suspension finds its epochs over, in every stream that others have opened meanwhile."""
    foreseen = NotPermittedError("attached to an epoch that is not running here")

    async def refuses(stream: Stream) -> None:
        raise ExceptionGroup("session", [foreseen, StreamClosed("gone")])

    async def fails(stream: Stream) -> None:
        raise KeyError("a bug")

    before = structlog.get_config()
    configure_logging(as_json=False)
    try:
        async with mesh("memory") as (a, b):
            for purpose, handler in (("foreseen", refuses), ("bug", fails)):
                b.serve(purpose, handler)
                near = await a.open(b.peer_id, purpose, b.addresses)
                with pytest.raises(StreamClosed):
                    await near.recv()
    finally:
        structlog.configure(**before)
    lines = capfd.readouterr().err.splitlines()
    assert sum("attached to an epoch" in line for line in lines) == 1
    assert sum("KeyError: 'a bug'" in line for line in lines) == 1
    assert len(lines) < 30
