"""Nobody gets in without the key, nobody is taken for another, and whoever is refused reads why."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from structlog.testing import capture_logs

from dht import Members
from meshcee.config import Timeouts
from meshcee.errors import JoinError, NotPermittedError, ProtocolError
from meshcee.fields import read
from peers.transport import direct, handshake
from peers.transport.base import Frame, StreamClosed
from peers.transport.handshake import SHOWN_BYTES
from peers.transport.memory import MemoryNetwork
from peers.transport.stream import FramedStream
from tests.peers.transport.harness import KEY, echo, eventually, sockets
from tests.rig.mutations import check_every_field


async def both(dialing: Coroutine[Any, Any, Any], accepting: Coroutine[Any, Any, Any]) -> tuple[Any, Any]:
    async with asyncio.timeout(3):
        ends: tuple[Any, Any] = await asyncio.gather(dialing, accepting, return_exceptions=True)
    return ends


async def test_two_peers_of_one_mesh_agree() -> None:
    async with sockets() as (near, far):
        dialled, accepted = await both(
            handshake.dial(near, "a", "job", KEY),
            handshake.accept(far, "b", KEY),
        )
        assert dialled == accepted == "job"


async def test_who_shows_the_longest_certificate_shakes_hands() -> None:
    """Its hello costs more than the window that a stranger has."""

    class Long(Members):
        def admit(self, peer_id: str, shown: bytes, purpose: str = "") -> None:
            """Whoever comes."""

    for size in (600, 1000, SHOWN_BYTES):
        async with sockets() as (near, far):
            dialled, accepted = await both(
                handshake.dial(near, "a", "job", KEY, members=Long(shown=bytes(size))),
                handshake.accept(far, "b", KEY, members=Long(shown=bytes(size))),
            )
            assert dialled == accepted == "job"
            near.establish("job")
            far.establish("job")
            await near.send(Frame("large", {}, [bytes(100_000)]))
            assert (await far.recv()).kind == "large"


async def test_an_open_mesh_has_an_empty_key() -> None:
    async with sockets() as (near, far):
        dialled, accepted = await both(handshake.dial(near, "a", "x", b""), handshake.accept(far, "b", b""))
        assert dialled == accepted == "x"


@pytest.mark.parametrize("keys", [(KEY, b"other"), (KEY, b""), (b"", KEY), (KEY, KEY + b"\0x")])
async def test_another_key_is_refused_on_both_sides(keys: tuple[bytes, bytes]) -> None:
    async with sockets() as (near, far):
        dialled, accepted = await both(handshake.dial(near, "a", "x", keys[0]), handshake.accept(far, "b", keys[1]))
        assert isinstance(dialled, NotPermittedError)
        assert isinstance(accepted, NotPermittedError)
        assert "the token belongs to another mesh" in str(dialled)
        assert "the token belongs to another mesh" in str(accepted)


@pytest.mark.parametrize(("ours", "theirs", "older"), [(1, 2, "this peer"), (3, 2, "peer b")])
async def test_another_version_names_both_and_who_must_upgrade(ours: int, theirs: int, older: str) -> None:
    async with sockets() as (near, far):
        dialled, accepted = await both(
            handshake.dial(near, "a", "x", KEY, version=ours), handshake.accept(far, "b", KEY, version=theirs)
        )
    assert isinstance(dialled, JoinError)
    assert isinstance(accepted, JoinError)
    assert f"peer b speaks protocol version {theirs}" in str(dialled)
    assert f"this peer speaks {ours}" in str(dialled)
    assert f"upgrade {older} with `pip install -U meshcee`" in str(dialled)
    assert f"peer a speaks protocol version {ours}" in str(accepted)


async def test_a_future_hello_is_understood_as_far_as_its_version() -> None:
    """Only `version` and `software` are promised to stay; everything else may change."""
    async with sockets() as (near, far):
        await near.send(Frame("hello", {"version": 99, "software": "9.0", "new": {"shape": True}}))
        with pytest.raises(JoinError, match=r"version 99 \(meshcee 9\.0\).*upgrade this peer"):
            await handshake.accept(far, "b", KEY)
        refusal = await near.recv()
        assert (refusal.kind, refusal.header["version"]) == ("refused", handshake.PROTOCOL_VERSION)


async def test_a_peer_under_a_false_name_is_refused() -> None:
    async with sockets(a="mallory") as (near, far):  # the transport knows that it is mallory
        dialled, accepted = await both(handshake.dial(near, "a", "x", KEY), handshake.accept(far, "b", KEY))
        assert isinstance(dialled, NotPermittedError)
        assert isinstance(accepted, NotPermittedError)
        assert "false name" in str(accepted)


async def test_a_peer_that_is_not_the_one_that_was_dialled_is_refused() -> None:
    async with sockets() as (near, far):
        # A relay that answers for itself although b was dialled: it must not be enough to know the key.
        dialled, accepted = await both(handshake.dial(near, "a", "x", KEY), handshake.accept(far, "c", KEY))
        assert isinstance(dialled, NotPermittedError)
        assert isinstance(accepted, NotPermittedError)
    async with sockets() as (near, far):
        task = asyncio.create_task(handshake.dial(near, "a", "x", KEY))
        hello = await far.recv()
        answer = {"version": handshake.PROTOCOL_VERSION, "software": "0", "peer": "c", "nonce": b"n" * 32, "shown": b""}
        proof = handshake.prove(KEY, "acceptor", hello.header, answer)
        await far.send(Frame("answer", {**answer, "proof": proof}))
        with pytest.raises(NotPermittedError, match="not the one that was dialled"):
            await task


async def test_a_recorded_handshake_cannot_be_replayed() -> None:
    """The dialer's frames of a good handshake, sent again by somebody without the key."""
    recorded: list[Frame] = []
    async with sockets() as (near, far):
        original = near.send

        async def recording(frame: Frame) -> None:
            recorded.append(frame)
            await original(frame)

        near.send = recording  # type: ignore[method-assign]
        await both(handshake.dial(near, "a", "x", KEY), handshake.accept(far, "b", KEY))
    assert [frame.kind for frame in recorded] == ["hello", "proof"]
    async with sockets() as (near, far):
        for frame in recorded:
            await near.send(frame)
        with pytest.raises(NotPermittedError):
            await handshake.accept(far, "b", KEY)


async def test_an_acceptors_proof_cannot_be_reflected() -> None:
    async with sockets() as (near, far):
        accepting = asyncio.create_task(handshake.accept(far, "b", KEY))
        hello = {
            "version": handshake.PROTOCOL_VERSION,
            "software": "0",
            "peer": "a",
            "to": "b",
            "purpose": "x",
            "nonce": b"n" * 32,
            "shown": b"",
        }
        await near.send(Frame("hello", hello))
        answer = await near.recv()
        await near.send(Frame("proof", {"proof": answer.header["proof"]}))
        with pytest.raises(NotPermittedError):
            await accepting


async def test_a_proof_holds_for_one_purpose_and_pair_only() -> None:
    hello = {
        "version": handshake.PROTOCOL_VERSION,
        "peer": "a",
        "to": "b",
        "purpose": "x",
        "nonce": b"n" * 32,
        "shown": b"",
    }
    answer = {"version": handshake.PROTOCOL_VERSION, "peer": "b", "nonce": b"m" * 32, "shown": b"v"}
    proofs = {handshake.prove(KEY, role, hello, answer) for role in ("dialer", "acceptor")}
    for name, value in (
        ("purpose", "y"),
        ("peer", "z"),
        ("to", "c"),
        ("nonce", b"o" * 32),
        ("shown", b"w"),
        ("version", handshake.PROTOCOL_VERSION + 1),
    ):
        proofs.add(handshake.prove(KEY, "dialer", {**hello, name: value}, answer))
        if name in answer:
            proofs.add(handshake.prove(KEY, "dialer", hello, {**answer, name: value}))
    assert len(proofs) == 2 + 6 + 4


GOOD = {
    "version": handshake.PROTOCOL_VERSION,
    "software": "0",
    "peer": "a",
    "to": "b",
    "purpose": "x",
    "nonce": b"n" * 32,
    "shown": b"",
}


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ({"version": 3}, handshake.Version),
        ({"version": 4, "software": "9"}, handshake.Software),
        ({"peer": "a", "to": "b", "purpose": "x", "nonce": b"n" * 32, "shown": b"c"}, handshake.Hello),
        ({"peer": "b", "nonce": b"n" * 32, "shown": b"c", "proof": b"p" * 32}, handshake.Answer),
        ({"proof": b"p" * 32}, handshake.Proof),
        ({"code": "key", "reason": "another mesh"}, handshake.Refusal),
        ([b"k" * 32, ["/ip4/192.0.2.1/tcp/1"]], direct.Offer),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_field_that_is_read_before_anybody_is_known_is_checked(message: Any, kind: type) -> None:
    check_every_field(message, lambda changed: read(changed, kind, "the message"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": "1"},
        {"version": True},
        {"version": None},
        {"peer": 5},
        {"peer": ""},
        {"peer": "p" * 513},
        {"to": None},
        {"purpose": ""},
        {"purpose": ["x"]},
        {"nonce": b"short"},
        {"nonce": "n" * 32},
        {"shown": "c"},
        {"shown": b"c" * 1401},
    ],
)
async def test_a_mistyped_hello_is_a_protocol_error(wrong: dict[str, Any]) -> None:
    async with sockets() as (near, far):
        await near.send(Frame("hello", {**GOOD, **wrong}))
        with pytest.raises(ProtocolError):
            await handshake.accept(far, "b", KEY)


@pytest.mark.parametrize(
    "answer",
    [
        Frame("something"),
        Frame("answer"),
        Frame("answer", {"version": handshake.PROTOCOL_VERSION, "peer": "b", "nonce": b"m" * 32, "shown": b""}),
        Frame(
            "answer",
            {"version": handshake.PROTOCOL_VERSION, "peer": "b", "nonce": b"m", "shown": b"", "proof": b"p" * 32},
        ),
        Frame(
            "answer",
            {"version": handshake.PROTOCOL_VERSION, "peer": "b", "nonce": b"m" * 32, "shown": b"", "proof": "p" * 32},
        ),
        Frame("refused", {}),
        Frame("refused", {"code": "key", "reason": "x" * 600}),
    ],
)
async def test_a_mistyped_answer_is_a_protocol_error(answer: Frame) -> None:
    async with sockets() as (near, far):
        await far.send(answer)
        with pytest.raises(ProtocolError):
            await handshake.dial(near, "a", "x", KEY)


async def test_the_key_is_never_on_the_wire() -> None:
    async with sockets() as (near, far):
        wire = bytearray()
        for stream in (near, far):
            write = stream.write_bytes

            def tapped(data: bytes | memoryview, write: Any = write) -> None:
                wire.extend(data)
                write(data)

            stream.write_bytes = tapped  # type: ignore[method-assign]
        await both(handshake.dial(near, "a", "x", KEY), handshake.accept(far, "b", KEY))
        assert b"hello" in wire
        assert b"proof" in wire
        assert KEY not in wire


async def test_payloads_wait_for_the_handshake() -> None:
    async with sockets() as (near, far):
        near.outgoing.accepted = True  # somebody who does not keep the rules
        await near.send(Frame("hello", GOOD, [b"x"]))
        with pytest.raises(ProtocolError, match="more than 0"):
            await handshake.accept(far, "b", KEY)


# Through a transport


async def test_whoever_dials_and_says_nothing_is_hung_up_on() -> None:
    network = MemoryNetwork()
    brief = Timeouts(handshake_s=0.1)
    async with network.transport("a", KEY) as a, network.transport("b", KEY, timeouts=brief) as b:
        b.serve("echo", echo)
        silent = FramedStream("b")
        with capture_logs() as logs:
            await network.connect(a, silent)
            async with asyncio.timeout(2):
                with pytest.raises(StreamClosed):
                    await silent.recv()
            await eventually(lambda: bool(logs))
        assert "did not finish the handshake within 0.1 s" in logs[0]["error"]


async def test_a_peer_that_never_answers_is_given_up() -> None:
    network = MemoryNetwork()
    brief = Timeouts(handshake_s=0.1)
    async with network.transport("a", KEY, timeouts=brief) as a, network.transport("b", KEY) as b:
        b.take = lambda stream: None  # type: ignore[method-assign]
        async with asyncio.timeout(2):
            with pytest.raises(JoinError, match=r"did not finish the handshake within 0\.1 s"):
                await a.open("b", "echo")


async def test_a_peer_that_hangs_up_or_speaks_nonsense_is_a_join_error() -> None:
    network = MemoryNetwork()
    async with network.transport("a", KEY) as a, network.transport("b", KEY) as b:
        b.take = FramedStream.abort  # type: ignore[method-assign, assignment]
        with pytest.raises(JoinError, match="hung up during the handshake"):
            await a.open("b", "echo")

        def nonsense(stream: FramedStream) -> None:
            stream.write_bytes(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        b.take = nonsense  # type: ignore[method-assign]
        with pytest.raises(JoinError, match="does not answer as a meshcee peer"):
            await a.open("b", "echo")
